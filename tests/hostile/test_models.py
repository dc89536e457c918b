"""Models made to hurt: each works or is refused in one sentence, within bounded work and memory, and nothing is left.

Linux only, where a process can bound its own memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import AttributeProto, TensorProto

from hostile import bad_models, bad_nesting, bad_parts, damaged
from onnxq.errors import ModelError
from onnxq.ir import read_model

if sys.platform != "linux":
    pytest.skip("memory of a process can be bounded on Linux alone", allow_module_level=True)

QUANTIZE_EACH = Path(__file__).with_name("quantize_each.py")
LONGEST_SENTENCE = 700
FEW, MANY = 100, 2000


def quantize_all(folder: Path) -> dict[str, str]:
    """Quantize every model of a folder, in processes that are replaced when they die, and return each outcome."""
    temporary = folder / "temporary"
    temporary.mkdir()
    waiting = [str(path) for path in sorted(folder.glob("*.onnx"))]
    outcomes: dict[str, str] = {}
    while waiting:
        run = subprocess.run(
            [sys.executable, str(QUANTIZE_EACH), *waiting],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        events = [json.loads(line) for line in run.stdout.splitlines()]
        outcomes |= {event["ends"]: event["outcome"] for event in events if "ends" in event}
        if run.returncode:
            started = [event["starts"] for event in events if "starts" in event]
            assert started, run.stderr
            outcomes[started[-1]] = f"died with {run.returncode}: {run.stderr[-2000:]}"
        waiting = [path for path in waiting if path not in outcomes]
    return {Path(path).stem: outcome for path, outcome in outcomes.items()}


def assert_handled(outcome: str, model: Path) -> None:
    """Check that a model was quantized, or refused in a sentence with no file written."""
    written = model.with_suffix(".int8.onnx")
    if outcome == "valid":
        assert written.exists()
        return
    kind, sentence = outcome.split(": ", 1)
    assert kind in ("ModelError", "LoadError", "CandidateError", "DataError", "RunError", "AccuracyError"), outcome
    assert "\n" not in sentence
    assert len(sentence) < LONGEST_SENTENCE
    assert not written.exists()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("hostile")
    for index, build in enumerate(bad_models.MODELS.values()):
        (folder / f"{index}.onnx").write_bytes(build().SerializeToString())
    return folder, quantize_all(folder)


@pytest.mark.parametrize("index", range(len(bad_models.MODELS)), ids=list(bad_models.MODELS))
def test_a_hostile_model_is_quantized_or_refused(index: int, ended: tuple[Path, dict[str, str]]) -> None:
    folder, outcomes = ended
    assert_handled(outcomes[str(index)], folder / f"{index}.onnx")


def test_nothing_is_written_beside_the_outputs(ended: tuple[Path, dict[str, str]]) -> None:
    folder, outcomes = ended
    sound = {stem for stem, outcome in outcomes.items() if outcome == "valid"}
    assert {path.name for path in folder.iterdir()} == {
        "temporary",
        *(f"{stem}.onnx" for stem in outcomes),
        *(f"{stem}.int8.onnx" for stem in sound),
    }
    # onnxruntime leaves the name of its session in this file as soon as it is imported.
    assert {path.name for path in (folder / "temporary").iterdir()} <= {".ses"}


def check_mutations(count: int, seed: int, folder: Path) -> dict[str, str]:
    data = damaged.victim().SerializeToString()
    for index, mutated in enumerate(damaged.mutations(data, count, seed)):
        (folder / f"{index}.onnx").write_bytes(mutated)
    outcomes = quantize_all(folder)
    assert len(outcomes) == count
    for stem, outcome in outcomes.items():
        assert_handled(outcome, folder / f"{stem}.onnx")
    return outcomes


def test_damaged_copies_of_a_model_are_quantized_or_refused(tmp_path: Path) -> None:
    outcomes = check_mutations(FEW, 0, tmp_path)
    refused = sum(outcome != "valid" for outcome in outcomes.values())
    assert FEW / 4 < refused < FEW


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
def test_many_damaged_copies_of_a_model_are_quantized_or_refused(seed: int, tmp_path: Path) -> None:
    check_mutations(MANY // 2, seed, tmp_path)


def test_a_file_of_control_flow_a_thousand_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.onnx").write_bytes(bad_nesting.nested_bytes(1000))
    assert quantize_all(tmp_path)["deep"].startswith("ModelError: ")


def test_a_message_of_control_flow_a_thousand_deep_is_refused() -> None:
    model = bad_parts.sound()
    graph = model.graph
    for _ in range(1000):
        node = graph.node.add(op_type="If", input=["b"], output=["c"])
        node.attribute.add(name="else_branch", type=AttributeProto.GRAPH)
        graph = node.attribute.add(name="then_branch", type=AttributeProto.GRAPH).g
    with pytest.raises(ModelError, match="nests control flow deeper than 32 levels"):
        read_model(model)


# --- external data ------------------------------------------------------------------------------------------------

EXTERNAL = (
    ({"location": "../outside.bin"}, "not a path inside the model's folder"),
    ({"location": "/etc/passwd"}, "not a path inside the model's folder"),
    ({"location": "a/../../outside.bin"}, "not a path inside the model's folder"),
    ({"location": "..\\outside.bin"}, "not a path inside the model's folder"),
    ({"location": "weights.bin\0"}, "not a path inside the model's folder"),
    ({"location": ""}, "not a path inside the model's folder"),
    ({"location": "."}, "not a regular file"),
    ({"location": "missing.bin"}, "cannot be found"),
    ({"location": "x" * 5000}, "cannot be found"),
    ({"location": "pipe"}, "not a regular file"),
    ({"location": "link to a file outside"}, "outside the model's folder"),
    ({"location": "link to a folder outside/outside.bin"}, "outside the model's folder"),
    ({"location": "link to a folder outside/models/weights.bin"}, "valid"),
    ({"location": "link to a device"}, "outside the model's folder"),
    ({"location": "link to itself"}, "cannot be found"),
    ({"offset": "-4"}, "expected a number >= 0"),
    ({"length": "-1024"}, "expected a number >= 0"),
    ({"offset": "9" * 30}, "expected a number >= 0"),
    ({"offset": "1e3"}, "expected a number >= 0"),
    ({"offset": "1025"}, "has only 2048"),
    ({"offset": str(2**63)}, "has only 2048"),
    ({"length": "1020"}, "1020 bytes"),
    ({"offset": "0"}, "valid"),
    ({"offset": "512", "length": "1024"}, "valid"),
)


@pytest.fixture(scope="module")
def read_outside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Quantize models whose weight lies elsewhere, and return the outcomes."""
    outside = tmp_path_factory.mktemp("outside")
    folder = outside / "models"
    folder.mkdir()
    values = bad_parts.sound().graph.initializer[0].raw_data
    (folder / "weights.bin").write_bytes(values * 2)
    (outside / "outside.bin").write_bytes(values * 2)
    (folder / "link to a file outside").symlink_to("../outside.bin")
    (folder / "link to a folder outside").symlink_to(outside)
    (folder / "link to a device").symlink_to("/dev/zero")
    (folder / "link to itself").symlink_to("link to itself")
    os.mkfifo(folder / "pipe")
    for index, (entries, _) in enumerate(EXTERNAL):
        model = bad_parts.sound()
        weight = model.graph.initializer[0]
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "weights.bin", **entries}.items():
            weight.external_data.add(key=key, value=value)
        (folder / f"{index}.onnx").write_bytes(model.SerializeToString())
    return folder, quantize_all(folder)


@pytest.mark.parametrize(
    ("index", "expected"),
    [(index, expected) for index, (_, expected) in enumerate(EXTERNAL)],
    ids=[f"{next(iter(entries.items()))}"[:40] for entries, _ in EXTERNAL],
)
def test_external_data_is_read_from_the_folder_alone(
    index: int, expected: str, read_outside: tuple[Path, dict[str, str]]
) -> None:
    folder, outcomes = read_outside
    assert_handled(outcomes[str(index)], folder / f"{index}.onnx")
    assert expected in outcomes[str(index)]


def test_weights_whose_external_data_overlaps_are_read_each_by_itself(tmp_path: Path) -> None:
    values = bad_parts.sound().graph.initializer[0].raw_data
    (tmp_path / "weights.bin").write_bytes(values * 2)
    expected = {0: "valid", 512: "valid", 1024: "valid", 1028: "has only 2048"}
    for offset in expected:
        model = bad_parts.sound("y = MatMul(b, v)", v=np.eye(16, dtype=np.float32))
        for weight, start in zip(model.graph.initializer, (0, offset), strict=True):
            weight.ClearField("raw_data")
            weight.data_location = TensorProto.EXTERNAL
            for key, value in {"location": "weights.bin", "offset": start, "length": 1024}.items():
                weight.external_data.add(key=key, value=str(value))
        (tmp_path / f"{offset}.onnx").write_bytes(model.SerializeToString())
    outcomes = quantize_all(tmp_path)
    for offset, outcome in expected.items():
        assert_handled(outcomes[str(offset)], tmp_path / f"{offset}.onnx")
        assert outcome in outcomes[str(offset)]
