"""The options of ``paceline ps serve``: declared once, for the command and for the process.

Must not import torch, numpy or zmq: ``--help`` is instant.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from paceline.ps.protocol.settings import GIB, ServerSettings

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

EXAMPLE = """\
example:
  paceline ps serve ipc:///run/user/1000/tables.sock --dir tables
  paceline ps serve tcp://0.0.0.0:7077 --keys keys/server --dir tables --save-root saved
"""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a server."""
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("address", help="ipc://PATH, or tcp://HOST:PORT with --keys")
    parser.add_argument(
        "--dir",
        dest="directory",
        type=Path,
        metavar="DIR",
        help="keep journal and snapshots there: a killed server comes back with every push it "
        "acknowledged (default: memory only)",
    )
    parser.add_argument(
        "--fsync",
        action="store_true",
        help="sync the journal before each acknowledgement: survives the machine, and is slow",
    )
    parser.add_argument(
        "--snapshot-every",
        dest="snapshot_every_s",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how often a snapshot replaces the journal; 0: only at the end (default: 60)",
    )
    parser.add_argument(
        "--max-bytes",
        type=parse_bytes,
        default=0,
        metavar="BYTES",
        help="of rows and optimizer state, as 500M or 12G (default: 3/4 of this machine's memory)",
    )
    parser.add_argument(
        "--max-message-bytes",
        type=parse_bytes,
        default=GIB,
        metavar="BYTES",
        help="of one message's values, in either direction (default: 1G)",
    )
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help="of the server, made by `paceline ps keys`"
    )
    parser.add_argument(
        "--save-root",
        type=Path,
        metavar="DIR",
        help="trainers save to and load from directories below this one only (default: saves in "
        "--dir; without either they cannot)",
    )


def settings_from(args: argparse.Namespace) -> ServerSettings:
    """What was asked for.

    Raises:
        ConfigurationError: It does not go together.
    """
    return ServerSettings(
        **{each.name: getattr(args, each.name) for each in fields(ServerSettings)}
    )


def parse_bytes(text: str) -> int:
    """A number of bytes, with K, M, G or T behind it or not."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if unit not in _UNITS or not number.isdigit():
        raise argparse.ArgumentTypeError(f"a number of bytes is 4096, 500M or 12G, not {text!r}")
    return int(number) * _UNITS[unit]
