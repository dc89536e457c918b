"""Write integers as inputs and outputs of a verified model, and check that it computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import evenly
from onnxq.errors import ModelError, SchemeError
from onnxq.ir import load, save
from onnxq.ir.stored_tensors import is_large
from onnxq.passes.preparing.equivalence import worst_difference
from onnxq.passes.quantize.graph_io import (
    GraphTensor,
    float_values,
    graph_tensors,
    quantized_values,
    remove_outer_quantizers,
)
from onnxq.runtime.sessions import open_session, run

_COMPARED = 4


def quantize_inputs_outputs(model: Path, samples: SampleSource) -> tuple[GraphTensor, ...]:
    """Take the quantizers of inputs and the dequantizers of outputs out of a model file.

    A few samples are quantized, run, and dequantized as an application does it. The outputs must be equal to the bit.

    Args:
        model: file of the verified model, which is replaced.
        samples: of the float model; empty checks nothing, for models that onnxruntime does not load.

    Raises:
        SchemeError: the plan quantizes no input and no output.
        ModelError: an output differs.
    """
    looked = list(evenly(samples, _COMPARED)) if len(samples) else []
    graph = load(model)
    names = [tensor.name for tensor in graph.outputs]
    before = _answers(model, looked, names, ())
    remove_outer_quantizers(graph)
    tensors = graph_tensors(graph.metadata)
    if not tensors:
        raise SchemeError("the plan quantizes neither an input nor an output of the model; leave --io quantized out")
    save(graph, model)
    worst = worst_difference(names, before, _answers(model, looked, names, tensors))
    if worst.share:
        raise ModelError(
            f"output {worst.output} differs with quantized inputs and outputs, expected the same bits; leave --io "
            "quantized out, and report it"
        )
    return tensors


def _answers(
    model: Path, samples: Sequence[Sample], names: Sequence[str], tensors: Sequence[GraphTensor]
) -> list[list[Any]]:
    """Return the float outputs for float samples, some of which the application quantizes and dequantizes."""
    session = open_session(model, mapped=is_large(model)) if samples else None
    runs = (run(session, quantized_values(sample, tensors), names) for sample in samples if session is not None)
    return [list(float_values(dict(zip(names, outputs, strict=True)), tensors).values()) for outputs in runs]
