"""Measurements for work on Paceline itself; what users measure is `paceline bench`."""
