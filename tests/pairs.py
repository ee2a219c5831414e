"""Few cases in which every value of one factor meets every value of every other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Pair = frozenset[tuple[str, Any]]


def pairs_of(choice: Mapping[str, Any]) -> set[Pair]:
    """Return the pairs of values that meet in one case."""
    return {frozenset(pair) for pair in combinations(choice.items(), 2)}


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Return every pair of values of two factors."""
    return {
        frozenset([(a, x), (b, y)])
        for a, b in combinations(factors, 2)
        for x, y in product(factors[a], factors[b])
    }


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return cases that cover `all_pairs`; the greedy choice, the same every time."""
    missing = all_pairs(factors)
    cases = []
    while missing:
        # begin with a pair that is missing still, so that every case brings something
        choice: dict[str, Any] = dict(min(missing, key=_order))
        for name, values in factors.items():
            if name not in choice:
                gains = [len(pairs_of({**choice, name: value}) & missing) for value in values]
                choice[name] = values[gains.index(max(gains))]
        missing -= pairs_of(choice)
        cases.append({name: choice[name] for name in factors})
    return cases


def _order(pair: Pair) -> list[tuple[str, str]]:
    return sorted((name, repr(value)) for name, value in pair)
