"""The random generators of this process: torch's, also on accelerators, numpy's and Python's.

Kept at every commit by :mod:`paceline.elastic.commit.kept`, so that must be cheap; sent to other
ranks by :mod:`paceline.elastic.transfer`, so it can be told as tensors and JSON.
"""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import torch

from paceline.elastic.commit.generator_memory import NumpyMemory, PythonMemory, read_memory


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


class KeptGenerators:
    """Where all generators stood at the last commit.

    What can be read from memory is kept as bytes, the rest as states: generator_memory.py.
    """

    def __init__(self) -> None:
        self._python = PythonMemory.find()
        self._numpy: NumpyMemory | None = None
        self._bit_generator: Any = None  # the one that was looked at last
        self._read_bit_generator = _bit_generator
        self._has_device = accelerator() is not None
        self._aim()
        self.keep()

    def _aim(self) -> None:
        found = [each.spans for each in (self._python, self._numpy) if each is not None]
        self._spans = tuple(number for spans in found for number in spans)

    def keep(self) -> None:
        """Keep where they stand now."""
        if self._read_bit_generator() is not self._bit_generator:
            self._look_at_numpy()
        self._torch = torch.default_generator.get_state()
        self._memory = read_memory(self._spans)
        python = self._python
        self._gauss_next = None if python is None else python.generator.gauss_next  # type: ignore[attr-defined]
        self._rest: dict[str, Any] = {}
        if python is None:
            self._rest["python"] = random.getstate()
        if self._numpy is None and self._bit_generator is not None:
            self._rest["numpy"] = _numpy_state(sys.modules["numpy.random"])
        if self._has_device:
            self._rest |= _read_device()

    def _look_at_numpy(self) -> None:
        numpy = sys.modules["numpy.random"]
        self._read_bit_generator = numpy.get_bit_generator
        self._bit_generator = numpy.get_bit_generator()
        self._numpy = NumpyMemory.find(numpy, self._bit_generator)
        self._aim()

    def states(self) -> dict[str, Any]:
        """What :func:`read_generators` would have returned then."""
        states = {"torch": self._torch, **self._rest}
        size = 0
        if self._python is not None:
            size = self._python.spans[1]
            states["python"] = self._python.state(self._memory[:size], self._gauss_next)
        if self._numpy is not None:
            states["numpy"] = self._numpy.state(self._memory[size:])
        return states

    def put_back(self) -> None:
        """Let all go on from there."""
        kept = self._bit_generator
        if self._read_bit_generator() is not kept and kept is not None:
            sys.modules["numpy.random"].set_bit_generator(kept)
        write_generators(self.states())


def _bit_generator() -> Any:
    """Which one numpy has: it may be replaced. None if it is not imported, or just being so."""
    read = getattr(sys.modules.get("numpy.random"), "get_bit_generator", None)
    return None if read is None else read()


def _numpy_state(numpy: Any) -> Any:
    """A tuple for MT19937, as its ``set_state`` has always taken it; a dict for any other."""
    state = numpy.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return state
    words = state["state"]
    return "MT19937", words["key"].tolist(), words["pos"], state["has_gauss"], state["gauss"]


# --- accelerators ---------------------------------------------------------------------------------


@functools.cache
def accelerator() -> tuple[str, Any] | None:
    """The type of accelerator that this process has, and torch's module for it; None: none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else (device.type, torch.get_device_module(device))


def _read_device() -> dict[str, Any]:
    """The states of all devices, by their type; nothing before the first is used."""
    found = accelerator()
    if found is None:
        return {}
    kind, module = found
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return {}
    if hasattr(module, "get_rng_state_all"):
        return {"device": [kind, module.get_rng_state_all()]}
    return {"device": [kind, [module.get_rng_state()]]}


def _write_device(kind: str, states: list[torch.Tensor]) -> None:
    """Nothing is written if this process has devices of another type, or another number."""
    found = accelerator()
    if found is None or found[0] != kind:
        return
    module = found[1]
    if not hasattr(module, "set_rng_state_all"):
        module.set_rng_state(states[0])
    elif len(states) == module.device_count():
        module.set_rng_state_all(states)


# --- as states ------------------------------------------------------------------------------------


def read_generators() -> dict[str, Any]:
    """Return the state of every generator, by name."""
    found: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
    }
    if _bit_generator() is not None:
        found["numpy"] = _numpy_state(sys.modules["numpy.random"])
    return found | _read_device()


def write_generators(states: dict[str, Any]) -> None:
    """Put every generator back. One that this process does not have is left out."""
    torch.default_generator.set_state(states["torch"])
    random.setstate(states["python"])
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and "numpy" in states:
        numpy.set_state(states["numpy"])
    if "device" in states:
        _write_device(*states["device"])


def to_plain(states: dict[str, Any]) -> dict[str, Any]:
    """Return the same as tensors, numbers and lists."""
    version, numbers, gauss = states["python"]
    plain = states | {"python": [version, torch.tensor(numbers, dtype=torch.int64), gauss]}
    if isinstance(states.get("numpy"), tuple):
        name, words, *rest = states["numpy"]
        plain["numpy"] = [name, torch.tensor(words, dtype=torch.int64), *rest]
    elif "numpy" in states:
        plain["numpy"] = _without_arrays(states["numpy"])
    return plain


def _without_arrays(value: Any) -> Any:
    """Bit generators other than MT19937 have dicts with arrays of up to 64 bits a number."""
    if isinstance(value, dict):
        return {key: _without_arrays(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def from_plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`to_plain`; arrays stay lists, which numpy takes, too."""
    version, numbers, gauss = plain["python"]
    states = plain | {"python": (version, tuple(numbers.tolist()), gauss)}
    if isinstance(plain.get("numpy"), list):
        name, words, *rest = plain["numpy"]
        states["numpy"] = (name, words.tolist(), *rest)
    return states
