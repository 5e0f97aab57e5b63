"""The process of a server: its sockets, its loop, and who may connect."""
