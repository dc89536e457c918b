"""Two convolutions with something between them, and short looks at a plan, for several test files."""

from __future__ import annotations

from onnx import ModelProto

from onnxq.config.scheme import Mode
from onnxq.planning.plan import Plan

KERNEL = (8, 8, 3, 3)
PADS = "<pads = [1,1,1,1]>"


def between_convolutions(build, middle: str, **weights) -> ModelProto:
    """Return a convolution [first], nodes that turn ``a`` into ``b``, and a convolution [last]."""
    text = f"""(float[1,8,8,8] x) => (float[N,C,H,W] y) {{
        [first] a = Conv {PADS} (x, w0) {middle} [last] y = Conv {PADS} (b, w1)
    }}"""
    return build(text, **{"w0": KERNEL, "w1": KERNEL, **weights})


def modes(plan: Plan) -> dict[str, Mode]:
    return {decision.node: decision.mode for decision in plan.decisions}


def groups(plan: Plan) -> dict[str, str]:
    return {activation.tensor: activation.group for activation in plan.activations}
