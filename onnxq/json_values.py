"""Values as JSON has them."""

from __future__ import annotations

import math


def plain(value: object) -> object:
    """Return a value of dictionaries, lists and numbers with null for what JSON has no word for.

    >>> plain({"sqnr": float("inf"), "range": (0, 1)})
    {'sqnr': None, 'range': [0, 1]}
    """
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
