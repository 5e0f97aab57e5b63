"""Inputs in pieces, outputs together: every container, and the mistakes that are told."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import paceline
from tests.dp.compare import CPUS

Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    values: torch.Tensor
    name: str


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor | None = None
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: float


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: torch.Tensor


@dataclass
class Settings:
    rate: float


class Kind(enum.Enum):
    A = 1


def x(rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * 3.0).reshape(rows, 3)


NESTS: list[Any] = [
    x(),
    (x(), 1, "a", None),
    [x(), [x(), (x(),)]],
    {"a": x(), "b": {"c": x(), "d": []}},
    OrderedDict(a=x(), b=()),
    Pair(x(), Pair(1, x())),
    Typed(x(), "name"),
    Batch(x(), x(), ["a"]),
    Frozen(x(), 0.5),
    Slotted(x()),
    {"a": Batch(x()), "b": [Typed(x(), "t")]},
    x(1),
    (x(0), x(0)),
    (x(3), Kind.A, torch.float32),
]


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_scatter_then_gather_gives_the_same(nest: Any, devices: int) -> None:
    pieces = paceline.scatter(nest, ["cpu"] * devices)
    assert len(pieces) <= devices
    assert isinstance(pieces, tuple if isinstance(nest, torch.Tensor) else list)
    assert all(type(piece) is type(nest) for piece in pieces)
    whole = paceline.gather(pieces, "cpu")
    assert type(whole) is type(nest)
    assert_equal(whole, nest)


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_equal(list(found.values()), list(expected.values()))
    elif hasattr(expected, "__dataclass_fields__"):
        for name in expected.__dataclass_fields__:
            assert_equal(getattr(found, name), getattr(expected, name))
    else:
        assert found == expected


def test_pieces_are_those_of_chunk() -> None:
    for rows in range(1, 9):
        for devices in range(1, 6):
            sizes = [len(piece) for piece in paceline.scatter(x(rows), ["cpu"] * devices)]
            assert sizes == [len(piece) for piece in x(rows).chunk(devices)]


def test_other_dimensions() -> None:
    left, right = paceline.scatter(x(), CPUS, dim=1)
    assert torch.equal(left, x()[:, :2])
    assert torch.equal(paceline.gather([left, right], "cpu", dim=1), x())
    left, right = paceline.scatter(x(), CPUS, dim=-1)
    assert torch.equal(right, x()[:, 2:])


def test_a_defaultdict_keeps_its_factory() -> None:
    pieces = paceline.scatter(defaultdict(list, a=x()), CPUS)
    assert pieces[1]["new"] == []
    assert torch.equal(paceline.gather([{"a": p["a"]} for p in pieces], "cpu")["a"], x())


def test_scalars_and_settings_go_to_every_replica_as_they_are() -> None:
    settings, scale = Settings(0.1), torch.tensor(2.0, requires_grad=True)
    pieces = paceline.scatter((x(), settings, scale), CPUS)
    assert all(piece[1] is settings for piece in pieces)
    sum(piece[2] for piece in pieces).backward()
    assert scale.grad == 2


def test_without_tensors_there_is_one_piece_per_device() -> None:
    assert paceline.scatter((1, "a"), CPUS) == [(1, "a"), (1, "a")]
    assert paceline.scatter_kwargs((1,), {}, CPUS) == (((1,), (1,)), ({}, {}))


def test_constants_do_not_make_more_pieces_than_the_batch_has() -> None:
    args, kwargs = paceline.scatter_kwargs((x(1),), {"flag": True}, CPUS)
    assert len(args) == len(kwargs) == 1
    args, kwargs = paceline.scatter_kwargs((), {"x": x(2), "flag": True}, ["cpu"] * 3)
    assert args == ((), ())
    assert [k["flag"] for k in kwargs] == [True, True]
    assert paceline.scatter_kwargs((), None, CPUS) == ((), ())


def test_different_numbers_of_pieces_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"\(4, 3\) into 2, \(1, 3\) into 1") as caught:
        paceline.scatter((x(4), x(1)), CPUS)
    assert isinstance(caught.value, paceline.errors.ScatterError)


def test_a_dimension_that_is_not_there() -> None:
    with pytest.raises(IndexError, match=r"dimension 2.*\(4, 3\)"):
        paceline.scatter(x(), CPUS, dim=2)


def test_a_packed_sequence_is_an_error() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    with pytest.raises(RuntimeError, match="pack inside of the module"):
        paceline.scatter((packed,), CPUS)


def test_a_piece_is_a_view_unless_gradients_flow() -> None:
    plain = x()
    assert paceline.scatter(plain, CPUS)[1].data_ptr() == plain[2:].data_ptr()
    hidden = x().requires_grad_() * 1

    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    leaf = x().requires_grad_()
    paceline.DataParallel(InPlace(), CPUS)(leaf * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((4, 3), 6.0))
    assert hidden.requires_grad


def test_other_devices() -> None:
    left, right = paceline.scatter({"a": x()}, ["cpu", "meta"])
    assert (left["a"].device.type, right["a"].device.type) == ("cpu", "meta")
    assert paceline.gather([x(), x()], "meta").device.type == "meta"


def test_none_and_equal_values_are_gathered_as_they_are() -> None:
    value = object()
    rows = [(None, 3, "a", Kind.A, value, torch.Size([1])) for _ in range(2)]
    assert paceline.gather(rows, "cpu") == rows[0]


@pytest.mark.parametrize(
    ("outputs", "kind", "text"),
    [
        ([{"a": x()}, {"b": x()}], KeyError, r"keys \['a'\], replica 1.*keys \['b'\]"),
        ([[x()], [x(), x()]], ValueError, "1 entries.*2 entries"),
        ([1, 2], TypeError, "1 from replica 0, 2 from replica 1"),
        ([{1}, {2}], TypeError, "type set"),
        ([x(), None], TypeError, "Tensor from 0, NoneType from 1"),
        ([None, x()], TypeError, "NoneType from 0, Tensor from 1"),
        (
            [torch.zeros(2, 3), torch.zeros(2, 4)],
            RuntimeError,
            r"\(2, 3\) from replica 0, \(2, 4\)",
        ),
    ],
)
def test_outputs_that_do_not_fit(outputs: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        paceline.gather(outputs, "cpu")
    assert isinstance(caught.value, paceline.errors.GatherError)


def test_scalars_along_another_dimension_are_an_error() -> None:
    with pytest.raises(paceline.errors.GatherError, match="dimension 1"):
        paceline.gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu", dim=1)


def test_dataclasses_and_named_tuples_through_a_module() -> None:
    class Model(nn.Module):
        def forward(self, batch: Batch, pair: Any) -> Any:
            assert batch.names == ["a"]
            return Pair(batch.x * 2, Frozen(pair.left + 1, 0.5))

    batch = Batch(x(), None, ["a"])
    found = paceline.DataParallel(Model(), CPUS)(batch, pair=Pair(x(), None))
    assert_equal(found, Pair(x() * 2, Frozen(x() + 1, 0.5)))
