"""Quantization error along the depth of a model: each layer alone, and all layers up to it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxq.algorithms.equalization import ChannelScales
from onnxq.calibration.data import Data, SamplesLike
from onnxq.calibration.instrument import tensor_types
from onnxq.calibration.segments import Stage, read_without_data, stages
from onnxq.data.inputs import Sample, SampleSource
from onnxq.errors import DataError
from onnxq.evaluation.comparison import open_pair
from onnxq.numerics.affine import sqnr_db
from onnxq.numerics.blocks import along
from onnxq.planning.plan import DIVIDED_KEY, Plan
from onnxq.runtime.sessions import Array
from onnxq.system.records import to_plain

_FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
)
# Number of worst samples of each layer.
_WORST = 3


@dataclass(frozen=True)
class SampleSqnr:
    """The SQNR in decibels of a tensor on one sample, given by its index."""

    sample: int
    sqnr: float


@dataclass(frozen=True)
class Layer:
    """A tensor of both models, with the nodes between it and the nearest tensors of both models before it.

    Attributes:
        node: the node of the float model that outputs it; empty if it has no name.
        mode: the node's mode in the plan; empty if not known.
        isolated: SQNR in decibels over all samples if these nodes read the float model's tensors; infinite if equal.
        accumulated: SQNR in decibels in the quantized model as it runs.
        worst: the samples with the lowest accumulated SQNR, the lowest first.
    """

    tensor: str
    node: str
    op_type: str
    mode: str
    isolated: float
    accumulated: float
    worst: tuple[SampleSqnr, ...]


@dataclass(frozen=True)
class Layers:
    """The layers of a quantized model beside those of the float model.

    Attributes:
        samples: number of samples that were run.
        layers: in the order in which the quantized model computes them.
        left: tensors of both models that are not compared, with the reason.
    """

    samples: int
    layers: tuple[Layer, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    def of_samples(self, places: Sequence[int]) -> Layers:
        """Return the same with sample `i` renumbered to `places[i]`."""
        layers = (
            replace(layer, worst=tuple(replace(entry, sample=places[entry.sample]) for entry in layer.worst))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite SQNR is the word Infinity."""
        return dict(to_plain(self))


def compare_layers(
    reference: str | Path,
    candidate: str | Path,
    data: SamplesLike | Data,
    *,
    plan: Plan | None = None,
) -> Layers:
    """Run a float model and its quantized model, and compare all tensors of the main graphs that have the same name.

    A tensor is compared as it is computed. The error of its own quantization belongs to the layers that read it.

    Args:
        reference: file of the float model.
        candidate: file of the quantized model.
        data: samples that fit the float model, or Data with how they are read. All tensors of one sample are in memory.
        plan: the candidate's plan. It holds the factors that divide the channels of some tensors; without it, these
            tensors are not compared.

    Raises:
        ModelError: A file cannot be read or loaded.
        DataError: The samples do not fit, or the models share no tensor.

    >>> import onnxq
    >>> compare_layers("models/gru.onnx", "models/gru.onnx", onnxq.Data("models/data/calib.npz", limit=8)).samples
    8
    """
    with open_pair(reference, candidate, data) as pair:
        return _compare_layers(*pair, plan)


def _compare_layers(reference: Path, candidate: Path, samples: SampleSource, plan: Plan | None) -> Layers:
    floats, quantized = read_without_data(reference), read_without_data(candidate)
    divided, names = _divided(quantized), _shared(floats, quantized)
    factors = {name: scales for name in divided if (scales := _factors(divided[name], plan)) is not None}
    left = {
        name: "its channels are divided by factors, which the report holds"
        for name in names
        if name in divided.keys() - factors.keys()
    }
    names = [name for name in names if name not in left]
    if not names:
        raise DataError(
            f"{reference} and {candidate} have no tensor name in common, expected a float model and its quantized model"
        )
    (whole,) = stages(reference, (), observed=names)
    tallies = {name: _LayerErrors(factors.get(name)) for name in names}
    parts = stages(candidate, names)
    for sample in samples:
        _add(tallies, sample, whole.run(sample), parts)
    left.update({name: "their shapes differ" for name, tally in tallies.items() if not tally.rows})
    makers = {name: node for node in floats.graph.node for name in node.output}
    modes = {} if plan is None else {decision.node: str(decision.mode) for decision in plan.decisions}
    coders = {name: node.name for node in quantized.graph.node for name in node.output}
    compared = (name for part in parts for name in part.outputs if name in tallies and name not in left)
    layers = tuple(
        tallies[name].layer(name, makers[name], modes.get(coders[name]) or modes.get(makers[name].name, ""))
        for name in compared
    )
    return Layers(len(samples), layers, left)


def _shared(floats: onnx.ModelProto, quantized: onnx.ModelProto) -> list[str]:
    """Return the float tensors that nodes of both main graphs output."""
    names_in_both = [
        {name for name, value in tensor_types(model).items() if value.type.tensor_type.elem_type in _FLOATS}
        for model in (floats, quantized)
    ]
    computed = (node for node in floats.graph.node if node.op_type != "Constant")
    common = {name for node in computed for name in node.output if name}.intersection(*names_in_both)
    return [name for node in quantized.graph.node for name in node.output if name in common]


def _divided(quantized: onnx.ModelProto) -> dict[str, str]:
    """Return the tensors with divided channels, each with the tensor whose factors divide them."""
    entries = [entry.value for entry in quantized.metadata_props if entry.key == DIVIDED_KEY]
    return {name: str(tensor) for entry in entries for name, tensor in json.loads(entry).items()}


def _factors(tensor: str, plan: Plan | None) -> ChannelScales | None:
    if plan is None:
        return None
    activation = plan.by_tensor.get(tensor)
    if activation is not None and activation.factors:
        return ChannelScales(activation.channels, np.array(activation.factors))
    # Channels of float activations are the last axis.
    return next((ChannelScales(-1, np.array(scales.factors)) for scales in plan.awq if scales.tensor == tensor), None)


def _add(
    tallies: Mapping[str, _LayerErrors], sample: Sample, expected: Mapping[str, Array], parts: Sequence[Stage]
) -> None:
    """Run the quantized model on a sample twice: as it is, and with the float model's tensors between its parts."""
    accumulated: dict[str, Array] = dict(sample)
    isolated: dict[str, Array] = dict(sample)
    for part in parts:
        outputs = part.run(accumulated)
        same = all(accumulated[name] is isolated[name] for name in part.inputs)
        alone = outputs if same else part.run(isolated)
        for name in outputs:
            if name in tallies and outputs[name].shape == expected[name].shape:
                fed = tallies[name].add(expected[name], alone[name], outputs[name])
                alone = {**alone, name: np.asarray(fed, outputs[name].dtype)}
        accumulated = _kept({**accumulated, **outputs}, part.kept)
        isolated = _kept({**isolated, **alone}, part.kept)


def _kept(values: Mapping[str, Array], names: Collection[str]) -> dict[str, Array]:
    return {name: values[name] for name in names if name in values}


class _LayerErrors:
    """Energies of one tensor by sample: of the signal, of the isolated error and of the accumulated error."""

    def __init__(self, factors: ChannelScales | None) -> None:
        self.factors = factors
        self.rows: list[tuple[float, float, float]] = []

    def add(self, expected: Array, isolated: Array, accumulated: Array) -> Any:
        """Compare one sample, and return the quantized model's value without error."""
        own = self.factors
        factors = 1.0 if own is None else along(own.values, own.axis, expected.ndim)
        usable, wide = np.isfinite(expected), expected.astype(np.float64)
        scaled = (values.astype(np.float64) * factors for values in (isolated, accumulated))
        # Masked before the difference, as the difference of two infinite values is no number.
        alone, together = (_energy(values[usable] - wide[usable]) for values in scaled)
        self.rows.append((_energy(wide[usable]), alone, together))
        return wide / factors

    def layer(self, name: str, maker: onnx.NodeProto, mode: str) -> Layer:
        signal, isolated, accumulated = (sum(column) for column in zip(*self.rows, strict=True))
        by_sample = [SampleSqnr(place, sqnr_db(row[0], row[2])) for place, row in enumerate(self.rows)]
        return Layer(
            name,
            maker.name,
            maker.op_type,
            mode,
            sqnr_db(signal, isolated),
            sqnr_db(signal, accumulated),
            tuple(sorted(by_sample, key=lambda entry: entry.sqnr)[:_WORST]),
        )


def _energy(values: Array) -> float:
    energy = float(np.vdot(values, values))
    return math.inf if math.isnan(energy) else energy
