"""Wrong passes on the command line: one sentence that names the pass."""

from __future__ import annotations

import pytest

from hostile.command_line import Place, Run, quantize_arguments, refused

PASSES = """
from dataclasses import dataclass
from onnxq import Changes, Pass
import onnx_graphsurgeon as gs

class Raises(Pass):
    def apply(self, graph):
        raise KeyError("no\\nsuch node")

class ReturnsNothing(Pass):
    def apply(self, graph):
        graph.nodes[0].name = "changed"

class ReturnsText(Pass):
    def apply(self, graph):
        return Changes("changed")

class AppendsText(Pass):
    def apply(self, graph):
        graph.nodes.append("Relu")
        return Changes(("Relu",))

class AppendsPlainGraph(Pass):
    def apply(self, graph):
        graph.nodes[0].attrs["body"] = gs.Graph()
        return Changes(("body",))

class MixesTypes(Pass):
    def apply(self, graph):
        graph.nodes[0].op = "And"
        return Changes(("And",))

class TakesOutput(Pass):
    def apply(self, graph):
        graph.outputs.clear()
        return Changes(("outputs",))

class Recurses(Pass):
    def apply(self, graph):
        return self.apply(graph)

class Abstract(Pass):
    pass

class Unrelated:
    def apply(self, graph):
        return Changes()

def function(graph):
    return Changes()
"""


WRONG_PASSES = {
    "Raises": "pass Raises raised KeyError",
    "ReturnsNothing": "pass ReturnsNothing returned NoneType",
    "ReturnsText": "pass ReturnsText raised TypeError: Changes takes",
    "AppendsText": "pass AppendsText: graph 'main' lists 'Relu' of type str",
    "AppendsPlainGraph": "pass AppendsPlainGraph: attribute 'body' of node 'first' is a plain GraphSurgeon graph",
    "MixesTypes": "",
    "TakesOutput": "",
    "Recurses": "pass Recurses raised RecursionError",
    "Abstract": "cannot be made: TypeError",
    "Unrelated": "expected a subclass of onnxq.Pass",
    "function": "is of type function",
    "Gone": "holds no 'Gone'",
}
# A dry run loads nothing in onnxruntime, and who verifies nothing may take an output away.
UNSEEN = {("dry", "MixesTypes"), ("run", "TakesOutput")}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, name)
        for command in ("run", "verified", "quantize", "dry")
        for name in WRONG_PASSES
        if (command, name) not in UNSEEN
    ],
)
def test_passes_that_are_wrong(place: Place, onnxq: Run, command: str, name: str) -> None:
    (place.root / "passes.py").write_text(PASSES)
    before = place.files()
    chosen = ["--pass", f"{place.root / 'passes.py'}:{name}"]
    arguments = {
        "run": ["run", place.model, "-o", place.output],
        "verified": ["run", place.model, "-o", place.output, "--verify-each", "--data", place.calib],
        "quantize": quantize_arguments(place, "--search", "off"),
        "dry": ["quantize", place.model, "--dry-run"],
    }[command]
    assert WRONG_PASSES[name] in refused(onnxq(*arguments, *chosen))
    assert place.files() == before
