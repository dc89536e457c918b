"""Models made to hurt: a name and the bytes of each; all of them take x, float32 of shape [2,16], where they can."""

from __future__ import annotations

from hostile import bad_nesting, bad_sizes, bad_values

MODELS = {**bad_sizes.MODELS, **bad_values.MODELS, **bad_nesting.MODELS}
