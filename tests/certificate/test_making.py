"""Making certificates: recipes that look like the samples, and what is left out of odd models with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import model as model_of

from certificate.certified import CALIB, MODELS, PLAIN, certified_text
from onnxq import Data, certify, quantize
from onnxq.certificate import making
from onnxq.certificate.certificate import MOST_BYTES, read_certificate
from onnxq.certificate.onnxq_verify import make_input
from onnxq.certificate.overflow import find_overflow
from onnxq.certificate.recipes import describe_input
from onnxq.certificate.verifying import verify
from onnxq.data.inputs import Input
from onnxq.errors import OutputError
from onnxq.ir import as_graph, save
from onnxq.system.records import to_plain

GENERATOR = np.random.default_rng(0)


def made_up(values: list[np.ndarray[Any, Any]], shape: tuple[int, ...], *, dims: tuple[Any, ...] = ()) -> Any:
    entry = Input("x", values[0].dtype, dims or tuple(shape))
    return make_input(to_plain(describe_input(entry, values, shape)), 7, 0)


def test_made_up_floats_have_the_samples_distribution_and_neighbours() -> None:
    smooth = [GENERATOR.standard_normal((1, 1024)).astype(np.float32).repeat(4, axis=1) for _ in range(4)]
    found = made_up(smooth, (1, 4096))
    assert found.dtype == np.float32
    for share in (0.1, 0.5, 0.9):
        wanted = np.quantile(np.concatenate(smooth), share)
        assert np.isclose(np.quantile(found, share), wanted, atol=0.1 * np.std(smooth))
    assert np.corrcoef(found[0, :-1], found[0, 1:])[0, 1] > 0.3


def test_columns_of_a_table_keep_their_own_ranges() -> None:
    scales = np.array([1.0, 1e4, 1e-2], np.float32)
    rows = [(GENERATOR.random((5, 3)).astype(np.float32) + 2) * scales for _ in range(8)]
    found = made_up(rows, (5, 3), dims=("N", 3))
    assert (found >= 2 * scales * 0.9).all()
    assert (found <= 3 * scales * 1.1).all()


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "int32"])
def test_made_up_integers_are_values_of_the_samples(dtype: str) -> None:
    values = [GENERATOR.choice([0, 1, 1, 1], (1, 64)).astype(dtype) for _ in range(4)]
    found = made_up(values, (1, 64))
    assert found.dtype == dtype
    assert set(np.unique(found).tolist()) == {0, 1}
    assert 0.5 < found.mean() < 0.95


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        ((["red", "green", "a private remark"], ["red", "green", "another"]), {"red", "green"}),
        # Texts of single samples are not stored.
        ((["a secret"], ["other"]), {"text"}),
    ],
)
def test_made_up_texts_are_those_that_samples_share(texts: tuple[list[str], ...], kept: set[str]) -> None:
    assert set(made_up([np.array(one, object) for one in texts], (50,))) == kept


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_an_input_that_samples_leave_empty_has_a_recipe(dtype: str) -> None:
    empty = [np.zeros((1, 2, 0, 4), dtype)] * 2
    assert made_up(empty, (1, 2, 0, 4)).shape == (1, 2, 0, 4)
    assert not made_up(empty, (1, 2, 3, 4)).any()
    values = made_up([np.linspace(-2, 2, 100).astype(np.float16)], (100,))
    assert values.dtype == np.float16
    assert -2 <= values.min() < values.max() <= 2


def test_a_certificate_of_quantize_is_small_and_says_what_was_measured(tmp_path: Path) -> None:
    found = quantize(MODELS / "mobilenet.onnx", Data(CALIB, limit=16), tmp_path / "q.onnx", budget=PLAIN)
    certificate, digest = read_certificate(tmp_path / "q.onnx")
    assert certificate is not None
    assert certificate == found.report.certificate
    assert certificate.graph == digest
    assert len(certificate.to_json().encode()) <= MOST_BYTES
    assert 3 <= len(certificate.seeds) <= 8
    assert certificate.measured.samples == 4
    assert certificate.measured.unseen == 4
    assert certificate.overflow.pairs == ()
    assert {(one.threads, one.optimized) for one in certificate.verified} == {(1, True), (2, False)}


def test_a_weight_whose_pairs_saturate_is_named() -> None:
    weight = np.full((4, 8, 3, 3), 127, np.int8)
    text = """(uint8[1,8,9,9] x) => (float[1,4,7,7] y) {
        d = DequantizeLinear (x, s) f = DequantizeLinear (w, s) y = Conv (d, f) }"""
    model = model_of(text, w=weight, s=np.float32(0.1))
    model.graph.node[2].name = "conv"
    assert find_overflow(as_graph(model)).pairs == ("conv",)
    model = model_of(text, w=weight // 2, s=np.float32(0.1))
    assert find_overflow(as_graph(model)).pairs == ()


def normal(*shape: int, names: tuple[str, ...] = ("x",)) -> list[dict[str, Any]]:
    return [{name: GENERATOR.standard_normal(shape).astype(np.float32) for name in names} for _ in range(4)]


COUNTED = "(float[1,16] x) => (float[1,16] y, int64[2,n] z) {{ y = Tanh (x) {} z = NonZero (r) }}"
WORDS = """(string[N,T] words, float[N,T] x) => (float[N,T] y, bool[N,T] b) {
    b = Equal (words, red) f = Cast <to = 1> (b) y = Add (f, x) }"""
TEXTS = [np.array([["red", "green", "red"]], object), np.array([["green", "red"]], object)]
STATES = """(float[1,8] x, float[1,8] state) => (float[1,8] y, float[1,8] stateN) {
    stateN = Add (x, state) y = Tanh (stateN) }"""
ODD: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], str, set[str]]] = {
    # Text, samples, options and weights, why there are no probes, and outputs that are left out.
    "counted by data": (
        COUNTED.format("r = Relu (x)"),
        normal(1, 16),
        {"quantized": COUNTED.format("o = Add (x, c) r = Relu (o)"), "c": np.float32(0.05)},
        "",
        {"z"},
    ),
    "random": (
        "(float[1,16] x) => (float[1,16] y) { r = RandomNormalLike (x) y = Add (x, r) }",
        normal(1, 16),
        {},
        "no output can be compared: it is random, or depends on earlier runs",
        {"y"},
    ),
    "NaN at the same places": ("(float[1,64] x) => (float[1,64] y) { y = Log (x) }", normal(1, 64), {}, "", set()),
    "states": (STATES, normal(1, 8, names=("x", "state")), {}, "", set()),
    "dynamic shapes and texts": (
        WORDS,
        [{"words": one, "x": np.ones(one.shape, np.float32)} for one in TEXTS],
        {"opset": 19, "red": np.array(["red"], object)},
        "",
        set(),
    ),
    "a type without recipes": (
        "(bfloat16[4] x) => (float[4] y) { y = Cast <to = 1> (x) }",
        [{"x": np.ones(4, "bfloat16")}],
        {},
        "no values can be made for input 'x' bfloat16",
        set(),
    ),
}


@pytest.mark.parametrize(("text", "samples", "options", "without", "left_out"), ODD.values(), ids=ODD)
def test_odd_models_are_certified_as_far_as_probes_can_compare_them(
    text: str,
    samples: list[dict[str, Any]],
    options: dict[str, Any],
    without: str,
    left_out: set[str],
    tmp_path: Path,
) -> None:
    made, path = certified_text(tmp_path, text, samples, **options)
    found = verify(path)
    assert found.right
    assert set(made.left_out) == left_out
    assert without in made.without_probes
    assert bool(made.without_probes) == bool(without) == ("nothing to compare" in found.sentences[0])
    assert {one.name for one in made.inputs} == (set() if without else set(samples[0]))
    if "Log" in text:
        assert all(0 < count < 64 for count in made.fingerprints[0].finite)
    if "words" in text:
        assert made.inputs[0].tables == ("green", "red")


def test_certify_writes_another_file_with_its_weights(tmp_path: Path) -> None:
    model = model_of("(float[1,64] x) => (float[1,64] y) { y = MatMul (x, w) }", w=np.eye(64, dtype=np.float32))
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    source, output = tmp_path / "from" / "m.onnx", tmp_path / "to" / "c.onnx"
    onnx.save(model, source, save_as_external_data=True, location="m.data", size_threshold=0)
    samples = normal(1, 64)
    with pytest.raises(OutputError, match="is the model itself"):
        certify(source, source, samples)
    made = certify(source, source, samples, output)
    assert set(made.data) == {"m.data"}
    assert verify(output).right
    again = certify(source, output, samples, tmp_path / "to" / "again.onnx")
    assert again.graph == made.graph
    (tmp_path / "to" / "m.data").write_bytes(b"\0" * (64 * 64 * 4))
    found = verify(output)
    assert found.fault == "its weights in m.data are missing or were changed after it was certified"


@pytest.mark.parametrize(("most", "places"), [(1 << 24, 2), (1 << 12, 1)])
def test_unfused_kernels_do_not_decode_many_weights_of_a_file(
    most: int, places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "_MUCH", most)
    path = tmp_path / "model.onnx"
    weight = GENERATOR.standard_normal((64, 64)).astype(np.float32)
    model = model_of("(float[1,64] x) => (float[1,64] y) { y = MatMul(x, w) }", w=weight)
    save(as_graph(model), path, external_data=True)
    samples = normal(1, 64)
    assert len(certify(path, path, samples, tmp_path / "certified.onnx").verified) == places
