"""Measurements of Paceline beside torch's own DDP, each repeatable with one command (README.md)."""
