"""Rules that rewrite a little, and rules with a mistake each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from model_texts import difference, outputs, sample
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.ir import Graph, as_graph
from onnxq.rewrite import (
    Changes,
    Match,
    NodePattern,
    OpsetPatternBuilder,
    RewriteContext,
    RewriteRule,
    RewriteRules,
)

POWER = "g (float[4] x) => (float[4] y) { [a] y = Pow(x, e) }"


class Twice(RewriteRule):
    """x + x is 2 * x."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Add(op.any("x"), op.any("x"))

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Mul(match.x, 2.0)


class Negations(RewriteRule):
    """-(-x) is x."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Neg(op.Neg(op.any("x")))

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return match.x


class NegatedDifference(RewriteRule):
    """-(a - b) is b - a."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Neg(op.Sub(op.any("a"), op.any("b")))

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Sub(match.b, match.a)


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


class SplitExponential(RewriteRule):
    """The exponential of a sum, which others may read too, is a product of exponentials."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Exp(op.Add(op.any("a"), op.any("b"), name="sum", allow_other_consumers=True), name="exp")

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.named(match.sum, new.Mul(new.like(match.exp, match.a), new.like(match.exp, match.b)))


class Endless(RewriteRule):
    """x + y is y + x, forever."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Add(op.any("a"), op.any("b"))

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Add(match.b, match.a)


class WrongType(Endless):
    """Gives another type."""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Cast(match.a, to=10)


class WrongShape(Endless):
    """Gives another shape."""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Unsqueeze(match.a, np.array([0]))


class ReadsItself(Endless):
    """Reads the result."""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Neg(match.root.outputs[0])


class Growing(Endless):
    """x + y is -(-x) + y, forever."""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Add(new.Neg(new.Neg(match.a)), match.b)


class ToProduct(RewriteRule):
    """x + x is x * 2."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Add(op.any("x"), op.any("x"))

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Mul(match.x, 2.0)


class ToSum(RewriteRule):
    """x * 2 is x + x, which undoes the other."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Mul(op.any("x"), 2.0)

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Add(match.x, match.x)


class Refusing(Endless):
    """Refuses the model."""

    def check(self, match: Match) -> str:
        raise ModelError("its data lies elsewhere")


class IllTyped(Endless):
    """Makes a node that cannot be."""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.MatMul(match.a, np.zeros((7, 7), np.float32))


class Raising(Endless):
    """Is wrong."""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        raise LookupError("nothing")


class TwoForOne(Endless):
    """Gives too much."""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return [match.a, match.b]


class NoTensor(Endless):
    """Gives something else."""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return 0


class NoPattern(Endless):
    """Looks for anything."""

    def pattern(self, op: OpsetPatternBuilder) -> Any:
        return op.any("x")
