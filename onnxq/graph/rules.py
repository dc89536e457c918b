"""Rules: a pattern and what takes its place, applied until nothing changes, in linear passes over all scopes."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from onnxq.errors import OnnxqError, PassError
from onnxq.graph.edit import remove_nodes, replace_uses
from onnxq.graph.elements import Constant, Node, Tensor, Variable, onnx_dtype
from onnxq.graph.model import Graph
from onnxq.graph.origins import joined_origins
from onnxq.graph.passes import Changes, Pass
from onnxq.graph.patterns import Call, Match, Operators, find
from onnxq.graph.replacements import New
from onnxq.graph.scopes import Names, scopes
from onnxq.graph.surgeon import restore_classes

# Rules that undo each other never end; sets that do end rewrite a node a few times.
_MOST_PER_NODE: Final = 16
_ALWAYS_FINE: Final = 1024


@dataclass(frozen=True)
class RewriteRule(Pass):
    """A pattern of operators and what takes its place; a pass of its own, and a part of `RewriteRules`.

    Inner values that others read, or that a graph returns, do not match, and neither do nodes of several graphs.

    >>> class Silu(RewriteRule):
    ...     def pattern(self, op):
    ...         return op.Mul(op.any("x"), op.Sigmoid(op.any("x")))
    ...     def replacement(self, new, found):
    ...         return new.Swish(found.x)
    """

    @abstractmethod
    def pattern(self, op: Operators) -> Call | tuple[Call, ...]:
        """Return what is looked for: the last node of it, or several forms of the same."""

    def obstacle(self, found: Match) -> str:
        """Return why the rule leaves what it has found, or an empty string."""
        return ""

    @abstractmethod
    def replacement(self, new: New, found: Match) -> Tensor | Sequence[Tensor]:
        """Make the new nodes and return what takes the place of the root's output, or of each of its outputs."""

    def apply(self, graph: Graph) -> Changes:
        """Apply this rule alone until nothing changes."""
        return RewriteRules((self,)).apply(graph)


@dataclass(frozen=True)
class RewriteChanges(Changes):
    """What rules did.

    Attributes:
        counts: how often each rule was applied, by its name.
    """

    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RewriteRules(Pass):
    """Rules that are applied together until nothing changes.

    Each round looks at every node once, in the order of the graph, and tries the rules that end in its operator:
    larger patterns first, since they say more, and otherwise in their order.

    Attributes:
        rules: the rules.
    """

    rules: tuple[RewriteRule, ...]

    def apply(self, graph: Graph) -> RewriteChanges:
        """Apply; ``changed`` holds the names of the nodes that were replaced, ``left`` what a rule refused.

        Raises:
            PassError: a rule makes an ill-typed node, fails, or the rules never end; the message names it.
        """
        rewriting = _Rewriting(restore_classes(graph), _by_root(self.rules))
        while rewriting.round():
            pass
        left = tuple((node.name, reason) for (node, _), reason in rewriting.left.items() if node not in rewriting.gone)
        return RewriteChanges(tuple(rewriting.changed), left, dict(rewriting.counts))


def _by_root(rules: Sequence[RewriteRule]) -> dict[tuple[str, str], list[tuple[RewriteRule, Call]]]:
    found: dict[tuple[str, str], list[tuple[RewriteRule, Call]]] = {}
    for rule in rules:
        name = type(rule).__name__
        patterns = rule.pattern(Operators(name))
        for pattern in patterns if isinstance(patterns, tuple) else (patterns,):
            if not isinstance(pattern, Call):
                raise PassError(f"the pattern of rule {name} is {pattern!r}, expected an operator such as op.Add(x, y)")
            found.setdefault((pattern.domain, pattern.op_type), []).append((rule, pattern))
    return {root: sorted(ending, key=lambda pair: -pair[1].size) for root, ending in found.items()}


class _Rewriting:
    """One application of rules to a graph; nodes that are replaced stay attached until their round ends."""

    def __init__(self, graph: Graph, rules: Mapping[tuple[str, str], Sequence[tuple[RewriteRule, Call]]]) -> None:
        self.graph, self.rules = graph, rules
        self.names = Names(graph)
        self.owner = {node: scope for scope in scopes(graph) for node in scope.nodes}
        self.most = _ALWAYS_FINE + _MOST_PER_NODE * len(self.owner)
        self.gone: set[Node] = set()
        self.changed: list[str] = []
        self.left: dict[tuple[Node, str], str] = {}
        self.counts: Counter[str] = Counter()

    def round(self) -> bool:
        """Try every node once; return whether anything changed."""
        before, known = len(self.changed), set(self.gone)
        self.left.clear()
        for scope in list(scopes(self.graph)):
            instead: dict[Node, list[Node]] = {}
            for node in list(scope.nodes):
                if node not in self.gone and (node.domain or "", node.op) in self.rules:
                    self._try(scope, node, instead)
            if instead:
                # What a rule has made may have been replaced in the same round again.
                spliced = (new for node in scope.nodes for new in instead.get(node, (node,)))
                scope.nodes[:] = [node for node in spliced if node not in self.gone]
        # Detached at once, in linear time; the lists of nodes are right already.
        remove_nodes(Graph(), self.gone - known)
        return len(self.changed) > before

    def _try(self, scope: Graph, node: Node, instead: dict[Node, list[Node]]) -> None:
        for rule, pattern in self.rules[node.domain or "", node.op]:
            found = find(pattern, node, self.graph.opset)
            if found is None or not self._is_alone(found, scope):
                continue
            name = type(rule).__name__
            try:
                if reason := rule.obstacle(found):
                    self.left[node, name] = reason
                    continue
                if self._replace(rule, found, scope, instead):
                    self.changed.append(node.name)
                    self.counts[name] += 1
                    self._check_end()
                    return
            except OnnxqError:
                raise
            except Exception as error:
                raise PassError(
                    f"rule {name} failed at {node.op} node {node.name!r}: {type(error).__name__}: {error}"
                ) from error

    def _is_alone(self, found: Match, scope: Graph) -> bool:
        """Whether all nodes stand in one graph and nobody else reads their inner values."""
        inside = set(found.nodes)
        return all(
            self.owner.get(node) is scope
            and node not in self.gone
            and (node is found.root or node in found.kept or not self._is_read(node, inside))
            for node in found.nodes
        )

    def _is_read(self, node: Node, inside: set[Node]) -> bool:
        """Whether somebody outside a match reads what a node makes."""
        return any(
            tensor.returned_by or any(reader not in inside and reader not in self.gone for reader in tensor.outputs)
            for tensor in node.outputs
        )

    def _replace(self, rule: RewriteRule, found: Match, scope: Graph, instead: dict[Node, list[Node]]) -> bool:
        new = New(self.graph, self.names, found)
        made = rule.replacement(new, found)
        results: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
        outputs = [tensor for tensor in found.root.outputs if tensor.name]
        if len(results) != len(outputs):
            raise ValueError(f"it gives {len(results)} tensors for the {len(outputs)} outputs of the node")
        makers = set(new.nodes)
        for result, output in zip(results, outputs, strict=True):
            _check_type(result, output)
            fresh = bool(result.inputs) and result.inputs[0] in makers
            if not fresh and output.returned_by and not self._can_be_returned(result, scope):
                self.left[found.root, type(rule).__name__] = "its output is an output of the graph"
                self.gone.update(new.nodes)
                return False
        inside = set(found.nodes)
        self.gone.update(node for node in found.nodes if node not in found.kept or not self._is_read(node, inside))
        for result, output in zip(results, outputs, strict=True):
            _take_place(result, output, makers)
        self._name(new, found, next((output.inputs[0] for output in outputs if makers & set(output.inputs)), None))
        instead[found.root] = new.nodes
        self.owner.update(dict.fromkeys(new.nodes, scope))
        return True

    def _name(self, new: New, found: Match, last: Node | None) -> None:
        """Give new nodes the names of those whose work they do, and tell them all that they stand for.

        Users know the names that go: each is given once, that of the root to the last node where nothing else gets it.
        """
        gone = [node for node in found.nodes if node in self.gone]
        free = {node.name for node in gone if node.name}
        named_after = dict(new.named_after)
        if last is not None:
            named_after.setdefault(last, found.root)
        for made, node in named_after.items():
            if node.name in free:
                made.name = node.name
                free.remove(node.name)
            elif made.name and made.name == node.name:
                made.name = self.names.fresh(node.name)
        for made in new.nodes:
            first = named_after.get(made, found.root)
            made.origins = joined_origins((first if first in gone else found.root, *gone))

    def _can_be_returned(self, tensor: Tensor, scope: Graph) -> bool:
        """Whether a tensor that is there already may become an output of its graph under another name."""
        producer = tensor.inputs[0] if tensor.inputs else None
        return self.owner.get(producer) is scope and not tensor.returned_by and isinstance(tensor, Variable)

    def _check_end(self) -> None:
        if len(self.changed) > self.most:
            name, count = self.counts.most_common(1)[0]
            raise PassError(
                f"rules never end: {name} was applied {count} times to a graph of {len(self.owner)} nodes or fewer; "
                "its replacement must not match its own pattern, nor that of a rule that undoes it"
            )


def _check_type(result: Tensor, output: Variable) -> None:
    if not isinstance(result, Variable | Constant):
        raise TypeError(f"it gives {result!r}, expected a tensor")
    made, wanted = onnx_dtype(result), onnx_dtype(output)
    if made and wanted and made != wanted:
        raise TypeError(f"it gives a tensor of type {result.dtype} in the place of one of type {output.dtype}")


def _take_place(result: Any, output: Variable, makers: set[Node]) -> None:
    """Let everybody who reads an output read a result instead; a new node makes the output itself."""
    producer = result.inputs[0] if result.inputs else None
    if producer not in makers:
        replace_uses(output, result, graph_outputs=True)
        return
    assert producer is not None, "a maker of the replacement"
    list.remove(output.inputs, output.inputs[0])
    index = next(index for index, tensor in enumerate(producer.outputs) if tensor is result)
    producer.outputs[index] = output
    replace_uses(result, output)
    if output.dtype is None:
        output.dtype = result.dtype
    if output.shape is None:
        output.shape = result.shape
