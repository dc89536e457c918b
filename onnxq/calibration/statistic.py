"""Statistics: what a request gives, as a value that merges; and how arrays become one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.bins import stride_of
from onnxq.calibration.requests import Option, Request
from onnxq.data.inputs import is_floating
from onnxq.errors import DataError

Found = TypeVar("Found")
Arrays = Mapping[str, NDArray[Any]]

MASK = 8192.0
"""Least magnitude of an attention-mask constant: -1e4 with a score added to it still counts."""


class _Once(Generic[Found]):
    """A property that is computed once; unlike functools' up to Python 3.11 it lets other threads compute theirs."""

    def __init__(self, compute: Callable[[Any], Found]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, owner: Any, _: object = None) -> Found:
        found = self._compute(owner)
        # What is in the instance is found before what is in its class.
        vars(owner)[self._compute.__name__] = found
        return found


class Seen:
    """An array of a tensor in one sample, not empty, with what several kinds need of it, computed once.

    Args:
        tensor: Its name.
        array: Of any shape.
        sample: The digest of the sample.
        index: Its place among the samples, for errors.
    """

    def __init__(self, tensor: str, array: NDArray[Any], sample: str = "", index: int | None = None) -> None:
        self.tensor = tensor
        self.array = array
        self.sample = sample
        self._index = index

    @_Once
    def values(self) -> NDArray[Any]:
        """All elements, float32 or float64 of shape (elements,).

        Raises:
            DataError: The dtype is no float type.
        """
        if not is_floating(self.array.dtype):
            raise DataError(
                f"Tensor {self.tensor!r} is {self.array.dtype.name}, expected a float type; leave it out of calibration"
            )
        values = self.array.reshape(-1)
        return values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)

    @_Once
    def ends(self) -> tuple[float, float]:
        """The least and the greatest element.

        Raises:
            DataError: The dtype is no float type, or an element is NaN or infinite.
        """
        minimum, maximum = ends_of(self.values)
        if not (math.isfinite(minimum) and math.isfinite(maximum)):
            bad = self.values.size - int(np.count_nonzero(np.isfinite(self.values)))
            at = "" if self._index is None else f" in sample {self._index}"
            raise DataError(
                f"Tensor {self.tensor!r} holds {bad} NaN or infinite values of {self.values.size}{at}, expected finite "
                "values; check the sample and the float model, or keep the tensor in float"
            )
        return minimum, maximum

    @_Once
    def core(self) -> NDArray[Any]:
        """The elements below `MASK` in magnitude, of shape (elements,)."""
        minimum, maximum = self.ends
        return self.values if max(-minimum, maximum) < MASK else self.values[np.abs(self.values) < MASK]

    @_Once
    def core_ends(self) -> tuple[float, float]:
        """The least and the greatest element below `MASK` in magnitude; +inf and -inf where there is none."""
        if self.core is self.values:
            return self.ends
        return ends_of(self.core) if self.core.size else (math.inf, -math.inf)

    def selection(self, size: int, elements: int | None) -> slice:
        """Return which of `size` elements of the array stand for all: about `elements`, evenly spaced; all for None.

        Where they begin is the sample's own, so that not all samples show the same places, whatever their order.
        """
        stride = stride_of(size, elements)
        return slice(int(self.sample[-8:] or "0", 16) % min(stride, size), None, stride)

    def axis(self, axis: int | None) -> int:
        """Return an axis counted from the front.

        Raises:
            DataError: The array has no such axis.
        """
        if axis is None or not -self.array.ndim <= axis < self.array.ndim:
            raise DataError(
                f"Tensor {self.tensor!r} has {self.array.ndim} axes, expected axis {axis} for its channels; "
                "observe it whole"
            )
        return axis % self.array.ndim


def ends_of(values: NDArray[Any]) -> tuple[float, float]:
    """Return the least and the greatest element of an array that is not empty."""
    # Adding 0.0 makes an extreme of -0.0 independent of the order of the elements.
    return float(np.minimum.reduce(values)) + 0.0, float(np.maximum.reduce(values)) + 0.0


class Observer(Protocol):
    """What is shown the arrays of one tensor, one after the other, and turns them into a statistic."""

    def add(self, seen: Seen) -> None:
        """Take in one array."""
        ...

    def statistic(self) -> Statistic:
        """Return the statistic of all that was added."""
        ...


class Statistic(ABC):
    """What a request has given: a value that merges, in any order, with ``cls()`` as its neutral element.

    A kind is a frozen dataclass (``eq=False``) of this class: it says what it keeps of an array, how two merge, and
    which arrays hold it in a file. Kinds that gain by changing themselves in place bring an observer of their own.
    """

    kind: ClassVar[str]
    """Its name in requests and files."""
    options: ClassVar[tuple[tuple[str, Option], ...]] = ()
    """Of a request that does not say otherwise."""

    @classmethod
    @abstractmethod
    def observed(cls, seen: Seen, request: Request) -> Self:
        """Return the statistic of one array.

        Raises:
            DataError: The array is not what the kind is for.
        """

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the statistic of the elements of both.

        Raises:
            DataError: They do not belong together.
        """

    @abstractmethod
    def arrays(self) -> Arrays:
        """Return arrays, under names, that say all of it; of one name all statistics have one dtype."""

    @classmethod
    @abstractmethod
    def restored(cls, arrays: Arrays) -> Self:
        """Return the statistic of which these are the arrays.

        Raises:
            ValueError: They contradict each other.
        """

    def check(self) -> None:
        """Check that it is one that arrays may have given, which what comes from elsewhere need not be.

        Raises:
            ValueError: It is not.
        """
        arrays, plain = self.arrays(), type(self)().arrays()
        if any(arrays[name].dtype != array.dtype for name, array in plain.items()):
            raise ValueError(f"the arrays of {self.kind} have other types than theirs")
        type(self).restored(arrays)

    @classmethod
    def observer(cls, request: Request) -> Observer:
        """Return what turns the arrays of one tensor into a statistic of this kind."""
        return _Merging(cls, request)

    @classmethod
    def bytes_kept(cls, request: Request, elements: int, samples: int) -> int:
        """Return about how much memory the statistic of a tensor takes.

        Args:
            request: What is wanted of the tensor.
            elements: How many the tensor has in a sample.
            samples: How many samples are seen.
        """
        return 64

    @property
    def note(self) -> str:
        """What people should know of it, in some words; empty where there is nothing."""
        return ""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, Statistic):
            return False
        mine, theirs = self.arrays(), other.arrays()
        return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]


class _Merging:
    """An observer that merges the statistics of the arrays."""

    def __init__(self, kind: type[Statistic], request: Request) -> None:
        self._kind, self._request = kind, request
        self._total: Statistic = kind()

    def add(self, seen: Seen) -> None:
        self._total = self._total.merge(self._kind.observed(seen, self._request))

    def statistic(self) -> Statistic:
        return self._total


def check_channels(a: int, b: int) -> None:
    """Raise what is said where two parts of a tensor have different numbers of channels.

    Raises:
        DataError: They have.
    """
    if a != b:
        raise DataError(f"A tensor has {a} and {b} channels, expected one number in all samples; observe it whole")


def restored_from(arrays: Arrays, names: Iterable[str]) -> list[NDArray[Any]]:
    """Return the arrays of these names.

    Raises:
        ValueError: One is missing, or there is another one.
    """
    wanted = list(names)
    if set(arrays) != set(wanted):
        raise ValueError(f"arrays are {sorted(arrays)}, expected {sorted(wanted)}")
    return [arrays[name] for name in wanted]
