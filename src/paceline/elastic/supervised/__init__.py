"""Elastic jobs whose ranks something else than ``paceline run`` has started."""
