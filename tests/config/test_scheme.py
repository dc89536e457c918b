"""Schemes, their files and presets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto
from packaged_encoders import HALVED, installed_package

from onnxq.config.effort import ACCURACIES, EFFORTS, METHODS, accuracy_named, effort_named
from onnxq.config.presets import DESCRIPTIONS, PRESETS, preset_named
from onnxq.config.scheme import (
    Granularity,
    Method,
    Mode,
    QuantSpec,
    Rounding,
    Rule,
    Scheme,
    Storage,
    check_method,
    matches,
    packaged_encoder,
)
from onnxq.config.scheme_file import load_scheme, scheme_named
from onnxq.errors import SchemeError
from onnxq.numerics.formats import FORMATS, SCALE_FORMATS, format_named

NAMES = ("/head/Conv_1", "/head/Conv_12", "layer[0].conv", "a*b")


def weights_by(method: str) -> Rule:
    return Rule(Mode.WEIGHT_ONLY, weight=QuantSpec("int4", (32,), method=method))


def mode_of(scheme: Scheme, node: str, op_type: str = "Conv", tensors: tuple[str, ...] = ()) -> Mode:
    return scheme.rule_for(op_type, node, tensors).mode


# --- patterns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", NAMES),
        ("/head/*", NAMES[:2]),
        ("/head/Conv_?", NAMES[:1]),
        ("/HEAD/*", ()),
        ("Conv", ()),
        ("layer[0].conv", ("layer[0].conv",)),
        ("layer[[]0].*", ("layer[0].conv",)),
        ("a*b", ("a*b",)),
        ("re:/head/Conv_\\d", NAMES[:1]),
        ("re:.*Conv_\\d+", NAMES[:2]),
        ("re:layer\\[0\\].*", ("layer[0].conv",)),
        ("re:head", ()),
    ],
)
def test_a_pattern_matches_the_whole_name(pattern: str, found: tuple[str, ...]) -> None:
    assert tuple(name for name in NAMES if matches(pattern, name)) == found


@given(st.text(min_size=1))
def test_a_name_always_matches_itself(name: str) -> None:
    if not name.startswith("re:"):
        assert matches(name, name)


@pytest.mark.parametrize("kind", ["op_types", "nodes", "tensors"])
def test_a_bad_regular_expression_is_told_when_the_rule_is_made(kind: str) -> None:
    with pytest.raises(SchemeError, match=r"^pattern 're:\(' is not a valid regular expression: missing \)"):
        Rule(Mode.FLOAT, **{kind: ("ok", "re:(")})


# --- rules ----------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_selects_decides() -> None:
    scheme = Scheme((Rule(Mode.FLOAT, nodes=("a*",)), Rule(Mode.STORAGE, op_types=("Conv",)), Rule(Mode.STATIC)))
    assert mode_of(scheme, "a1") is Mode.FLOAT
    assert mode_of(scheme, "b1") is Mode.STORAGE
    assert mode_of(scheme, "b1", "Gemm") is Mode.STATIC


def test_what_no_rule_selects_stays_in_float() -> None:
    assert mode_of(Scheme((Rule(Mode.STATIC, op_types=("Gemm",)),)), "a") is Mode.FLOAT


def test_every_condition_of_a_rule_must_hold() -> None:
    scheme = Scheme((Rule(Mode.STATIC, op_types=("Conv", "Re*"), nodes=("a", "b"), tensors=("w*",)),))
    assert mode_of(scheme, "b", "Conv", ("x", "w1")) is Mode.STATIC
    assert mode_of(scheme, "b", "Relu", ("w",)) is Mode.STATIC
    assert mode_of(scheme, "c", "Conv", ("w1",)) is Mode.FLOAT
    assert mode_of(scheme, "a", "Conv", ("x",)) is Mode.FLOAT
    assert mode_of(scheme, "a", "Gemm", ("w1",)) is Mode.FLOAT


def test_tensors_may_be_an_iterator() -> None:
    scheme = Scheme((Rule(Mode.FLOAT, tensors=("no",)), Rule(Mode.STATIC, tensors=("w",))))
    assert scheme.rule_for("Conv", "a", iter(["x", "w"])).mode is Mode.STATIC


@pytest.mark.parametrize(
    ("rule", "taken"),
    [
        (Rule(Mode.STATIC, nodes=("bias",)), True),
        (Rule(Mode.STATIC, nodes=("product",), op_types=("MatMul",)), True),
        (Rule(Mode.STATIC, nodes=("bias",), op_types=("Add",)), True),
        (Rule(Mode.STATIC, nodes=("bias",), op_types=("MatMul",)), False),
        (Rule(Mode.STATIC, op_types=("MatMul",)), True),
        (Rule(Mode.STATIC, op_types=("Gemm",)), True),
        (Rule(Mode.STATIC, op_types=("Add",)), False),
        (Rule(Mode.STATIC, nodes=("bias",), tensors=("w",)), True),
        (Rule(Mode.STATIC, nodes=("bias",), tensors=("v",)), False),
    ],
)
def test_a_node_is_selected_as_those_that_it_stands_for(rule: Rule, taken: bool) -> None:
    origins = (("product", "MatMul"), ("bias", "Add"))
    found = Scheme((rule,)).rule_for("Gemm", "fused", ["x", "w"], origins)
    assert found.mode is (Mode.STATIC if taken else Mode.FLOAT)


def test_excluding_comes_before_all_rules() -> None:
    scheme = PRESETS["int8"].excluding("a", "b*")
    assert [mode_of(scheme, name) for name in ("a", "b1", "c")] == [Mode.FLOAT, Mode.FLOAT, Mode.STATIC]
    assert scheme.name == "int8"
    assert PRESETS["int8"].excluding() is PRESETS["int8"]


def test_patterns_that_match_something_pass() -> None:
    scheme = Scheme((Rule(Mode.FLOAT, op_types=("Conv*",), nodes=("re:a.",), tensors=("w",)), Rule(Mode.STATIC)))
    scheme.check_used({"ConvTranspose"}, {"a1"}, {"w", "x"})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            Rule(Mode.FLOAT, op_types=("Covn",)),
            "op type pattern 'Covn' matches nothing in the model; did you mean 'Conv'?",
        ),
        (
            Rule(Mode.FLOAT, nodes=("head/c",)),
            "node pattern 'head/c' matches nothing in the model; did you mean '/head/c'?",
        ),
        (Rule(Mode.FLOAT, nodes=("zzzzzz",)), "node pattern 'zzzzzz' matches nothing in the model"),
        (
            Rule(Mode.FLOAT, tensors=("head.wieght",)),
            "tensor pattern 'head.wieght' matches nothing in the model; did you mean 'head.weight'?",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(rule: Rule, message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        Scheme((Rule(Mode.STATIC), rule)).check_used({"Conv"}, {"/head/c"}, {"head.weight"})
    assert str(caught.value) == message


def test_the_name_of_a_tensor_suggests_the_nodes_that_read_it() -> None:
    scheme = Scheme((Rule(Mode.STATIC), Rule(Mode.FLOAT, nodes=("/head/c_output_0",))))
    with pytest.raises(SchemeError, match="is the name of a tensor, expected nodes; give those that read it: a, b"):
        scheme.check_used({"Conv"}, {"/head/c", "a", "b"}, set(), {"/head/c_output_0": ["a", "b"]})


# --- files ----------------------------------------------------------------------------------------------------------


def test_modes_and_choices_of_specs_are_taken_as_texts() -> None:
    assert Rule("float").mode is Mode.FLOAT
    spec = QuantSpec("int8", method="mse", storage="words", scale_rounding="nearest")
    assert (spec.method, spec.storage, spec.scale_rounding) == (Method.MSE, Storage.WORDS, Rounding.NEAREST)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Rule("flaot"), "mode 'flaot' is not one of static, .*; did you mean 'float'"),
        (lambda: Rule(None), "mode 'None' is not one of"),
        (lambda: QuantSpec("int8", method=3), "the method is 3 of type int, expected a Method such as"),
        (lambda: weights_by("msee"), "method 'msee' is unknown, expected one of minmax, .*; did you mean 'mse'"),
        (lambda: Rule("static", activation=QuantSpec("int8", method="tortch")), "did you mean 'torch'"),
        (lambda: QuantSpec("int8", scale_rounding="zz"), "scale rounding 'zz' is not one of up, nearest, floor"),
    ],
)
def test_texts_that_name_nothing_are_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        make()


# --- encoders of packages -------------------------------------------------------------------------------------------


def test_a_method_may_be_the_encoder_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed_package(monkeypatch):
        assert weights_by("halved").weight.method == "halved"
        assert packaged_encoder("halved") is HALVED
        with pytest.raises(SchemeError, match=r"expected one of minmax, .*, halved, .*; did you mean 'halved'"):
            weights_by("halvedd")
        with pytest.raises(SchemeError, match="Encoder 'nothing' of packaged_encoders:NOTHING cannot be loaded"):
            weights_by("nothing")
    monkeypatch.undo()
    with pytest.raises(SchemeError, match="method 'halved' is unknown, expected one of"):
        weights_by("halved")


def test_ours_are_known_without_a_look_at_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.config.scheme.load_registered", None)
    for method in Method:
        check_method(method)


def test_what_is_installed_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []
    with installed_package(monkeypatch):
        monkeypatch.setattr("onnxq.config.scheme.load_registered", lambda *given: requested.append(given) or HALVED)
        for _ in range(3):
            weights_by("halved")
    assert len(requested) == 1


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


names = st.lists(st.text("abcXYZ012/._-*?[]:", min_size=1), max_size=3).map(tuple)


def consistent_specs() -> Iterator[QuantSpec]:
    """Yield every combination of choices that do not contradict each other."""
    pers = (*Granularity, (32,), (2, 16))
    switches = (False, True)
    for choices in product(FORMATS, pers, switches, SCALE_FORMATS, Rounding, switches, Method, Storage):
        with suppress(SchemeError):
            yield QuantSpec(*choices)


specs = st.sampled_from(list(consistent_specs()))


rules = st.builds(
    Rule,
    mode=st.sampled_from(Mode),
    op_types=names,
    nodes=names,
    tensors=names,
    weight=st.none() | specs,
    activation=st.none() | specs,
)


def as_toml(scheme: Scheme) -> str:
    def spec(key: str, one: QuantSpec | None) -> str:
        if one is None:
            return ""
        granularity = list(one.granularity) if isinstance(one.granularity, tuple) else f'"{one.granularity}"'
        return (
            f'{key} = {{ format = "{one.format}", granularity = {granularity}, '
            f'symmetric = {str(one.symmetric).lower()}, scale = "{one.scale}", '
            f'scale_rounding = "{one.scale_rounding}", two_level = {str(one.two_level).lower()}, '
            f'method = "{one.method}", storage = "{one.storage}" }}\n'
        )

    return "".join(
        f'[[rule]]\nmode = "{rule.mode}"\nop_types = {list(rule.op_types)}\nnodes = {list(rule.nodes)}\n'
        f"tensors = {list(rule.tensors)}\n" + spec("weight", rule.weight) + spec("activation", rule.activation)
        for rule in scheme.rules
    )


@given(st.lists(rules, min_size=1, max_size=2))
def test_a_scheme_written_as_toml_is_read_back(tmp_path_factory: pytest.TempPathFactory, written: list[Rule]) -> None:
    scheme = Scheme(tuple(written), name="mine")
    assert load_scheme(write(tmp_path_factory.getbasetemp(), as_toml(scheme))) == scheme


def test_a_file_adds_its_rules_in_front_of_its_base(tmp_path: Path) -> None:
    scheme = load_scheme(write(tmp_path, 'base = "int8"\n[[rule]]\nmode = "float"\nnodes = "head"\n'))
    assert scheme.rules == (Rule(Mode.FLOAT, nodes=("head",)), *PRESETS["int8"].rules)
    assert scheme.name == "mine"
    assert load_scheme(write(tmp_path, 'base = "int8"')).rules == PRESETS["int8"].rules


def test_a_file_has_the_range_method_of_its_base_unless_it_names_one(tmp_path: Path) -> None:
    assert load_scheme(write(tmp_path, 'base = "int8"')).ranges == ""
    assert load_scheme(write(tmp_path, 'base = "torch-fbgemm"')).ranges == "histogram"
    assert load_scheme(write(tmp_path, 'base = "torch-fbgemm"\nranges = "mse"')).ranges == "mse"
    assert PRESETS["torch-fbgemm"].excluding("head").ranges == "histogram"


def test_what_a_file_leaves_out_has_defaults(tmp_path: Path) -> None:
    text = '[[rule]]\nmode = "static"\nweight = { format = "int8" }\nactivation = { format = "uint8" }\n'
    rule = load_scheme(write(tmp_path, text)).rules[0]
    assert rule.weight == QuantSpec("int8", Granularity.TENSOR, symmetric=True)
    assert rule.activation == QuantSpec("uint8", Granularity.TENSOR, symmetric=False)


def test_codes_without_zero_point_are_symmetric_wherever_they_are(tmp_path: Path) -> None:
    text = '[[rule]]\nmode = "static"\nactivation = { format = "float8e4m3fn" }\n'
    assert load_scheme(write(tmp_path, text)).rules[0].activation == QuantSpec("float8e4m3fn")


RULE = '[[rule]]\nmode = "static"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'it has no rules; add [[rule]] tables or base = "int8"'),
        ("rule", "cannot be read: "),
        ('bas = "int8"', "a scheme has no key 'bas'; did you mean 'base'?"),
        ('base = "int9"', "preset 'int9' is not one of int8, int8-per-tensor"),
        ("base = 8", "base is a string, found 8"),
        ("rule = 3", "rules are written as [[rule]] tables"),
        ("rule = [3]", "rules are written as [[rule]] tables"),
        ('[rule]\nmode = "static"', "rules are written as [[rule]] tables"),
        ('[[rule]]\nnodes = "a"', "rule has no mode"),
        (
            '[[rule]]\nmode = "statik"',
            "mode is one of static, dynamic, weight-only, storage, float, found 'statik'; did you mean 'static'?",
        ),
        ("[[rule]]\nmode = 1", "mode is one of static, dynamic, weight-only, storage, float, found 1"),
        (RULE + 'node = "a"', "rule has no key 'node'; did you mean 'nodes'?"),
        (RULE + "nodes = 3", "nodes is a list of values, found 3"),
        (RULE + "op_types = [1]", "op_types is a string, found 1"),
        (RULE + "tensors = {}", "tensors is a list of values, found {}"),
        (RULE + 'weight = "int8"', "weight is a table, found 'int8'"),
        (RULE + 'activation = { granularity = "tensor" }', "activation has no format"),
        (RULE + 'weight = { format = "int9" }', "number format 'int9' is not one of"),
        (RULE + 'weight = { format = "int8", fromat = 1 }', "weight has no key 'fromat'; did you mean 'format'?"),
        (
            RULE + 'weight = { format = "int8", granularity = "chanel" }',
            "granularity is one of tensor, channel, found 'chanel'; did you mean 'channel'?",
        ),
        (RULE + 'weight = { format = "int8", symmetric = "no" }', "symmetric is true or false, found 'no'"),
        (RULE + 'weight = { format = "int8", two_level = 1 }', "two_level is true or false, found 1"),
        (
            RULE + 'weight = { format = "int8", granularity = [1.5] }',
            "granularity is a whole number, found 1.5",
        ),
        (
            RULE + 'weight = { format = "int8", granularity = [true] }',
            "granularity is a whole number, found True",
        ),
        (
            RULE + 'weight = { format = "int8", granularity = [0] }',
            "blocks have 1 to 5 extents of at least 1, found [0]",
        ),
        (RULE + 'weight = { format = "int8", scale = "half" }', "scale format 'half' is not one of float32, float16"),
        (
            RULE + 'weight = { format = "int8", method = "mes" }',
            "method 'mes' is unknown, expected one of minmax, mse, hqq, ",
        ),
        (
            RULE + 'weight = { format = "int8", scale_rounding = "down" }',
            "scale_rounding is one of up, nearest, floor, found 'down'",
        ),
        (RULE + 'weight = { format = "int8", storage = "u32" }', "storage is one of native, words, found 'u32'"),
        (RULE + 'weight = { format = "uint8" }', "uint8 has no negative values"),
        (RULE + 'nodes = "re:("', "pattern 're:(' is not a valid regular expression: missing )"),
    ],
)
def test_each_mistake_in_a_file_has_its_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SchemeError) as caught:
        load_scheme(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None, lambda path: path.write_bytes(b"\xff\xfe\x00")])
def test_a_file_that_cannot_be_read_is_told(make, tmp_path: Path) -> None:
    path = tmp_path / "scheme.toml"
    make(path)
    with pytest.raises(SchemeError, match=r"^scheme .*scheme\.toml cannot be read: "):
        load_scheme(path)


def test_a_text_is_a_preset_or_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[[rule]]\nmode = "float"\n')
    assert scheme_named(str(path)) == load_scheme(path)
    assert scheme_named("int4-block32") is PRESETS["int4-block32"]
    with pytest.raises(SchemeError, match="cannot be read"):
        scheme_named(str(tmp_path / "none.toml"))


WEIGHTS = [name for name, scheme in PRESETS.items() if scheme.rules[0].mode is Mode.WEIGHT_ONLY]


@pytest.mark.parametrize(
    ("name", "mode", "granularity"),
    [
        ("int8", Mode.STATIC, Granularity.CHANNEL),
        ("int8-per-tensor", Mode.STATIC, Granularity.TENSOR),
        ("int8-storage", Mode.STORAGE, Granularity.CHANNEL),
        ("int8-block32", Mode.WEIGHT_ONLY, (32,)),
    ],
)
def test_a_preset_is_one_rule_for_all_nodes(name: str, mode: Mode, granularity: Granularity | tuple[int, ...]) -> None:
    rule = preset_named(name).rule_for("Conv", "any", ())
    assert rule.mode is mode
    assert rule.weight is not None
    assert (rule.weight.format, rule.weight.granularity, rule.weight.symmetric) == ("int8-narrow", granularity, True)


def test_presets_are_listed_by_their_names_with_a_line_each() -> None:
    assert [scheme.name for scheme in PRESETS.values()] == list(PRESETS) == list(DESCRIPTIONS)
    assert all(0 < len(line) <= 80 and not line.endswith(".") for line in DESCRIPTIONS.values())


def test_no_two_presets_are_the_same() -> None:
    assert len({scheme.rules for scheme in PRESETS.values()}) == len(PRESETS)


# Decibels by bits: of two random layers, whose noise nothing averages out.
LOWEST_SQNR = {2: 1, 4: 14, 6: 20, 8: 20}


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_preset_of_weights_makes_a_smaller_model_that_runs(
    name: str, build, quantize_to, running_graph, tmp_path: Path
) -> None:
    model: ModelProto = build(
        """(int64[2,3] i) => (float[2,3,32] y) {
        e = Gather(table, i) a = MatMul(e, w0) b = Relu(a) y = MatMul(b, w1)
        }""",
        table=(200, 64),
        w0=(64, 96),
        w1=(96, 32),
    )
    samples = [{"i": np.random.default_rng(seed).integers(0, 200, (2, 3))} for seed in range(4)]
    done = quantize_to(model, tmp_path / "q.onnx", scheme=name, samples=samples)
    assert done.report.files.bytes < done.report.files.float_bytes * 0.4
    format = format_named(preset_named(name).rules[0].weight.format)
    assert done.report.agreement.worst_sqnr > LOWEST_SQNR[format.bits]
    left = {node.op_type for node in running_graph(tmp_path / "q.onnx").node}
    assert "DequantizeLinear" not in left
    assert ("MatMulNBits" in left) == (not format.is_float)


def test_the_per_tensor_preset_has_one_scale_for_each_weight(perceptron, plan_of) -> None:
    pers = {
        weight.spec.granularity
        for one in plan_of(perceptron, scheme="int8-per-tensor").decisions
        for weight in one.weights
    }
    assert pers == {Granularity.TENSOR}


def test_an_unknown_preset_is_told_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match=r"^preset 'int8_storage' is not one of .*; did you mean 'int8-storage'\?$"):
        preset_named("int8_storage")


@pytest.mark.parametrize("name", ACCURACIES)
def test_every_effort_has_a_name(name: str) -> None:
    assert accuracy_named(name) is ACCURACIES[name]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_tried_alone(name: str) -> None:
    assert accuracy_named(name).methods == (name,)


def test_methods_are_tried_in_one_order() -> None:
    assert accuracy_named("gptq,ranges").methods == ("ranges", "gptq")


def test_a_wrong_name_is_told_with_the_nearest_one() -> None:
    with pytest.raises(SchemeError, match=r"accuracy 'equalizations' is not one of .*did you mean 'equalization'"):
        accuracy_named("equalizations")
    with pytest.raises(SchemeError, match=r"accuracy 'fast' is not one of"):
        accuracy_named("gptq, fast")


def test_full_measures_more_than_fast_and_off_nothing() -> None:
    fast, full = EFFORTS["fast"], EFFORTS["full"]
    assert EFFORTS["off"] is None
    assert fast is not None
    assert full is not None
    for name in ("sensitivity", "tried", "grown", "timed", "seconds"):
        assert getattr(full, name) > getattr(fast, name)


@pytest.mark.parametrize("name", list(EFFORTS))
def test_each_is_found_by_its_name(name: str) -> None:
    assert effort_named(name) is EFFORTS[name]


def test_an_unknown_effort_suggests_the_nearest() -> None:
    with pytest.raises(SchemeError, match="search 'fats' is not one of off, fast, full; did you mean 'fast'"):
        effort_named("fats")


@pytest.mark.parametrize("name", ["bias", "bias-correction"])
def test_a_method_that_is_no_choice_any_more_is_refused_with_what_took_its_place(name: str) -> None:
    with pytest.raises(SchemeError, match=f"accuracy '{name}' is not a choice any more: all biases make up for"):
        accuracy_named(f"ranges,{name}")
