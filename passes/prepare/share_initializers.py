"""Keep one of several equal initializers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from onnx import TensorProto

from onnxq.ir import Constant, Graph, Names, onnx_dtype, place_constants, replace_uses
from onnxq.rewrite import Changes, Pass


@dataclass(frozen=True)
class ShareInitializers(Pass):
    """Let all nodes read the first of several initializers of equal type, shape and bytes.

    One that is shared by several bodies of control flow moves to the innermost graph around them. Leaves initializers
    that are inputs or outputs of a graph, those that training moves on, and text.

    Attributes:
        scalars_apart: whether each graph keeps scalars of its own. onnxruntime 1.30 does not load two bodies whose
            integer kernels give codes with one zero point.
    """

    scalars_apart: bool = False

    def apply(self, graph: Graph) -> Changes:
        """Share; ``changed`` holds the names of the initializers that are no longer read."""
        shared = list(_shareable(graph))
        # Most large weights are alone in their shape and ends, and their bytes need not be read.
        kinds = {tensor: _kind(tensor) for tensor, _ in shared}
        alike = Counter(kinds.values())
        first: dict[tuple[Hashable, bytes, Graph | None], tuple[Constant, Graph]] = {}
        moved: set[Constant] = set()
        names: Names | None = None
        changed = []
        for tensor, scope in shared:
            if alike[kinds[tensor]] == 1:
                continue
            among = scope if self.scalars_apart and not tensor.shape else None
            kept, home = first.setdefault((kinds[tensor], _digest(tensor), among), (tensor, scope))
            if kept is tensor:
                continue
            if home is not scope and kept not in moved:
                # It is going to be seen from several bodies, where other tensors may bear its name.
                names = names or Names(graph)
                kept.name = names.fresh(kept.name)
                moved.add(kept)
            replace_uses(tensor, kept)
            changed.append(tensor.name)
        return Changes(tuple(changed))


def _shareable(graph: Graph) -> Iterator[tuple[Constant, Graph]]:
    for scope, tensors in place_constants(graph).items():
        fixed = {tensor.name for tensor in (*scope.inputs, *scope.outputs)}
        for tensor in tensors:
            if tensor.name not in fixed and tensor.input_source is None and _is_read_number(tensor):
                yield tensor, scope


def _is_read_number(tensor: Constant) -> bool:
    """Whether sharing can make a difference: text has no bytes, and what nothing reads was stored so on purpose.

    The statistics of a BatchNormalization in training are written where they lie.
    """
    moves = any(reader.op == "BatchNormalization" and reader.attrs.get("training_mode") for reader in tensor.outputs)
    return bool(tensor.outputs) and onnx_dtype(tensor) != TensorProto.STRING and not moves


def _kind(tensor: Constant) -> tuple[int, tuple[int, ...], str]:
    return onnx_dtype(tensor), tuple(tensor.shape), tensor.payload.ends


def _digest(tensor: Constant) -> bytes:
    """Return what stands for the bytes of a constant."""
    digest = hashlib.blake2b(digest_size=20)
    for chunk in tensor.payload.chunks():
        digest.update(chunk)
    return digest.digest()
