"""Paceline inside of other programs: training frameworks, and scripts that cannot be edited.

One module for each framework, imported by whoever uses that framework and by nobody else: none of
them is a dependency. ``docs/frameworks/`` has the line for each.
"""
