"""Constants wait in a file and not in memory, and are the same."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from onnxq.ir import ArrayData, PackedTensor, constant, spilling
from onnxq.ir.tensor_data import KEEP, SMALLEST_SPILLED_BYTES, place_of


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.float16, ml_dtypes.bfloat16, ml_dtypes.int4, np.bool_])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_spilled_array_is_the_same(dtype: type, order: str, tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 2, (1031, 1033)).astype(dtype), order=order)
    with spilling(tmp_path):
        kept = KEEP.get()(array), KEEP.get()(array[::-1])
    for found, expected in zip(kept, (array, array[::-1]), strict=True):
        assert found.base is not None
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_small_arrays_text_and_whatever_is_outside_the_context_stay(tmp_path: Path) -> None:
    small, large, text = (
        np.zeros(SMALLEST_SPILLED_BYTES - 1, np.uint8),
        np.zeros(SMALLEST_SPILLED_BYTES, np.uint8),
        np.full(SMALLEST_SPILLED_BYTES, "a", object),
    )
    with spilling(tmp_path):
        assert KEEP.get()(small) is small
        assert KEEP.get()(text) is text
        kept = KEEP.get()(large)
        assert KEEP.get()(kept) is kept
    assert KEEP.get()(large) is large


def test_constants_are_spilled_whatever_they_are_made_of(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(0, 256, SMALLEST_SPILLED_BYTES, np.uint8)
    with spilling(tmp_path):
        plain = constant("w", codes)
        packed = PackedTensor(TensorProto.INT4, (2 * SMALLEST_SPILLED_BYTES,), codes.tobytes())
        again = ArrayData(plain.values)
    assert not np.shares_memory(plain.values, codes)
    assert again.array is plain.values
    np.testing.assert_array_equal(plain.values, codes)
    assert b"".join(packed.chunks()) == codes.tobytes()


def test_what_lies_in_a_file_is_not_written_again(tmp_path: Path) -> None:
    codes = np.arange(2 * SMALLEST_SPILLED_BYTES, dtype=np.uint32).view(np.uint8)
    with spilling(tmp_path, "codes.data"):
        kept = KEEP.get()(codes).reshape(8, -1)
        again = PackedTensor(TensorProto.UINT8, kept.shape, np.ascontiguousarray(kept).reshape(-1))
        assert place_of(kept) == (tmp_path / "codes.data", 0)
        assert place_of(kept[1]) == (tmp_path / "codes.data", SMALLEST_SPILLED_BYTES)
        assert place_of(kept[:, ::2]) is None
        assert again.stored is not None
        assert place_of(again.stored) == place_of(kept)
    with spilling(tmp_path, "codes.data"):
        other = KEEP.get()(np.ones(SMALLEST_SPILLED_BYTES, np.uint8))
    assert place_of(other) == (tmp_path / "codes.data", codes.nbytes)
    assert (tmp_path / "codes.data").read_bytes() == codes.tobytes() + other.tobytes()
    assert place_of(codes) is None


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    with spilling(tmp_path):
        kept = KEEP.get()(np.ones(SMALLEST_SPILLED_BYTES, np.uint8))
    assert list(tmp_path.iterdir()) == []
    assert kept.all()
    del kept
    gc.collect()


@pytest.mark.skipif(sys.platform != "linux", reason="counts anonymous memory as Linux does")
def test_memory_does_not_grow_with_what_is_spilled(tmp_path: Path) -> None:
    script = f"""
    from pathlib import Path
    import numpy as np
    from onnxq.ir import constant
    from onnxq.ir import spilling
    def anonymous():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
    before = anonymous()
    with spilling(Path({str(tmp_path)!r})):
        kept = [constant(f"w{{i}}", np.full(16 << 20, i, np.uint8)) for i in range(10)]
    assert [int(each.values[-1]) for each in kept] == list(range(10))
    print((anonymous() - before) // 1024)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40
