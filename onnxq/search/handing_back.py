"""Finer codes handed back where the noise allows: backward elimination over groups of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onnxq.planning.plan import Demotion

Demotions = Mapping[str, Demotion]


def handed_back(
    better: Demotions,
    coarser: Mapping[str, Demotion | None],
    is_enough: Callable[[Demotions], bool],
    *,
    most: int,
) -> Demotions:
    """Return demotions with as many exchanged for coarser ones as can be found.

    What weights add in noise together is not what they add alone, and a prefix of the noisiest holds large quiet ones
    that one small noisy one stands behind. Groups are tried from halves on, and those that are too noisy are split.

    Args:
        better: what is faithful enough.
        coarser: what nodes would be instead, those first that are worth most for their noise; None takes no demotion.
        is_enough: whether demotions are faithful enough.
        most: how often to ask.

    >>> from onnxq.config.scheme import Mode
    >>> fine = dict.fromkeys("abcd", Demotion(Mode.STORAGE, "too coarse"))
    >>> sorted(handed_back(fine, dict.fromkeys("abcd"), lambda left: "c" in left, most=9))
    ['c']
    """
    kept, asked = dict(better), 0
    groups = _halves([node for node in coarser if node in better])
    while groups and asked < most:
        group = groups.pop(0)
        tried = {node: one for node, one in kept.items() if node not in group}
        tried.update({node: one for node in group if (one := coarser[node]) is not None})
        asked += 1
        if is_enough(tried):
            kept = tried
        elif len(group) > 1:
            groups += _halves(group)
    return kept


def _halves(group: Sequence[str]) -> list[Sequence[str]]:
    middle = (len(group) + 1) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
