"""Calibration for methods of accuracy: the samples run once, and what their groups show is known apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from onnxq.algorithms.parameters import requests_for
from onnxq.algorithms.sites import Site, sites
from onnxq.calibration.accumulators import Request
from onnxq.calibration.methods import RangeMethod
from onnxq.data.inputs import SampleSource
from onnxq.ir import Graph, constants
from onnxq.planning.plan import Plan
from onnxq.search.effort import Accuracy
from onnxq.search.folds import groups_of
from onnxq.search.workbench import Workbench
from onnxq.system.resources import Progress


def observe_groups(
    bench: Workbench,
    plan: Plan,
    samples: SampleSource,
    accuracy: Accuracy,
    methods: Sequence[RangeMethod],
    progress: Progress,
) -> None:
    """Let the bench know what each of the groups shows by which methods of accuracy are judged.

    Args:
        bench: has the model.
        plan: the one in which every node is static that can be.
        samples: by which codes are chosen.
        accuracy: what is tried, without which nothing is observed.
        methods: of ranges, for any of which evidence is kept.
        progress: told of the stage ``calibrate``.
    """
    if not accuracy.methods:
        return
    groups = groups_of(samples, accuracy.judges(len(samples)))
    requests = requests_for(plan, methods)
    if bench.is_large or not requests or sum(map(len, groups)) < len(samples):
        return
    tapped = {request.tensor for request in requests}
    apart = channel_requests(bench.graph, sites(bench.graph, plan).found).values()
    # With another tensor the model would be cut elsewhere, and kernels might round otherwise.
    known = [request for request in apart if request.tensor in tapped]
    bench.grouped.observe(bench.prepared, groups, requests, known, partial(progress, "calibrate"))


def channel_requests(graph: Graph, found: Iterable[Site]) -> dict[str, Request]:
    """Return what is wanted of the tensors of sites that neither are constants nor lie in bodies, by name."""
    known = {tensor.name for tensor in constants(graph)}
    return {
        name: Request(name, "channel-ranges", own.axis)
        for site in found
        for name, own in site.tensors.items()
        if name not in known and name not in site.inside
    }
