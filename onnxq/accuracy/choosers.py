"""The table of methods that choose codes; what carries one out is loaded only where methods are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from onnxq.accuracy.biasing import with_biases
from onnxq.accuracy.dividing import with_scaling
from onnxq.accuracy.effort import Accuracy
from onnxq.accuracy.folds import Basis, Folds
from onnxq.accuracy.migrating import with_migration
from onnxq.accuracy.ranging import with_ranges
from onnxq.accuracy.rounding import with_compensation
from onnxq.planning.plan import Plan

CHOOSERS: Mapping[str, Callable[[Folds, Plan, Basis, Accuracy], Basis]] = MappingProxyType(
    {
        "ranges": with_ranges,
        "migration": with_migration,
        "scaling": with_scaling,
        "compensation": with_compensation,
        "bias": with_biases,
    }
)
"""What carries out each method that chooses codes, by its name."""
