from __future__ import annotations

from itertools import permutations

from onnxq.calibration.accumulators import Request

REQUESTS = [
    Request("a", "channel-means"),
    Request("a", "channel-means", -1),
    Request("a", "channel-means", 1),
    Request.of("a", "hessian", 1, kernel="3,3"),
    Request.of("a", "hessian", 1, rows=4),
    Request("b", "channel-means"),
]


def test_requests_have_one_order_whatever_their_axes_and_options() -> None:
    for shuffled in permutations(REQUESTS):
        assert sorted(shuffled) == REQUESTS


def test_options_are_in_order_and_have_defaults() -> None:
    request = Request.of("a", "hessian", rows=4, groups=2)
    assert request == Request("a", "hessian", None, (("groups", 2), ("rows", 4)))
    assert (request.option("rows", 1), request.option("kernel", "")) == (4, "")
    assert str(Request("a", "hessian", 1)) == "hessian of 'a' along axis 1"
