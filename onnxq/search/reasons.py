"""Why nodes are not what the scheme wants, and the figures behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnxq.config.scheme import Mode
from onnxq.numerics.affine import decibels
from onnxq.search.alternatives import Alternative
from onnxq.search.costs import Costs

_BESIDE = {
    Mode.STATIC: "with fixed scales",
    Mode.DYNAMIC: "with dynamic scales",
    Mode.STORAGE: "with floats that the codes become when the model is loaded",
}


def reason_of(costs: Costs, name: str, wanted: Mode, ratio: float, taken: Alternative | None) -> tuple[str, str]:
    """Return why a node is not what the scheme wants, and the figures behind it.

    Args:
        costs: of the nodes.
        name: of the node.
        wanted: what the scheme wants, static, dynamic or stored.
        ratio: noise-to-signal ratio that it adds alone as what the scheme wants; 0 where that is not known.
        taken: what it is instead; None where it computes in float.
    """
    floats, integers = costs.floats.nodes.get(name, 0.0), _integers(costs, wanted).get(name, 0.0)
    figures = [f"{floats / 1e6:.3f} ms in float"]
    figures += [f"{integers / 1e6:.3f} ms as integers"] if wanted is not Mode.STORAGE else []
    figures += _others(costs, name, wanted)
    if ratio:
        figures.append(f"{decibels(ratio):.1f} dB as integers alone")
    if taken is not None:
        reason = f"it is faster so, or less noisy, than {_BESIDE[wanted]}"
    elif integers >= floats:
        reason = "it is not faster as an integer kernel on this machine"
    elif ratio:
        reason = "the time it gains as an integer kernel is not worth the noise"
    else:
        reason = "what it gains as an integer kernel is less than what its borders cost"
    return reason, ", ".join(figures)


def untimed_reason(wanted: Mode, ratio: float) -> tuple[str, str]:
    """Return why a node computes in float where nobody knows what it takes in time, and the figures behind it.

    Args:
        wanted: what the scheme wants, static or dynamic.
        ratio: noise-to-signal ratio that it adds alone so; 0 where that is not known.

    >>> untimed_reason(Mode.STATIC, 0.01)
    ('static quantization of it hurts the worst output too much', '20.0 dB as integers alone')
    """
    if not ratio:
        return "as integers it would need borders between codes and floats for little that it computes", ""
    return f"{wanted} quantization of it hurts the worst output too much", f"{decibels(ratio):.1f} dB as integers alone"


def _integers(costs: Costs, wanted: Mode) -> Mapping[str, float]:
    return costs.static_nodes if wanted is Mode.STATIC else costs.offered.get(Alternative(Mode.DYNAMIC), {})


def _others(costs: Costs, name: str, wanted: Mode) -> Iterator[str]:
    for alternative, times in costs.offered.items():
        if name in times and alternative.mode is not wanted:
            yield f"{times[name] / 1e6:.3f} ms {alternative.described}"
