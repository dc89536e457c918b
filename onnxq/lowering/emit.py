"""Which operators a written model may hold."""

from __future__ import annotations

from enum import StrEnum

from onnxq.errors import check_name


class Emit(StrEnum):
    """What a written model may hold."""

    FASTEST = "fastest"
    """As QDQ, and where time is measured, onnxruntime's own operators where these are faster."""
    QDQ = "qdq"
    """Standard ONNX that onnxruntime executes: a type without kernels is stored in another, value for value."""
    ORT = "ort"
    """onnxruntime's own MatMulNBits, GatherBlockQuantized and DynamicQuantizeLSTM where they fit, else as QDQ."""
    STRICT = "strict"
    """Standard ONNX in which each number has its own type and DequantizeLinear decodes it, runnable or not."""

    @property
    def has_own(self) -> bool:
        """Whether operators of the runtime's own may be written."""
        return self in (Emit.FASTEST, Emit.ORT)


def emit_named(name: str) -> Emit:
    """Return the member of Emit with this value.

    Raises:
        SchemeError: there is none; the message suggests the nearest one.
    """
    check_name("emit", name, [str(one) for one in Emit])
    return Emit(name)
