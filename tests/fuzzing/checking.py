"""Rewrite a case in every way and say what is wrong with what comes out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, ValueInfoProto

from fuzzing.comparing import Original, agree_in_numpy, has_halves, stores_denormals
from fuzzing.generator import Case
from fuzzing.quantized import by_onnxq, by_onnxruntime, handmade, network, recorded, worse
from fuzzing.rewriting import SINGLE, Rewrite, Rewritten, alone, canonical, counted, named_in, prepared
from fuzzing.runtime import Feed, checked, opened, run, values_of
from onnxq.config.presets import PRESETS
from onnxq.errors import ModelError, OnnxqError
from onnxq.ir import to_model
from onnxq.pipeline.dequantization import dequantize
from onnxq.runtime.targets import TARGETS

ACCEPTED = frozenset({"range", "nan", "invalid"})
"""Kinds of differences that no rewrite is blamed for; see `Difference`."""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a rewritten model.

    Attributes:
        rule: the pass or rule that does it.
        kind: of a `Difference`, or ``error`` (an exception), ``refused`` (onnxruntime does not load or run it),
            ``checker`` (onnx's check complains), ``interface`` (other inputs or outputs), ``name`` (a tensor on the way
            keeps its name and gets other values), ``unstable`` (rewritten again it changes again), or ``crash`` (of
            onnxruntime, at what was rewritten).
        rewrite: which rewriting it was: ``canonical``, a target, or a pass alone.
        detail: a line about it.
        feed: the name of the feed that shows it.
    """

    rule: str
    kind: str
    rewrite: str
    detail: str
    feed: str = ""


@dataclass(frozen=True)
class Example:
    """A fault with the model that shows it, and what that is fed."""

    seed: int
    fault: Fault
    model: bytes
    feed: dict[str, Any]


@dataclass
class Outcome:
    """What came of a case."""

    fired: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    accepted: Counter[str] = field(default_factory=Counter)
    is_valid: bool = False
    examples: list[Example] = field(default_factory=list)


def rewrites(case: Case) -> Iterator[tuple[str, Rewrite]]:
    """Yield the canonical form, a target, and passes alone: those that the case is for, and another one."""
    random = np.random.default_rng([case.seed, 7])
    yield "canonical", canonical
    if random.random() < 0.5:
        target = str(random.choice(sorted(TARGETS)))
        yield f"prepared for {target}", prepared(target)
    opset = next(entry.version for entry in case.model.opset_import if not entry.domain)
    for name in dict.fromkeys((*case.rules, str(random.choice(SINGLE)))):
        if name in SINGLE:
            yield (
                f"{name} alone",
                alone(name, bool(random.random() < 0.7), int(random.integers(opset, max(opset, 23) + 1))),
            )


def check(case: Case, note: Any = lambda text: None) -> Outcome:
    """Rewrite a case in every way.

    Args:
        case: the case.
        note: is given the rewriting before its result runs, for the event of a crash.
    """
    outcome = Outcome()
    note("")
    original = Original.of(case.model, case.feeds)
    if original is None:
        return outcome
    outcome.is_valid = True
    is_sound = not checked(case.model)
    for name, rewrite in rewrites(case):
        note(name)
        fault, result = examine(original, name, rewrite, is_sound)
        if result is not None:
            outcome.fired += result.fired
        if fault is None:
            continue
        if accepted := _acceptance(fault, result, case, rewrite):
            outcome.accepted[accepted] += 1
            continue
        outcome.faults.append(fault)
        if name == "canonical":
            # What follows would say the same again.
            break
    return outcome


def _acceptance(fault: Fault, result: Rewritten | None, case: Case, rewrite: Rewrite) -> str:
    """Return the reason for which no rule is blamed, or an empty string."""
    model, feeds = case.model, case.feeds
    if fault.kind in ACCEPTED:
        return fault.kind
    flushed = fault.rule == "several" and result is not None and result.fired["FlushDenormals"] > 0
    # What is denormal may become zero in any product of constants, and infinity times that is NaN.
    lost = fault.kind == "nonfinite" and stores_denormals(model)
    rule = "FlushDenormals" if flushed or lost else fault.rule
    if fault.kind in _ON_PURPOSE.get(rule, ((), ""))[0]:
        return f"{rule}, {fault.kind}"
    if rule == "WidenFloats" and re.search(r"np\.(True_|False_|u?int)", fault.detail):
        # What is nearly nothing is zero in 16 bits, and decides otherwise in 32.
        return "WidenFloats, decision"
    if fault.rule == "several" and fault.kind == "decision" and result is not None and result.fired["WidenFloats"]:
        # 32 bits decide otherwise, and without them float16 that onnxruntime does not round may decide the same.
        result = rewrite(model, frozenset({"WidenFloats"}))
    decided = fault.kind in ("decision", "values") and has_halves(model) and result is not None
    if decided and agree_in_numpy(model, result.model, feeds[fault.feed]):
        # onnxruntime rounds float16 in front of an Identity and not in front of a Cast.
        return "float16 that onnxruntime does not round"
    if fault.rule == "FoldShapes" and fault.kind == "shape" and _empty_axes(feeds[fault.feed]) > 1:
        # Two entries of a Reshape target are 0 at once, and copy dimensions that the target does not name.
        return "FoldShapes, two axes without elements"
    if "attempting to re-use buffer" in fault.detail:
        # onnxruntime takes dimensions of one name for equal, which those of the given model are not.
        return "names of dimensions"
    return "onnx's converter" if fault.rule == "UpgradeOpset" and _is_converted_wrongly(model) else ""


def _empty_axes(feed: Feed) -> int:
    return sum(np.shape(values).count(0) for values in feed.values())


# The converter makes a Reshape of these that no runtime accepts where data is empty.
_FLATTENED_BEFORE_13 = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
# A bound that is left out becomes the largest number, which onnxruntime does not clamp infinity to.
_BOUNDED_BEFORE_11 = frozenset({"Clip"})


def _is_converted_wrongly(model: ModelProto) -> bool:
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    operators = set(_operators(model.graph))
    return bool((opset < 13 and operators & _FLATTENED_BEFORE_13) or (opset < 11 and operators & _BOUNDED_BEFORE_11))


def examine(original: Original, name: str, rewrite: Rewrite, is_sound: bool) -> tuple[Fault | None, Rewritten | None]:
    """Rewrite a model and return what is wrong with the result, blamed on a pass or rule, and the result."""
    try:
        result = rewrite(original.model, frozenset())
    except ModelError as error:
        if name.startswith("UpgradeOpset"):
            return None, None
        return Fault(named_in(error), "error", name, f"{type(error).__name__}: {error}"), None
    # Whatever a rule raises is what is looked for.
    except Exception as error:  # noqa: BLE001
        return Fault(named_in(error), "error", name, f"{type(error).__name__}: {error}"), None
    if result.failed:
        rule, said = result.failed[0]
        return Fault(rule, "error", name, said), result
    if not result.fired:
        return None, result
    found = _wrong(original, result.model, is_sound)
    if found is None:
        # A few tell as much as all.
        if name == "canonical" and len(result.fired) % 3 == 0 and (again := _unstable(rewrite, result.model)):
            return Fault(again, "unstable", name, "rewritten again it changes again"), result
        return None, result
    kind, detail, feed = found
    return Fault(_culprit(original, name, rewrite, result, found[0], is_sound), kind, name, detail, feed), result


def _wrong(original: Original, model: ModelProto, is_sound: bool) -> tuple[str, str, str] | None:
    try:
        session = opened(model)
    # onnxruntime has a class for each kind of refusal.
    except Exception as error:  # noqa: BLE001
        return "refused", f"it does not load: {' '.join(str(error).split())[:600]}", ""
    if is_sound and (complaint := checked(model)):
        return "checker", complaint[:300], ""
    if (before := _ports(original.model)) != (after := _ports(model)):
        return "interface", f"{before} became {after}", ""
    accepted = None
    for name, feed in original.feeds.items():
        try:
            found = run(session, feed)
        except Exception as error:  # noqa: BLE001
            return "refused", f"it does not run: {' '.join(str(error).split())[:600]}", name
        if difference := original.difference(name, found):
            if difference.kind not in ACCEPTED:
                return difference.kind, difference.detail, name
            accepted = accepted or (difference.kind, difference.detail, name)
    name, feed = next(iter(original.feeds.items()))
    if accepted is None and (detail := misnamed(original.model, model, feed)):
        return "name", detail, name
    return accepted


def misnamed(before: ModelProto, after: ModelProto, feed: Feed) -> str:
    """Return a tensor of both main graphs that has other values, by far more than rounding explains."""
    one, other = (_on_the_way(model, feed) for model in (before, after))
    for name in sorted(one.keys() & other.keys()):
        old, new = one[name], other[name]
        if old.shape != new.shape:
            return f"tensor {name}: {old.shape} became {new.shape}"
        if old.dtype.kind == "f" and np.isfinite(old).all() and np.isfinite(new).all():
            wide = old.astype(np.float64)
            error, size = (np.abs(array).max(initial=0) for array in (new.astype(np.float64) - wide, wide))
            is_far = error > _FAR * size + np.finfo(old.dtype).tiny
            if is_far and _is_beyond_rounding(before, feed, name, old, new.astype(old.dtype)):
                return f"tensor {name}: differs by {error:.3g} of {size:.3g}"
    return ""


# What differs by less may be rounding, which need not be drawn for each tensor of each graph.
_FAR = 0.05


def _is_beyond_rounding(model: ModelProto, feed: Feed, name: str, old: Any, new: Any) -> bool:
    """Whether a tensor on the way differs by more than the rounding in front of it, which grows where values cancel."""
    whole = ModelProto.FromString(model.SerializeToString())
    del whole.graph.output[:]
    whole.graph.output.append(ValueInfoProto(name=name))
    difference = Original(whole, {"": feed}, {"": [old]}).difference("", [new])
    return difference is not None and difference.kind not in ACCEPTED


def _on_the_way(model: ModelProto, feed: Feed) -> dict[str, Any]:
    """Return tensors of the main graph; none where onnxruntime does not return all."""
    try:
        found = values_of(model, feed)
    # onnxruntime has a class for each kind of refusal; sequences have no type here.
    except Exception:  # noqa: BLE001
        return {}
    return {name: array for name, array in found.items() if isinstance(array, np.ndarray)}


def _ports(model: ModelProto) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}
    return (
        [(entry.name, entry.type.tensor_type.elem_type) for entry in graph.input if entry.name not in stored],
        [(entry.name, entry.type.tensor_type.elem_type) for entry in graph.output],
    )


def _unstable(rewrite: Rewrite, model: ModelProto) -> str:
    """Return a pass that changes the operators of what it had its turn at."""
    try:
        again = rewrite(model, frozenset())
    # Whatever a rule raises is what is looked for.
    except Exception as error:  # noqa: BLE001
        return named_in(error)
    if _operators(model.graph) == _operators(again.model.graph) or again.fired["FixInitializers"]:
        # Once the constants beside them have gone, those that can be fed are all that a model lists.
        return ""
    return next((name for name in again.fired if name not in _RENAMING), "")


def _operators(graph: GraphProto) -> list[str]:
    """Return the operators in order, but for Identity, which a constant needs to become an output and an Expand not."""
    found = [node.op_type for node in graph.node if node.op_type != "Identity"]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                found += _operators(attribute.g)
    return sorted(found)


_RENAMING = ("NameNodes", "NameTensors", "RemoveUnused", "DeduplicateTransposedWeights", "ShareInitializers")
_ON_PURPOSE = {
    "FlushDenormals": (
        ("nonfinite", "overflow", "values"),
        "weights below the smallest normal number become zero, which shows beside data of 1e30 and infinity",
    ),
    "WidenFloats": (("decision", "nonfinite"), "32 bits round less than 16, and hold what leaves the range of these"),
}
"""Kinds of differences that a pass may make, with the reason."""


def _culprit(original: Original, name: str, rewrite: Rewrite, result: Rewritten, kind: str, is_sound: bool) -> str:
    """Return the pass or rule without which nothing is wrong."""
    if name.endswith(" alone"):
        return name.removesuffix(" alone")
    for one in sorted(result.fired, key=lambda fired: fired not in _ON_PURPOSE):
        try:
            without = rewrite(original.model, frozenset({one}))
        except Exception:  # noqa: BLE001
            continue
        found = _wrong(original, without.model, is_sound)
        if found is None or (found[0] in ACCEPTED and kind not in ACCEPTED):
            return one
    return "several" if len(result.fired) > 1 else next(iter(result.fired))


# Quantized models

_REFUSALS = re.compile(
    r"no float (meaning|counterpart)|not known|nothing to (de)?quantize|computed, expected a constant|have one scale"
)


def check_quantized(seed: int, note: Any = lambda text: None) -> Outcome:
    """Bring a quantized model that hands wrote back to floats."""
    outcome = Outcome()
    note("")
    model, feed = handmade(seed)
    try:
        run(opened(model), feed)
    # Some declare shapes that their values do not have: these load, and do not run.
    except Exception:  # noqa: BLE001
        return outcome
    outcome.is_valid = True
    _dequantized(outcome, seed, "dequantize", model, feed, note)
    return outcome


def check_quantizers(seed: int, note: Any = lambda text: None) -> Outcome:
    """Quantize a network by onnxruntime and by onnxq, and bring both back to floats."""
    outcome = Outcome(is_valid=True)
    note("")
    model, feeds = network(seed)
    try:
        theirs = by_onnxruntime(model, feeds, seed)
        run(opened(theirs), feeds[0])
    # What its quantizers refuse, or write and cannot run, is none of ours.
    except Exception:  # noqa: BLE001
        theirs = None
    if theirs is not None:
        _dequantized(outcome, seed, "dequantize what onnxruntime wrote", theirs, feeds[0], note)
    preset = sorted(PRESETS)[seed % len(PRESETS)]
    ours = _tried(outcome, seed, f"quantize {preset}", model, feeds[0], note, lambda: by_onnxq(model, feeds, preset))
    if ours is not None:
        nsr = 0.02 if preset.startswith(("int8", "torch", "burn-q8", "mxfp8", "mxint8", "float8")) else 0.2
        _compared(outcome, seed, f"quantize {preset}", model, ours, feeds[0], nsr)
        _dequantized(outcome, seed, f"dequantize {preset}", ours, feeds[0], note)
    return outcome


def _dequantized(outcome: Outcome, seed: int, name: str, model: ModelProto, feed: Feed, note: Any) -> None:
    made = _tried(outcome, seed, name, model, feed, note, lambda: to_model(dequantize(model)))
    if made is not None:
        _compared(outcome, seed, name, model, made, feed, 0.02)


def _tried(
    outcome: Outcome, seed: int, name: str, model: ModelProto, feed: Feed, note: Any, make: Callable[[], ModelProto]
) -> ModelProto | None:
    """Return what is made of a model; None where it is refused for a reason, or with a fault."""
    note(name)
    try:
        with recorded() as applied:
            made = make()
    except OnnxqError as error:
        if _REFUSALS.search(str(error)):
            outcome.accepted["refusal"] += 1
            return None
        found: Exception = error
    # Whatever is raised is what is looked for.
    except Exception as error:  # noqa: BLE001
        found = error
    else:
        outcome.fired += counted(applied)
        return made
    fault = Fault(named_in(found), "error", name, f"{type(found).__name__}: {found}")
    outcome.faults.append(fault)
    outcome.examples.append(Example(seed, fault, model.SerializeToString(), dict(feed)))
    return None


def _compared(
    outcome: Outcome, seed: int, name: str, model: ModelProto, made: ModelProto, feed: Feed, nsr: float
) -> None:
    fault = None
    if not checked(model) and (complaint := checked(made)):
        fault = Fault(name, "checker", name, complaint[:300])
    else:
        try:
            difference = worse(model, made, feed, nsr)
        # onnxruntime has a class for each kind of refusal.
        except Exception as error:  # noqa: BLE001
            fault = Fault(name, "refused", name, " ".join(str(error).split())[:300])
        else:
            fault = Fault(name, "values", name, difference) if difference else None
    if fault is not None:
        outcome.faults.append(fault)
        outcome.examples.append(Example(seed, fault, model.SerializeToString(), dict(feed)))
