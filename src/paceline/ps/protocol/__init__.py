"""What trainers and servers have in common: bytes, tables, keys. Imports neither side."""
