"""Graph rewriting: patterns, rules, passes and pipelines, constant folding, symbolic shapes."""

from __future__ import annotations

from onnxq.rewrite.passes import Changes, Pass, PassResult, Pipeline
from onnxq.rewrite.patterns import Match, NodePattern, OpsetPatternBuilder
from onnxq.rewrite.rules import RewriteContext, RewriteRule, RewriteRules, RoundingRule

__all__ = [
    "Changes",
    "Match",
    "NodePattern",
    "OpsetPatternBuilder",
    "Pass",
    "PassResult",
    "Pipeline",
    "RewriteContext",
    "RewriteRule",
    "RewriteRules",
    "RoundingRule",
]
