"""Rewrite rules: a pattern and its replacement, applied together until nothing changes."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import defs

from onnxq.errors import PassError
from onnxq.ir.edit import remove_nodes, replace_uses
from onnxq.ir.elements import Constant, Node, Tensor, Variable, onnx_dtype
from onnxq.ir.graph import Graph, restore_classes
from onnxq.ir.queries import Names, OperatorKey, all_graphs, all_nodes, join_origins, owner_graphs, producer
from onnxq.ir.type_inference import infer_types
from onnxq.rewrite.passes import Changes, Pass
from onnxq.rewrite.patterns import Match, NodePattern, OpsetPatternBuilder, find
from onnxq.rewrite.soundness import FIRST_OPSET, Uses, has_kernel
from onnxq.system.plugins import describe_error


class RewriteContext:
    """Make the nodes of a replacement: ``new.Add(x, 1.0)`` adds a node and returns its output.

    Types are inferred where possible. Numbers and arrays become constants of the type of the first tensor among the
    inputs. If that type is unknown, the first floating-point constant of the match sets it. None leaves an input out.

    Args:
        graph: main graph of the model.
        names: all names of the model.
        match: the matched nodes.

    >>> def rewrite(self, new, match):
    ...     return new.Mul(match.x, new.Sigmoid(match.x))
    """

    def __init__(self, graph: Graph, names: Names, match: Match) -> None:
        self._graph, self._names, self._found, self._root = graph, names, match, match.root
        self.nodes: list[Node] = []
        self.named_after: dict[Node, Node] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.call("", op_type, *inputs, **attributes)

    def call(self, domain: str, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return its output, or a tuple of several. Attributes that are None are left out."""
        name = self._names.unique(f"{self._root.name or self._root.op}.{op_type}")
        node = Node(op_type, name, {}, domain=domain)
        node.attrs.update({key: value for key, value in attributes.items() if value is not None})
        return self._added(node, inputs, [True] * outputs)

    def like(self, node: Node, *inputs: Any, **attributes: Any) -> Any:
        """Add a node with the operator, name, attributes and named outputs of ``node``, which it replaces.

        Returns:
            Its named outputs; a tuple of several.
        """
        twin = node.copy()
        twin.attrs.update(attributes)
        for name in [name for name, value in twin.attrs.items() if value is None]:
            del twin.attrs[name]
        self.named_after[twin] = node
        return self._added(twin, inputs, [bool(tensor.name) for tensor in node.outputs])

    def named(self, name: Node | str, output: Any) -> Any:
        """Name the producer of ``output``; return ``output``.

        Args:
            name: a node that is removed, or what to add to the names of the root and of its first output.
            output: of a new node.
        """
        node = output.inputs[0]
        if isinstance(name, Node):
            self.named_after[node] = name
        else:
            node.name = self._names.unique(f"{self._root.name or self._root.op}.{name}")
            output.name = self._names.unique(f"{self._root.outputs[0].name}.{name}")
        return output

    def constant(self, values: npt.ArrayLike, name: str = "constant", of: Tensor | None = None) -> Constant:
        """Return a constant of these values, named after the root or after another tensor.

        An empty list becomes int64, for axes or sizes.
        """
        array = np.asarray(values, np.int64) if isinstance(values, list) and not values else np.asarray(values)
        base = self._root.name or self._root.op if of is None else of.name
        return self._names.store(f"{base}.{name}", array)

    def _added(self, node: Node, inputs: Sequence[Any], named: Sequence[bool]) -> Any:
        beside = next((tensor for tensor in inputs if isinstance(tensor, Variable | Constant)), None)
        dtype = self._dtype if beside is not None and beside.dtype is None else getattr(beside, "dtype", None)
        node.inputs = [self._tensor(value, dtype) for value in inputs]
        node.outputs = [
            Variable(self._names.unique(f"{node.name}.{index or 'y'}") if has_name else "")
            for index, has_name in enumerate(named)
        ]
        self.nodes.append(node)
        infer_types(node, self._graph.opset_imports)
        outputs = [tensor for tensor in node.outputs if tensor.name]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @property
    def _dtype(self) -> Any:
        """The first floating-point constant of the match stood beside data of the same type."""
        read = (tensor for node in self._found.nodes for tensor in node.inputs if isinstance(tensor, Constant))
        return next((tensor.dtype for tensor in read if tensor.dtype.kind == "f"), None)

    def _tensor(self, value: Any, dtype: Any) -> Tensor:
        if value is None:
            return Variable("")
        if isinstance(value, Variable | Constant):
            return value
        # Exporters seldom give the types of inner tensors, and their floats are float32 far more often than float64.
        array = np.asarray(value, np.float32 if isinstance(value, float) and dtype is None else None)
        fits = isinstance(value, bool | int | float) or array.dtype.kind == "f"
        return self.constant(array.astype(dtype) if fits and dtype is not None else array)


# Rules ----------------------------------------------------------------------------------------------------------------

_LOG = logging.getLogger(__name__)
# Rules that undo each other never end. Sets that do end rewrite each node a few times.
_MOST_PER_NODE: Final = 16
_ALWAYS_FINE: Final = 1024


@dataclass(frozen=True)
class RewriteRule(Pass):
    """A pattern of operators and its replacement. A rule is a pass, and a part of `RewriteRules`.

    A match must lie in one graph. No other node and no graph output may read its inner values.

    >>> class Silu(RewriteRule):
    ...     def pattern(self, op):
    ...         return op.Mul(op.any("x"), op.Sigmoid(op.any("x")))
    ...     def rewrite(self, new, match):
    ...         return new.Swish(match.x)
    """

    @abstractmethod
    def pattern(self, op: OpsetPatternBuilder) -> NodePattern | tuple[NodePattern, ...]:
        """Return the last node of the pattern, or several variants of it."""

    def check(self, match: Match) -> str:
        """Return why the rule skips the match, or an empty string."""
        return ""

    def rounds(self, match: Match) -> bool:
        """Return whether the replacement rounds differently. If so, matches before a discrete operator are skipped."""
        return False

    @abstractmethod
    def rewrite(self, new: RewriteContext, match: Match) -> Tensor | Sequence[Tensor] | str:
        """Make the new nodes and return the tensor that replaces the root's output, or one for each output.

        A rule that finds only here why it skips the match returns the reason.
        """

    def apply(self, graph: Graph) -> Changes:
        """Apply this rule alone until nothing changes."""
        return RewriteRules((self,)).apply(graph)


class RoundingRule(RewriteRule):
    """A rule of which every replacement rounds differently."""

    def rounds(self, match: Match) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True)
class RewriteRules(Pass):
    """Apply rules together until nothing changes.

    Each round visits every node once, in graph order, and tries the rules that end in its operator. Larger patterns
    come first, because they are more specific. Patterns of equal size keep the order of ``rules``.

    A match is skipped if the replacement has another shape, or a node without an onnxruntime kernel. It is also
    skipped if the rule raises, or makes another type. A rule that keeps firing is stopped. Models below opset 7 are
    skipped as a whole.

    >>> import onnxq
    >>> RewriteRules((onnxq.passes.MergeClamps(),)).apply(onnxq.load("models/gru.onnx")).changed
    ()
    """

    rules: tuple[RewriteRule, ...]

    def apply(self, graph: Graph) -> Changes:
        """Apply the rules. ``changed`` names the replaced nodes, ``skipped`` the matches that a rule left.

        ``failed`` names the rules that raised or were stopped, with the first error of each.
        """
        if graph.opset < FIRST_OPSET:
            reason = f"rules are for opset {FIRST_OPSET} and later, to which UpgradeOpset converts a model"
            return Changes(skipped=((graph.name, reason),))
        rewriting = _Rewriting(graph, self.rules)
        if any(node.op in rewriting.roots for _, node in all_nodes(graph)):
            restore_classes(graph)
            while rewriting.round():
                pass
        return rewriting.changes()


def _patterns(rule: RewriteRule) -> tuple[NodePattern, ...]:
    name = type(rule).__name__
    patterns = rule.pattern(OpsetPatternBuilder(name))
    several = patterns if isinstance(patterns, tuple) else (patterns,)
    for pattern in several:
        if not isinstance(pattern, NodePattern):
            raise PassError(f"the pattern of rule {name} is {pattern!r}, expected an operator such as op.Add(x, y)")
    return several


class _Rewriting:
    """One application of rules to a graph. Replaced nodes stay attached until their round ends."""

    def __init__(self, graph: Graph, rules: Sequence[RewriteRule]) -> None:
        self.graph = graph
        self.names = Names(graph)
        self.uses = Uses(graph)
        self.most = 0
        self.gone: set[Node] = set()
        self.changed: list[str] = []
        self.skipped: dict[tuple[Node, str], str] = {}
        self.counts: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        self.stopped: set[str] = set()
        self.rules = self._by_root(rules)
        self.roots = {op_type for _, op_type in self.rules}

    @cached_property
    def owner(self) -> dict[Node, Graph]:
        return owner_graphs(self.graph)

    def _by_root(self, rules: Sequence[RewriteRule]) -> dict[OperatorKey, list[tuple[RewriteRule, NodePattern]]]:
        rules_of: dict[OperatorKey, list[tuple[RewriteRule, NodePattern]]] = {}
        for rule in rules:
            try:
                patterns = _patterns(rule)
            except Exception as error:  # noqa: BLE001
                self._report(rule, f"rule {type(rule).__name__} has no pattern: {describe_error(error)}")
                continue
            for pattern in patterns:
                rules_of.setdefault((pattern.domain, pattern.op_type), []).append((rule, pattern))
        return {root: sorted(ending, key=lambda pair: -pair[1].size) for root, ending in rules_of.items()}

    def _report(self, rule: RewriteRule, what: str) -> str:
        _LOG.debug("%s", what, exc_info=True)
        self.failed.setdefault(type(rule).__name__, what)
        return what

    def changes(self) -> Changes:
        skipped = tuple((node.name, reason) for (node, _), reason in self.skipped.items() if node not in self.gone)
        return Changes(tuple(self.changed), skipped, tuple(self.failed.items()), counts=dict(self.counts))

    def round(self) -> bool:
        before, gone_before = len(self.changed), set(self.gone)
        self.skipped.clear()
        self.uses = Uses(self.graph)
        for scope in list(all_graphs(self.graph)):
            instead: dict[Node, list[Node]] = {}
            for node in list(scope.nodes):
                if node.op in self.roots and node not in self.gone:
                    self._try(scope, node, instead)
            if instead:
                # A later rule of the same round may have replaced a new node.
                spliced = (new for node in scope.nodes for new in instead.get(node, (node,)))
                scope.nodes[:] = [node for node in spliced if node not in self.gone]
        # Detaching all at once is linear. The node lists are correct already.
        remove_nodes(Graph(), self.gone - gone_before)
        return len(self.changed) > before

    def _try(self, scope: Graph, node: Node, instead: dict[Node, list[Node]]) -> None:
        makers = {maker.op for tensor in node.inputs for maker in tensor.inputs}
        for rule, pattern in self.rules.get((node.domain, node.op), ()):
            name = type(rule).__name__
            if name in self.stopped or not pattern.fed_by <= makers:
                continue
            match = find(pattern, node, self.graph.opset, self.uses)
            if match is None or not self._is_alone(match, scope):
                continue
            try:
                reason = rule.check(match) or self._replace(rule, match, scope, instead)
            except Exception as error:  # noqa: BLE001
                reason = self._report(
                    rule, f"rule {name} failed at {node.op} node {node.name!r}: {describe_error(error)}"
                )
            if reason:
                # Larger patterns come first, and say more.
                self.skipped.setdefault((node, name), reason)
                continue
            self.changed.append(node.name)
            self.counts[name] += 1
            self._check_end()
            return

    def _is_alone(self, match: Match, scope: Graph) -> bool:
        inside = set(match.nodes)
        return all(
            self.owner.get(node) is scope
            and node not in self.gone
            and (node is match.root or node in match.kept or not self._is_read(node, inside))
            for node in match.nodes
        )

    def _is_read(self, node: Node, inside: set[Node]) -> bool:
        return any(
            tensor.graph_output_of or any(reader not in inside and reader not in self.gone for reader in tensor.outputs)
            for tensor in node.outputs
        )

    def _replace(self, rule: RewriteRule, match: Match, scope: Graph, instead: dict[Node, list[Node]]) -> str:
        outputs = [tensor for tensor in match.root.outputs if tensor.name]
        if rule.rounds(match) and self.uses.decides(outputs):
            return "its last bit may decide what reads it"
        new = RewriteContext(self.graph, self.names, match)
        reason = "it failed"
        try:
            replacement = rule.rewrite(new, match)
            results: list[Any] = list(replacement) if isinstance(replacement, list | tuple) else [replacement]
            refusal = replacement if isinstance(replacement, str) else ""
            reason = refusal or self._obstacle(new, match, results, outputs, scope)
        finally:
            if reason:
                # They stay attached until the round ends, but no longer count as consumers.
                self.gone.update(new.nodes)
        if reason:
            return reason
        makers = set(new.nodes)
        self.gone.update(self._going(match, results))
        for result, output in zip(results, outputs, strict=True):
            _take_place(result, output, makers)
        self._name(new, match, next((output.inputs[0] for output in outputs if makers & set(output.inputs)), None))
        instead[match.root] = new.nodes
        self.owner.update(dict.fromkeys(new.nodes, scope))
        return ""

    def _obstacle(
        self, new: RewriteContext, match: Match, results: Sequence[Any], outputs: Sequence[Variable], scope: Graph
    ) -> str:
        """Return why a replacement is refused. Nothing has been changed yet."""
        if len(results) != len(outputs):
            raise ValueError(f"it gives {len(results)} tensors for the {len(outputs)} outputs of the node")
        if any(tensor in outputs for node in new.nodes for tensor in node.inputs):
            raise ValueError("its replacement reads the outputs that it replaces")
        before = {node.op for node in match.nodes}
        for node in new.nodes:
            dtype = node.outputs[0].dtype
            if node.op in before or node.domain:
                continue
            if not defs.has(node.op, self.graph.opset, ""):
                return f"opset {self.graph.opset} of the model has no {node.op}"
            if not has_kernel(node.op, dtype, self.graph.opset):
                return f"onnxruntime has no {node.op} of {dtype}"
        makers = set(new.nodes)
        for result, output in zip(results, outputs, strict=True):
            _check_type(result, output)
            if (output.outputs or output.graph_output_of) and not _may_be_equal(result.shape, output.shape):
                return f"it would make the shape {result.shape} of {output.shape}"
            fresh = bool(result.inputs) and result.inputs[0] in makers
            if not fresh and output.graph_output_of and not self._can_be_returned(result, scope):
                return "its output is an output of the graph"
        return ""

    def _going(self, match: Match, results: Sequence[Tensor]) -> set[Node]:
        """Return the matched nodes whose outputs nobody reads any more, not even the replacement."""
        kept = set(results)
        going = set(match.nodes)
        while staying := {
            node
            for node in going
            if node is not match.root and (self._is_read(node, going) or not kept.isdisjoint(node.outputs))
        }:
            going -= staying
        return going

    def _name(self, new: RewriteContext, match: Match, last: Node | None) -> None:
        """Users know the names of removed nodes: each goes to one new node, the root's by default to the last one."""
        gone = [node for node in match.nodes if node in self.gone]
        free = {node.name for node in gone if node.name}
        named_after = dict(new.named_after)
        if last is not None:
            named_after.setdefault(last, match.root)
        for new_node, node in named_after.items():
            if node.name in free:
                new_node.name = node.name
                free.remove(node.name)
            elif new_node.name and new_node.name == node.name:
                new_node.name = self.names.unique(node.name)
        for new_node in new.nodes:
            first = named_after.get(new_node, match.root)
            new_node.origins = join_origins((first if first in gone else match.root, *gone))

    def _can_be_returned(self, tensor: Tensor, scope: Graph) -> bool:
        maker = producer(tensor)
        is_made = maker is not None and self.owner.get(maker) is scope and isinstance(tensor, Variable)
        return is_made and not tensor.graph_output_of

    def _check_end(self) -> None:
        """Stop the rule that fires most if rules keep firing. Its replacements so far are valid."""
        if len(self.changed) <= _ALWAYS_FINE:
            return
        allowed = _ALWAYS_FINE + _MOST_PER_NODE * len(self.owner)
        self.most = self.most or allowed
        if len(self.changed) <= self.most:
            return
        name = max((name for name in self.counts if name not in self.stopped), key=self.counts.__getitem__)
        self.stopped.add(name)
        self.most = len(self.changed) + allowed
        self.failed.setdefault(
            name,
            f"rule {name} was stopped after {self.counts[name]} applications to {len(self.owner)} nodes; its "
            "replacement must match neither its own pattern, nor that of an opposite rule",
        )


def _check_type(result: Tensor, output: Variable) -> None:
    if not isinstance(result, Variable | Constant):
        raise TypeError(f"it gives {result!r}, expected a tensor")
    if not output.outputs and not output.graph_output_of:
        return
    result_type, output_type = onnx_dtype(result), onnx_dtype(output)
    if result_type and output_type and result_type != output_type:
        raise TypeError(f"it gives a tensor of type {result.dtype} in the place of one of type {output.dtype}")


def _may_be_equal(left: Any, right: Any) -> bool:
    return (
        left is None
        or right is None
        or (
            len(left) == len(right)
            and all(a == b for a, b in zip(left, right, strict=True) if isinstance(a, int) and isinstance(b, int))
        )
    )


def _take_place(result: Any, output: Variable, makers: set[Node]) -> None:
    maker = producer(result)
    if maker not in makers:
        if output.graph_output_of:
            result.take_type(output)
        replace_uses(output, result, graph_outputs=True)
        return
    assert maker is not None, "a maker of the replacement"
    list.remove(output.inputs, output.inputs[0])
    index = next(index for index, tensor in enumerate(maker.outputs) if tensor is result)
    maker.outputs[index] = output
    replace_uses(result, output)
    if output.dtype is None:
        output.dtype = result.dtype
    if output.shape is None:
        output.shape = result.shape
