"""The graph in memory: a model, or the body of a control-flow node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_graphsurgeon as gs
from onnx import FunctionProto, GraphProto, ModelProto, OperatorSetIdProto, SparseTensorProto, helper
from onnx_graphsurgeon.util.misc import SynchronizedList

from onnxq.errors import ModelError
from onnxq.ir.elements import Constant, Identity, Node, Tensor, Variable, canonical_domain, subgraphs_of
from onnxq.ir.external_data import DataFolder
from onnxq.ir.order import toposort
from onnxq.ir.protos import copy_other_fields
from onnxq.ir.queries import AnyGraph, all_graphs
from onnxq.ir.tensor_data import as_tensor_data


class _Outputs(SynchronizedList):
    def __init__(self, graph: Graph, tensors: Iterable[Tensor]) -> None:
        super().__init__(graph, "graph_output_of", list(tensors))

    def _add_to_elem(self, elem: Any) -> None:
        elem.__dict__.setdefault("graph_output_of", []).append(self.parent_obj)

    def _remove_from_elem(self, elem: Any) -> None:
        elem.__dict__["graph_output_of"].remove(self.parent_obj)

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


# The most operators, inputs and outputs that `Graph.__repr__` lists.
_SHOWN = 8


class Graph(Identity, gs.Graph):
    """A model, or the body of a control-flow node.

    Attributes:
        nodes: in execution order when read and when written.
        inputs: what a caller must feed, without overridable initializers.
        outputs: tensors that the graph returns.
        name: of the graph.
        doc_string: text of the exporter.
        opset: version of the domain of ONNX.
        import_domains: opsets of other domains, as GraphSurgeon keeps them.
        functions: the model-local functions as protos; as graphs, which GraphSurgeon makes of them, they lose fields.
        initializers: constants that this graph declares. New ones need no entry: they are declared where needed.
        sparse_initializers: sparse constants, written unchanged, each with the Variable that stands for it.
        opset_imports: version by domain; ``""`` is the domain of ONNX. Shared with all bodies.
        ir_version: version of the file format, raised on writing if the opset needs a higher one.
        folder: the folder of the model's external data, or None.
        parent: the enclosing graph of a body; None for the main graph.
        source: the GraphProto it was read from, or None.
        model_source: the ModelProto around the main graph, or None.

    >>> import onnxq
    >>> len(onnxq.load("models/gru.onnx").nodes)
    34
    """

    nodes: list[Any]
    inputs: list[Any]
    outputs: list[Any]
    name: str
    doc_string: str
    functions: list[FunctionProto]
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
        self.opset_imports: dict[str, int] = {}
        self.initializers: list[Constant] = []
        self.sparse_initializers: list[tuple[Variable, SparseTensorProto]] = []
        self.input_order: list[Tensor] = []
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
        # A summary in a few lines; `str` lists all nodes, as GraphSurgeon does.
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
        """Version of the default domain; 0 if the model does not import it."""
        return self.opset_imports.get("", 0)

    @opset.setter
    def opset(self, version: int) -> None:
        self.opset_imports[""] = version

    @property
    def import_domains(self) -> list[OperatorSetIdProto]:
        """The imported domains in GraphSurgeon's form. Change ``opset_imports`` instead."""
        return [helper.make_opsetid(domain, version) for domain, version in self.opset_imports.items()]

    @import_domains.setter
    def import_domains(self, imports: Iterable[OperatorSetIdProto] | None) -> None:
        self.opset_imports.update({canonical_domain(entry.domain): entry.version for entry in imports or ()})

    @property
    def metadata(self) -> dict[str, str]:
        """A copy of the model's metadata_props."""
        properties = self.model_source.metadata_props if self.model_source is not None else ()
        return {entry.key: entry.value for entry in properties}

    def set_metadata(self, key: str, value: str) -> None:
        """Set one entry of the model's metadata_props."""
        if self.model_source is None:
            self.model_source = ModelProto()
        properties = self.model_source.metadata_props
        entry = next((entry for entry in properties if entry.key == key), None) or properties.add(key=key)
        entry.value = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "outputs":
            if value is not (present := self.__dict__.get("outputs")):
                if present is not None:
                    present.clear()
                self.__dict__["outputs"] = _Outputs(self, value)
            return
        super().__setattr__(name, value)

    def adopt(self, source: Graph) -> None:
        """Become another graph in place; ``source`` must not be used afterwards.

        An opset upgrade, for example, makes a new graph while the caller keeps a reference to this one.
        """
        outputs = list(source.outputs)
        source.outputs = []
        self.__dict__.update({name: value for name, value in source.__dict__.items() if name != "outputs"})
        self.outputs = outputs
        for node in self.nodes:
            for body in node.subgraphs():
                body.parent = self

    def cleanup(
        self,
        remove_unused_node_outputs: bool = False,
        recurse_subgraphs: bool = True,
        remove_unused_graph_inputs: bool = False,
        recurse_functions: bool = False,
    ) -> Graph:
        """Remove nodes that no output depends on, as GraphSurgeon does, but never shift the outputs of a node.

        ``recurse_functions`` and ``remove_unused_node_outputs`` have no effect: functions and unused outputs stay.
        """
        restore_classes(self)
        super().cleanup(False, recurse_subgraphs, remove_unused_graph_inputs, recurse_functions=False)
        return self

    def toposort(self, recurse_subgraphs: bool = True, recurse_functions: bool = False, mode: str = "full") -> Graph:
        """Sort the nodes of this graph and its bodies, as `onnxq.ir.toposort` does."""
        toposort(restore_classes(self))
        return self

    def copy(self, tensor_map: Mapping[str, Tensor] | None = None) -> Graph:
        """Return an independent graph that shares the values of constants and the protos that were read."""
        return copy_graph(restore_classes(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self.copy()


def _first(things: Sequence[object]) -> str:
    left = len(things) - _SHOWN
    return ", ".join([*map(str, things[:_SHOWN]), *([f"and {left} more"] if left > 0 else [])])


# Copies

_SHARED = ("name", "doc_string", "ir_version", "producer_name", "producer_version", "source", "folder", "unattached")


def copy_graph(graph: Graph) -> Graph:
    """Return a copy with its own nodes and tensors, in bodies too, of a graph without plain GraphSurgeon objects.

    Values of constants and protos that nodes were read from are shared, because they are never changed. The copy of a
    body reads the same tensors of the enclosing graphs.
    """
    twins: dict[Any, Graph] = {scope: type(scope)() for scope in all_graphs(graph)}
    twins[graph].opset_imports.update(graph.opset_imports)
    own = None if graph.parent is None else _own_tensors(twins)
    tensors: dict[Tensor, Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        if own is not None and tensor not in own:
            return tensor
        if tensor not in tensors:
            tensors[tensor] = tensor.copy()
        return tensors[tensor]

    for scope, twin in twins.items():
        for name in _SHARED:
            setattr(twin, name, getattr(scope, name))
        twin.parent = twins.get(scope.parent, scope.parent)
        twin.opset_imports = twins[graph].opset_imports
        twin.functions = list(scope.functions)
        twin.model_source = without_graph(scope.model_source) if scope.model_source is not None else None
        twin.inputs = list(map(copy_of, scope.inputs))
        twin.initializers = list(map(copy_of, scope.initializers))
        twin.input_order = list(map(copy_of, scope.input_order))
        twin.sparse_initializers = [(copy_of(tensor), proto) for tensor, proto in scope.sparse_initializers]
        for node in scope.nodes:
            copy = node.copy(list(map(copy_of, node.inputs)), list(map(copy_of, node.outputs)))
            copy.attrs.update({name: _attribute(value, twins) for name, value in node.attrs.items()})
            twin.nodes.append(copy)
        twin.outputs = list(map(copy_of, scope.outputs))
    return twins[graph]


def _own_tensors(scopes: Iterable[Graph]) -> set[Tensor]:
    own: set[Tensor] = set()
    for scope in scopes:
        own.update((*scope.inputs, *scope.initializers, *(tensor for tensor, _ in scope.sparse_initializers)))
        own.update(tensor for node in scope.nodes for tensor in node.outputs)
    return own


def _attribute(value: Any, twins: dict[Any, Any]) -> Any:
    if isinstance(value, list):
        return [twins.get(entry, entry) if entry.__hash__ else entry for entry in value]
    if isinstance(value, Constant):
        return value.copy()
    return twins.get(value, value)


def without_graph(source: ModelProto) -> ModelProto:
    """Return a copy of a model without graph and functions, which take most of the memory."""
    twin = ModelProto()
    copy_other_fields(source, twin, ("graph", "functions"))
    return twin


# Plain GraphSurgeon objects

# Attributes that are neither tensors nor bodies.
_SIMPLE = (bool, int, float, str, bytes)


def restore_classes(graph: AnyGraph) -> AnyGraph:
    """Convert plain GraphSurgeon objects in a graph to onnxq's classes, in place, and set the parent of every body.

    Code written for GraphSurgeon puts plain objects into onnxq's graphs. Code that reads a graph need not handle them.

    Raises:
        ModelError: a plain constant holds sparse values, a body is a plain graph, or an entry is not a node or tensor.
    """
    root: Any = graph
    pending = [(root, getattr(root, "parent", None))]
    seen: set[int] = set()
    while pending:
        scope, parent = pending.pop()
        if isinstance(scope, gs.Graph) and not isinstance(scope, Identity):
            raise ModelError(f"graph {scope.name!r} is a plain GraphSurgeon graph; convert it with onnxq.ir.as_graph")
        scope.parent = parent
        if parent is not None:
            scope.opset_imports = parent.opset_imports
        for node in scope.nodes:
            if type(node) is gs.Node:
                node.__class__ = Node
            _check_node(node, scope)
            for tensor in (*node.inputs, *node.outputs):
                if id(tensor) not in seen:
                    _restore_tensor(tensor, seen)
            for name, value in node.attrs.items():
                if isinstance(value, _SIMPLE):
                    continue
                _restore_tensor(value, seen)
                if isinstance(value, gs.Graph) and not isinstance(value, Identity):
                    raise ModelError(
                        f"attribute {name!r} of node {node.name!r} is a plain GraphSurgeon graph; "
                        "make it from onnxq.ir.Graph"
                    )
                pending.extend((body, scope) for body in subgraphs_of((value,)))
        for tensor in (*scope.inputs, *scope.outputs):
            _restore_tensor(tensor, seen)
    return graph


def _check_node(node: Any, scope: Any) -> None:
    if not isinstance(node, Node):
        raise ModelError(f"graph {scope.name!r} lists {node!r} of type {type(node).__name__}, expected a node")
    if not isinstance(node.op, str) or not node.op or not isinstance(node.name, str):
        raise ModelError(f"node {node.name!r} has the operator {node.op!r}, expected the names of both as text")
    if strangers := [tensor for tensor in (*node.inputs, *node.outputs) if not isinstance(tensor, gs.Tensor)]:
        stranger = strangers[0]
        raise ModelError(
            f"{node.op} node {node.name!r} reads or makes {stranger!r} of type {type(stranger).__name__}, "
            "expected a tensor"
        )


def _restore_tensor(tensor: Any, seen: set[int]) -> None:
    kind = type(tensor)
    if not isinstance(tensor, gs.Tensor) or id(tensor) in seen:
        return
    seen.add(id(tensor))
    for node in (*tensor.inputs, *tensor.outputs):
        if type(node) is gs.Node:
            node.__class__ = Node
    if kind is gs.Variable:
        tensor.__class__ = Variable
    elif kind is gs.Constant:
        tensor_data = as_tensor_data(tensor._values, tensor._export_dtype)
        tensor.__class__ = Constant
        tensor._values = tensor_data
