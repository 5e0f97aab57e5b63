"""The tree is given by the number of shards alone, and ranks' parts always add up to it. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.shards.sums import PartStack, add_into
from paceline.shards.tree import Shares, Tree, owned_shards, split

counts = st.integers(1, 70)


def by_hand(begin: int, end: int) -> str:
    """The sum of shards as a term with all its brackets, by the rule in the docs."""
    if end - begin == 1:
        return str(begin)
    half = 1
    while half * 2 < end - begin:
        half *= 2
    return f"({by_hand(begin, begin + half)}+{by_hand(begin + half, end)})"


def test_eight() -> None:
    assert by_hand(0, 8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert by_hand(0, 5) == "(((0+1)+(2+3))+4)"


@pytest.mark.parametrize(("node", "middle"), [((0, 2), 1), ((0, 3), 2), ((4, 8), 6), ((0, 9), 8)])
def test_split(node: tuple[int, int], middle: int) -> None:
    assert split(node) == middle


@given(counts, st.data())
def test_any_number_of_ranks_writes_the_same_term(shards: int, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, shards))
    terms = []
    for rank in range(world):
        shares = Shares(shards, rank, world)
        parts = []
        for node in shares.parts[rank]:
            inner = Tree(shards)
            leaves = {(s, s + 1): str(s) for s in range(shards)}
            inner.root = node
            parts.append(inner.combine(leaves, lambda a, b: f"({a}+{b})"))
        terms.append(parts)
    shares = Shares(shards, 0, world)
    found = shares.tree.combine(shares.by_node(terms), lambda a, b: f"({a}+{b})")
    assert found == by_hand(0, shards)


@given(counts, st.data())
def test_every_shard_has_one_owner(shards: int, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, shards))
    ranges = [owned_shards(shards, rank, world) for rank in range(world)]
    assert [shard for each in ranges for shard in each] == list(range(shards))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(st.integers(1, 300))
def test_a_rank_holds_few_sets(shards: int) -> None:
    import torch

    stack = PartStack(Tree(shards))
    most = 0
    for shard in range(shards):
        stack.push((shard, shard + 1), [torch.ones(1)])
        most = max(most, len(stack))
    assert len(stack) == 1
    assert most <= max(1, shards.bit_length())
    assert stack.value(0)[0] == shards


def test_nothing_counts_as_zero() -> None:
    import torch

    for left, right in ((torch.tensor([-0.0]), None), (None, torch.tensor([-0.0]))):
        total = [left]
        add_into(total, [right])
        assert total[0] is not None
        assert not torch.signbit(total[0])
