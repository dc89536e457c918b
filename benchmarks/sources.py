"""Calibrate on the same 1,000 samples as each source gives them: time, memory, and whether statistics agree.

    python benchmarks/sources.py [--samples 1000] [SOURCE ...]

Every source runs in a process of its own, on a tenth of the samples and on all of them: memory is flat where
calibrating adds as much to what the process holds already (read from /proc of Linux). Statistics are compared with
those of a folder of ``.npz`` files of the same arrays. Sources whose library is missing are told.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxq

SIDE, WINDOW, RATE, TOKENS, WORDS = 64, 16_000, 16_000, 128, 500
MODELS = {
    "image": f"""(float[1,3,{SIDE},{SIDE}] image) => (float[1,8,1,1] y) {{
        a = Conv <strides = [4,4]> (image, kernel)  b = Relu(a)  y = GlobalAveragePool(b) }}""",
    "sound": f"""(float[1,1,{WINDOW}] sound) => (float[1,8,1] y) {{
        a = Conv <strides = [64]> (sound, kernel)  b = Relu(a)  y = GlobalAveragePool(b) }}""",
    "words": f"""(int64[1,{TOKENS}] input_ids) => (float[1,{TOKENS},8] y) {{
        a = Gather(table, input_ids)  b = Relu(a)  y = MatMul(b, kernel) }}""",
}
KERNELS = {"image": (8, 3, 4, 4), "sound": (8, 1, 64), "words": (16, 8)}
KINDS = {"audio": "sound", "text": "words"}
MEGABYTE = 1 << 20

Samples = Callable[[int], Iterator[dict[str, np.ndarray]]]


def image(count: int) -> Iterator[dict[str, np.ndarray]]:
    """The arrays of samples, the same ones each time."""
    for index in range(count):
        values = np.random.default_rng(index).standard_normal((1, 3, SIDE, SIDE), np.float32)
        yield {"image": values}


def sound(count: int) -> Iterator[dict[str, np.ndarray]]:
    """Windows of sound, in steps that 16 bits hold."""
    for index in range(count):
        steps = np.random.default_rng(index).integers(-9000, 9000, (1, 1, WINDOW))
        yield {"sound": (steps / 32768).astype(np.float32)}


def words(count: int) -> Iterator[dict[str, np.ndarray]]:
    """Numbers of words."""
    for index in range(count):
        yield {"input_ids": np.random.default_rng(index).integers(0, WORDS, (1, TOKENS))}


ARRAYS: dict[str, Samples] = {"image": image, "sound": sound, "words": words}


def npz(folder: Path, count: int, kind: str = "image") -> Any:
    for index, sample in enumerate(ARRAYS[kind](count)):
        np.savez(folder / f"{index:04}.npz", allow_pickle=False, **sample)
    return folder


def generator(folder: Path, count: int) -> Any:
    return image(count)


class _Set:
    """Samples without their first axis, as data sets of torch have them."""

    def __init__(self, count: int, named: bool) -> None:
        self.count, self.named = count, named

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index >= self.count:
            raise IndexError(index)
        (values,) = np.random.default_rng(index).standard_normal((1, 3, SIDE, SIDE), np.float32)
        return {"image": values} if self.named else (values, index)


def loader_of_tuples(folder: Path, count: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(_Set(count, named=False), batch_size=10)


def loader_of_dictionaries(folder: Path, count: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(_Set(count, named=True), batch_size=10)


def hugging_face(folder: Path, count: int) -> Any:
    import datasets

    return datasets.Dataset.from_generator(_rows, gen_kwargs={"count": count}, cache_dir=str(folder)).with_format(
        "numpy"
    )


def _rows(count: int) -> Iterator[dict[str, Any]]:
    return ({"image": sample["image"][0]} for sample in image(count))


def tf_data(folder: Path, count: int) -> Any:
    import tensorflow as tf

    like = {"image": tf.TensorSpec((3, SIDE, SIDE), tf.float32)}
    return tf.data.Dataset.from_generator(lambda: _rows(count), output_signature=like).batch(10)


def pandas(folder: Path, count: int) -> Any:
    import pandas as pd

    return pd.DataFrame({"image": [row["image"] for row in _rows(count)]})


def parquet(folder: Path, count: int) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows_left = _rows(count)
    kind = pa.list_(pa.list_(pa.list_(pa.float32())))
    with pq.ParquetWriter(folder / "all.parquet", pa.schema([("image", kind)])) as file:
        for rows in iter(lambda: list(islice(rows_left, 50)), []):
            file.write_table(pa.table({"image": pa.array([row["image"].tolist() for row in rows], kind)}))
    return folder


def tar(folder: Path, count: int) -> Any:
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for index, row in enumerate(_rows(count)):
            stream = io.BytesIO()
            np.save(stream, row["image"])
            member = tarfile.TarInfo(f"{index:04}.image.npy")
            member.size = stream.tell()
            stream.seek(0)
            archive.addfile(member, stream)
    return folder


def store(folder: Path, count: int) -> Any:
    import fsspec

    fsspec.filesystem("memory").put(str(npz(folder, count)), "/samples", recursive=True)
    return "memory://samples"


def data_reader(folder: Path, count: int) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = image(count)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.left, None)

    return Reader()


def audio(folder: Path, count: int) -> Any:
    import soundfile

    # Ten windows a file.
    windows = []
    for index, sample in enumerate(sound(count)):
        windows.append(sample["sound"].ravel())
        if len(windows) == 10 or index == count - 1:
            soundfile.write(folder / f"{index:04}.wav", np.concatenate(windows), RATE, subtype="PCM_16")
            windows = []
    return onnxq.Data(folder, source=onnxq.Audio(RATE))


def text(folder: Path, count: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    with (folder / "lines.txt").open("w") as file:
        for sample in words(count):
            file.write(" ".join(f"w{number}" for number in sample["input_ids"].ravel()) + "\n")
    return onnxq.Data(folder / "lines.txt", source=onnxq.Text(str(folder / "tokenizer.json")))


SOURCES: dict[str, Callable[[Path, int], Any]] = {
    "generator": generator,
    "DataLoader, tuples": loader_of_tuples,
    "DataLoader, dictionaries": loader_of_dictionaries,
    "Hugging Face datasets": hugging_face,
    "tf.data": tf_data,
    "pandas": pandas,
    "Parquet": parquet,
    "WebDataset tar": tar,
    "fsspec": store,
    "CalibrationDataReader": data_reader,
    "audio": audio,
    "text": text,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS, metavar=("SOURCE", "COUNT"))
    parser.add_argument("names", nargs="*", metavar="SOURCE", help=f"of {', '.join(SOURCES)}")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(calibrated(options.one[0], int(options.one[1]))))
        return
    print(f"| source | seconds | memory for {options.samples // 10} samples | for {options.samples} | statistics |")
    print("|---|---|---|---|---|")
    for name in options.names or SOURCES:
        few, all_of_them = (run(name, count) for count in (options.samples // 10, options.samples))
        message = all_of_them.get("fault") or ("as of .npz" if all_of_them["same"] else "differs")
        peaks = [f"{one['grown'] / MEGABYTE:.0f} MiB" if "grown" in one else "-" for one in (few, all_of_them)]
        print(f"| {name} | {all_of_them.get('seconds', 0.0):.1f} | {peaks[0]} | {peaks[1]} | {message} |", flush=True)


def run(name: str, count: int) -> dict[str, Any]:
    """Calibrate in a process of its own."""
    command = [sys.executable, __file__, "--one", name, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"fault": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:100]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def calibrated(name: str, count: int) -> dict[str, Any]:
    """Return the time and peak memory of calibrating on a source, and whether statistics are those of .npz files."""
    kind = KINDS.get(name, "image")
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = Path(place, "ours"), Path(place, "npz")
        for folder in (ours, theirs):
            folder.mkdir()
        model = model_of(kind)
        given = SOURCES[name](ours, count)
        # What came before counts no more in VmHWM.
        Path("/proc/self/clear_refs").write_text("5")
        before, start = held("VmRSS"), time.perf_counter()
        found = onnxq.calibrate(model, given)
        took, grown = time.perf_counter() - start, held("VmHWM") - before
        expected = onnxq.calibrate(model, npz(theirs, count, kind))
        return {"seconds": took, "grown": grown, "same": found == expected and len(found.samples) == count}


def held(field: str) -> int:
    """Return the bytes that the system tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def model_of(kind: str) -> onnx.ModelProto:
    """Return a small model of one kind of input."""
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> main {MODELS[kind]}')
    random = np.random.default_rng(0)
    weights = {"kernel": random.standard_normal(KERNELS[kind], np.float32)}
    if kind == "words":
        weights["table"] = random.standard_normal((WORDS, 16), np.float32)
    made.graph.initializer.extend(onnx.numpy_helper.from_array(values, key) for key, values in weights.items())
    return made


if __name__ == "__main__":
    main()
