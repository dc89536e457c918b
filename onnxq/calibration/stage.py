"""Stages: parts of a model as callables, whose weights can be others in each call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

import onnx

from onnxq.calibration.runner import read_without_data
from onnxq.calibration.segments import Segment, segments
from onnxq.errors import DataError, ModelError, did_you_mean
from onnxq.ir.large_models import is_large
from onnxq.runtime.sessions import Array, Memory, Session, open_session, run

_OWN: Mapping[str, Array] = MappingProxyType({})


class Stage:
    """A part of a model between cuts, run by itself.

    Its session is opened by the first run and takes memory until the stage is closed, which ``with`` does too; a closed
    stage can be run again.

    Attributes:
        inputs: tensors that it is fed: inputs of the whole model, and outputs of earlier stages.
        outputs: tensors that it gives: those asked for, and those that later stages are fed.
        kept: tensors that later stages are fed, wherever they come from.
        weights: initializers that it can be fed in place of its own.
    """

    def __init__(
        self,
        segment: Segment,
        folder: Path | None = None,
        *,
        optimize: bool = True,
        mapped: bool = False,
        threads: int | None = None,
    ) -> None:
        """Take a segment; see `stages` for the arguments.

        Args:
            segment: the part, with the tensors that it is fed and gives.
            folder: where its external data lies.
            optimize: whether onnxruntime's graph optimisations are on.
            mapped: whether external weights stay in their files.
            threads: threads inside an operator; None leaves the choice to onnxruntime.
        """
        self.inputs, self.outputs = segment.inputs, segment.outputs
        self.kept, self.weights = segment.kept, segment.weights
        self._model = segment.model
        self._folder = folder
        self._optimize = optimize
        self._mapped = mapped
        self._threads = threads
        self._session: Session | None = None

    def run(
        self,
        values: Mapping[str, Array],
        weights: Mapping[str, Array] = _OWN,
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Run one sample.

        Args:
            values: arrays by tensor, `inputs` at least; what else is there is not looked at, so that everything that is
                known of a sample can be given.
            weights: arrays for some of `weights`, in the shape and type of those they stand for.
            outputs: those of `outputs` that are wanted; None wants all.

        Returns:
            Arrays by output.

        Raises:
            DataError: an input is missing, a weight is not free here, or the run fails.
            ModelError: onnxruntime refuses the part.
        """
        for name in self.inputs:
            if name not in values:
                raise DataError(
                    f"Tensor {name!r} is not among the values, expected it as an input of the stage; feed it"
                )
        for name in weights:
            if name not in self.weights:
                raise DataError(
                    f"Weight {name!r} is not free in the stage, expected one of "
                    f"{', '.join(self.weights) or 'none'}{did_you_mean(name, self.weights)}"
                )
        if self._session is None:
            self._session = open_session(
                self._model,
                threads=self._threads,
                optimize=self._optimize,
                memory=Memory.UNPLANNED,
                external_folder=self._folder,
                mapped=self._mapped,
            )
        wanted = self.outputs if outputs is None else tuple(outputs)
        fed = {name: values[name] for name in self.inputs} | dict(weights)
        return dict(zip(wanted, run(self._session, fed, wanted), strict=True))

    def close(self) -> None:
        """Give back the memory of the session."""
        self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stages(
    model: onnx.ModelProto | Path,
    cuts: Collection[str],
    *,
    observed: Collection[str] = (),
    free: Collection[str] = (),
    optimize: bool = True,
    threads: int | None = None,
) -> tuple[Stage, ...]:
    """Return a model as stages in the order in which they run, each up to the next cut.

    Fed with what the stages before it gave, the last one gives what the model gives. Bodies of control flow stay whole.

    Args:
        model: the model; a path for models whose weights are in external files.
        cuts: tensors behind whose nodes a stage ends, or as soon behind as nothing else crosses than tensors of a known
            type; those that no node of the main graph makes cut nothing.
        observed: further tensors that are given; those of bodies as `with_body_taps` carries them out.
        free: initializers of the main graph that can be fed.
        optimize: whether onnxruntime's graph optimisations are on; they fuse nothing across a cut and fold no free
            weight.
        threads: threads inside an operator; None leaves the choice to onnxruntime.

    Raises:
        ModelError: the model cannot be read, a name is no tensor of it, or a free weight is no initializer.
    """
    proto = read_without_data(model) if isinstance(model, Path) else model
    stored = {tensor.name for tensor in proto.graph.initializer}
    for name in free:
        if name not in stored:
            raise ModelError(
                f"Weight {name!r} is not in the main graph, expected an initializer's name{did_you_mean(name, stored)}"
            )
    fed = {value.name for value in proto.graph.input} - stored
    given = {*cuts, *observed, *(value.name for value in proto.graph.output)} - fed
    folder, mapped = model.parent if isinstance(model, Path) else None, is_large(proto)
    found = []
    for part in segments(proto, given, cuts=frozenset(cuts), free=frozenset(free)):
        # Of old models every initializer is an input as well.
        inputs = tuple(name for name in part.inputs if name not in stored)
        part = replace(part, inputs=inputs, kept=part.kept - stored)
        found.append(Stage(part, folder, optimize=optimize, mapped=mapped, threads=threads))
    return tuple(found)
