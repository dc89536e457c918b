"""Take encodings through AIMET: onnxq writes them, AIMET loads and exports them, and onnxq reads them again.

    python benchmarks/encodings.py --aimet VENV/bin/python [--model models/resnet.onnx] [--data models/data/calib.npz]

AIMET (``pip install aimet-onnx``) needs an environment of its own. Equal means that scales, zero points and formats
are equal to the last bit, and that quantizing by the encodings writes the same encodings again.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import onnxq

ROOT = Path(__file__).parents[1]
VERSIONS = ("0.6.1", "1.0.0", "2.0.0")
PLAIN = onnxq.Budget(search="off", accuracy="off", latency_seconds=0, certificate=False)
THEIRS = """
import sys
import onnx
from aimet_onnx import QuantizationSimModel
from aimet_onnx.quantsim import load_encodings_to_sim

model, kind, encodings, folder, *versions = sys.argv[1:]
simulation = QuantizationSimModel(onnx.load(model), param_type="int8", activation_type=kind)
load_encodings_to_sim(simulation, encodings, strict=False, allow_overwrite=False)
for version in versions:
    simulation._export_encodings(f"{folder}/{version}.encodings", version)
"""


def main() -> None:
    """Print the entries of each version, and whether they are equal to those that were written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aimet", required=True, help="the Python of an environment with aimet-onnx")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "resnet.onnx")
    parser.add_argument("--data", type=Path, default=ROOT / "models" / "data" / "calib.npz")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = folder / "float.onnx"
        # With folded BatchNormalizations, weights have the names that encodings give them.
        onnxq.optimize(given.model, model)
        for preset, kind in (("int8", "int8"), ("int8-int16-data", "int16")):
            ours = written(model, given.data, onnxq.PRESETS[preset], folder / "ours.encodings")
            arguments = (str(model), kind, str(folder / "ours.encodings"), str(folder), *VERSIONS)
            subprocess.run([given.aimet, "-c", THEIRS, *arguments], check=True, capture_output=True)
            for version in VERSIONS:
                found = onnxq.load_encodings(folder / f"{version}.encodings")
                scheme = replace(onnxq.PRESETS[preset], encodings=found)
                again = written(model, onnxq.Data(given.data, limit=8), scheme, folder / "again.encodings")
                print(f"{preset} {version}: {len(found)} entries, equal: {again == ours}")


def written(model: Path, data: object, scheme: onnxq.Scheme, file: Path) -> str:
    """Quantize a model, and return the encodings that are written."""
    goal = onnxq.Goal(force=True)
    done = onnxq.quantize(model, data, scheme=scheme, target="qnn", budget=PLAIN, goal=goal)  # type: ignore[arg-type]
    onnxq.save_encodings(done.graph, done.report.plan, model, file)
    return file.read_text()


if __name__ == "__main__":
    main()
