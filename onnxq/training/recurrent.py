"""Recurrent cells, written out step by step, so that gradients pass through time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from onnxq.training.calls import Call

State = tuple[Tensor, ...]
Cell = Callable[[Call, "Weights", Tensor, State], State]
# Rows of each weight for one direction, in multiples of the hidden size.
_GATES: Mapping[str, int] = MappingProxyType({"GRU": 3, "LSTM": 4, "RNN": 1})
_USUAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh"), "RNN": ("Tanh",)}
)
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh}
)


class Weights:
    """What one direction of a cell multiplies and adds.

    Attributes:
        data: of shape [gates * size, inputs].
        hidden: of shape [gates * size, size].
        data_bias: of shape [gates * size].
        hidden_bias: likewise.
        peepholes: of shape [3 * size], of an LSTM; zero where there are none.
        functions: the activations, in ONNX's order.
    """

    def __init__(self, call: Call, direction: int) -> None:
        size = call.attribute("hidden_size")
        self.data, self.hidden = call[1][direction], call[2][direction]
        bias, peepholes = call.optional(3), call.optional(7)
        rows = _GATES[call.node.op] * size
        both = torch.zeros(2 * rows).to(self.data) if bias is None else bias[direction]
        self.data_bias, self.hidden_bias = both[:rows], both[rows:]
        self.peepholes = torch.zeros(3 * size).to(self.data) if peepholes is None else peepholes[direction]
        names, each = call.attribute("activations"), len(_USUAL[call.node.op])
        names = names[direction * each : (direction + 1) * each] if names else _USUAL[call.node.op]
        self.functions = [_FUNCTIONS[name] for name in names]


def _rnn(call: Call, weights: Weights, data: Tensor, state: State) -> State:
    return (weights.functions[0](data + state[0] @ weights.hidden.T + weights.hidden_bias),)


def _gru(call: Call, weights: Weights, data: Tensor, state: State) -> State:
    (hidden,), (gate, change) = state, weights.functions
    size = hidden.shape[-1]
    if call.attribute("linear_before_reset", 0):
        shown = hidden @ weights.hidden.T + weights.hidden_bias
        update, reset = gate(data[:, : 2 * size] + shown[:, : 2 * size]).split(size, -1)
        new = change(data[:, 2 * size :] + reset * shown[:, 2 * size :])
    else:
        rows, bias = weights.hidden, weights.hidden_bias
        shown = hidden @ rows[: 2 * size].T + bias[: 2 * size]
        update, reset = gate(data[:, : 2 * size] + shown).split(size, -1)
        new = change(data[:, 2 * size :] + (reset * hidden) @ rows[2 * size :].T + bias[2 * size :])
    return ((1 - update) * new + update * hidden,)


def _lstm(call: Call, weights: Weights, data: Tensor, state: State) -> State:
    (hidden, cell), (gate, change, shown) = state, weights.functions
    into, out, forget, new = (data + hidden @ weights.hidden.T + weights.hidden_bias).chunk(4, -1)
    into_peep, out_peep, forget_peep = weights.peepholes.chunk(3)
    into = gate(into + into_peep * cell)
    kept = 1 - into if call.attribute("input_forget", 0) else gate(forget + forget_peep * cell)
    cell = kept * cell + into * change(new)
    return gate(out + out_peep * cell) * shown(cell), cell


_CELLS: Mapping[str, tuple[Cell, int]] = MappingProxyType({"GRU": (_gru, 1), "LSTM": (_lstm, 2), "RNN": (_rnn, 1)})


def _run(call: Call) -> tuple[Tensor, ...]:
    """Return all hidden states, and the last state of each kind, as ONNX's operator does."""
    (cell, kinds), size = _CELLS[call.node.op], call.attribute("hidden_size")
    data, lengths, turned = call[0], call.optional(4), bool(call.attribute("layout", 0))
    data = data.transpose(0, 1) if turned else data
    steps, batch, _ = data.shape
    direction = call.attribute("direction", "forward")
    count = 2 if direction == "bidirectional" else 1
    given = [call.optional(5 + kind) for kind in range(kinds)]
    shown, last = [], []
    for number in range(count):
        weights = Weights(call, number)
        back = direction == "reverse" or number == 1
        starts = (None if one is None else one.transpose(0, 1) if turned else one for one in given)
        zeros = torch.zeros(batch, size).to(data)
        state: State = tuple(zeros if one is None else one[number] for one in starts)
        # What does not depend on the step before is multiplied at once.
        inputs = data @ weights.data.T + weights.data_bias
        found: list[Tensor] = [zeros] * steps
        for step in reversed(range(steps)) if back else range(steps):
            new = cell(call, weights, inputs[step], state)
            if lengths is not None:
                there = (step < lengths.to(data.device)).unsqueeze(-1)
                found[step] = torch.where(there, new[0], 0)
                state = tuple(torch.where(there, one, old) for one, old in zip(new, state, strict=True))
            else:
                found[step], state = new[0], new
        shown.append(torch.stack(found) if found else data.new_zeros(0, batch, size))
        last.append(state)
    every = torch.stack(shown, 1)
    ends = [torch.stack([state[kind] for state in last]) for kind in range(kinds)]
    if turned:
        return every.permute(2, 0, 1, 3), *(end.transpose(0, 1) for end in ends)
    return every, *ends


def is_plain(call: Call) -> bool:
    """Whether the cell is one of those written here: activations of the usual three, none with numbers of their own."""
    names = set(call.attribute("activations") or ())
    return names <= _FUNCTIONS.keys() and not call.node.attrs.keys() & {"clip", "activation_alpha", "activation_beta"}


RECURRENT: Mapping[str, Callable[[Call], Any]] = MappingProxyType(dict.fromkeys(_CELLS, _run))
"""The function of each recurrent operator by its name."""
