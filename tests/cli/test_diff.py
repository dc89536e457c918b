"""onnxq diff on plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cli.commands import invoke
from onnxq.config.scheme import Mode
from onnxq.planning.plan import Plan
from onnxq.planning.plan_file import save_plan


def test_nodes_that_are_treated_otherwise_are_told_one_a_line(plan: Plan, tmp_path: Path) -> None:
    stored = [
        replace(one, mode=Mode.STORAGE, reason="too slow") if one.node == "stem" else one for one in plan.decisions
    ]
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    save_plan(plan, first)
    save_plan(replace(plan, decisions=tuple(stored)), second)
    assert invoke("diff", first, first).stdout == f"{first} and {first} treat all nodes the same\n"
    assert json.loads(invoke("diff", first, first, "--json").stdout) == []
    assert invoke("diff", first, second).stdout == "stem\tstatic int8-narrow\tstorage int8-narrow\ttoo slow\n"
    assert [one["name"] for one in json.loads(invoke("diff", first, second, "--json").stdout)] == ["stem"]
