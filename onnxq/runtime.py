"""The one room that talks to onnxruntime: sessions, runs, and its errors as sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx

from onnxq.errors import DataError, ModelError

Array = npt.NDArray[Any]
Session = Any
"""An onnxruntime.InferenceSession, which ships without types."""

_LONGEST_REASON = 300


def open_session(
    model: onnx.ModelProto | bytes | Path,
    *,
    threads: int | None = None,
    optimize: bool = True,
    optimized_copy: Path | None = None,
) -> Session:
    """Load a model on the CPU.

    Args:
        model: a model in memory (below 2 GiB) or a file.
        threads: threads inside an operator; None takes all cores.
        optimize: whether all graph optimisations are on, or none.
        optimized_copy: where to save the graph that runs, for a look at its kernels.

    Returns:
        The session. Its threads do not spin when idle, so that two sessions can be timed beside one another.

    Raises:
        ModelError: onnxruntime refuses the model; the message holds its reason.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        if optimize
        else onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    if optimized_copy is not None:
        options.optimized_model_filepath = str(optimized_copy)
    if isinstance(model, Path):
        source: str | bytes = str(model)
    elif isinstance(model, bytes):
        source = model
    else:
        source = model.SerializeToString()
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as reason:
        what = f"model {model}" if isinstance(model, Path) else "the model"
        raise ModelError(f"{what} does not load in onnxruntime: {shortened(reason)}") from reason


def run(session: Session, sample: Mapping[str, Array], outputs: Sequence[str] | None = None) -> list[Any]:
    """Run one sample.

    Args:
        session: from open_session.
        sample: arrays by input name.
        outputs: names of the wanted outputs; None wants all.

    Returns:
        The outputs in order, numpy arrays unless the model gives sequences or maps.

    Raises:
        DataError: the run fails; the message holds onnxruntime's reason.
    """
    try:
        result: list[Any] = session.run(None if outputs is None else list(outputs), dict(sample))
    except Exception as reason:
        raise DataError(f"the model does not run on this sample: {shortened(reason)}") from reason
    return result


def shortened(reason: BaseException) -> str:
    """Return the first line of an onnxruntime error without its code and source location."""
    text = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
    for mark in ("[ONNXRuntimeError] : ", "Load model from "):
        text = text.removeprefix(mark)
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."
