"""What holds for every pass: its form, and on a zoo of models its effect, which is none the second time."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path

import onnx
import pytest
from model_texts import difference, outputs, sample
from model_zoo import zoo
from onnx import ModelProto

import onnxq.passes
from onnxq.algorithms.encode import encode
from onnxq.algorithms.encodings import Encodings
from onnxq.config.presets import preset_named
from onnxq.ir import Graph, as_graph, load, save, to_model
from onnxq.lowering import AllowedOps
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    NOT_CANONICAL,
    PASSES,
    CompressWeights,
    DecodeWeights,
    IsolateProducts,
    NameNodes,
    QuantizeDynamically,
    QuantizeRecurrentCells,
    RemoveQuantizeDequantize,
    ReplaceIntegerOperators,
    ReplaceIntegerProducts,
    ReplaceWithContrib,
    passes_of,
)
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Plan
from onnxq.rewrite import Pass, Pipeline, RewriteRule
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.resources import silent

ZOO: Mapping[str, Callable[[], ModelProto]] = dict(zoo())
SEEDS = (0, 1)
SCHEMES: dict[type[Pass], str] = (
    {CompressWeights: "int8-storage"}
    | dict.fromkeys((DecodeWeights, IsolateProducts, ReplaceWithContrib), "int8-block32")
    | dict.fromkeys((QuantizeDynamically, QuantizeRecurrentCells), "int8-dynamic")
)
DEQUANTIZING = (RemoveQuantizeDequantize, ReplaceIntegerOperators, ReplaceIntegerProducts)
OPSETS = {"int8": 13, "int8-dynamic": 13, "int8-storage": 13, "int8-block32": 21}

REWRITING = 2e-6
"""Passes that only rewrite may reorder float32 sums; relative to the largest output."""
FUSED_FLOAT16 = 1e-3
"""Weights that are folded in float16 are rounded once more, to 11 bits."""
QUANTIZED = 0.05
"""Eight-bit weights and activations; small random models have no redundancy that would hide the noise."""
REPEATED = 0.08
"""The noise of a recurrence goes through each of the steps that follow."""


@dataclass(frozen=True)
class Prepared:
    """A model as plans are made for, with a plan and the quantized values that it gets."""

    path: Path
    plan: Plan
    encodings: Encodings


@cache
def expected_outputs(name: str, seed: int) -> dict[str, object]:
    """What the model computes as it was written; onnxruntime refuses repeated node names, so there are none."""
    model = ZOO[name]()
    inputs = sample(model, seed)
    for node in model.graph.node:
        node.name = ""
    return outputs(model, inputs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@cache
def prepared(name: str, scheme: str, folder: Path) -> Prepared:
    model = ZOO[name]()
    graph = prepare(as_graph(model), opset=OPSETS[scheme])
    (folder / f"{name}-{scheme}").mkdir()
    path = folder / f"{name}-{scheme}" / "prepared.onnx"
    save(graph, path)
    emit = AllowedOps.ORT if scheme == "int8-dynamic" else AllowedOps.QDQ
    bench = PreparedModel(path, preset_named(scheme), target_named("onnxruntime-cpu"), emit=emit)
    plan = bench.plan({})
    statistics = bench.calibrate(plan, [sample(model, seed) for seed in SEEDS], silent)
    return Prepared(path, plan, encode(plan, load(path), statistics))


def before(name: str, step: type[Pass], folder: Path) -> tuple[Graph, Pass]:
    """A graph of the model in the form that the pass wants, and the pass."""
    wanted = {field.name for field in fields(step)} & {"plan", "encodings"}
    if wanted:
        scheme = SCHEMES.get(step, "int8")
        made = prepared(name, scheme, folder)
        return load(made.path), step(**{field: getattr(made, field) for field in wanted})
    graph = as_graph(ZOO[name]())
    if step is not NameNodes:
        NameNodes().apply(graph)
    infer_shapes(graph)
    if step is RemoveQuantizeDequantize:
        # It refuses what computes with quantized values, which these take away.
        Pipeline((ReplaceIntegerOperators(), ReplaceIntegerProducts())).apply(graph)
    return graph, step()


def tolerance(name: str, step: type[Pass]) -> float:
    if any(field.name == "plan" for field in fields(step)):
        return REPEATED if name.startswith("unrolled") else QUANTIZED
    if name.startswith("quantized") and step in DEQUANTIZING:
        return QUANTIZED
    return FUSED_FLOAT16 if name.startswith("float16") else REWRITING


@pytest.mark.parametrize("model", ZOO)
@pytest.mark.parametrize("step", PASSES.values(), ids=PASSES)
def test_keeps_what_the_model_computes_and_changes_nothing_the_second_time(
    model: str, step: type[Pass], folder: Path
) -> None:
    graph, instance = before(model, step, folder)
    instance.apply(graph)
    once = to_model(graph)

    onnx.checker.check_model(once, full_check=True)
    for seed in SEEDS:
        inputs = sample(ZOO[model](), seed)
        assert difference(outputs(once, inputs), expected_outputs(model, seed)) <= tolerance(model, step)

    again = instance.apply(graph)
    assert not again, again.changed
    assert to_model(graph) == once


@pytest.mark.parametrize("model", ZOO)
def test_preparing_keeps_what_the_model_computes(model: str) -> None:
    once = to_model(prepare(as_graph(ZOO[model]()), opset=13))
    for seed in SEEDS:
        inputs = sample(ZOO[model](), seed)
        assert difference(outputs(once, inputs), expected_outputs(model, seed)) <= tolerance(model, NameNodes)


@pytest.mark.parametrize("step", PASSES.values(), ids=PASSES)
def test_is_a_frozen_dataclass_with_a_docstring_of_its_own(step: type[Pass]) -> None:
    assert is_dataclass(step)
    assert step.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert step.__doc__ is not None
    assert not step.__doc__.startswith(f"{step.__name__}("), "dataclass wrote it"
    documented = " ".join(base.__doc__ or "" for base in step.__mro__)
    assert all(field.name in documented for field in fields(step))


def test_every_public_pass_of_a_module_is_found() -> None:
    modules = Path(onnxq.passes.__file__).parent.rglob("[!_]*.py")
    written = {
        name
        for path in modules
        for name in re.findall(r"^class ([A-Z]\w*)\((?:\w*Pass|RewriteRule|RoundingRule)\)", path.read_text(), re.M)
    } - {"PlannedPass", "EncodedPass"}
    assert written == set(PASSES) <= set(dir(onnxq.passes))
    assert all(getattr(onnxq.passes, name) is step for name, step in PASSES.items())


def test_every_rule_begins_with_its_equation() -> None:
    rules = {name: step for name, step in PASSES.items() if issubclass(step, RewriteRule)}
    assert not [name for name, step in rules.items() if not re.match(r"``.+ -> .+``\.\n", step.__doc__ or "")]


def test_the_page_of_rules_is_that_of_their_docstrings() -> None:
    docs = Path(__file__).parents[2] / "docs"
    written = (docs / "reference" / "rules.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(docs / "rules.py"))["page"]() == written, "run python docs/rules.py"


def test_rules_of_floats_are_canonical_unless_they_are_named() -> None:
    canonical, prepare = passes_of("canonical"), passes_of("prepare")
    assert list(canonical) == sorted(canonical)
    assert all(issubclass(step, RewriteRule) for step in canonical.values())
    assert {name for name, step in prepare.items() if issubclass(step, RewriteRule)} == NOT_CANONICAL
