"""Rewriting graphs: patterns, rules, the protocol of passes and their runner, constant folding, symbolic shapes."""

from __future__ import annotations

from onnxq.rewrite.passes import Applied, Changes, Pass, Pipeline
from onnxq.rewrite.patterns import Call, Match, Operators
from onnxq.rewrite.rules import New, RewriteChanges, RewriteRule, RewriteRules

__all__ = [
    "Applied",
    "Call",
    "Changes",
    "Match",
    "New",
    "Operators",
    "Pass",
    "Pipeline",
    "RewriteChanges",
    "RewriteRule",
    "RewriteRules",
]
