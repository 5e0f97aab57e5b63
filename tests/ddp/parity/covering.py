"""Few cases that hold every pair of values of many features, and what was really seen of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = Mapping[str, Any]
Choice = tuple[str, Any]
Pair = tuple[Choice, Choice]


def pairs_of(case: Case) -> Iterator[Pair]:
    """Yield every pair of choices in a case, each once."""
    return combinations(sorted(case.items(), key=lambda choice: choice[0]), 2)


def all_pairs(features: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Return every pair of values of two different features."""
    choices = [(name, value) for name, values in sorted(features.items()) for value in values]
    return {(a, b) for a, b in combinations(choices, 2) if a[0] != b[0]}


def cover_pairs(
    features: Mapping[str, Sequence[Any]], is_allowed: Callable[[Case], bool], seed: int = 0
) -> list[dict[str, Any]]:
    """Return allowed cases that together hold every pair that an allowed case can hold.

    Greedy: each case is grown from a pair that is still missing, by values that bring the most
    missing pairs with them.
    """
    draw = random.Random(seed)
    missing, cases = all_pairs(features), []
    for pair in sorted(missing, key=repr):
        if pair not in missing:
            continue
        best = max(
            (case for case in _grown(features, pair, missing, is_allowed, draw)),
            key=lambda case: len(missing.intersection(pairs_of(case))),
            default=None,
        )
        if best is not None:
            missing.difference_update(pairs_of(best))
            cases.append(best)
    return cases


def _grown(
    features: Mapping[str, Sequence[Any]],
    pair: Pair,
    missing: set[Pair],
    is_allowed: Callable[[Case], bool],
    draw: random.Random,
    attempts: int = 20,
) -> Iterator[dict[str, Any]]:
    for _ in range(attempts):
        case = dict(pair)
        names = [name for name in features if name not in case]
        draw.shuffle(names)
        for name in names:
            values = list(features[name])
            draw.shuffle(values)
            fits = [v for v in values if is_allowed(case | {name: v})]
            if not fits:
                break
            case[name] = max(fits, key=lambda v: _gain(case, (name, v), missing))
        if case.keys() == features.keys() and is_allowed(case):
            yield case


def _gain(case: Case, choice: Choice, missing: set[Pair]) -> int:
    pairs = (tuple(sorted([choice, other], key=lambda c: c[0])) for other in case.items())
    return sum(pair in missing for pair in pairs)


def draw_case(
    features: Mapping[str, Sequence[Any]], is_allowed: Callable[[Case], bool], draw: random.Random
) -> dict[str, Any]:
    """Return one allowed case, at random."""
    while True:
        case = {name: draw.choice(list(values)) for name, values in features.items()}
        if is_allowed(case):
            return case


def table(
    features: Mapping[str, Sequence[Any]],
    seen: Iterable[Case],
    refused: Mapping[frozenset[Choice], Any],
) -> str:
    """Draw who was seen with whom: how often, or ``x`` for what is refused, ``.`` for never."""
    counts: dict[Pair, int] = {}
    for case in seen:
        for pair in pairs_of(case):
            counts[pair] = counts.get(pair, 0) + 1
    choices = [(name, value) for name, values in sorted(features.items()) for value in values]
    labels = [f"{name}={value}" for name, value in choices]
    width = max(map(len, labels))
    lines = [" " * width + " " + " ".join(f"{n:3}" for n in range(len(labels)))]
    for row, one in enumerate(choices):
        cells = []
        for other in choices[:row]:
            count = counts.get((other, one), 0)
            is_refused = frozenset((one, other)) in refused
            same = one[0] == other[0]
            cells.append(f"{'' if same else 'x' if is_refused else count or '.':>3}")
        lines.append(f"{labels[row]:{width}} " + " ".join([*cells, f"{row:3}"]))
    return "\n".join(lines)
