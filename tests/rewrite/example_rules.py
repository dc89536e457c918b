"""Rules that rewrite a little, and rules with a mistake each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from model_texts import difference, outputs, sample
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.ir import Graph, as_graph
from onnxq.rewrite import Changes, Match, NodePattern, OpsetPatternBuilder, RewriteContext, RewriteRule, RewriteRules

POWER = "g (float[4] x) => (float[4] y) { [a] y = Pow(x, e) }"


def rule(
    name: str,
    pattern: Callable[[OpsetPatternBuilder], Any],
    rewrite: Callable[[RewriteContext, Match], Any],
    **more: Any,
) -> RewriteRule:
    """Return a rule of this name; further methods are given by name."""
    methods = {
        "pattern": lambda self, op: pattern(op),
        "rewrite": lambda self, new, match: rewrite(new, match),
        **{name: lambda self, match, method=method: method(match) for name, method in more.items()},
    }
    return type(name, (RewriteRule,), {"__doc__": f"The rule {name}.", **methods})()


def addition(op: OpsetPatternBuilder) -> NodePattern:
    return op.Add(op.any("a"), op.any("b"))


def doubled(op: OpsetPatternBuilder) -> NodePattern:
    return op.Add(op.any("x"), op.any("x"))


def refuse(match: Match) -> str:
    raise ModelError("its data lies elsewhere")


def fail(new: RewriteContext, match: Match) -> Any:
    raise LookupError("nothing")


TWICE = rule("Twice", doubled, lambda new, match: new.Mul(match.x, 2.0))
NEGATIONS = rule("Negations", lambda op: op.Neg(op.Neg(op.any("x"))), lambda new, match: match.x)
NEGATED_DIFFERENCE = rule(
    "NegatedDifference",
    lambda op: op.Neg(op.Sub(op.any("a"), op.any("b"))),
    lambda new, match: new.Sub(match.b, match.a),
)
# The exponential of a sum, which others may read too, is a product of exponentials.
SPLIT_EXPONENTIAL = rule(
    "SplitExponential",
    lambda op: op.Exp(op.Add(op.any("a"), op.any("b"), name="sum", allow_other_consumers=True), name="exp"),
    lambda new, match: new.named(match.sum, new.Mul(new.like(match.exp, match.a), new.like(match.exp, match.b))),
)
TO_SUM = rule("ToSum", lambda op: op.Mul(op.any("x"), 2.0), lambda new, match: new.Add(match.x, match.x))
ENDLESS = rule("Endless", addition, lambda new, match: new.Add(match.b, match.a))
GROWING = rule("Growing", addition, lambda new, match: new.Add(new.Neg(new.Neg(match.a)), match.b))
WRONG_SHAPE = rule("WrongShape", addition, lambda new, match: new.Unsqueeze(match.a, np.array([0])))
NO_PATTERN = rule("NoPattern", lambda op: op.any("x"), lambda new, match: match.x)
MISTAKES = {
    rule("WrongType", addition, lambda new, match: new.Cast(match.a, to=10)): (
        "TypeError: it gives a tensor of type float16"
    ),
    rule("IllTyped", addition, lambda new, match: new.MatMul(match.a, np.zeros((7, 7), np.float32))): "ValueError: ",
    rule("Raising", addition, fail): "LookupError: nothing",
    rule("Refusing", addition, fail, check=refuse): "ModelError: its data lies elsewhere",
    rule("ReadsItself", addition, lambda new, match: new.Neg(match.root.outputs[0])): (
        "ValueError: its replacement reads the outputs that it replaces"
    ),
    rule("TwoForOne", addition, lambda new, match: [match.a, match.b]): (
        "ValueError: it gives 2 tensors for the 1 outputs"
    ),
    rule("NoTensor", addition, lambda new, match: 0): "TypeError: it gives 0, expected a tensor",
}


@dataclass(frozen=True)
class SmallPowers(RewriteRule):
    """Powers of small whole exponents are products."""

    largest: int = 3

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Pow(op.any("x"), op.scalar("exponent"))

    def check(self, match: Match) -> str:
        exponent = match.exponent.values.item()
        return "" if exponent in range(2, self.largest + 1) else f"its exponent is {exponent}"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        made = match.x
        for _ in range(int(match.exponent.values.item()) - 1):
            made = new.Mul(made, match.x)
        return made


def applied(rule: RewriteRule | RewriteRules, made: ModelProto) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    changes = rule.apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 1e-6
    assert not rule.apply(graph)
    return graph, changes
