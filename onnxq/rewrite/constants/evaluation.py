"""Many operators on constants, computed in order: what is small together, what is large one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxq.errors import ModelError, OnnxqError
from onnxq.ir import ArrayPayload, Graph, Node, Payload, Variable, to_model
from onnxq.ir.data_types import numpy_dtype
from onnxq.rewrite.constants.linear import Array
from onnxq.rewrite.constants.steps import Step, compute, is_numpys, is_small
from onnxq.runtime.sessions import open_session, run

# Steps that read no more than this run in one session.
_TOGETHER = 1 << 16
_TYPES = ("to", "dtype", "output_dtype")

Source = Payload | Variable


@dataclass(frozen=True)
class Evaluated:
    """What came of steps.

    Attributes:
        values: of the wanted tensors, and of those that a step reads which could not be computed.
        failed: the steps that could not be computed, and why; those that depend on one are among them.
    """

    values: Mapping[Variable, Payload]
    failed: Mapping[Step, str]


def evaluate(
    steps: Sequence[Step], wanted: Variable, opset: int, given: Mapping[Variable, Array] | None = None
) -> Array:
    """Compute a decoder; onnxruntime runs what numpy does not compute the same way.

    Args:
        steps: in an order of execution.
        wanted: an output of one of them.
        opset: version of the default domain that the steps are written in.
        given: values of tensors that no step makes.

    Raises:
        ModelError: a step cannot be computed; the message names its node.
    """
    found = evaluate_all(steps, [wanted], opset, given)
    for step, reason in found.failed.items():
        raise ModelError(f"node {step.node} ({step.op}) decodes a weight, but {reason}")
    return found.values[wanted].load()


def evaluate_all(
    steps: Sequence[Step],
    wanted: Collection[Variable],
    opset: int,
    given: Mapping[Variable, Array] | None = None,
    largest: int | None = None,
) -> Evaluated:
    """Compute steps; each value is held until the last step that reads it has.

    Args:
        steps: in an order of execution.
        wanted: outputs of them.
        opset: version of the default domain that they are written in.
        given: values of tensors that no step makes.
        largest: bytes that a value may have which is not computed anew whenever it is asked for; None for any.
    """
    held: dict[Variable, Payload] = {tensor: ArrayPayload(array) for tensor, array in (given or {}).items()}
    work = _Evaluation(opset, largest, set(wanted), held)
    for step in steps:
        for source in set(step.inputs):
            work.readers.setdefault(source, set()).add(step)
    for step in steps:
        work.take(step)
    work.flush()
    return Evaluated(work.values, work.failed)


@dataclass(eq=False)
class _Evaluation:
    """Steps under way.

    Attributes:
        opset: version of the default domain.
        largest: bytes that a value may have that is kept in memory.
        wanted: tensors whose values are kept.
        values: the values that are known and needed.
        readers: the steps that have yet to read each source.
        failed: steps that cannot be computed, and why.
        lost: what those would have made.
        waiting: small steps that are computed together.
        coming: what those are going to make.
    """

    opset: int
    largest: int | None
    wanted: set[Variable]
    values: dict[Variable, Payload]
    readers: dict[Source | None, set[Step]] = field(default_factory=dict)
    failed: dict[Step, str] = field(default_factory=dict)
    lost: set[Variable] = field(default_factory=set)
    waiting: list[Step] = field(default_factory=list)
    coming: set[Variable] = field(default_factory=set)

    def take(self, step: Step) -> None:
        """Compute a step, or let it wait for others."""
        waits = any(source in self.coming for source in step.inputs)
        known = [self._payload(source) for source in step.inputs if source is not None and source not in self.coming]
        if not self._fits(step, known):
            if waits:
                self.flush()
            self._alone(step)
        elif waits or not is_numpys(step, known):
            self.waiting.append(step)
            self.coming.update(step.outputs)
        else:
            self._alone(step)

    def flush(self) -> None:
        """Compute the steps that wait."""
        waiting, self.waiting, self.coming = self.waiting, [], set()
        pending = [waiting] if waiting else []
        while pending:
            steps = pending.pop()
            if len(steps) == 1:
                self._alone(steps[0])
            elif not self._together(steps):
                # One step that cannot be computed must not keep the others.
                half = len(steps) // 2
                pending += [steps[half:], steps[:half]]

    def _payload(self, source: Source | None) -> Payload | None:
        return source if isinstance(source, Payload) else self.values.get(source) if source is not None else None

    def _fits(self, step: Step, known: Iterable[Payload | None]) -> bool:
        """Whether a session may hold a step beside others."""
        types = (numpy_dtype(kind) for name in _TYPES if isinstance(kind := step.attributes.get(name), int))
        if step.op == "DequantizeLinear" or any(dtype is not None and is_small(dtype) for dtype in types):
            return False
        return all(
            payload is not None and payload.nbytes <= _TOGETHER and not is_small(payload.dtype) for payload in known
        )

    def _alone(self, step: Step) -> None:
        if self._depends_on_lost(step):
            return
        try:
            found = compute(step, [self._payload(source) for source in step.inputs], self.opset)
            self._keep(step.outputs, found)
        except OnnxqError as error:
            self._fail(step, str(error))
        else:
            self._read([step])

    def _together(self, steps: Sequence[Step]) -> bool:
        """Run several steps in one session; return whether that went well."""
        able = [step for step in steps if not self._depends_on_lost(step)]
        inside = set(able)
        made = dict.fromkeys(tensor for step in able for tensor in step.outputs if tensor.name)
        needed = [tensor for tensor in made if tensor in self.wanted or self.readers.get(tensor, set()) - inside]
        try:
            found = _run(able, needed, self._payload, self.opset) if needed else []
            self._keep(needed, found)
        except OnnxqError:
            return False
        self._read(able)
        return True

    def _depends_on_lost(self, step: Step) -> bool:
        if any(source in self.lost for source in step.inputs):
            self._fail(step, "what it reads cannot be computed")
            return True
        return False

    def _fail(self, step: Step, reason: str) -> None:
        self.failed[step] = reason
        self.lost.update(step.outputs)

    def _keep(self, tensors: Iterable[Variable], found: Iterable[Payload]) -> None:
        new = {tensor: payload for tensor, payload in zip(tensors, found, strict=False) if tensor.name}
        for payload in new.values():
            if payload.dtype.kind not in "fiub" and not is_small(payload.dtype):
                raise ModelError(f"its result is of type {payload.dtype}")
            if self.largest is not None and isinstance(payload, ArrayPayload) and payload.nbytes > self.largest:
                raise ModelError(f"its result of {payload.nbytes} bytes is too large")
        self.values.update(new)

    def _read(self, steps: Iterable[Step]) -> None:
        """Forget the values that these steps were the last to read, or that none reads."""
        for step in steps:
            for source in set(step.inputs):
                self.readers[source].discard(step)
        for step in steps:
            for tensor in (*step.inputs, *step.outputs):
                if isinstance(tensor, Variable) and not self.readers.get(tensor) and tensor not in self.wanted:
                    self.values.pop(tensor, None)


def _run(
    steps: Sequence[Step], needed: Sequence[Variable], payload_of: Callable[[Source], Payload | None], opset: int
) -> list[Payload]:
    """Return the values of tensors, computed in one session."""
    made = {tensor for step in steps for tensor in step.outputs}
    twins: dict[Source, Variable] = {}
    feeds: dict[str, Array] = {}

    def twin(source: Source | None) -> Variable:
        if source is None or (isinstance(source, Variable) and not source.name):
            return Variable("")
        if source not in twins:
            twins[source] = Variable(f"t{len(twins)}")
            if source not in made:
                payload = payload_of(source)
                assert payload is not None, "a step comes behind those that make what it reads"
                twins[source].dtype, twins[source].shape = payload.dtype, list(payload.shape)
                feeds[twins[source].name] = payload.load()
        return twins[source]

    nodes = [
        Node(step.op, f"n{index}", dict(step.attributes), list(map(twin, step.inputs)), list(map(twin, step.outputs)))
        for index, step in enumerate(steps)
    ]
    outputs = [twin(tensor) for tensor in needed]
    graph = Graph(nodes, [tensor for tensor in twins.values() if tensor.name in feeds], outputs, "steps", opset=opset)
    found = run(open_session(to_model(graph), threads=1, optimize=False), feeds)
    if not all(isinstance(array, np.ndarray) for array in found):
        raise ModelError("a result is no tensor")
    return [ArrayPayload(array) for array in found]
