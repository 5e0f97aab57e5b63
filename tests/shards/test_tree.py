"""The tree is given by the number of shards alone, and ranks' parts always add up to it. Pure."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.shards.sums import PartStack, add_into
from paceline.shards.tree import Node, Shares, Tree, owned_shards, split

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


def most_sets_above_accumulation(shares: Shares, *, is_preset: bool) -> int:
    """The most sets of gradients that a rank holds in a round, its buckets aside; less one.

    As the loop over shards does it: with presets, the first of two siblings stays in place, and
    autograd adds the second one.
    """
    tree, owned, stack, most = shares.tree, shares.owned, PartStack(shares.tree), 0
    staying: Node | None = None
    for shard in owned:
        node = (staying[0] if staying else shard, shard + 1)
        if is_preset and stack.completes(node) and node not in tree.halves:
            node = (stack.pop()[0][0], shard + 1)
        most = max(most, len(stack) + 1)
        following = (shard + 1, shard + 2)
        has_sibling = tree.are_siblings(node, following) and following[0] in owned
        staying = node if is_preset and has_sibling and node not in tree.halves else None
        if staying is None and shard != owned[-1]:
            stack.push(node, [None])
    return most - 1


@pytest.mark.parametrize(("is_preset", "least"), [(True, 50), (False, 20)])
def test_sets_of_gradients_as_the_docs_say(is_preset: bool, least: int) -> None:
    """At most log2(V / N) + 1 for small V, and where ranks own whole subtrees; else 2 log2."""
    exceeding = set()
    for shards in range(1, 104):
        for world in range(1, min(shards, 8) + 1):
            ranks = [Shares(shards, rank, world) for rank in range(world)]
            found = max(most_sets_above_accumulation(each, is_preset=is_preset) for each in ranks)
            largest = -(-shards // world)
            if found > math.log2(shards / world) + 1:
                exceeding.add(shards)
                assert any(len(parts) > 1 for parts in ranks[0].parts), (shards, world)
            assert found <= max(1, 2 * math.log2(largest)), (shards, world)
    assert min(exceeding) == least


def test_nothing_counts_as_zero() -> None:
    import torch

    for left, right in ((torch.tensor([-0.0]), None), (None, torch.tensor([-0.0]))):
        total = [left]
        add_into(total, [right])
        assert total[0] is not None
        assert not torch.signbit(total[0])
