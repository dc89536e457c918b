"""What runs models: a runtime of some version, here, in another process or on another machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from onnxq.errors import EngineError
from onnxq.runtime.kernels import Kernel
from onnxq.runtime.sessions import Array
from onnxq.runtime.turns import Turn, timed_by_turns
from onnxq.system.resources import available_cores


class LoadedModel(ABC):
    """A model that an engine has loaded.

    Attributes:
        outputs: names of its outputs in order.
    """

    outputs: tuple[str, ...]

    @abstractmethod
    def run(self, sample: Mapping[str, Array]) -> list[Any]:
        """Return the outputs of a sample in order.

        Raises:
            OnnxqError: the run fails.
        """

    def close(self) -> None:  # noqa: B027
        """Give its memory back; nothing runs afterwards."""


class Engine(ABC):
    """A runtime. It is closed when it is not needed any more, as a context manager or by `close`.

    Attributes:
        name: the name users write.
        version: the runtime and its version, as in ``openvino 2026.4.1 in f32``, which stands beside every figure.
        profiles: whether it tells what each node takes; a search times whole models where it does not.
        threads: how many an operator is given where a load does not say it; None stands for as many as there are cores.
    """

    name: str
    version: str
    profiles: bool = False
    threads: int | None = None

    @property
    def threads_given(self) -> int:
        """How many threads an operator is given by this engine: what is timed, and what is profiled, has as many."""
        return self.threads or available_cores()

    @abstractmethod
    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        """Load a model file.

        Args:
            model: the file; its external data lies beside it.
            threads: threads inside an operator; None takes the engine's own number, and leaves it to the runtime where
                there is none.

        Raises:
            OnnxqError: the runtime refuses it.
        """

    def load_all(self, models: Sequence[Path], threads: int | None = None) -> list[LoadedModel]:
        """Load model files, which takes less time than one behind the other where the runtime loads several at once.

        Args:
            models: the files.
            threads: see `load`.

        Raises:
            OnnxqError: the runtime refuses one.
        """
        return [self.load(model, threads) for model in models]

    def time(
        self,
        models: Sequence[LoadedModel],
        samples: Sequence[Mapping[str, Array]],
        seconds: float,
        turn: int = 0,
        enough: int | None = None,
    ) -> list[list[Turn]]:
        """Return the seconds of models of this engine for each sample, see `timed_by_turns`."""
        return timed_by_turns([model.run for model in models], samples, seconds, turn, enough)

    def profile(
        self, model: Path, samples: Sequence[Mapping[str, Array]], folder: Path, repeats: int
    ) -> tuple[Kernel, ...]:
        """Return how long each kernel of a model takes in `threads_given`, in order of execution.

        Args:
            model: the file.
            samples: each is run ``repeats`` times.
            folder: where the runtime may write.
            repeats: at least one.

        Raises:
            EngineError: this engine does not tell.
        """
        raise EngineError(f"engine {self.name} does not tell what each node takes; time whole models")

    def started(self) -> None:  # noqa: B027
        """Wait until it has started and knows its version, where that goes on after it was made.

        Raises:
            EngineError: it does not start, or cannot do what it is for.
        """

    def close(self) -> None:  # noqa: B027
        """End what the engine has started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
