from __future__ import annotations

from functools import reduce
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from onnxq import extensions
from onnxq.errors import DataError, SchemeError
from onnxq.evidence.observer import ENTRY_POINTS, Observer, TensorObserver, observe, observer_named
from onnxq.evidence.sentinels import sentinels
from onnxq.evidence.storage import save_statistics
from onnxq.evidence.tensor_statistics import EMPTY, TensorStatistics, merge
from onnxq.execution.resume import Collection, calibrate_tensors
from onnxq.execution.runner import collect

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
SAMPLES = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:16]]

VALUES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-8, 8, width=32),
    st.sampled_from([0.0, -0.0, -1e4, 8192.0, -3.4028234663852886e38]),
)
ARRAYS = st.lists(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, min_side=0, max_side=20), elements=VALUES))


@given(ARRAYS, st.sampled_from([None, 0, 5]))
def test_adding_arrays_is_merging_their_statistics(arrays: list[NDArray[np.float32]], elements: int | None) -> None:
    observer = TensorObserver("h", elements)
    for index, array in enumerate(arrays):
        observer.add(array, index)
    parts = [observe(array, sample=index, histogram_elements=elements) for index, array in enumerate(arrays)]
    assert observer.statistics() == reduce(merge, parts, EMPTY)


@given(ARRAYS)
def test_without_a_histogram_all_else_is_the_same(arrays: list[NDArray[np.float32]]) -> None:
    counted, extremes = (TensorObserver("h", elements) for elements in (None, 0))
    for index, array in enumerate(arrays):
        counted.add(array, index)
        extremes.add(array, index)
    full, bare = counted.statistics(), extremes.statistics()
    assert (bare.count, bare.minimum, bare.maximum) == (full.count, full.minimum, full.maximum)
    assert np.array_equal(bare.extremes, full.extremes)
    assert (bare.core is None) == (full.core is None)
    assert sentinels(bare) == sentinels(full)


def test_masks_are_told_apart_without_a_histogram() -> None:
    scores = np.float32([-1e4, 0.5, -2, -1e4, 1])
    seen = observe(scores, histogram_elements=0)
    assert sentinels(seen) == (-1e4,)
    assert seen.core is not None
    assert (seen.core.minimum, seen.core.maximum, len(seen.core.counts)) == (-2, 1, 0)
    assert len(observe(scores[1:3], histogram_elements=0).counts) == 0


@pytest.mark.parametrize(("axis", "extremes"), [(0, [[0, 5], [6, 11]]), (1, [[0, 9], [1, 10], [2, 11]]), (-1, None)])
def test_extremes_of_channels_are_exact(axis: int, extremes: list[list[float]] | None) -> None:
    array = np.arange(12, dtype=np.float32).reshape(2, 2, 3).transpose(0, 2, 1)
    whole = observe(array, axis=axis)
    along = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    assert whole.channels.tolist() == (extremes or [[row.min(), row.max()] for row in along])
    shifted = merge(whole, observe(array + 1, axis=axis))
    assert shifted.channels.tolist() == [[low, high + 1] for low, high in whole.channels]


def test_channels_that_only_one_saw_are_dropped() -> None:
    array = np.ones((2, 3), np.float32)
    assert len(merge(observe(array, axis=1), observe(array)).channels) == 0
    assert len(merge(observe(array, axis=1), EMPTY).channels) == 3


def test_channels_that_do_not_fit_are_one_sentence() -> None:
    with pytest.raises(DataError, match="'h' has 2 axes, expected axis 2 for its channels"):
        observe(np.ones((2, 3), np.float32), name="h", axis=2)
    with pytest.raises(DataError, match="A tensor has 3 and 2 channels, expected one number"):
        merge(observe(np.ones((2, 3), np.float32), axis=1), observe(np.ones((2, 2), np.float32), axis=1))


def test_channels_of_a_model_are_kept_where_asked() -> None:
    seen = collect(MODEL, SAMPLES, ["image", "logits"], axes={"image": 1})
    pixels = np.concatenate([sample["image"] for sample in SAMPLES])
    assert seen.tensors["image"].channels.tolist() == [[pixels.min(), pixels.max()]]
    assert len(seen.tensors["logits"].channels) == 0


class Clipped:
    """An observer of somebody else, which takes no element beyond -1 and 1 for real."""

    def __init__(self, name: str, histogram_elements: int | None, axis: int | None) -> None:
        self._inner = TensorObserver(name, histogram_elements, axis)

    def add(self, array: NDArray[np.float32], sample: int | None) -> None:
        self._inner.add(array.clip(-1, 1), sample)

    def statistics(self) -> TensorStatistics:
        return self._inner.statistics()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a package is installed that registers the observer above, and one that is broken."""
    entries = EntryPoints(
        EntryPoint(name, f"{__name__}:{target}", ENTRY_POINTS)
        for name, target in (("clipped", "Clipped"), ("broken", "Nothing"))
    )
    monkeypatch.setattr(extensions, "entry_points", lambda **wanted: entries.select(**wanted))


@pytest.mark.usefixtures("installed")
def test_an_observer_of_an_installed_package_is_found_by_its_name() -> None:
    observer: Observer = observer_named("clipped")("h", None, None)
    observer.add(np.float32([-3, 0.5, 7]), 0)
    assert observer.statistics() == observe(np.float32([-1, 0.5, 1]), sample=0)


@pytest.mark.usefixtures("installed")
def test_statistics_say_which_observer_made_them(tmp_path: Path) -> None:
    notices: list[str] = []
    clipped = calibrate_tensors(MODEL, SAMPLES, ["logits"], Collection(observer="clipped"))
    assert (clipped.tensors["logits"].minimum, clipped.tensors["logits"].maximum) == (-1, 1)
    save_statistics(clipped, tmp_path / "s.npz")
    # Who gives a file and names no observer wants that of the file.
    taken = calibrate_tensors(MODEL, SAMPLES, ["logits"], Collection(reuse=tmp_path / "s.npz", notice=notices.append))
    assert (taken, notices) == (clipped, [])
    with pytest.raises(DataError, match="observers '' and 'clipped' cannot be merged"):
        calibrate_tensors(MODEL, SAMPLES[::-1], ["logits"], Collection()).merge(clipped)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cliped", "registers as onnxq.observers: clipped, broken; did you mean 'clipped'"),
        ("broken", "Observer 'broken' of .*:Nothing cannot be loaded"),
    ],
)
def test_a_wrong_observer_is_told_why(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        collect(MODEL, SAMPLES, ["logits"], observer=name)
