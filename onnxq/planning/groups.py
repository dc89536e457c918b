"""Groups of things that share something: a union-find whose representative is the first of each group."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


@dataclass
class Groups(Generic[Item]):
    """Disjoint groups; everything is a group of its own until it is joined.

    >>> groups = Groups[str]()
    >>> groups.join("a", "b")
    >>> groups.find("b"), groups.find("c")
    ('a', 'c')
    """

    parent: dict[Item, Item] = field(default_factory=dict)

    def find(self, item: Item) -> Item:
        """Return the item that stands for the group of ``item``."""
        root = item
        while self.parent.get(root, root) is not root:
            root = self.parent[root]
        while self.parent.get(item, item) is not root:
            self.parent[item], item = root, self.parent[item]
        return root

    def join(self, first: Item, second: Item) -> None:
        """Put the group of ``second`` into that of ``first``, whose representative stays."""
        self.parent[self.find(second)] = self.find(first)
