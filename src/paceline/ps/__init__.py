"""Parameter servers: embedding tables that live in server processes (docs/parameter-servers.md)."""
