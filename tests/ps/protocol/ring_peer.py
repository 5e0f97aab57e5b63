"""A process that writes into a ring for ever, or so many messages; run by ``test_ring.py``.

Loads the extension by its path, without torch, so that it starts at once.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("paceline.native._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def frames_of(number: int) -> list[bytes]:
    """Message ``number``: sizes and bytes follow from it."""
    count = 1 + number % 3
    sizes = [(number * 7919 + 611 * at) % 1200 * (number % 5 == 0) + at + 4 for at in range(count)]
    return [(number % 2**32).to_bytes(4, "little") + bytes([number % 251]) * size for size in sizes]


def main() -> None:
    extension, memory, capacity, own, peer, count = sys.argv[1:]
    pair = load(extension).Pair(int(memory), int(capacity), int(own), int(peer), False)
    number = 0
    while number != int(count):
        if pair.send(frames_of(number)):
            number += 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
