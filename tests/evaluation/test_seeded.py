"""Models that draw random numbers draw the same ones in every run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build
from onnx import ModelProto

from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.seeded import draws, put_seeds
from onnxq.runtime.sessions import open_session, run

FED = {"x": np.full((4, 8), 0.5, np.float32)}


DRAWING = {
    "RandomNormal": "n = RandomNormal<shape = [4, 8]>() y = Add(x, n)",
    "RandomUniform": "n = RandomUniform<shape = [4, 8]>() y = Add(x, n)",
    "RandomNormalLike": "y = RandomNormalLike(x)",
    "RandomUniformLike": "y = RandomUniformLike(x)",
    "Bernoulli": "y = Bernoulli(x)",
    "Multinomial": "i = Multinomial<sample_size = 8>(x) y = Cast<to = 1>(i)",
    "Dropout": "y = Dropout(x, half, yes)",
}


def random_model(build: Build, op: str, seed: str = "") -> ModelProto:
    nodes = DRAWING[op].replace(f"{op}(", f"{op}<{seed}>(").replace("]>", f"], {seed}>") if seed else DRAWING[op]
    return build(f"(float[4,8] x) => (float[4,8] y) {{ {nodes} }}", half=np.array(0.5, np.float32), yes=np.array(True))


@pytest.mark.parametrize("op", DRAWING)
def test_every_run_of_every_copy_draws_the_same(op: str, build: Build, tmp_path: Path) -> None:
    made = random_model(build, op)
    assert draws(made)
    plain = open_session(made)
    assert not np.array_equal(run(plain, FED)[0], run(plain, FED)[0])
    onnx.save(made, tmp_path / "model.onnx")
    one, other = (ComparisonSpec.whole(tmp_path / "model.onnx").open(tmp_path / "model.onnx") for _ in range(2))
    first = one.outputs(FED)["y"]
    assert len(np.unique(first)) > 1
    for session in (one, other, one):
        np.testing.assert_array_equal(session.outputs(FED)["y"], first)


def test_a_seed_of_the_model_stays(build: Build) -> None:
    made = random_model(build, "RandomNormal", "seed = 3.0")
    before = made.SerializeToString()
    put_seeds(made)
    assert made.SerializeToString() == before


def test_nodes_draw_apart(build: Build) -> None:
    made = build("(float[4,8] x) => (float[4,8] y, float[4,8] z) { y = RandomNormalLike(x) z = RandomNormalLike(x) }")
    put_seeds(made)
    one, other = run(open_session(made), FED)
    assert not np.array_equal(one, other)


def test_bodies_draw_too_and_a_dropout_only_in_training(build: Build) -> None:
    text = """(float[4,8] x, bool c) => (float[4,8] y) {{
        y = If (c) <then_branch = t () => (u) {{ u = {} }}, else_branch = e () => (v) {{ v = Relu(x) }}>
    }}"""
    inside = build(text.format("RandomNormalLike(x)"))
    assert draws(inside)
    put_seeds(inside)
    (drawing,) = inside.graph.node[0].attribute[0].g.node
    assert [attribute.name for attribute in drawing.attribute] == ["seed"]
    assert not draws(build(text.format("Dropout(x)")))
