"""The operator tests and the small models that onnx itself ships, read and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, checker
from onnx_cases import feeds_of, operator_cases

from onnxq.ir import load, read_model, remove_unused, save, to_model
from onnxq.onnx_api import infer_shapes, upgrade_opset
from onnxq.onnx_api.weightless import WeightlessModel

FLOOR = 1500
"""How many operator cases must be found at least, so that an empty collection cannot pass."""
NEWEST_IR = 13
SLICES = 10


def shipped_models() -> list[Path]:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data"
    return sorted(path for kind in ("simple", "light", "pytorch-*") for path in folder.glob(f"{kind}/**/*.onnx"))


def is_valid(model: ModelProto) -> bool:
    try:
        checker.check_model(model)
    except checker.ValidationError:
        return False
    return True


def without_ir(model: ModelProto) -> bytes:
    twin = ModelProto()
    twin.CopyFrom(model)
    twin.ClearField("ir_version")
    return twin.SerializeToString(deterministic=True)


def assert_same(model: ModelProto, written: ModelProto) -> None:
    assert without_ir(written) == without_ir(model)
    assert model.ir_version <= written.ir_version <= max(NEWEST_IR, model.ir_version)
    if written.ir_version != model.ir_version:
        assert is_valid(model) <= is_valid(written)


def test_every_operator_case_is_the_same_after_reading_and_writing() -> None:
    cases = operator_cases()

    assert len(cases) > FLOOR
    for model, _ in cases.values():
        assert_same(model, to_model(read_model(model)))


def test_every_operator_case_is_the_same_without_its_weights_and_with_them_put_back() -> None:
    for model, _ in operator_cases().values():
        assert_same(model, to_model(WeightlessModel.of(read_model(model), threshold=0).restore()))


def test_every_operator_case_stays_valid_with_inferred_shapes_and_without_unused_nodes() -> None:
    for name, (model, _) in operator_cases().items():
        graph = read_model(model)
        infer_shapes(graph)
        remove_unused(graph)
        written = to_model(graph)
        assert is_valid(model) <= is_valid(written), name
        assert list(written.graph.input) == list(model.graph.input), name


@pytest.mark.parametrize(
    "path", shipped_models(), ids=lambda path: f"{path.parent.parent.name}-{path.parent.name}-{path.stem}"
)
def test_a_shipped_model_is_the_same_after_loading_and_saving(path: Path, tmp_path: Path) -> None:
    model = onnx.load(path)

    save(load(path), tmp_path / "m.onnx")

    assert_same(model, onnx.load(tmp_path / "m.onnx"))


def test_models_are_shipped_with_onnx() -> None:
    assert len(shipped_models()) > 100


def results(model: ModelProto, feeds: dict[str, object]) -> list[object] | None:
    """Run a model, or return None where onnxruntime has no kernel for it or does not take its input."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    twin = ModelProto()
    twin.CopyFrom(model)
    twin.ir_version = min(twin.ir_version, NEWEST_IR)
    try:
        session = onnxruntime.InferenceSession(twin.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)
    except Exception:  # noqa: BLE001 - onnxruntime's errors share no base class, and TypeErrors mean the same here
        return None


def bits(value: object) -> object:
    """What two results have in common if they are the same bit for bit."""
    if isinstance(value, list):
        return [bits(each) for each in value]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype, value.shape, value.tobytes()
    return str(value)


def rewritten(model: ModelProto) -> ModelProto:
    """Return the model after its types were inferred and what is unused was taken out."""
    graph = read_model(model)
    infer_shapes(graph)
    remove_unused(graph)
    return to_model(graph)


def compare(names: Sequence[str]) -> int:
    compared = 0
    for name in names:
        model, data = operator_cases()[name]
        feeds = feeds_of(model, data[0][0])
        expected = results(model, feeds)
        if expected is None:
            continue
        found = results(rewritten(model), feeds)
        assert found is not None, name
        if bits(found) != bits(expected):
            # Random numbers differ each time.
            assert bits(results(model, feeds)) != bits(expected), name
            continue
        compared += 1
    return compared


@pytest.mark.parametrize("start", range(SLICES))
def test_operator_cases_compute_the_same_bits(start: int) -> None:
    names = list(operator_cases())[start::SLICES]

    assert compare(names) > FLOOR // SLICES // 2


@pytest.mark.slow
def test_upgraded_operator_cases_are_valid_and_run() -> None:
    """Every case that runs at an older opset also runs when converted to 21, but for known gaps of the converter."""
    failed = []
    for name, (model, data) in operator_cases().items():
        feeds = feeds_of(model, data[0][0])
        graph = read_model(model)
        if not 0 < graph.opset < 21 or results(model, feeds) is None:
            continue
        if results(to_model(upgrade_opset(graph, 21)), feeds) is None:
            failed.append(name)

    assert len(failed) <= 3, failed
