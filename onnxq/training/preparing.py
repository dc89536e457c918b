"""Modules for training loops of a user's own: a model and a plan to a module, and the module to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from torch import nn

from onnxq.algorithms.codes import encode
from onnxq.algorithms.noting import recipe_of
from onnxq.errors import SchemeError, check_type
from onnxq.ir import Graph, as_graph, constants
from onnxq.lowering import emit_named
from onnxq.planning.plan import Plan
from onnxq.preparing.preparation import check_float_model, check_plan
from onnxq.runtime.targets import target_named
from onnxq.search.workbench import Workbench, open_workbench
from onnxq.steps.wanted import Wanted
from onnxq.system.publish import staging
from onnxq.training.module import FakeQuantized
from onnxq.training.quantizers import FakeQuantize


class Prepared(FakeQuantized):
    """A module that knows how its model is written; see `prepare`."""

    def __init__(self, bench: Workbench, plan: Plan) -> None:
        graph = bench.graph_for(plan)
        for tensor in constants(graph):
            # The workbench's folder goes.
            tensor.values = np.array(tensor.values)
        super().__init__(graph, plan, encode(plan, graph, recipe=recipe_of(plan, 1)))
        self._placing, self._declared = bench.placing, bench.declared_types

    def quantized(self) -> Graph:
        """Return the model with the codes that the module computes with."""
        return self._placing.quantized(self.graph, self.plan, self.codes(), self._declared)


def prepare(model: str | Path | onnx.ModelProto | Any, plan: Plan) -> Prepared:
    """Return a float model as a torch module with fake quantization where a plan makes codes.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph, as it was given to quantize() or plan().
        plan: of the report of quantize(), or a file of it.

    Returns:
        The module, whose observers are disabled. Its parameters are weights, biases, scales and zero points of what
        becomes codes.

    Raises:
        SchemeError: the plan is of another model, or there is nothing by which it could be carried out again.
        DataError: the plan was not calibrated.
        ModelError: the model cannot be read, or computes in floats that training does not.
    """
    check_type(plan, Plan, "the plan", "a Plan, such as quantize(...).report.plan")
    wanted = Wanted.of(plan, plan.target, ())
    graph = as_graph(model)
    check_float_model(graph)
    with staging(None) as folder:
        emit = emit_named(wanted.scheme.emit)
        bench = open_workbench(graph, wanted.scheme, target_named(plan.target), folder, emit, plan)
        check_plan(plan, bench.graph)
        return Prepared(bench, plan)


def convert(module: Prepared) -> Graph:
    """Return the quantized model of a module, with the codes that it computes with; onnxq.save writes it.

    Raises:
        SchemeError: it is no module of prepare().
    """
    if not isinstance(module, Prepared):
        raise SchemeError(f"the module is {type(module).__name__}, expected one of onnxq.training.prepare()")
    return module.quantized()


def enable_fake_quant(module: nn.Module) -> None:
    """Let a quantizer make codes; for ``module.apply(enable_fake_quant)``, as those of torch.ao."""
    _switch(module, fake_quant_enabled=True)


def disable_fake_quant(module: nn.Module) -> None:
    """Let floats pass a quantizer as they are."""
    _switch(module, fake_quant_enabled=False)


def enable_observer(module: nn.Module) -> None:
    """Let what passes a quantizer set its scale."""
    _switch(module, observer_enabled=True)


def disable_observer(module: nn.Module) -> None:
    """Leave the scale of a quantizer to the optimiser."""
    _switch(module, observer_enabled=False)


def _switch(module: nn.Module, **flags: bool) -> None:
    if isinstance(module, FakeQuantize):
        for name, value in flags.items():
            setattr(module, name, value)
