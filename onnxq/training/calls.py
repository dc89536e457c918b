"""A call of an operator as the functions of the tables see it: tensors in, attributes by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onnxq.ir import Constant, Node


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a node.

    Attributes:
        node: the operator and its attributes.
        inputs: a tensor for each input, None where an optional one is left out.
        opset: version of the operator's domain.
    """

    node: Node
    inputs: tuple[Tensor | None, ...]
    opset: int

    def __getitem__(self, index: int) -> Tensor:
        """Return an input that has to be there."""
        found = self.inputs[index]
        assert found is not None, f"{self.node.op} {self.node.name!r} has no input {index}"
        return found

    def optional(self, index: int) -> Tensor | None:
        """Return an input, or None where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    @property
    def given(self) -> list[Tensor]:
        """The inputs that are there."""
        return [tensor for tensor in self.inputs if tensor is not None]

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute, tensors among them as arrays."""
        found = self.node.attrs.get(name, default)
        return found.values if isinstance(found, Constant) else found

    def numbers(self, index: int, name: str = "") -> list[int] | None:
        """Return whole numbers that are an input, or were an attribute in older opsets; None where they are neither."""
        found = self.optional(index)
        if found is not None:
            return [int(number) for number in found.reshape(-1).tolist()]
        given = self.attribute(name) if name else None
        return None if given is None else [int(number) for number in given]

    def number(self, index: int, name: str, default: Any) -> Any:
        """Return a number that is an input, or was an attribute in older opsets."""
        found = self.optional(index)
        return self.attribute(name, default) if found is None else found.item()
