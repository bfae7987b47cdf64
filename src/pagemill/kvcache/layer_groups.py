"""Layer groups: layers whose K/V live equally long share blocks.

All groups keep the same number of layers (some padded), so their blocks have equal bytes and share one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LayerGroup:
    """Names layers, model layer indices in order: layer `layers[i]` uses place i of each of the group's frames."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class LayerGroups:
    """Holds all groups.

    layers_per_frame: places in a frame, equal for all groups.
    remainders: so many groups at the end hold remainders (see `KVFormat`) of the layers of the first ones, in order.
    """

    groups: tuple[LayerGroup, ...]
    layers_per_frame: int
    remainders: int = 0

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups[: len(self.groups) - self.remainders])

    @property
    def num_places(self) -> int:
        """Places that a token takes, remainders aside."""
        return (len(self.groups) - self.remainders) * self.layers_per_frame

    def place(self, layer: int) -> tuple[int, int]:
        """Returns (group, place within the frame) of a model layer. Raises KeyError for a layer that is in no group."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(layer)


def group_layers(windows: Sequence[int | None]) -> LayerGroups:
    """Splits layers into groups of equal size and equal lifetime.

    The group size trades padding (bytes never used) against the number of rows in a block table: the cost of a size is
    padded layers / layers + 0.01 per group, and the cheapest wins.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)

    def cost(size: int) -> float:
        groups = sum(-(-len(members) // size) for members in kinds.values())
        return (groups * size - len(windows)) / len(windows) + 0.01 * groups

    size = min(range(1, max(map(len, kinds.values())) + 1), key=cost)
    groups = [
        LayerGroup(window, tuple(members[i : i + size]))
        for window, members in kinds.items()
        for i in range(0, len(members), size)
    ]
    return LayerGroups(tuple(groups), size)


def add_remainders(groups: LayerGroups, window: int) -> LayerGroups:
    """Returns groups beside each of which another one holds remainders of the latest `window` tokens. Its blocks are
    given back when no later query can see them, as those of any group with a window."""
    more = [LayerGroup(min(window, group.window or window), group.layers) for group in groups.groups]
    return LayerGroups((*groups.groups, *more), groups.layers_per_frame, len(more))


def add_full_layers(groups: LayerGroups, count: int) -> LayerGroups:
    """Returns groups that hold `count` more layers, with full attention, all in one group, numbered on from the others.
    These have no remainders.

    They go to the group with full attention that has the fewest layers, whose frames then have more places, or into a
    group of their own: whichever gives a token of a full context fewer places.
    """
    first = groups.num_layers
    more = tuple(range(first, first + count))
    held, rest = groups.groups[: (end := len(groups.groups) - groups.remainders)], groups.groups[end:]
    full = [index for index, group in enumerate(held) if group.window is None]
    alone = replace(
        groups,
        groups=(*held, LayerGroup(None, more), *rest),
        layers_per_frame=max(groups.layers_per_frame, count),
    )
    if not full:
        return alone
    at = min(full, key=lambda index: len(held[index].layers))
    grown = LayerGroup(None, held[at].layers + more)
    joined = replace(
        groups,
        groups=(*held[:at], grown, *held[at + 1 :], *rest),
        layers_per_frame=max(groups.layers_per_frame, len(grown.layers)),
    )
    return min(joined, alone, key=lambda one: one.num_places)
