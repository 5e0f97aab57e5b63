"""What a batch holds is cut, all of it; what cannot be cut is refused by name."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from paceline.errors import ConfigurationError
from paceline.shards.batches import cut_batch

OWNED = range(2, 5)  # three shards of two samples each


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass
class Graphs:
    nodes: Tensor
    labels: Any = None


class Registered:
    def __init__(self, x: Any, name: str) -> None:
        self.x, self.name = x, name


pytree.register_pytree_node(
    Registered, lambda value: ([value.x], value.name), lambda parts, name: Registered(*parts, name)
)


def rows() -> Tensor:
    return torch.arange(12.0).view(6, 2)


def names() -> list[str]:
    return list("abcdef")


def cut(batch: Any) -> list[Any]:
    return list(cut_batch(batch, OWNED, 8, 1))


def test_everything_is_cut() -> None:
    batch = {
        "x": rows(),
        "array": np.arange(6),
        "names": names(),
        "fields": [tuple(names()), rows()],
        "pair": Pair(rows(), names()),
        "graphs": Graphs(rows()),
        "registered": Registered(rows(), "it"),
        "deque": collections.deque([rows()]),
        "records": [{"id": each} for each in names()],
        "nothing": None,
        "empty": (),
    }
    found = cut(batch)
    assert len(found) == 3
    for number, micro in enumerate(found):
        own = slice(2 * number, 2 * number + 2)
        assert torch.equal(micro["x"], rows()[own])
        assert micro["array"].tolist() == list(range(6))[own]
        assert micro["names"] == names()[own]
        assert micro["fields"][0] == tuple(names()[own])
        assert torch.equal(micro["fields"][1], rows()[own])
        assert torch.equal(micro["pair"].x, rows()[own])
        assert micro["pair"].names == names()[own]
        assert torch.equal(micro["graphs"].nodes, rows()[own])
        assert torch.equal(micro["registered"].x, rows()[own])
        assert micro["registered"].name == "it"
        assert torch.equal(micro["deque"][0], rows()[own])
        assert micro["records"] == [{"id": each} for each in names()[own]]
        assert (micro["nothing"], micro["empty"]) == (None, ())
    assert not np.shares_memory(found[0]["array"], batch["array"])


def test_fields_of_texts_alone() -> None:
    """As torch's default_collate makes them of pairs of texts."""
    assert cut([tuple(names()), tuple(names())])[1] == [("c", "d"), ("c", "d")]


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"x": rows(), "scale": 0.5}, r"batch\['scale'\] \(float\) cannot be cut"),
        ((rows(), "train"), r"batch\[1\] \(str\) cannot be cut"),
        ((rows(), torch.tensor(1.0)), r"batch\[1\] \(a scalar\) cannot be cut"),
        (Graphs(rows(), object()), r"batch.labels \(object\) cannot be cut"),
        (Registered({1, 2}, "it"), r"batch\[0\] \(set\) cannot be cut"),
        ((rows(), ["a", "b"]), r"the same multiple of 3, not \[2, 6\] \(batch\[0\]: 6, batch\[1\]"),
        ((rows(), np.zeros(3)), r"not \[3, 6\]"),
        (collections.UserDict(x=rows()), r"batch \(UserDict\) cannot be cut"),
        ({}, "it is empty"),
    ],
)
def test_what_cannot_be_cut(batch: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        cut(batch)
