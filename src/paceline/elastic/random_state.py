"""The random generators of this process: torch's, on every device in use, numpy's and Python's.

Read at every commit by :mod:`paceline.elastic.kept`, so it must be cheap; sent to other ranks by
:mod:`paceline.elastic.transfer`, so it can be told as tensors and JSON.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

_numpy_before: tuple[bytes, Any] = (b"", None)


class KeptGenerator:
    """A generator of the user's own, as a member of a state.

    Args:
        generator: It is read and written, never replaced.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self._generator.set_state(state["generator"])


def _read_numpy(numpy: Any) -> Any:
    """Return the state of numpy's global generator.

    To read it takes 40 us, because numpy copies it word by word. Its memory is compared first: if
    no word has changed, and it holds no second normal number (which goes without a trace), it is
    what it was.
    """
    global _numpy_before
    generator = numpy.random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return numpy.random.get_state(legacy=True)
    words = ctypes.string_at(generator.ctypes.state_address, 4 * 625)
    before, state = _numpy_before
    if words != before or state[3]:
        state = numpy.random.get_state(legacy=True)
        _numpy_before = (words, state)
    return state


def read_generators() -> dict[str, Any]:
    """Return the state of every generator, by name; cheap, and not to be changed by the caller."""
    found: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = _read_numpy(numpy)
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def write_generators(states: dict[str, Any]) -> None:
    """Put every generator back. One that this process does not have is left out."""
    torch.default_generator.set_state(states["torch"])
    random.setstate(states["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
    if torch.cuda.is_available() and len(states.get("cuda", ())) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all(states["cuda"])


def to_plain(states: dict[str, Any]) -> dict[str, Any]:
    """Return the same as tensors, numbers and lists."""
    version, numbers, gauss = states["python"]
    plain: dict[str, Any] = {
        "torch": states["torch"],
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
    }
    if "numpy" in states:
        name, keys, position, has_gauss, cached = states["numpy"]
        keys = torch.from_numpy(keys.astype("int64"))
        plain["numpy"] = [str(name), keys, int(position), int(has_gauss), float(cached)]
    if "cuda" in states:
        plain["cuda"] = list(states["cuda"])
    return plain


def from_plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`to_plain`."""
    version, numbers, gauss = plain["python"]
    states: dict[str, Any] = {
        "torch": plain["torch"],
        "python": (version, tuple(numbers.tolist()), gauss),
    }
    if "numpy" in plain:
        name, keys, position, has_gauss, cached = plain["numpy"]
        keys = keys.numpy().astype("uint32")
        states["numpy"] = (name, keys, position, has_gauss, cached)
    if "cuda" in plain:
        states["cuda"] = plain["cuda"]
    return states
