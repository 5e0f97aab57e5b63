"""Where Python's and numpy's global generators stand, read from their memory in one go.

Used by :mod:`paceline.elastic.commit.random_state` at every commit. To ask Python for its state
makes 625 numbers, and to ask numpy copies as many, one by one. Their memory is 2,500 bytes each:
those are kept, and become a state only if a step fails.

[Note: where the words lie]
Nobody promises where in a generator its words lie. So each place is looked for in the memory of the
very generator (Python), or in one of the same type (numpy's second normal number), beside what its
own ``getstate`` says. Where that is not found, there is no place, and the state is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from typing import Any

from paceline.native.extension import native

Spans = tuple[int, ...]
"""Addresses and sizes by turns."""

_WORDS = 624
_INT, _DOUBLE = struct.Struct("@i"), struct.Struct("@d")
_PYTHON = struct.Struct(f"@i{_WORDS}I")
_NUMPY = struct.Struct(f"@{_WORDS}Ii")
_GAUSS = struct.Struct("@id")


def _read_memory(spans: Spans) -> bytes:
    pairs = zip(spans[::2], spans[1::2], strict=True)
    return b"".join(ctypes.string_at(address, size) for address, size in pairs)


read_memory = _read_memory if native is None else native.read_memory
"""Return what lies there, in a row."""


class PythonMemory:
    """The generator of the module ``random``.

    Attributes:
        generator: Its second normal number, ``gauss_next``, is not among the words.
        spans: Where its words lie.
    """

    def __init__(self, generator: random.Random, place: int, version: int) -> None:
        self.generator = generator
        self.spans: Spans = (id(generator) + place, _PYTHON.size)
        self._version = version

    @classmethod
    def find(cls) -> PythonMemory | None:
        """Look for the words: [Note: where the words lie]."""
        generator = getattr(random.getstate, "__self__", None)
        if not isinstance(generator, random.Random):
            return None
        version, words, _ = generator.getstate()
        if len(words) != _WORDS + 1:
            return None
        memory = read_memory((id(generator), type(generator).__basicsize__))
        place = memory.find(_PYTHON.pack(words[-1], *words[:-1]))
        return None if place < 0 else cls(generator, place, version)

    def state(self, memory: bytes, gauss_next: float | None) -> Any:
        """What ``random.setstate`` takes."""
        index, *words = _PYTHON.unpack(memory)
        return self._version, (*words, index), gauss_next


class NumpyMemory:
    """The generator of ``numpy.random``.

    Attributes:
        bit_generator: It may be replaced: then this is of another one.
        spans: Where the words of the bit generator lie, and the second normal number.
    """

    def __init__(self, bit_generator: Any, spans: Spans) -> None:
        self.bit_generator = bit_generator
        self.spans = spans

    @classmethod
    def find(cls, module: Any, bit_generator: Any) -> NumpyMemory | None:
        """Look for the words: [Note: where the words lie]."""
        if type(bit_generator).__name__ != "MT19937":
            return None
        owner, place = getattr(module.get_state, "__self__", None), gauss_place(module)
        if type(owner) is not module.RandomState or place is None:
            return None
        address = bit_generator.ctypes.state_address
        spans = (address, _NUMPY.size, id(owner) + place, _GAUSS.size)
        found = cls(bit_generator, spans)
        mine, theirs = found.state(read_memory(spans)), module.get_state(legacy=True)
        is_it = (list(mine[1]), *mine[2:4]) == (theirs[1].tolist(), *theirs[2:4])
        return found if is_it else None

    def state(self, memory: bytes) -> Any:
        """What ``numpy.random.set_state`` takes."""
        *words, position = _NUMPY.unpack(memory[: _NUMPY.size])
        has_gauss, gauss = _GAUSS.unpack(memory[_NUMPY.size :])
        return "MT19937", words, position, has_gauss, gauss


@functools.cache
def gauss_place(module: Any) -> int | None:
    """Where in a ``RandomState`` it says that it holds a second normal number, and which."""
    probe = module.RandomState(1)
    before = _whole(probe)
    probe.standard_normal()
    holding, state = _whole(probe), probe.get_state(legacy=True)
    probe.standard_normal()
    after = _whole(probe)
    number = holding.find(_DOUBLE.pack(state[4]))
    place = number - (_GAUSS.size - _DOUBLE.size)
    if number < 0 or place < 0 or state[3] != 1:
        return None
    flags = [_INT.unpack_from(memory, place)[0] for memory in (before, holding, after)]
    return place if flags == [0, 1, 0] else None


def _whole(thing: Any) -> bytes:
    return read_memory((id(thing), type(thing).__basicsize__))
