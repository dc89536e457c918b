"""Open sessions of onnxruntime, run them, and turn its errors into sentences; all calls of onnxruntime belong here."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.errors import CandidateError, LoadError, ModelError, OutputError, RunError
from onnxq.ir.stored_tensors import is_large

Array = npt.NDArray[Any]
Session = Any
"""An onnxruntime.InferenceSession, which has no type annotations."""

_OPTIMIZED_WEIGHTS = "session.optimized_model_external_initializers_file_name"
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
_LONGEST_REASON = 300
# The first version whose QMoE multiplies packed blocks, and has the attribute accuracy_level.
_FIRST_WITH_EXPERTS = (1, 32)
_EXTENDED = {
    f"tensor({name})": np.dtype(getattr(ml_dtypes, dtype))
    for name, dtype in (
        ("bfloat16", "bfloat16"),
        ("float8e4m3fn", "float8_e4m3fn"),
        ("float8e4m3fnuz", "float8_e4m3fnuz"),
        ("float8e5m2", "float8_e5m2"),
        ("float8e5m2fnuz", "float8_e5m2fnuz"),
    )
}
_LARGEST_FOLDED = 1 << 20
# Bytes of external data above which a session for a few runs leaves them in their file.
_WORTH_MAPPING = 1 << 28
# Option of glibc's mallopt, and bytes from which an allocation is mapped: fewer than a weight takes.
_MMAP_THRESHOLD, _SMALLEST_MAPPED = -3, 1 << 20
# Messages of onnxruntime without space for the graph, and for its external weights.
_NOT_WRITTEN = ("Protobuf serialization failed", "Failed to write external initializers")
# Messages about models that a later release reads.
_OF_A_NEWER_RUNTIME = (
    "is not a registered function/op",
    "No Op registered for",
    "Unsupported model IR version",
    "is under development",
)
# The file that onnxruntime names is named by the sentence around it.
_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : (?:Load model from .*? failed: ?)?")
# Such as "/onnxruntime_src/core/graph/model.cc:256 onnxruntime::Model::Model(int, bool) ".
_SOURCE_PLACE = re.compile(r"\S*\.(?:cc|h|cpp|hpp):\d+ .*?\) (?:const )?(?:\[with [^]]*\] )?")


class Memory(Enum):
    """How a session allocates intermediate tensors and outputs."""

    PLANNED = "laid out ahead for each shape of the inputs, which pays where few tensors are outputs"
    UNPLANNED = "taken when they are made"
    SHARED = "taken from what all such sessions of this process share, which pays where they run in turns"


def open_session(
    model: onnx.ModelProto | bytes | Path,
    *,
    threads: int | None = None,
    optimize: bool = True,
    memory: Memory = Memory.PLANNED,
    optimized_copy: Path | None = None,
    profile: Path | None = None,
    external_folder: Path | None = None,
    mapped: bool | None = None,
    is_made: bool = False,
    few_runs: bool = False,
) -> Session:
    """Load a model on the CPU.

    Args:
        model: a model in memory, or a file; a model above 2 GiB must be a file.
        threads: threads of an operator; None leaves the choice to onnxruntime.
        optimize: whether to apply all graph optimizations, or none.
        memory: how intermediate tensors and outputs are allocated.
        optimized_copy: where to save the optimized graph, to inspect its kernels.
        profile: prefix of the file of kernel times that ``end_profiling`` of the session writes.
        external_folder: folder of the external data of a model in memory.
        mapped: whether external weights are not dequantized at load, and stay in memory-mapped files: those of a large
            model are not prepacked for kernels either. Runs take longer, and the process needs little memory. None
            decides by `is_large`.
        is_made: whether the model was made from a float model that loads.
        few_runs: whether so few samples run that preparing much external data for kernels takes longer than it saves;
            the data stays in its file then.

    Returns:
        The session. Its idle threads do not spin, so that two sessions can be timed side by side and statistics can be
        collected while a sample runs.

    Raises:
        LoadError: onnxruntime refuses the model; the message contains its reason.
        CandidateError: onnxruntime refuses a model with `is_made`.
        OutputError: there is no space for the optimized copy.
    """
    options = _options(threads, external_folder)
    if not optimize:
        options.graph_optimization_level = type(options.graph_optimization_level).ORT_DISABLE_ALL
    options.enable_mem_pattern = memory is Memory.PLANNED
    if memory is Memory.SHARED:
        _share_memory()
        options.add_session_config_entry("session.use_env_allocators", "1")
        # Weights are released when their session ends.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if optimized_copy is not None:
        options.optimized_model_filepath = str(optimized_copy)
        # Inspecting kernels needs no weights in memory.
        options.add_session_config_entry(_OPTIMIZED_WEIGHTS, f"{optimized_copy.name}.data")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    large = is_large(model)
    unprepared = large or (few_runs and is_large(model, _WORTH_MAPPING))
    if unprepared if mapped is None else mapped:
        if unprepared:
            options.add_session_config_entry("session.disable_prepacking", "1")
        # An arena grows by powers of two and releases nothing, and a heap hardly more.
        options.enable_cpu_mem_arena = False
        _map_allocations()
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(_LARGEST_FOLDED))
    return _loaded(model, options, optimized_copy, is_made=is_made)


def copy_without_weights(folder: Path) -> Path:
    """Return a path in a folder for an optimized copy that shows kernels; the system drops large weights of it."""
    copy = folder / "optimized.onnx"
    with suppress(OSError, NotImplementedError):
        copy.with_name(f"{copy.name}.data").symlink_to(os.devnull)
    return copy


def _options(threads: int | None, external_folder: Path | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    if external_folder is not None:
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(external_folder.resolve()))
    return options


def _loaded(
    model: onnx.ModelProto | bytes | Path, options: Any, optimized_copy: Path | None = None, *, is_made: bool = False
) -> Session:
    import onnxruntime

    source = serialized(model) if isinstance(model, onnx.ModelProto) else model
    try:
        return onnxruntime.InferenceSession(
            str(source) if isinstance(source, Path) else source, options, providers=["CPUExecutionProvider"]
        )
    except _runtime_errors() as error:
        if optimized_copy is not None and any(message in str(error) for message in _NOT_WRITTEN):
            raise OutputError(
                f"the optimized model cannot be written to {optimized_copy.parent}: the disk is full, or the model "
                "exceeds 2 GiB; free disk space there"
            ) from error
        where = str(model) if isinstance(model, Path) else "the model"
        if is_made:
            raise CandidateError(
                f"{where} cannot be loaded by onnxruntime: {runtime_reason(error)}; the float model loads, so the "
                "fault lies in how this model was made from it"
            ) from error
        newer = any(message in str(error) for message in _OF_A_NEWER_RUNTIME)
        advice = "install a newer onnxruntime, or export the model for this one" if newer else "check the model"
        raise LoadError(f"{where} cannot be loaded by onnxruntime: {runtime_reason(error)}; {advice}") from error


def run(
    session: Session,
    sample: Mapping[str, Array],
    outputs: Sequence[str] | None = None,
    *,
    index: int | None = None,
    made: Path | None = None,
) -> list[Any]:
    """Run one sample.

    Args:
        session: from open_session.
        sample: arrays by input name.
        outputs: names of the outputs; None returns all.
        index: number of the sample, for error messages.
        made: file of the model, if it was made from a float model that runs the sample.

    Returns:
        The outputs in order: numpy arrays, or the model's sequences or maps.

    Raises:
        RunError: the run fails; the message contains onnxruntime's reason.
        CandidateError: the run of a model with `made` fails.
    """
    if outputs is not None and not outputs:
        return []
    try:
        wanted = None if outputs is None else list(outputs)
        if _has_extended_types(session, sample):
            return _run_extended(session, sample, wanted)
        values: list[Any] = session.run(wanted, dict(sample))
    except _runtime_errors() as error:
        where = "the sample" if index is None else f"sample {index}"
        if made is not None:
            raise CandidateError(
                f"{made} cannot run {where} on onnxruntime: {runtime_reason(error)}; the float model runs it, so the "
                "fault lies in how this model was made from it"
            ) from error
        raise RunError(
            f"{where} cannot be run by onnxruntime: {runtime_reason(error)}; check shapes and values"
        ) from error
    return values


def as_own(value: Any) -> Any:
    """Copy an output of a run into its own memory, because onnxruntime's array keeps the memory of the session.

    Args:
        value: an array; a sequence or map is returned unchanged.
    """
    return value.copy() if isinstance(value, np.ndarray) and not value.flags.owndata else value


def output_names(session: Session) -> list[str]:
    """Return the names of a session's outputs in order."""
    return [output.name for output in session.get_outputs()]


def _has_extended_types(session: Session, sample: Mapping[str, Array]) -> bool:
    is_extended = any(getattr(array, "dtype", None) in _EXTENDED.values() for array in sample.values())
    return is_extended or any(output.type in _EXTENDED for output in session.get_outputs())


def _run_extended(session: Session, sample: Mapping[str, Array], outputs: Sequence[str] | None) -> list[Any]:
    from onnxruntime import OrtValue

    feed = {
        name: OrtValue.ortvalue_from_numpy_with_onnx_type(
            np.ascontiguousarray(array), onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        )
        if array.dtype in _EXTENDED.values()
        else OrtValue.ortvalue_from_numpy(array)
        for name, array in sample.items()
    }
    return [_as_array(value) for value in session.run_with_ort_values(outputs, feed)]


def _as_array(value: Any) -> Any:
    dtype = _EXTENDED.get(value.data_type())
    if dtype is None:
        return value.numpy()
    # onnxruntime provides only the address of a value of these types.
    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(data, dtype).reshape(value.shape())


def runtime_version() -> str:
    """Return the version, as in ``onnxruntime 1.31.1``."""
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


def multiplies_experts() -> bool:
    """Return whether onnxruntime's QMoE multiplies packed blocks; before 1.32 each run dequantizes them first."""
    import onnxruntime

    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= _FIRST_WITH_EXPERTS


def to_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that computes in 16-bit floats where possible, with inputs and outputs of the original types."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    converted: onnx.ModelProto = convert_float_to_float16(model, keep_io_types=True)
    return converted


def serialized(model: onnx.ModelProto) -> bytes:
    """Return the bytes of a model in memory.

    Raises:
        ModelError: the model is above 2 GiB.
    """
    try:
        return bytes(model.SerializeToString())
    except (EncodeError, ValueError) as error:
        raise ModelError("the model is above 2 GiB, expected less in memory; save it and give its path") from error


def release_shared_memory() -> None:
    """Release the memory that sessions with shared memory no longer use; onnxruntime does so only after a run."""
    import onnxruntime

    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.BOOL, [1])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.BOOL, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Not", ["x"], ["y"])], "g", [value], [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    session = open_session(model, threads=1, memory=Memory.SHARED)
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session.run(None, {"x": np.zeros(1, np.bool_)}, options)


def return_memory() -> None:
    """Return the memory of closed sessions to the system, because the C library keeps it for later."""
    import gc

    gc.collect()
    if trim := _of_c_library("malloc_trim"):
        trim(0)


@cache
def _map_allocations() -> None:
    """Have the C library map each large allocation by itself, so that the system gets it back when it is freed.

    Otherwise the copies of weights that onnxruntime makes and frees at load stay in the heap, half the model's size.
    """
    if set_option := _of_c_library("mallopt"):
        set_option(_MMAP_THRESHOLD, _SMALLEST_MAPPED)


def _of_c_library(function: str) -> Any:
    """Return a function of the C library; None if it has no such function, as outside Linux."""
    return getattr(ctypes.CDLL(None) if sys.platform == "linux" else None, function, None)


@cache
def _share_memory() -> None:
    # The shared arena grows by the requested size, not by powers of two.
    import onnxruntime

    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    growth = {"max_mem": 0, "arena_extend_strategy": 1, "initial_chunk_size_bytes": -1, "max_dead_bytes_per_chunk": -1}
    onnxruntime.create_and_register_allocator(place, onnxruntime.OrtArenaCfg(growth))


@cache
def _runtime_errors() -> tuple[type[Exception], ...]:
    # onnxruntime's exceptions have no common base; its Python layer raises built-in ones.
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    native = [value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*native, RuntimeError, ValueError, TypeError)


def runtime_reason(error: BaseException) -> str:
    """Return what onnxruntime says of an error, in one line of bounded length without its codes."""
    return one_line(_SOURCE_PLACE.sub("", _CODE.sub("", " ".join(str(error).split()))) or type(error).__name__)


def one_line(reason: str) -> str:
    """Return a reason in one line of at most 300 characters."""
    text = " ".join(reason.split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."
