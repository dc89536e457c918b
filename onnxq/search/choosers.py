"""The table of methods that choose codes; what carries one out is loaded only where methods are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from onnxq.planning.plan import Plan
from onnxq.search.biasing import with_biases
from onnxq.search.dividing import with_scaling
from onnxq.search.effort import Accuracy
from onnxq.search.folds import Basis, Folds
from onnxq.search.migrating import with_migration
from onnxq.search.ranging import with_ranges
from onnxq.search.rounding import with_compensation

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
