"""What exporters write and rules look for, each with variations that a rule must leave as they are."""

from __future__ import annotations

from fuzzing.idioms import bodies, constants, elementwise, moving, normalizations, others, products
from fuzzing.idioms.writing import IDIOMS, Idiom

__all__ = ["IDIOMS", "Idiom", "bodies", "constants", "elementwise", "moving", "normalizations", "others", "products"]
