"""Models with bodies, and what their tapped tensors give."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper, parser

from onnxq.calibration.instrument import expose_body_tensors
from onnxq.runtime.sessions import open_session, run

Arrays = dict[str, NDArray[Any]]
X = np.float32([1, 2, 3])


def model(text: str, **constants: object) -> ModelProto:
    made = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> main {text}')
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    return made


def ran(made: ModelProto, sample: Arrays) -> Arrays:
    session = open_session(made, threads=1)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, run(session, sample), strict=True))


def instrumented(made: ModelProto, sample: Arrays, *names: str) -> dict[str, list[float]]:
    """Return the values of the named tensors, having seen that the model gives what it gave."""
    onnx.checker.check_model(made, full_check=True)
    before = made.SerializeToString(deterministic=True)
    carried = expose_body_tensors(made, names)
    assert made.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(carried, full_check=True)
    carried.graph.output.extend(value for value in carried.graph.value_info if value.name in names)
    found = ran(carried, sample)
    for name, expected in ran(made, sample).items():
        np.testing.assert_array_equal(found[name], expected, strict=True)
    return {name: found[name].reshape(-1).tolist() for name in names}


BRANCHES = """(float[3] x, bool c) => (float[3] y) {
    y = If (c) <
        then_branch = t () => (float[3] u) { a = Neg(x) u = Abs(a) },
        else_branch = e () => (float[3] v) { b = Add(x, x) d = Neg(b) v = Add(d, x) }>
}"""

LOOP = """(float[3] x, int64 n) => (float[3] y, float[k,3] z) {
    y, z = Loop (n, go, x) <body = b (int64 i, bool go_in, float[3] s) => (bool go_out, float[3] t, float[3] o) {
        go_out = Identity(go_in) a = Add(s, x) t = Neg(a) o = Abs(a)
    }>
}"""

SCAN = """(float[3] x, float[k,3] xs) => (float[3] y, float[k,3] z) {
    y, z = Scan (x, xs) <num_scan_inputs = 1, scan_output_directions = [1],
        body = b (float[3] s, float[3] e) => (float[3] t, float[3] o) { a = Add(s, e) t = Neg(a) o = Abs(a) }>
}"""
STEPS = np.float32([[1, 1, 1], [2, 2, 2]])


def in_loop(body: str) -> str:
    """Run the text that makes ``t`` from ``s`` in every iteration."""
    return f"""(float[3] x, int64 n) => (float[3] y) {{
        y = Loop (n, go, x) <body = b (int64 i, bool go_in, float[3] s) => (bool go_out, float[3] t) {{
            go_out = Identity(go_in) {body}
        }}>
    }}"""


IF_IN_LOOP = in_loop(
    """even = Equal(i, zero)
    t = If (even) <
        then_branch = yes () => (float[3] u) { a = Neg(s) u = Abs(a) },
        else_branch = no () => (float[3] v) { b = Add(s, x) v = Neg(b) }>"""
)
