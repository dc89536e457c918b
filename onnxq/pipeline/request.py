"""What is asked of a quantization: what is to become of a model, and what may be spent on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxq.config.effort import EFFORTS, AccuracyEffort, Effort, accuracy_named, effort_named
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Scheme
from onnxq.config.scheme_file import scheme_named
from onnxq.errors import SchemeError, check_type, convert_numpy_numbers
from onnxq.evaluation.goal import PREFERENCES, Goal
from onnxq.lowering import AllowedOps, allowed_ops_named
from onnxq.passes.preparing.named_passes import Step
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import target_named
from onnxq.search.times import default_path
from onnxq.system.resources import Progress, silent


@dataclass(frozen=True)
class QuantizationRequest:
    """What is to become of a model.

    Attributes:
        scheme: the rules; where a plan is carried out they only name what it was made by.
        target: name of the runtime, or of what several have in common; see `target_named`.
        prepare: passes of the user's.
        replay: a plan to carry out as it is, instead of the scheme.
    """

    scheme: Scheme
    target: str
    prepare: Sequence[Step] = ()
    replay: Plan | None = None

    def check(self, goal: Goal) -> None:
        """Check that a small size can be reached by choosing the bits of weights.

        Raises:
            SchemeError: the scheme is a plan, or not weight-only with integers in blocks.
        """
        from onnxq.search.bit_allocation import is_mixable

        option = "--prefer size" if goal.prefers_size else "--max-size" if goal.max_size is not None else ""
        if option and (self.replay is not None or not is_mixable(self.scheme)):
            name = "a plan" if self.replay is not None else f"scheme {self.scheme.name}"
            raise SchemeError(
                f"{option} chooses the bits of weights, and {name} has other formats, expected a weight-only scheme "
                "of integers in blocks; take a preset such as int4-block32"
            )

    @classmethod
    def of(cls, scheme: str | Scheme | Plan, target: str, prepare: Sequence[Step]) -> QuantizationRequest:
        """Return what the arguments of quantize() mean; a plan says its target itself.

        Raises:
            SchemeError: a name is not known, or an argument is of another type.
        """
        check_type(scheme, (str, Scheme, Plan), "the scheme", "the name of a preset or TOML file, a Scheme or a Plan")
        check_type(target, str, "the target", "the name of a runtime such as onnxruntime-cpu")
        if isinstance(scheme, Plan):
            return cls(replace(preset_named("int8"), emit=scheme.emit, io=scheme.io), scheme.target, prepare, scheme)
        scheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
        return cls(scheme, target_named(target).name, prepare)

    def emit(self, *, measured: bool, has_own: bool = False) -> AllowedOps:
        """Return what may be written for the target: where time is not measured nothing is known to be faster.

        Args:
            measured: whether a search measures time on this machine.
            has_own: whether the model has operators of onnxruntime's own; it runs nowhere else, so more limit nothing.

        Raises:
            SchemeError: operators of onnxruntime's own are asked for, and the target has none.
        """
        wished, target = allowed_ops_named(self.scheme.emit), target_named(self.target)
        if wished is AllowedOps.ORT and not target.is_onnxruntime:
            raise SchemeError(
                f"emit 'ort' is about operators only onnxruntime has, and the target is {target.name}; leave it out"
            )
        if wished is AllowedOps.FASTEST and has_own and target.is_onnxruntime and self.replay is None:
            return AllowedOps.ORT
        runs_here = target.is_onnxruntime and (measured or self.replay is not None)
        return AllowedOps.QDQ if wished is AllowedOps.FASTEST and not runs_here else wished


@dataclass(frozen=True)
class Budget:
    """How much is tried and measured, where, and who is told of it.

    Attributes:
        search: ``fast`` or ``full`` measures what each node costs and adds in noise and takes the fastest plan that is
            faithful enough, full with more effort; ``off`` takes the scheme as it is.
        accuracy: what is tried to make quantized values more accurate, each method kept only where it lowers the noise
            of the whole model: ``fast``, ``full``, ``off``, or names of methods, see `accuracy_named`.
        latency_seconds: seconds for comparing latency with the float model; 0 skips all timing.
        cache: whether times that were measured on this machine are kept in the user's cache folder, so that the same
            request decides alike, and sooner; or a file for them.
        cluster: address of a Dask scheduler such as ``tcp://10.0.0.1:8786``, or a connected `distributed.Client`, whose
            workers run the samples of the calibration; None takes threads of this process.
        progress: told of each stage.
        time_limit: seconds for all of it. Calibration takes what it takes, and time is reserved for judging the
            result. The phases between them share the rest; where nothing is left, the scheme is taken as it is.
        engine: what runs the result to verify and time it, see `open_engine`; an empty text leaves that to the target.
        threads: threads inside an operator wherever time is measured: of nodes, of candidates and of the result; None
            takes as many as there are cores, or as the engine takes by itself.
        layers: samples on which all layers are compared for the report, and their kernels looked up; 0 leaves it out.
        certificate: whether the model gets a certificate, which onnxq verify checks where the model runs.

    Raises:
        SchemeError: an effort does not exist, a number is negative or not finite, or something is of another type.

    >>> Budget.of("full") == Budget(search="full", accuracy="full")
    True
    """

    search: str = "fast"
    accuracy: str | AccuracyEffort = "fast"
    latency_seconds: float = 2.0
    cache: bool | str | Path = True
    cluster: Any = None
    progress: Progress = silent
    time_limit: float = math.inf
    engine: str = ""
    layers: int = 0
    threads: int | None = None
    certificate: bool = True

    def __post_init__(self) -> None:
        convert_numpy_numbers(self, "latency_seconds", "time_limit", "layers", "threads")
        check_type(self.search, str, "the search", f"one of {', '.join(EFFORTS)}")
        check_type(self.accuracy, (str, AccuracyEffort), "accuracy", "an effort such as 'fast', or methods")
        check_type(self.latency_seconds, (int, float), "the time for latency in seconds", "a number")
        check_type(self.cache, (bool, str, Path), "the cache", "True, False or a path")
        if self.cluster is not None and not hasattr(self.cluster, "scheduler"):
            check_type(self.cluster, str, "the cluster", "an address such as tcp://host:8786, or a Client of Dask")
        check_type(self.time_limit, (int, float), "the time limit in seconds", "a number")
        if not callable(self.progress):
            raise SchemeError(f"the progress is {self.progress!r}, expected a function; leave it out to hear nothing")
        check_type(self.layers, int, "the number of samples for layers", "a whole number")
        check_type(self.engine, str, "the engine", "a name such as openvino")
        check_type(self.threads, (int, type(None)), "the number of threads", "a whole number")
        check_type(self.certificate, bool, "the certificate", "True or False")
        effort_named(self.search)
        if isinstance(self.accuracy, str):
            accuracy_named(self.accuracy)
        if not 0 <= self.latency_seconds < math.inf:
            raise SchemeError(
                f"the time for latency in seconds is {self.latency_seconds}, expected a finite number "
                "that is not negative"
            )
        if self.layers < 0:
            raise SchemeError(f"the number of samples for layers is {self.layers}, expected 0 or more")
        for name, number in {"time limit in seconds": self.time_limit, "number of threads": self.threads}.items():
            if number is not None and not number > 0:
                raise SchemeError(f"the {name} is {number}, expected more than 0; leave it out to have no limit")

    @classmethod
    def of(cls, budget: str | Budget) -> Budget:
        """Return a budget as it is; ``fast``, ``full`` and ``off`` stand for that effort in search and accuracy."""
        if isinstance(budget, Budget):
            return budget
        check_type(budget, str, "the budget", f"one of {', '.join(EFFORTS)}, or Budget(...)")
        return cls(search=budget, accuracy=budget)

    def check(self, goal: Goal) -> None:
        """Check that what is preferred of plans can be looked for.

        Raises:
            SchemeError: another than the fastest plan is preferred, and there is no search.
        """
        if goal.prefer != PREFERENCES[0] and self.effort is None:
            raise SchemeError(f"prefer = {goal.prefer} needs a search, and search is off; leave one of them out")

    @property
    def effort(self) -> Effort | None:
        """How much a search measures; None where there is none."""
        effort = effort_named(self.search)
        if effort is None:
            return None
        return replace(effort, seconds=min(effort.seconds, self.time_limit))

    @property
    def limit(self) -> str:
        """The option that limits the time of a search; empty without a search."""
        if (effort := effort_named(self.search)) is None:
            return ""
        own = f"--search {self.search}"
        return own if effort.seconds <= self.time_limit else f"--time-limit {self.time_limit:g}"

    @property
    def longer(self) -> str:
        """The option that gives a search more time than its limit; empty if none does."""
        if (effort := effort_named(self.search)) is None:
            return ""
        if self.time_limit < effort.seconds:
            return f"--time-limit {2 * self.time_limit:g}"
        return "--search full" if self.search != "full" else ""

    @property
    def times_path(self) -> Path | None:
        """The file of measured times; None if they are not kept."""
        if isinstance(self.cache, bool):
            return default_path() if self.cache else None
        return Path(self.cache)

    @property
    def measures(self) -> bool:
        """Whether a search measures time, where something runs that tells of the target's."""
        return self.effort is not None and self.latency_seconds > 0

    @property
    def tried(self) -> AccuracyEffort:
        """What is tried for accuracy."""
        return accuracy_named(self.accuracy) if isinstance(self.accuracy, str) else self.accuracy
