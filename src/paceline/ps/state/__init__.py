"""The tables of a server and what each message does to them; no socket and no file."""
