"""torch's own DDP tests, run from the installed wheel against Paceline's class (see README.md)."""
