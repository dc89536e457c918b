"""A model with a bit of everything, and the same with a few bytes changed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
from onnx import ModelProto, TensorProto, helper

from hostile.bad_parts import IMAGE, sound

# --- damaged files ------------------------------------------------------------------------------------------------


def victim() -> ModelProto:
    """Return a small model that holds a bit of everything."""
    model = sound(
        """c = Reshape(b, s)
        d = Conv<pads = [1, 1, 1, 1]>(c, v, bias)
        e = Flatten(d)
        f = Gemm(e, g)
        y = If (yes) <then_branch = one () => (float[a,b] p) { p = MatMul(f, h) },
                      else_branch = other () => (float[a,b] q) { q = Relu(f) }>""",
        **IMAGE,
        bias=np.ones(2, "f"),
        g=np.random.default_rng(1).standard_normal((32, 16)).astype("f"),
        h=np.random.default_rng(2).standard_normal((16, 16)).astype("f"),
        yes=np.array(True),
    )
    model.metadata_props.add(key="author", value="somebody")
    model.graph.value_info.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, [1, 32]))
    return model


def mutations(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield damaged copies: cut short, bits flipped, bytes changed, pieces repeated or left out."""
    chance = random.Random(seed)
    for _ in range(count):
        found = bytearray(data)
        kind = chance.choice(("cut", "bits", "bits", "bytes", "repeat", "drop"))
        place = chance.randrange(len(data))
        length = chance.randint(1, 40)
        if kind == "cut":
            del found[place:]
        elif kind == "bits":
            for _ in range(chance.randint(1, 8)):
                found[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif kind == "bytes":
            found[place : place + length] = chance.randbytes(length)
        elif kind == "repeat":
            found[place:place] = found[place : place + length]
        else:
            del found[place : place + length]
        yield bytes(found)
