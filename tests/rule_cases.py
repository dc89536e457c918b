"""Cases of rules and passes: a graph in text form, and what a pass makes of it, or why it leaves it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import Array, difference, model, named_graph, ops, outputs, sample
from onnx import ModelProto

from onnxq.ir import Graph, to_model
from onnxq.rewrite import Changes, Pass, RewriteRules


@dataclass(frozen=True)
class Case:
    """A model, and what one application of a pass does to it.

    Args:
        step: applied once; a second time it finds nothing to do.
        text: of the graph, by which the case is known.
        made: the model.
        expected: operators of all scopes afterwards; None for any, if it changes.
        stays: a part of the reason why the graph stays as it is; "" where there need be none. None if it changes.
        error: largest difference of an output, relative to the largest value of that output.
        feed: inputs for which the outputs are compared; random ones of two batches if it is empty.
        runs: whether onnxruntime can run the model.
        holds: further statements about the graph afterwards.
        changed: names that the pass reports; None for any.
        then: applied before operators are looked at, such as RemoveUnused behind a pass that leaves that to it.
    """

    step: Pass
    text: str
    made: ModelProto
    expected: tuple[str, ...] | None = None
    stays: str | None = None
    error: float = 2e-6
    feed: Mapping[str, Array] = field(default_factory=dict)
    runs: bool = True
    holds: Callable[[Graph], object] | None = None
    changed: tuple[str, ...] | None = None
    then: Pass | None = None

    def __str__(self) -> str:
        first, *more = getattr(self.step, "rules", (self.step,))
        name = type(first).__name__ + " and others" * bool(more)
        text = " ".join(self.text.split())
        return f"{name}: {text if len(text) <= 160 else f'{text[:75]} ... {text[-75:]}'}"

    def check(self) -> Graph:
        """Apply the pass, and check operators or reason, validity, outputs, and a second application."""
        graph = named_graph(self.made)
        before = ops(graph)
        changes = self.step.apply(graph)
        assert not self.step.apply(graph), "there is nothing left to do"
        if self.then is not None:
            self.then.apply(graph)
        self._check_changes(changes, before, ops(graph))
        if self.holds is not None:
            assert self.holds(graph)
        if self.runs:
            written = to_model(graph)
            check_valid(written)
            for feed in [self.feed] if self.feed else [sample(self.made, 0, 2), sample(self.made, 1, 1)]:
                assert difference(outputs(written, feed), outputs(self.made, feed)) <= self.error
        return graph

    def _check_changes(self, changes: Changes, before: list[str], after: list[str]) -> None:
        assert not changes.failed
        if self.stays is None:
            assert changes.changed
            assert self.expected is None or tuple(after) == self.expected
            assert self.changed is None or changes.changed == self.changed
        else:
            assert not changes.changed
            assert after == before
            reasons = [reason for _, reason in changes.skipped]
            assert not self.stays or any(self.stays in reason for reason in reasons), reasons


def check_valid(written: ModelProto) -> None:
    """Check a model as onnx does, unless it asks for shapes of outputs, which inference does not always know."""
    if all(info.type.tensor_type.HasField("shape") for info in written.graph.output):
        onnx.checker.check_model(written, full_check=True)


class Rule:
    """Makes the cases of a rule, which share inputs and constants; a graph stores those that its text names."""

    def __init__(
        self, step: Pass | tuple[Any, ...], inputs: str = "float[N, 8] x", *, then: Pass | None = None, **shared: Any
    ) -> None:
        self.step = RewriteRules(step) if isinstance(step, tuple) else step
        self.inputs, self.then, self.shared = inputs, then, shared

    def __call__(
        self,
        body: str,
        expected: str | None = None,
        *,
        stays: str | None = None,
        inputs: str = "",
        error: float = 2e-6,
        feed: Mapping[str, Array] | None = None,
        runs: bool = True,
        holds: Callable[[Graph], object] | None = None,
        changed: str | None = None,
        step: Pass | None = None,
        damage: Callable[[ModelProto], object] | None = None,
        **options: Any,
    ) -> Case:
        """Make a case.

        Args:
            body: nodes that make y, or a graph with inputs and outputs.
            expected: operators afterwards, between blanks.
            stays: see Case, as the others.
            inputs: in place of those of the rule.
            error: as for Case.
            feed: as for Case.
            runs: as for Case.
            holds: as for Case.
            changed: names between blanks.
            step: in place of that of the rule.
            damage: changes the model before the pass sees it.
            options: of the model: its opset and constants; a tuple is the shape of a random one, a number is a scalar
                of 32 bits, and a list holds whole numbers.
        """
        text = body if body.startswith("(") else f"({inputs or self.inputs}) => (y) {{ {body} }}"
        shared = {name: stored(value) for name, value in self.shared.items() if reads(body, name)}
        own = {
            name: value if name in ("opset", "domains", "functions") else stored(value)
            for name, value in options.items()
        }
        made = model(text, **{**shared, **own})
        if damage is not None:
            damage(made)
        runs = runs and "local." not in body
        names = None if changed is None else tuple(changed.split())
        operators = None if expected is None else tuple(expected.split())
        return Case(step or self.step, body, made, operators, stays, error, feed or {}, runs, holds, names, self.then)


def reads(body: str, name: str) -> bool:
    """Whether nodes read a tensor that they do not make."""
    # Attributes have values, and tensors calls.
    made = re.search(rf"\b{name}\s*(,\s*\w*\s*)*=\s*[A-Za-z][\w.]*\s*[(<]", body)
    return made is None and re.search(rf"\b{name}\b", body) is not None


def stored(value: Any) -> Any:
    """A number as a scalar of 32 bits, a list as whole numbers, and all else as it is."""
    if isinstance(value, bool | list):
        return np.array(value)
    return np.array(value, np.float32) if isinstance(value, int | float) else value


def table(*groups: list[Case]) -> pytest.MarkDecorator:
    """Run a test for each case."""
    return pytest.mark.parametrize("case", [case for group in groups for case in group], ids=str)
