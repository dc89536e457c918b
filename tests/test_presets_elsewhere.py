"""Every preset computes the same on the runtime that it is written for, or is refused in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import MODELS
from node_packages import PLACE

from onnxq import PRESETS, Budget, Data, Goal, quantize
from onnxq.errors import EngineError, SchemeError
from onnxq.runtime.engines import open_engine

CALIB = MODELS / "data" / "calib.npz"
# Disagreement in decibels that is told apart from noise, and agreement beyond which it is of no interest.
ALLOWED, AGREEING = 3.0, 50.0
ENGINES = {"openvino": "openvino-f32", "onnxruntime-node": f"onnxruntime-node:{PLACE}"}
REFUSED = {"openvino": {"int2-block16", "int2-block32", "int8-words", "int4-words"}}
PLAIN = Budget(search="off", accuracy="off", latency_seconds=0)


@pytest.fixture(scope="module", params=list(ENGINES))
def target(request: pytest.FixtureRequest) -> str:
    try:
        with open_engine(ENGINES[request.param]):
            return str(request.param)
    except EngineError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("model", ["gru", "vit"])
def test_a_preset_agrees_or_is_refused(target: str, model: str, preset: str) -> None:
    budget = replace(PLAIN, engine=ENGINES[target])
    given = {"scheme": preset, "target": target, "goal": Goal(force=True), "budget": budget}
    data = Data(CALIB, limit=4)
    if preset in REFUSED.get(target, ()):
        with pytest.raises(SchemeError, match=r"^[^\n]*openvino[^\n]*$"):
            quantize(MODELS / f"{model}.onnx", data, **given)
        return
    report = quantize(MODELS / f"{model}.onnx", data, **given).report
    [elsewhere] = report.accuracy.on_engines
    here, there = report.accuracy.agreement.worst_sqnr, elsewhere.agreement.worst_sqnr
    assert there >= min(here - ALLOWED, AGREEING)
