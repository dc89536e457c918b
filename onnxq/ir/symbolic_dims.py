"""Arithmetic on dimensions, some of which are known only by a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

SymbolicDim: TypeAlias = "int | bool | str | None"
"""A number, the name of a dimension or of an expression of dimensions (never negative), or None if unknown."""

# Exporters write "?", "-1", "None" or "unk__12" for unknown dimensions: each occurrence may be another number.
_PLACEHOLDER = re.compile(r"(any|dyn(amic)?|nan|none|null|undefined|unk(nown)?)?[\W_]*\d*", re.IGNORECASE)


def is_symbol(name: str) -> bool:
    """Whether a dimension's name stands for the same number wherever it occurs.

    >>> is_symbol("batch"), is_symbol("s77"), is_symbol("?"), is_symbol("None"), is_symbol("unk__12")
    (True, True, False, False, False)
    """
    return _PLACEHOLDER.fullmatch(name) is None


def plus(one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    """Return the sum of two dimensions.

    >>> plus("seq", 0), plus("seq", "past"), plus("seq", None)
    ('seq', '(past+seq)', None)
    """
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    if 0 in (one, other):
        return other if one == 0 else one
    return _term("+", one, other)


def times(one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    """Return the product of two dimensions.

    >>> times("seq", 1), times(0, "seq"), times("seq", "batch"), times("seq", -1)
    ('seq', 0, '(batch*seq)', None)
    """
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    if 1 in (one, other):
        return other if one == 1 else one
    return 0 if 0 in (one, other) and None not in (one, other) else _term("*", one, other)


def product(entries: Iterable[SymbolicDim]) -> SymbolicDim:
    """Return the product of all dimensions.

    >>> product([2, "seq", 3]), product([])
    ('((2*seq)*3)', 1)
    """
    made: SymbolicDim = 1
    for entry in entries:
        made = times(made, entry)
    return made


def smaller(one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    """Return the smaller of two dimensions.

    >>> smaller(4, 3), smaller("seq", 64), smaller("seq", -1)
    (3, 'min(64,seq)', None)
    """
    if one == other or (isinstance(one, int) and isinstance(other, int)):
        return one if one == other else min(one, other)  # type: ignore[type-var]
    term = _term(",", one, other)
    return f"min{term}" if isinstance(term, str) else None


def is_bounded(extent: str, by: str) -> bool:
    """Whether ``extent`` is the minimum of ``by`` and numbers above 1.

    >>> is_bounded("min(64,seq)", "seq"), is_bounded("min(1,seq)", "seq")
    (True, False)
    """
    number, found, rest = extent.removeprefix("min(").partition(",")
    bounds = extent.startswith("min(") and found == "," and number.isdecimal() and int(number) > 1
    return bounds and (rest == f"{by})" or is_bounded(rest[:-1], by))


def is_zero_with(extent: SymbolicDim, entry: str) -> bool:
    """Whether a dimension is 0 wherever another one is, since it is a product or a minimum with each of its factors.

    >>> is_zero_with("(batch*seq)", "seq"), is_zero_with("batch", "(12*batch)"), is_zero_with("(past+seq)", "seq")
    (True, True, False)
    """
    factors = _factors(extent) if isinstance(extent, str) else []
    return all(
        factor.isdecimal() or any(factor == other or is_bounded(other, factor) for other in factors)
        for factor in _factors(entry)
    )


def _factors(term: str) -> list[str]:
    """Return the factors of a product that `times` made."""
    depth = 0
    for index, sign in enumerate(term):
        depth += (sign == "(") - (sign == ")")
        if sign == "*" and depth == 1 and term[0] == "(":
            return [*_factors(term[1:index]), *_factors(term[index + 1 : -1])]
    return [term]


def _term(sign: str, one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    negative = any(isinstance(entry, int) and entry < 0 for entry in (one, other))
    return None if one is None or other is None or negative else f"({sign.join(sorted((str(one), str(other))))})"


def minus(one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    """Return the difference of two dimensions; None for two different names, because it may be negative."""
    if isinstance(one, int) and isinstance(other, int):
        return one - other
    if one is None or other is None:
        return None
    return 0 if one == other else one if other == 0 else None


def over(one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    """Return the quotient of two dimensions, rounded towards zero."""
    if isinstance(one, int) and isinstance(other, int) and other:
        return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
    if other == 1:
        return one
    return f"({one}/{other})" if isinstance(one, str) and isinstance(other, int) and other > 1 else None


def remainder(one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    """Return the remainder of a division; None unless the dividend is at least 0 and the divisor positive."""
    natural = isinstance(one, int) and isinstance(other, int) and one >= 0 and other > 0
    return one % other if natural else None  # type: ignore[operator]


def equal(one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    """Return whether two dimensions are equal; None if unknown. A name may be any number that is not negative.

    >>> equal("seq", "seq"), equal("seq", -1), equal("seq", 4)
    (True, False, None)
    """
    if one is None or other is None:
        return None
    if (isinstance(one, int) and isinstance(other, int)) or one == other:
        return bool(one == other)
    return False if any(isinstance(entry, int) and entry < 0 for entry in (one, other)) else None


def numbers_only(compute: Callable[[int, int], int | bool]) -> Callable[[SymbolicDim, SymbolicDim], SymbolicDim]:
    """Extend a function of two numbers to dimensions: it returns None unless both are numbers."""
    return lambda one, other: compute(one, other) if isinstance(one, int) and isinstance(other, int) else None


def larger(one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    """Return the larger of two dimensions; None unless they are numbers or equal."""
    return one if one == other else numbers_only(max)(one, other)


def choose(condition: SymbolicDim, one: SymbolicDim, other: SymbolicDim) -> SymbolicDim:
    """Return ``one`` if a condition holds, else ``other``; None if the condition is unknown and they differ."""
    if condition is None:
        return one if one == other else None
    return one if condition else other


def negation(entry: SymbolicDim) -> SymbolicDim:
    """Return the opposite of a truth value."""
    return not entry if isinstance(entry, int) else None
