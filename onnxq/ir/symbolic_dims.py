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


def plus(left: SymbolicDim, right: SymbolicDim) -> SymbolicDim:
    """Return the sum of two dimensions.

    >>> plus("seq", 0), plus("seq", "past"), plus("seq", None)
    ('seq', '(past+seq)', None)
    """
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    if 0 in (left, right):
        return right if left == 0 else left
    return _term("+", left, right)


def times(left: SymbolicDim, right: SymbolicDim) -> SymbolicDim:
    """Return the product of two dimensions.

    >>> times("seq", 1), times(0, "seq"), times("seq", "batch"), times("seq", -1)
    ('seq', 0, '(batch*seq)', None)
    """
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    if 1 in (left, right):
        return right if left == 1 else left
    return 0 if 0 in (left, right) and None not in (left, right) else _term("*", left, right)


def product(entries: Iterable[SymbolicDim]) -> SymbolicDim:
    """Return the product of all dimensions.

    >>> product([2, "seq", 3]), product([])
    ('((2*seq)*3)', 1)
    """
    total: SymbolicDim = 1
    for entry in entries:
        total = times(total, entry)
    return total


def smaller(left: SymbolicDim, right: SymbolicDim) -> SymbolicDim:
    """Return the smaller of two dimensions.

    >>> smaller(4, 3), smaller("seq", 64), smaller("seq", -1)
    (3, 'min(64,seq)', None)
    """
    if left == right or (isinstance(left, int) and isinstance(right, int)):
        return left if left == right else min(left, right)  # type: ignore[type-var]
    term = _term(",", left, right)
    return f"min{term}" if isinstance(term, str) else None


def is_bounded(extent: str, by: str) -> bool:
    """Whether ``extent`` is the minimum of ``by`` and numbers above 1.

    >>> is_bounded("min(64,seq)", "seq"), is_bounded("min(1,seq)", "seq")
    (True, False)
    """
    number, comma, rest = extent.removeprefix("min(").partition(",")
    bounds = extent.startswith("min(") and comma == "," and number.isdecimal() and int(number) > 1
    return bounds and (rest == f"{by})" or is_bounded(rest[:-1], by))


def is_zero_with(extent: SymbolicDim, entry: str) -> bool:
    """Whether a dimension is 0 wherever another one is, since it is a product or a minimum with each of its factors.

    >>> is_zero_with("(batch*seq)", "seq"), is_zero_with("batch", "(12*batch)"), is_zero_with("(past+seq)", "seq")
    (True, True, False)
    """
    factors = _factors(extent) if isinstance(extent, str) else []
    return all(
        factor.isdecimal() or any(factor == candidate or is_bounded(candidate, factor) for candidate in factors)
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


def _term(sign: str, left: SymbolicDim, right: SymbolicDim) -> SymbolicDim:
    negative = any(isinstance(entry, int) and entry < 0 for entry in (left, right))
    return None if left is None or right is None or negative else f"({sign.join(sorted((str(left), str(right))))})"


def minus(left: SymbolicDim, right: SymbolicDim) -> SymbolicDim:
    """Return the difference of two dimensions; None for two different names, because it may be negative."""
    if isinstance(left, int) and isinstance(right, int):
        return left - right
    if left is None or right is None:
        return None
    return 0 if left == right else left if right == 0 else None


def over(left: SymbolicDim, right: SymbolicDim) -> SymbolicDim:
    """Return the quotient of two dimensions, rounded towards zero."""
    if isinstance(left, int) and isinstance(right, int) and right:
        return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    if right == 1:
        return left
    return f"({left}/{right})" if isinstance(left, str) and isinstance(right, int) and right > 1 else None


def remainder(left: SymbolicDim, right: SymbolicDim) -> SymbolicDim:
    """Return the remainder of a division; None unless the dividend is at least 0 and the divisor positive."""
    natural = isinstance(left, int) and isinstance(right, int) and left >= 0 and right > 0
    return left % right if natural else None  # type: ignore[operator]


def equal(left: SymbolicDim, right: SymbolicDim) -> SymbolicDim:
    """Return whether two dimensions are equal; None if unknown. A name may be any number that is not negative.

    >>> equal("seq", "seq"), equal("seq", -1), equal("seq", 4)
    (True, False, None)
    """
    if left is None or right is None:
        return None
    if (isinstance(left, int) and isinstance(right, int)) or left == right:
        return bool(left == right)
    return False if any(isinstance(entry, int) and entry < 0 for entry in (left, right)) else None


def numbers_only(compute: Callable[[int, int], int | bool]) -> Callable[[SymbolicDim, SymbolicDim], SymbolicDim]:
    """Extend a function of two numbers to dimensions: it returns None unless both are numbers."""
    return lambda left, right: compute(left, right) if isinstance(left, int) and isinstance(right, int) else None


def larger(left: SymbolicDim, right: SymbolicDim) -> SymbolicDim:
    """Return the larger of two dimensions; None unless they are numbers or equal."""
    return left if left == right else numbers_only(max)(left, right)


def choose(condition: SymbolicDim, if_true: SymbolicDim, if_false: SymbolicDim) -> SymbolicDim:
    """Return ``if_true`` if a condition holds, else ``if_false``; None if it is unknown and they differ."""
    if condition is None:
        return if_true if if_true == if_false else None
    return if_true if condition else if_false


def negation(entry: SymbolicDim) -> SymbolicDim:
    """Return the opposite of a truth value."""
    return not entry if isinstance(entry, int) else None
