"""``paceline ps WHAT``: run a parameter server, look at servers, make keys.

Must not import torch, numpy or zmq before something is done: ``--help`` is instant.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from paceline.errors import ConfigurationError, PacelineError
from paceline.ps.server.options import add_serve_arguments, settings_from

KEYS_EXAMPLE = """\
example:
  paceline ps keys keys                  keys/server for the server, keys/client for trainers
  paceline ps keys keys --client evening  one more client, which the same server lets in
"""
STATS_EXAMPLE = """\
example:
  paceline ps stats ipc:///run/user/1000/tables.sock
  paceline ps stats tcp://a:7077 tcp://b:7077 --keys keys/client --watch 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be done, with the options of each."""
    subparsers = parser.add_subparsers(dest="action", metavar="what", required=True)
    add_serve_arguments(
        subparsers.add_parser("serve", help="run a server", description="Run a server.")
    )
    _add_stats(subparsers.add_parser("stats", help="rows, bytes, rates and times of servers"))
    _add_keys(subparsers.add_parser("keys", help="make keys for servers that listen on tcp"))


def run(args: argparse.Namespace) -> int:
    """Do it, and return the exit code."""
    try:
        _require_extra()
        return {"serve": _serve, "stats": _stats, "keys": _keys}[args.action](args)
    except PacelineError as error:
        print(f"paceline ps {args.action}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1


def _add_stats(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what servers hold and how busy they are."
    parser.epilog, parser.formatter_class = STATS_EXAMPLE, argparse.RawDescriptionHelpFormatter
    parser.add_argument("addresses", nargs="+", metavar="address")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="of a client, for tcp")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument(
        "--watch", type=_seconds, metavar="SECONDS", help="again and again, until Ctrl-C"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=5.0, metavar="SECONDS", help="default: 5"
    )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a server's key pair, unless DIR has one, and that of a client it lets in."
    )
    parser.epilog, parser.formatter_class = KEYS_EXAMPLE, argparse.RawDescriptionHelpFormatter
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--client", default="client", metavar="NAME", help="default: client")


def _serve(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    from paceline.ps.server.process import run_here

    return run_here(settings)


def _stats(args: argparse.Namespace) -> int:
    from paceline.cli.ps_stats import show

    return show(args)


def _keys(args: argparse.Namespace) -> int:
    from paceline.ps.protocol.keys import make_keys

    server, client = make_keys(args.directory, args.client)
    print(f"for the server:   paceline ps serve tcp://HOST:PORT --keys {server}")
    print(f'for trainers:     ps.connect([...], keys="{client}")  # copy the directory to them')
    print("keep both directories secret; a server reads its clients/ when it starts")
    return 0


def _require_extra() -> None:
    packages = {"zmq": "pyzmq", "numpy": "numpy", "safetensors": "safetensors"}
    missing = [name for module, name in packages.items() if not importlib.util.find_spec(module)]
    if missing:
        raise ConfigurationError(
            f"parameter servers need {', '.join(missing)}: pip install {' '.join(missing)}"
        )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0, not {text!r}")
    return seconds
