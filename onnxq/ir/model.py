"""The graph in memory: a model, or the body of a control-flow node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_graphsurgeon as gs
from onnx import FunctionProto, GraphProto, ModelProto, OperatorSetIdProto, SparseTensorProto, helper
from onnx_graphsurgeon.util.misc import SynchronizedList

from onnxq.ir.copies import copy_graph
from onnxq.ir.elements import Constant, Identity, Node, Tensor, Variable, domain_named
from onnxq.ir.external import DataFolder
from onnxq.ir.order import toposort
from onnxq.ir.surgeon import restore_classes


class _Outputs(SynchronizedList):
    """The outputs of a graph; each tensor knows the graphs that return it."""

    def __init__(self, graph: Graph, tensors: Iterable[Tensor]) -> None:
        super().__init__(graph, "returned_by", list(tensors))

    def _add_to_elem(self, elem: Any) -> None:
        elem.__dict__.setdefault("returned_by", []).append(self.parent_obj)

    def _remove_from_elem(self, elem: Any) -> None:
        elem.__dict__["returned_by"].remove(self.parent_obj)

    def __setitem__(self, index: Any, value: Any) -> None:
        tensors = list(self)
        tensors[index] = value
        self.clear()
        self.extend(tensors)

    def __delitem__(self, index: Any) -> None:
        tensors = list(self)
        del tensors[index]
        self.clear()
        self.extend(tensors)


# Operators, inputs and outputs that a graph is told by.
_TOLD = 8


class Graph(Identity, gs.Graph):
    """A model, or the body of a control-flow node.

    Attributes:
        nodes: the nodes, in an order of execution when read and when written.
        inputs: what a caller must feed; initializers that a caller may override are not listed.
        outputs: what the graph returns.
        initializers: constants that this graph declares. New ones need no entry: they are declared where needed.
        sparse_initializers: sparse constants, carried unchanged, each with the Variable that stands for it.
        opset_imports: version by domain, ``""`` being ONNX's own; shared with all bodies.
        ir_version: version of the file format, raised on writing when the opset needs a higher one.
        functions: model-local functions, carried unchanged.
        folder: where the external data of the model lies, or None.
        parent: the graph around this body, or None.
        source: the GraphProto it was read from, or None.
        model_source: the ModelProto around the main graph, or None.
    """

    nodes: list[Any]
    inputs: list[Any]
    outputs: list[Any]
    name: str
    doc_string: str
    ir_version: int | None
    parent: Graph | None = None
    source: GraphProto | None = None
    model_source: ModelProto | None = None
    folder: DataFolder | None = None
    unattached: frozenset[str] = frozenset()

    def __init__(
        self,
        nodes: Sequence[Node] | None = None,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        name: str | None = None,
        doc_string: str | None = None,
        opset: int | None = None,
        import_domains: Iterable[OperatorSetIdProto] | None = None,
        *,
        ir_version: int | None = None,
    ) -> None:
        """Make a graph as GraphSurgeon does; functions, and who made it, are set afterwards."""
        self.opset_imports: dict[str, int] = {}
        self.initializers: list[Constant] = []
        self.sparse_initializers: list[tuple[Variable, SparseTensorProto]] = []
        self.input_order: list[Tensor] = []
        self._functions: list[FunctionProto] = []
        super().__init__(
            list(nodes or ()),
            inputs,
            outputs,
            name,
            doc_string,
            opset,
            import_domains,
            ir_version=ir_version,
        )

    def __repr__(self) -> str:
        """Return what it is in a few lines; as text it is all of its nodes, as GraphSurgeon's."""
        counts = Counter(node.op for node in self.nodes).most_common()
        lines = (
            f"Graph {self.name} (Opset {self.opset})",
            f"Inputs: {_first(self.inputs)}",
            f"Nodes: {len(self.nodes)}, {_first([f'{count} {op}' for op, count in counts])}",
            f"Outputs: {_first(self.outputs)}",
        )
        return "\n".join(lines)

    @property
    def opset(self) -> int:
        """Version of the default domain; 0 when the model does not import it."""
        return self.opset_imports.get("", 0)

    @opset.setter
    def opset(self, version: int) -> None:
        self.opset_imports[""] = version

    @property
    def import_domains(self) -> list[OperatorSetIdProto]:
        """The imported domains in GraphSurgeon's form; change ``opset_imports`` instead."""
        return [helper.make_opsetid(domain, version) for domain, version in self.opset_imports.items()]

    @import_domains.setter
    def import_domains(self, imports: Iterable[OperatorSetIdProto] | None) -> None:
        self.opset_imports.update({domain_named(entry.domain): entry.version for entry in imports or ()})

    @property
    def metadata(self) -> dict[str, str]:
        """The model's metadata_props, as a copy."""
        properties = self.model_source.metadata_props if self.model_source is not None else ()
        return {entry.key: entry.value for entry in properties}

    def set_metadata(self, key: str, value: str) -> None:
        """Set one entry of the model's metadata_props."""
        if self.model_source is None:
            self.model_source = ModelProto()
        properties = self.model_source.metadata_props
        entry = next((entry for entry in properties if entry.key == key), None) or properties.add(key=key)
        entry.value = value

    @property
    def functions(self) -> list[FunctionProto]:
        """The model-local functions; GraphSurgeon would make graphs of them, and lose what it has no place for."""
        return self._functions

    @functions.setter
    def functions(self, functions: Iterable[FunctionProto]) -> None:
        self._functions[:] = functions

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "outputs":
            if value is not (known := self.__dict__.get("outputs")):
                if known is not None:
                    known.clear()
                self.__dict__["outputs"] = _Outputs(self, value)
            return
        super().__setattr__(name, value)

    def adopt(self, other: Graph) -> None:
        """Become the other graph in place; that one must not be used afterwards.

        For what makes a new graph, such as an opset upgrade, where the caller holds on to this one.
        """
        outputs = list(other.outputs)
        other.outputs = []
        self.__dict__.update({name: value for name, value in other.__dict__.items() if name != "outputs"})
        self.outputs = outputs
        for node in self.nodes:
            for body in node.bodies():
                body.parent = self

    def cleanup(
        self,
        remove_unused_node_outputs: bool = False,
        recurse_subgraphs: bool = True,
        remove_unused_graph_inputs: bool = False,
        recurse_functions: bool = False,
    ) -> Graph:
        """Remove what no output depends on, as GraphSurgeon does, and never shift the outputs of a node.

        Functions are carried unchanged, whatever ``recurse_functions`` says, and so are unused outputs.
        """
        restore_classes(self)
        super().cleanup(False, recurse_subgraphs, remove_unused_graph_inputs, recurse_functions=False)
        return self

    def toposort(self, recurse_subgraphs: bool = True, recurse_functions: bool = False, mode: str = "full") -> Graph:
        """Sort the nodes of this graph and its bodies, as `onnxq.ir.toposort` does."""
        toposort(restore_classes(self))
        return self

    def copy(self, tensor_map: Mapping[str, Tensor] | None = None) -> Graph:
        """Return an independent graph; the values of constants and the protos that were read are shared, not copied."""
        return copy_graph(restore_classes(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self.copy()


def _first(things: Sequence[object]) -> str:
    left = len(things) - _TOLD
    return ", ".join([*map(str, things[:_TOLD]), *([f"and {left} more"] if left > 0 else [])])
