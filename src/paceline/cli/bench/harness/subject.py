"""Runs one subject: checks its output files, starts the fork server, tells what went wrong.

Called by ``paceline bench`` and by ``python -m benchmarks``, which handle Ctrl-C above it: ranks
are gone by then, because ``run_ranks`` leaves none behind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from rich.console import Console

from paceline.cli.bench.harness.options import check_outputs
from paceline.cli.fork_server import start_fork_server
from paceline.errors import ConfigurationError


def run_subject(
    program: str, run: Callable[[argparse.Namespace], int], args: argparse.Namespace
) -> int:
    """Run it and return the exit code: 2 if an option is wrong, 1 if a rank failed."""
    from paceline.testing import RanksFailedError

    try:
        check_outputs(args)
        start_fork_server()
        return run(args)
    except ConfigurationError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except RanksFailedError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    finally:
        Console(stderr=True).show_cursor(True)  # rank 0 hides it, and may have been killed
