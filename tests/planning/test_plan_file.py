"""Plans in files: exact, stable, and wrong ones told in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec, Rounding, Storage
from onnxq.errors import OutputError, SchemeError
from onnxq.ir import read_model
from onnxq.lowering import AllowedOps
from onnxq.numerics.formats import FORMATS
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import NOTED_METHODS, Activation, Decision, Plan, Weight
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.planning.plan_fit import check_fits
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import TARGETS

CPU = TARGETS["onnxruntime-cpu"]


def valid_specs() -> st.SearchStrategy[QuantSpec]:
    def made(*choices):
        try:
            return QuantSpec(*choices)
        except SchemeError:
            return None

    extents = st.lists(st.integers(1, 4096), min_size=1, max_size=5).map(tuple)
    choices = (
        st.sampled_from(list(FORMATS)),
        st.sampled_from(Granularity) | extents,
        st.booleans(),
        st.sampled_from(["float32", "float16", "e8m0"]),
        st.sampled_from(Rounding),
        st.booleans(),
        st.sampled_from([*Method, "somebody's"]),
        st.sampled_from(Storage),
    )
    return st.builds(made, *choices).filter(lambda spec: spec is not None)


# Anything that UTF-8 can hold: names come from files.
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
weights = st.builds(
    Weight, st.integers(0, 9), names, valid_specs(), st.integers(-4, 4), st.integers(0, 2**40), st.integers(-4, 4)
)
activations = st.builds(
    Activation,
    names,
    valid_specs(),
    names,
    st.none() | st.tuples(finite, finite).map(lambda pair: (min(pair), max(pair))),
    st.booleans(),
    names,
)
decisions = st.builds(
    Decision,
    names,
    names,
    st.sampled_from(Mode),
    names,
    st.lists(weights, max_size=2).map(tuple),
    st.none() | st.integers(0, 9),
    names,
)
plans = st.builds(
    Plan,
    st.lists(decisions, max_size=4, unique_by=lambda one: one.node).map(tuple),
    st.lists(activations, max_size=4, unique_by=lambda one: one.tensor).map(tuple),
    names,
    st.sampled_from(list(TARGETS)),
    names,
    st.lists(st.sampled_from(NOTED_METHODS), max_size=2).map(tuple),
)


@settings(max_examples=100)
@given(plan=plans)
def test_a_plan_comes_back_as_it_was(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.toml"
    save_plan(plan, path)
    found = load_plan(path)
    assert found == plan
    before = path.read_bytes()
    save_plan(found, path)
    assert path.read_bytes() == before


@pytest.fixture
def path(plan: Plan, tmp_path: Path) -> Path:
    save_plan(plan, tmp_path / "plan.toml")
    return tmp_path / "plan.toml"


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("model", ["residual", "perceptron"])
def test_the_plan_of_a_model_comes_back_and_fits(
    model: str, preset: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    graph = prepare(read_model(request.getfixturevalue(model)))
    plan = make_plan(graph, PRESETS[preset], CPU)
    save_plan(plan, tmp_path / "plan.toml")
    found = load_plan(tmp_path / "plan.toml")
    assert found == plan
    check_fits(found, graph)


def test_a_cell_with_two_weights_comes_back_and_fits(build, tmp_path: Path) -> None:
    model = build(
        "(float[2,4,8] x) => (float[2,1,4,16] y) { [n] y = LSTM <hidden_size = 16> (x, w, r) }",
        w=(1, 64, 8),
        r=(1, 64, 16),
    )
    graph = prepare(read_model(model))
    plan = make_plan(graph, PRESETS["int8"], CPU, emit=AllowedOps.ORT)
    assert plan.by_node["n"].mode is Mode.DYNAMIC
    save_plan(plan, tmp_path / "plan.toml")
    found = load_plan(tmp_path / "plan.toml")
    assert found == plan
    check_fits(found, graph)


def test_the_file_is_made_to_be_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# A plan of onnxq: what happens to every node")
    assert all(f"#   {mode}" in text for mode in Mode)
    assert '[nodes.stem_relu]\nop_type = "Relu"\nmode = "static"\nreason = "fused into the QuantizeLinear' in text
    assert text.count('format = "int8-narrow"') == 1


def test_a_mode_edited_by_hand_counts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('op_type = "Conv"\nmode = "static"', 'op_type = "Conv"\nmode = "storage"', 1))
    assert load_plan(path).by_node["stem"].mode is Mode.STORAGE


def test_what_a_file_leaves_out_has_its_usual_value(path: Path) -> None:
    path.write_text(
        """
        target = "onnxruntime-cpu"
        specs.s.format = "int8"
        activations.x = { spec = "s", group = "x", fixed_range = [0, 1] }
        nodes.a = { op_type = "Relu", mode = "float", reason = "" }
        """
    )
    activation = Activation("x", QuantSpec("int8"), "x", (0.0, 1.0))
    assert load_plan(path) == Plan((Decision("a", "Relu", Mode.FLOAT, ""),), (activation,), "", "onnxruntime-cpu")


TARGET = 'target = "onnxruntime-cpu"\n'
NODE = TARGET + '[nodes.a]\nop_type = "Relu"\nreason = "none"\nmode = '
SPEC = TARGET + '[specs.s]\nformat = "int8"\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nodes = [", "cannot be read: Invalid value"),
        ("", "it has no target, expected a plan file; quantize --plan-out writes one"),
        (TARGET + 'accuracy = ["gtpq"]', "accuracy 'gtpq' is not one of equalization, .*; did you mean 'gptq'"),
        ('target = "onnxruntime-cpuu"', "target 'onnxruntime-cpuu' is not one of .*; did you mean 'onnxruntime-cpu'"),
        (TARGET + "scheme = 1", "scheme is a string, found 1"),
        (TARGET + "node = {}", "a plan has no key 'node'; did you mean 'nodes'"),
        (TARGET + "nodes = 3", r"nodes are written as tables such as \[nodes.NAME\]"),
        (NODE + '"statik"', "node 'a': mode is one of static, .*, found 'statik'; did you mean 'static'"),
        (NODE + "true", "node 'a': mode is one of static, .*, found True"),
        (NODE + '"float"\nbiass = 1', "node 'a' has no key 'biass'; did you mean 'bias'"),
        (NODE + '"float"\nbias = true', "node 'a': bias is a whole number, found True"),
        (NODE + '"float"\nbias = 1.5', "node 'a': bias is a whole number, found 1.5"),
        (NODE + '"float"\nweights = 5', "node 'a': weights is a list of values, found 5"),
        (NODE + '"float"\nweights = [5]', "node 'a': weights is a table, found 5"),
        (NODE + '"float"\nweights = [{ index = 1 }]', "node 'a': weights has no tensor"),
        (TARGET + '[nodes.a]\nop_type = "Relu"', "node 'a' has no mode"),
        (
            SPEC + 'granularity = "chanel"',
            "spec 's': granularity is one of tensor, channel, found 'chanel'; did you mean 'channel'",
        ),
        (SPEC + "granularity = [0]", "spec 's': blocks have 1 to 5 extents"),
        (SPEC + "granularity = [1.0]", "spec 's': granularity is a whole number, found 1.0"),
        (SPEC + 'symmetric = "yes"', "spec 's': symmetric is true or false, found 'yes'"),
        (SPEC.replace("int8", "int9"), "spec 's': .*'int9'.*; did you mean 'int8'"),
        (SPEC + '[activations.x]\nspec = "t"\ngroup = "x"', "activation 'x': spec is one of s, found 't'"),
        (SPEC + '[activations.x]\nspec = "s"', "activation 'x' has no group"),
        (SPEC + '[activations.x]\nspec = "s"\ngroup = "x"\nfixed_range = [1, 0]', r"smallest and largest value, .*\[1"),
        (SPEC + '[activations.x]\nspec = "s"\ngroup = "x"\nfixed_range = [0, nan]', r"largest value, found \[0.0, nan"),
        (SPEC + '[activations.x]\nspec = "s"\ngroup = "x"\nfixed_range = [0]', "fixed_range is a list of 2 values"),
    ],
)
def test_a_wrong_file_is_told_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(SchemeError, match=rf"^plan .*wrong\.toml:? .*{sentence}"):
        load_plan(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match=r"^plan .*none\.toml cannot be read"):
        load_plan(tmp_path / "none.toml")


def test_a_place_that_cannot_be_written_is_told(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^plan .*plan\.toml cannot be written"):
        save_plan(plan, tmp_path / "missing" / "plan.toml")
