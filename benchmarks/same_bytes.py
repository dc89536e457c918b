"""Check that a change changed no output: the digests of all quantized models, before and after.

    python benchmarks/same_bytes.py --models DIR --data DIR --save before.json      # at the commit before
    python benchmarks/same_bytes.py --models DIR --data DIR --against before.json   # at the commit after

DIR holds NAME.onnx, the other DIR NAME/calib; the project's own models/ are always among them. Models are quantized as
by ``--search off --accuracy off --latency-seconds 0 --force``, which nothing but the code decides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click

import onnxq

OWN = Path(__file__).parents[1] / "models"
# The others share the data of the model that they are a variant of.
SHARED_DATA = {"silero-vad-ifless": "silero-vad"}


def cases(models: Path | None, data: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield each model and its calibration samples."""
    yield from ((path, OWN / "data" / "calib.npz") for path in sorted(OWN.glob("*.onnx")))
    if models is None or data is None:
        return
    for path in sorted(models.glob("*.onnx")):
        if (samples := data / SHARED_DATA.get(path.stem, path.stem) / "calib").exists():
            yield path, samples


def digest(model: Path, samples: Path, preset: str) -> str:
    """Return the digest of the quantized model."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "out.onnx"
        try:
            onnxq.quantize(
                model,
                onnxq.Data(samples, limit=8),
                output,
                scheme=preset,
                goal=onnxq.Goal(force=True),
                budget=onnxq.Budget(search="off", accuracy="off", latency_seconds=0, certificate=False),
            )
        except onnxq.OnnxqError as error:
            return str(error)
        return hashlib.sha256(output.read_bytes()).hexdigest()


@click.command()
@click.option("--models", type=click.Path(exists=True, path_type=Path))
@click.option("--data", type=click.Path(exists=True, path_type=Path))
@click.option("--preset", "presets", multiple=True, default=("int8", "int4-block32"))
@click.option("--save", type=click.Path(path_type=Path), help="Write the digests here.")
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="Compare with these digests.")
def main(
    models: Path | None, data: Path | None, presets: tuple[str, ...], save: Path | None, against: Path | None
) -> None:
    """Digest, then save or compare."""
    found = {
        f"{path.stem} {preset}": digest(path, samples, preset)
        for path, samples in cases(models, data)
        for preset in presets
    }
    if save is not None:
        save.write_text(json.dumps(found, indent=1) + "\n")
    before = json.loads(against.read_text()) if against is not None else found
    changed = [name for name in found if found[name] != before.get(name)]
    for name in changed:
        click.echo(f"{name}: {before.get(name)} before, {found[name]} now")
    click.echo(f"{len(found) - len(changed)} of {len(found)} outputs are the same bytes")
    raise SystemExit(bool(changed))


if __name__ == "__main__":
    main()
