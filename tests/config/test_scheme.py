"""Schemes: which rule takes a node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaged_encoders import HALVED, installed_package

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import (
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
from onnxq.errors import SchemeError

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
        (lambda: weights_by("msee"), "method 'msee' is not known, .* expected one of minmax, .*; did you mean 'mse'"),
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
    with pytest.raises(SchemeError, match="method 'halved' is not known, nor an encoder of an installed package"):
        weights_by("halved")


def test_ours_are_known_without_a_look_at_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.config.scheme.load_registered", None)
    for method in Method:
        check_method(method)


def test_what_is_installed_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    with installed_package(monkeypatch):
        monkeypatch.setattr("onnxq.config.scheme.load_registered", lambda *given: asked.append(given) or HALVED)
        for _ in range(3):
            weights_by("halved")
    assert len(asked) == 1
