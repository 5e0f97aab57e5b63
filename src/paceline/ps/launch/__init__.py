"""Servers on this host, started from a program."""
