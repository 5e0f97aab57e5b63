"""What every benchmark shares: taking turns, estimates, progress, tables, JSON, plots.

Used by the subjects of ``paceline bench`` and by ``benchmarks/`` of the repository. Nothing here
knows a subject. :mod:`~paceline.cli.bench.harness.options` is read for ``--help``: no torch there.
"""
