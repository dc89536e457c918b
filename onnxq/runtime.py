"""The one room that talks to onnxruntime: sessions, runs, and its errors as sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.errors import DataError, ModelError

Array = npt.NDArray[Any]
Session = Any
"""An onnxruntime.InferenceSession, which ships without types."""

_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
_LONGEST_REASON = 300
_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
# Such as "/onnxruntime_src/core/graph/model.cc:256 onnxruntime::Model::Model(int, bool) ".
_SOURCE_PLACE = re.compile(r"\S*\.(?:cc|h|cpp|hpp):\d+ .*?\) (?:const )?(?:\[with [^]]*\] )?")


def open_session(
    model: onnx.ModelProto | bytes | Path,
    *,
    threads: int | None = None,
    optimize: bool = True,
    memory_plan: bool = True,
    optimized_copy: Path | None = None,
    external_folder: Path | None = None,
) -> Session:
    """Load a model on the CPU.

    Args:
        model: a model in memory, or a file, which models above 2 GiB must be.
        threads: threads inside an operator; None leaves the choice to onnxruntime.
        optimize: whether all graph optimisations are on, or none.
        memory_plan: whether memory is laid out ahead for each shape of the inputs, which pays where few tensors are
            outputs.
        optimized_copy: where to save the graph that runs, for a look at its kernels.
        external_folder: where the external data of a model in memory lies.

    Returns:
        The session. Its threads do not spin when idle, so that two sessions can be timed beside one another and
        statistics can be collected while a sample runs.

    Raises:
        ModelError: onnxruntime refuses the model; the message holds its reason.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_mem_pattern = memory_plan
    if threads is not None:
        options.intra_op_num_threads = threads
    if optimized_copy is not None:
        options.optimized_model_filepath = str(optimized_copy)
    if external_folder is not None:
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(external_folder.resolve()))
    source = serialized(model) if isinstance(model, onnx.ModelProto) else model
    try:
        return onnxruntime.InferenceSession(
            str(source) if isinstance(source, Path) else source, options, providers=["CPUExecutionProvider"]
        )
    except _runtime_errors() as error:
        where = str(model) if isinstance(model, Path) else "the model"
        raise ModelError(f"{where} cannot be loaded by onnxruntime: {_reason(error)}; check the model") from error


def run(
    session: Session, sample: Mapping[str, Array], outputs: Sequence[str] | None = None, *, index: int | None = None
) -> list[Any]:
    """Run one sample.

    Args:
        session: from open_session.
        sample: arrays by input name.
        outputs: names of the wanted outputs; None wants all.
        index: number of the sample, for the message of an error.

    Returns:
        The outputs in order, numpy arrays unless the model gives sequences or maps.

    Raises:
        DataError: the run fails; the message holds onnxruntime's reason.
    """
    if outputs is not None and not outputs:
        return []
    try:
        values: list[Any] = session.run(None if outputs is None else list(outputs), dict(sample))
    except _runtime_errors() as error:
        where = "the sample" if index is None else f"sample {index}"
        raise DataError(f"{where} cannot be run by onnxruntime: {_reason(error)}; check shapes and values") from error
    return values


def serialized(model: onnx.ModelProto) -> bytes:
    """Return the bytes of a model in memory.

    Raises:
        ModelError: it is above 2 GiB.
    """
    try:
        return bytes(model.SerializeToString())
    except (EncodeError, ValueError) as error:
        raise ModelError("the model is above 2 GiB, expected less in memory; save it and give its path") from error


@cache
def _runtime_errors() -> tuple[type[Exception], ...]:
    """Return onnxruntime's exceptions, which have no common base, and those of its Python layer."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    native = [value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*native, RuntimeError, ValueError, TypeError)


def _reason(error: Exception) -> str:
    """Return an error of onnxruntime in one line, without its code and where in its source it was raised."""
    text = _SOURCE_PLACE.sub("", _CODE.sub("", " ".join(str(error).split()))) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."
