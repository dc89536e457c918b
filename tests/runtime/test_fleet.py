"""What makes up a fleet, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.errors import EngineError, SchemeError
from onnxq.numerics.pairs import MOST, Pairs, fit_pairs, kernel_order, row_shape
from onnxq.runtime.engine import is_in_process
from onnxq.runtime.fleet import Member, members_of, start_fleet
from onnxq.runtime.targets import TARGETS, target_named
from onnxq.system.resources import available_cores


@pytest.mark.parametrize(
    ("targets", "engines", "threads", "members"),
    [
        (["openvino"], [], None, [Member("openvino")]),
        (["openvino"], ["openvino-f32"], 3, [Member("openvino", "openvino-f32", 3)]),
        (
            ["onnxruntime-cpu:threads=1", "openvino"],
            [],
            2,
            [Member("onnxruntime-cpu", "", 1), Member("openvino", "", 2)],
        ),
        (
            ["onnxruntime-cpu"],
            ["onnxruntime", "ssh:board:/usr/bin/python3:threads=4"],
            None,
            [Member("onnxruntime-cpu", "onnxruntime"), Member("onnxruntime-cpu", "ssh:board:/usr/bin/python3", 4)],
        ),
        (
            ["onnxruntime-cpu", "openvino:threads=1"],
            ["ssh:one", "ssh:other"],
            None,
            [Member("onnxruntime-cpu", "ssh:one"), Member("openvino", "ssh:other", 1)],
        ),
        (["onnxruntime-cpu+openvino"], [], None, [Member("onnxruntime-cpu"), Member("openvino")]),
    ],
)
def test_targets_engines_and_threads_make_members(
    targets: list[str], engines: list[str], threads: int | None, members: list[Member]
) -> None:
    assert members_of(targets, engines, threads) == tuple(members)


@pytest.mark.parametrize(
    ("targets", "engines", "sentence"),
    [
        (["openvino", "openvino"], [], "target 'openvino' with .* threads is given 2 times; leave one out"),
        (["openvino:threads=64", "openvino:threads=64"], [], "target 'openvino' with 64 threads is given 2 times"),
        (["qnn"], ["ssh:a", "ssh:a"], "target 'qnn' on engine 'ssh:a' with .* threads is given 2 times"),
        (["openvina", "qnn"], [], "target 'openvina' is not one of .*; did you mean 'openvino'"),
        (["openvino:cores=2"], [], "target 'openvino:cores=2' is not one of"),
        (["openvino:threads=0"], [], "the number of threads of target 'openvino' is '0', expected a whole number"),
        (["openvino:threads=two"], [], "the number of threads of target 'openvino' is 'two'"),
        (["openvino"], ["ssh:a:threads=-1"], "the number of threads of engine 'ssh:a' is '-1'"),
        (["openvino", "qnn"], ["ssh:a", "ssh:b", "ssh:c"], "there are 2 targets and 3 of --engine, expected an engine"),
        (["openvino", "qnn"], ["ssh:a"], "there are 2 targets and 1 of --engine"),
        (["qnn:threads=2"], ["ssh:a:threads=3"], "target 'qnn' has 2 threads and engine 'ssh:a' 3; leave one out"),
    ],
)
def test_what_contradicts_itself_is_refused(targets: list[str], engines: list[str], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        members_of(targets, engines)


def test_all_cores_are_a_number_of_threads() -> None:
    with pytest.raises(SchemeError, match="is given 2 times"):
        members_of(["onnxruntime-cpu", f"onnxruntime-cpu:threads={available_cores()}"])


def test_engines_are_started_once_for_each_member_and_what_cannot_run_is_said() -> None:
    members = members_of(["onnxruntime-cpu:threads=1", "tensorrt", "onnxruntime-cpu:threads=2"])
    with start_fleet(members) as fleet:
        assert [one.threads_given for one in fleet.engines] == [1, 2]
        assert all(map(is_in_process, fleet.engines))
        assert not fleet.elsewhere
        assert fleet.unmeasured.startswith("tensorrt: no engine runs tensorrt on this machine")


def test_an_engine_that_is_not_there_ends_those_that_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr("onnxq.runtime.engine.OnnxRuntime.close", lambda engine: closed.append(engine.name))
    with pytest.raises(EngineError, match="engine 'nothing' is not one of"):
        start_fleet([Member("onnxruntime-cpu"), Member("onnxruntime-cpu", "nothing")])
    assert closed == ["onnxruntime"]


@pytest.mark.parametrize("name", TARGETS)
def test_a_joined_target_of_one_is_that_target(name: str) -> None:
    assert target_named(name) == TARGETS[name]
    assert target_named(f"{name}+{name}") == TARGETS[name]


def test_a_joined_target_has_what_all_have_and_the_limits_of_each() -> None:
    own, other = TARGETS["onnxruntime-cpu"], TARGETS["openvino"]
    both = target_named("onnxruntime-cpu+openvino")
    assert both.kernels.fused.ops == own.kernels.fused.ops & other.kernels.fused.ops
    assert both.kernels.fused.whole == {"HardSwish"}
    assert both.kernels.multiplied == ()
    assert (both.reads.fewest_bits, both.reads.words, both.reads.whole_blocks) == (4, False, True)
    assert both.reads.constants == other.reads.constants
    assert (both.workarounds, both.has_contrib, both.kernels.pairs) == (True, False, Pairs.BOTH)
    # TensorRT takes symmetric activations alone, and has no dynamic quantization.
    rigid = target_named("onnxruntime-cpu+tensorrt")
    assert (rigid.activation.symmetric, rigid.kernels.dynamic, rigid.reads.static_bits) == (True, frozenset(), 8)


@pytest.mark.parametrize("channels", [3, 4])
def test_weights_for_both_kinds_of_kernels_fit_both_kinds_of_pairs(channels: int) -> None:
    weights = np.random.default_rng(0).integers(-127, 128, (16, channels, 3, 3)).astype(np.int8)
    fitted = fit_pairs(weights, Pairs.BOTH, 0, 1)
    assert (np.abs(fitted) <= np.abs(weights)).all()
    ordered = fitted.transpose(kernel_order(4, 0, 1)).astype(int)
    for pairs in Pairs.BOTH.each:
        rows = ordered.reshape(row_shape(ordered.shape, pairs))
        even = rows.shape[1] // 2 * 2
        first, second = rows[:, :even:2], rows[:, 1:even:2]
        assert np.abs(first + second)[np.sign(first) == np.sign(second)].max() <= MOST
