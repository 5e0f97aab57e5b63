"""Every generator goes on where it stood at the commit, however it was read."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from paceline.elastic.commit import generator_memory, random_state
from paceline.elastic.commit.generator_memory import NumpyMemory, PythonMemory
from paceline.elastic.commit.random_state import (
    KeptGenerators,
    from_plain,
    read_generators,
    to_plain,
    write_generators,
)

Draw = Callable[[], float]
DRAWS: list[Draw] = [
    random.random,
    lambda: random.gauss(0.0, 1.0),
    numpy.random.random,
    numpy.random.standard_normal,
    lambda: float(torch.rand(())),
]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    numpy.random.seed(1)
    before, bit_generator = read_generators(), numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(bit_generator)
    write_generators(before)


@pytest.fixture(params=["memory", "asked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "asked":  # as if the words were not found
        monkeypatch.setattr(PythonMemory, "find", lambda: None)
        monkeypatch.setattr(NumpyMemory, "find", lambda *_: None)
    return str(request.param)


def test_the_words_are_found_here() -> None:
    """The other tests would pass without."""
    assert PythonMemory.find() is not None
    assert NumpyMemory.find(numpy.random, numpy.random.get_bit_generator()) is not None


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_come_again(draw: Draw) -> None:
    """After each number of draws: a second normal number may be held back."""
    kept = KeptGenerators()
    for _ in range(5):
        kept.keep()
        expected = [draw() for _ in range(3)]
        for _ in range(2):
            kept.put_back()
            assert [draw() for _ in range(3)] == expected
        kept.put_back()
        draw()


def test_after_a_whole_round_of_words() -> None:
    kept = KeptGenerators()
    for _ in range(4):
        for _ in range(217):
            random.random(), numpy.random.random(3)
        kept.keep()
        expected = random.random(), numpy.random.random()
        random.seed(3), numpy.random.seed(3)
        kept.put_back()
        assert (random.random(), numpy.random.random()) == expected


@pytest.mark.usefixtures("way")
def test_what_is_kept_is_what_would_have_been_read() -> None:
    random.gauss(0.0, 1.0), numpy.random.standard_normal()
    kept, read = to_plain(KeptGenerators().states()), to_plain(read_generators())
    assert repr(kept) == repr(read)
    assert repr(to_plain(from_plain(kept))) == repr(read)


@pytest.mark.parametrize("name", ["PCG64", "Philox", "SFC64", "MT19937"])
def test_another_bit_generator_of_numpy(name: str) -> None:
    kept = KeptGenerators()
    numpy.random.set_bit_generator(getattr(numpy.random, name)(7))
    kept.keep()
    expected = numpy.random.standard_normal(3).tolist()
    kept.put_back()
    assert numpy.random.standard_normal(3).tolist() == expected
    write_generators(from_plain(to_plain(kept.states())))
    assert numpy.random.standard_normal(3).tolist() == expected
    numpy.random.set_bit_generator(numpy.random.PCG64(9))  # after the commit
    kept.put_back()
    assert numpy.random.standard_normal(3).tolist() == expected


def test_numpy_that_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy.random")
        kept = KeptGenerators()
        assert "numpy" not in kept.states()
    kept.keep()
    expected = numpy.random.random()
    kept.put_back()
    assert numpy.random.random() == expected


def test_words_that_lie_elsewhere_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Python or numpy of another layout."""
    read = generator_memory.read_memory
    monkeypatch.setattr(generator_memory, "read_memory", lambda spans: read(spans)[::-1])
    generator_memory.gauss_place.cache_clear()
    assert PythonMemory.find() is None
    assert NumpyMemory.find(numpy.random, numpy.random.get_bit_generator()) is None
    generator_memory.gauss_place.cache_clear()


def test_memory_is_read_alike_without_the_native_core() -> None:
    python = PythonMemory.find()
    assert python is not None
    spans = python.spans * 2
    assert generator_memory._read_memory(spans) == generator_memory.read_memory(spans)


class Device:
    """An accelerator with two devices, as torch's modules for CUDA and XPU are."""

    def __init__(self) -> None:
        self.states = [torch.zeros(16), torch.ones(16)]
        self.is_used = False

    def is_initialized(self) -> bool:
        return self.is_used

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.states = states


class OneDevice:
    """As torch's module for MPS is."""

    def __init__(self) -> None:
        self.state = torch.zeros(16)

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state


def test_an_accelerator_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(random_state, "accelerator", lambda: ("xpu", device))
    kept = KeptGenerators()
    assert "device" not in kept.states()  # nobody has used it: reading would start it
    device.is_used = True
    kept.keep()
    device.states[0] += 5
    sent: Any = to_plain(kept.states())
    kept.put_back()
    assert [state.tolist() for state in device.states] == [[0.0] * 16, [1.0] * 16]
    device.states.pop()  # of another rank, which has one device
    write_generators(from_plain(sent))
    assert [state.tolist() for state in device.states] == [[0.0] * 16]


def test_an_accelerator_with_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = OneDevice()
    monkeypatch.setattr(random_state, "accelerator", lambda: ("mps", device))
    kept = KeptGenerators()
    device.state += 1
    kept.put_back()
    assert device.state.tolist() == [0.0] * 16
    device.state += 1
    states = kept.states()
    monkeypatch.setattr(random_state, "accelerator", lambda: ("cuda", device))
    write_generators(states)
    assert device.state.tolist() == [1.0] * 16
