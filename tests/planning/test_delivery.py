"""What a scheme asks for beside what a plan delivers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.ir import read_model
from onnxq.lowering import AllowedOps
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.delivery import Delivery, deliveries, left_by_standard, missing
from onnxq.planning.plan import Demotion
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import TARGETS

CPU = TARGETS["onnxruntime-cpu"]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_the_first_plan_of_every_preset_delivers_all_of_it(preset: str, residual) -> None:
    graph = prepare(read_model(residual))
    (found,) = deliveries(make_plan(graph, PRESETS[preset], CPU), graph, PRESETS[preset], CPU)
    assert found.requested == found.got >= 4
    assert missing([found]) == ""


def test_weights_that_the_search_made_finer_or_left_are_missing_with_their_reason(residual) -> None:
    graph, scheme = prepare(read_model(residual)), PRESETS["int4-block32"]
    finer = PRESETS["int8"].rules[0].weight
    plan = make_plan(
        graph,
        scheme,
        CPU,
        {"stem": Demotion(Mode.STORAGE, "too coarse", weight=finer), "last": Demotion(Mode.FLOAT, "hurts")},
    )
    (found,) = deliveries(plan, graph, scheme, CPU)
    assert (found.bits, found.requested, found.got) == (4, 4, 2)
    assert missing([found]).startswith("2 of 4 weights have at most 4 bits; ")
    assert all(word in missing([found]) for word in ("1 weight has more: ", "too coarse", "hurts"))


def test_why_codes_are_finer_is_told_and_not_why_they_are_only_stored(residual) -> None:
    graph, scheme = prepare(read_model(residual)), PRESETS["int4-block32"]
    finer = PRESETS["int8"].rules[0].weight
    demotion = Demotion(Mode.STORAGE, "slow in each run", weight=finer, finer="codes of 4 bits hurt")
    plan = make_plan(graph, scheme, CPU, {"stem": demotion})
    assert "slow in each run" in plan.by_node["stem"].reason
    (found,) = deliveries(plan, graph, scheme, CPU)
    assert found.reasons == (("codes of 4 bits hurt", 1),)


def test_rows_of_finer_codes_are_looked_up_for_a_reason(build) -> None:
    model = build("(int64[4] i) => (float[4,64] y) { [table] y = Gather(t, i) }", t=(256, 64))
    graph, scheme = prepare(read_model(model)), PRESETS["int4-block32"]
    finer = Demotion(Mode.WEIGHT_ONLY, "why not", weight=PRESETS["int8"].rules[0].weight, finer="errors stand")
    plan = make_plan(graph, scheme, CPU, {"table": finer})
    assert plan.by_node["table"].reason == "looks up int8-narrow rows: errors stand"
    assert deliveries(plan, graph, scheme, CPU)[0].reasons == (("errors stand", 1),)


def test_what_the_user_leaves_out_was_not_asked_for(residual) -> None:
    graph, scheme = prepare(read_model(residual)), PRESETS["int8"].excluding("stem")
    (found,) = deliveries(make_plan(graph, scheme, CPU), graph, scheme, CPU)
    assert found.requested == found.got == 3


def test_one_weight_has_and_many_have() -> None:
    assert missing([Delivery(2, 18, 1)]) == "1 of 18 weights has at most 2 bits"
    assert missing([Delivery(2, 18, 3), replace(Delivery(4, 5, 5))]) == "3 of 18 weights have at most 2 bits"


def test_reasons_account_for_all_weights_also_where_not_all_are_told() -> None:
    found = Delivery(2, 20, 1, (("noisy", 15), ("no kernel", 3), ("left out", 1)))
    reported = "1 of 20 weights has at most 2 bits; 15 weights have more: noisy; 3 weights have more: no kernel"
    assert str(found) == f"{reported}; 1 weight has more for other reasons"
    assert str(replace(found, got=2, reasons=found.reasons[:2])).endswith("3 weights have more: no kernel")


@pytest.mark.parametrize(
    ("emit", "preset", "target", "left"),
    [
        (AllowedOps.QDQ, "int8", "onnxruntime-cpu", 1),
        (AllowedOps.QDQ, "int8-dynamic", "onnxruntime-cpu", 1),
        (AllowedOps.ORT, "int8", "onnxruntime-cpu", 0),
        (AllowedOps.QDQ, "int8-storage", "onnxruntime-cpu", 0),
        (AllowedOps.QDQ, "int8", "tensorrt", 0),
    ],
)
def test_cells_that_standard_onnx_leaves_in_float_are_counted(
    emit: AllowedOps, preset: str, target: str, left: int, build
) -> None:
    cell = "(float[2,4,8] x) => (float[2,1,4,16] y) { [n] y = LSTM <hidden_size = 16> (x, w, r) }"
    graph, scheme = prepare(read_model(build(cell, w=(1, 64, 8), r=(1, 64, 16)))), PRESETS[preset]
    plan = make_plan(graph, scheme, TARGETS[target], emit=emit)
    assert left_by_standard(plan, graph, scheme, TARGETS[target]) == left
