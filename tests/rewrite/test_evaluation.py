"""Many steps in order: small ones together, large ones alone, and what cannot be computed keeps nothing else."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

import onnxq.rewrite.constant_folding as constant_folding
from onnxq.ir import ArrayData, TensorData, Variable
from onnxq.rewrite.constant_folding import DerivedPayload, Step, evaluate_all

SMALL = np.float32([1, 4, 9])
LARGE = np.arange(40_000, dtype=np.float32).reshape(200, 200)


class Chain:
    """Steps under construction."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def then(self, op: str, *inputs: Variable | np.ndarray, **attributes: Any) -> Variable:
        made = Variable(f"t{len(self.steps)}")
        sources = [tensor if isinstance(tensor, Variable) else ArrayData(tensor) for tensor in inputs]
        self.steps.append(Step(f"n{len(self.steps)}", op, attributes, tuple(sources), (made,)))
        return made


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the sessions that are opened."""
    opened: list[int] = []
    open_session = constant_folding.open_session

    def counted(*args: Any, **options: Any) -> Any:
        opened.append(1)
        return open_session(*args, **options)

    monkeypatch.setattr(constant_folding, "open_session", counted)
    return opened


def test_small_steps_share_a_session(sessions: list[int]) -> None:
    chain = Chain()
    tensor = chain.then("Sqrt", SMALL)
    for _ in range(50):
        tensor = chain.then("Neg", chain.then("Mul", tensor, np.float32([1])))
    found = evaluate_all(chain.steps, [tensor], 17)
    assert found.values[tensor].load().tolist() == [1, 2, 3]
    assert list(found.values) == [tensor]
    assert len(sessions) == 1


def test_large_steps_run_alone_and_only_what_is_read_again_is_held(sessions: list[int]) -> None:
    chain = Chain()
    tensor = chain.then("Neg", chain.then("Sqrt", LARGE))
    found = evaluate_all(chain.steps, [tensor], 17)
    np.testing.assert_array_equal(found.values[tensor].load(), -np.sqrt(LARGE))
    assert len(sessions) == 2
    assert list(found.values) == [tensor]


def test_layouts_and_casts_of_what_is_large_are_computed_later_and_take_no_session(sessions: list[int]) -> None:
    chain = Chain()
    turned = chain.then("Transpose", LARGE)
    cast = chain.then("Cast", chain.then("Reshape", turned, np.array([400, -1])), to=TensorProto.DOUBLE)
    shape = chain.then("Shape", cast)
    found = evaluate_all(chain.steps, [cast, shape], 17)
    assert isinstance(found.values[cast], DerivedPayload)
    np.testing.assert_array_equal(found.values[cast].load(), LARGE.T.reshape(400, 100).astype(np.float64))
    assert found.values[shape].load().tolist() == [400, 100]
    assert not sessions


def test_a_step_that_fails_takes_along_only_what_depends_on_it() -> None:
    chain = Chain()
    roots = [chain.then("Sqrt", SMALL) for _ in range(9)]
    broken = chain.then("Reshape", chain.then("Neg", roots[4]), np.array([5]))
    behind = chain.then("Neg", broken)
    last = chain.then("Concat", *roots, axis=0)
    found = evaluate_all(chain.steps, [last, behind], 17)
    assert [step.node for step in found.failed] == ["n10", "n11"]
    assert found.values[last].shape == (27,)
    failed = next(iter(found.failed))
    assert isinstance(failed.inputs[0], Variable)
    assert found.values[failed.inputs[0]].load().tolist() == [-1, -2, -3], "what it reads is kept"


def test_results_above_the_limit_and_of_other_kinds_fail() -> None:
    chain = Chain()
    wide = chain.then("Expand", SMALL[:1], np.array([1000]))
    text = chain.then("Cast", SMALL, to=TensorProto.STRING)
    listed = chain.then("SequenceConstruct", SMALL)
    found = evaluate_all(chain.steps, [wide, text, listed], 17, largest=2000)
    assert [step.op for step in found.failed] == ["Expand", "Cast", "SequenceConstruct"]
    assert "too large" in next(iter(found.failed.values()))


def test_a_sequence_between_steps_is_no_obstacle() -> None:
    chain = Chain()
    listed = chain.then("SequenceConstruct", SMALL, SMALL)
    whole = chain.then("ConcatFromSequence", listed, axis=0)
    assert evaluate_all(chain.steps, [whole], 17).values[whole].shape == (6,)


def test_types_that_onnxruntime_hands_out_wrongly_are_computed_alone() -> None:
    chain = Chain()
    numbers = chain.then("Floor", np.float32([1.5, -3.5]))
    codes = chain.then("Cast", numbers, to=TensorProto.BFLOAT16)
    back = chain.then("Cast", chain.then("Transpose", codes), to=TensorProto.FLOAT)
    found = evaluate_all(chain.steps, [codes, back], 17)
    assert found.values[codes].dtype == ml_dtypes.bfloat16
    assert found.values[back].load().tolist() == [1, -4]


def test_given_values_are_read() -> None:
    chain, fed = Chain(), Variable("x")
    made = chain.then("Sqrt", fed)
    values: dict[Variable, TensorData] = dict(evaluate_all(chain.steps, [made], 17, {fed: SMALL}).values)
    assert values[made].load().tolist() == [1, 2, 3]


def test_a_chain_of_thousands_takes_no_time_when_a_step_in_it_fails() -> None:
    chain = Chain()
    tensor = chain.then("Sqrt", SMALL)
    good = [tensor := chain.then("Neg", tensor) for _ in range(3000)]
    broken = chain.then("Reshape", tensor, np.array([5]))
    found = evaluate_all(chain.steps, [good[-1], broken], 17)
    assert len(found.failed) == 1
    assert found.values[good[-1]].load().tolist() == [1, 2, 3]
