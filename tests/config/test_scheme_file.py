"""Scheme files: what TOML may say, and the sentence for each mistake in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec, Rounding, Rule, Scheme, Storage
from onnxq.config.scheme_file import load_scheme, scheme_named
from onnxq.errors import SchemeError
from onnxq.numerics.formats import FORMATS, SCALE_FORMATS


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
        per = list(one.per) if isinstance(one.per, tuple) else f'"{one.per}"'
        return (
            f'{key} = {{ format = "{one.format}", per = {per}, symmetric = {str(one.symmetric).lower()}, '
            f'scale = "{one.scale}", scale_rounding = "{one.scale_rounding}", '
            f'two_level = {str(one.two_level).lower()}, method = "{one.method}", storage = "{one.storage}" }}\n'
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
        ("base = 8", "preset '8' is not one of"),
        ("rule = 3", "rules are written as [[rule]] tables"),
        ("rule = [3]", "rules are written as [[rule]] tables"),
        ('[rule]\nmode = "static"', "rules are written as [[rule]] tables"),
        ('[[rule]]\nnodes = "a"', "a rule has no mode; expected one of static, dynamic, weight-only, storage, float"),
        (
            '[[rule]]\nmode = "statik"',
            "mode is one of static, dynamic, weight-only, storage, float, found 'statik'; did you mean 'static'?",
        ),
        ("[[rule]]\nmode = 1", "mode is one of static, dynamic, weight-only, storage, float, found 1"),
        (RULE + 'node = "a"', "a rule has no key 'node'; did you mean 'nodes'?"),
        (RULE + "nodes = 3", "nodes is a string or a list of strings, found 3"),
        (RULE + "op_types = [1]", "op_types is a string or a list of strings, found [1]"),
        (RULE + "tensors = {}", "tensors is a string or a list of strings, found {}"),
        (RULE + 'weight = "int8"', "weight is a table such as { format = \"int8\" }, found 'int8'"),
        (RULE + 'activation = { per = "tensor" }', "activation is a table such as"),
        (RULE + 'weight = { format = "int9" }', "number format 'int9' is not one of"),
        (RULE + 'weight = { format = "int8", fromat = 1 }', "a weight has no key 'fromat'; did you mean 'format'?"),
        (
            RULE + 'weight = { format = "int8", per = "chanel" }',
            "per is one of tensor, channel, found 'chanel'; did you mean 'channel'?",
        ),
        (RULE + 'weight = { format = "int8", symmetric = "no" }', "symmetric is true or false, found 'no'"),
        (RULE + 'weight = { format = "int8", two_level = 1 }', "two_level is true or false, found 1"),
        (
            RULE + 'weight = { format = "int8", per = [1.5] }',
            "per is a list of whole numbers such as [32], found [1.5]",
        ),
        (RULE + 'weight = { format = "int8", per = [true] }', "per is a list of whole numbers such as [32]"),
        (RULE + 'weight = { format = "int8", per = [0] }', "blocks have 1 to 5 extents of at least 1, found [0]"),
        (RULE + 'weight = { format = "int8", scale = "half" }', "scale format 'half' is not one of float32, float16"),
        (
            RULE + 'weight = { format = "int8", method = "mes" }',
            "method 'mes' is not known, nor an encoder of an installed package, expected one of minmax, mse, hqq, ",
        ),
        (
            RULE + 'weight = { format = "int8", scale_rounding = "down" }',
            "scale_rounding is one of up, nearest, floor, found 'down'",
        ),
        (RULE + 'weight = { format = "int8", storage = "u32" }', "storage is one of native, words, found 'u32'"),
        (RULE + 'weight = { format = "uint8" }', "uint8 has no negative codes"),
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
