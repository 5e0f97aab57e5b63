"""Copies of states: the native function and the one in Python make the same."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic.commit import plain_copy
from paceline.elastic.commit.plain_copy import copied_state

LEFT_OUT = frozenset(("params", "names"))
KEYS = st.one_of(st.sampled_from(["params", "names", "lr"]), st.integers(), st.text(max_size=3))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
                   st.binary(max_size=3), st.complex_numbers())  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
)


@given(VALUES)
def test_both_copy_alike(value: Any) -> None:
    seen: list[list[Any]] = [[], []]

    def other(into: list[Any]) -> Any:
        return lambda each: into.append(each) or repr(each)

    both = plain_copy._copy_plain, plain_copy.copy_plain
    found = [copied(value, LEFT_OUT, other(seen[n])) for n, copied in enumerate(both)]
    assert repr(found[0]) == repr(found[1])
    assert repr(seen[0]) == repr(seen[1])


@given(VALUES)
def test_a_state_is_copied_as_deepcopy_does(value: Any) -> None:
    assert repr(copied_state(value)) == repr(copy.deepcopy(value))


def test_what_is_changed_later_is_not_changed_in_the_copy() -> None:
    counter, ordered = Counter([2, 2, 5]), OrderedDict(a=[1])
    state = {"rates": [0.1], "steps": counter, "pair": ([1],), "ordered": ordered}
    found = copied_state(state)
    state["rates"].append(7)  # type: ignore[attr-defined]
    state["pair"][0].append(7)
    counter[9] += 1
    ordered["a"].append(7)
    assert found == {"rates": [0.1], "steps": Counter([2, 2, 5]), "pair": ([1],),
                     "ordered": OrderedDict(a=[1])}  # fmt: skip
    assert type(found["steps"]) is Counter


@pytest.mark.parametrize("copied", [plain_copy._copy_plain, plain_copy.copy_plain])
def test_errors_come_through(copied: Any) -> None:
    def refuse(_: Any) -> None:
        raise ValueError("not this")

    with pytest.raises(ValueError, match="not this"):
        copied({"a": [1, ({1, 2},)]}, LEFT_OUT, refuse)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        copied(endless, LEFT_OUT, refuse)
