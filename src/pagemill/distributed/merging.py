"""Makes one answer of those that several replicas give to a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from pagemill.engine.kv_map import KVMap
from pagemill.engine.messages import Done, EngineReady, KVBlocks, PinList, SequenceList
from pagemill.engine.stats import EngineStats, TenantStats

A = TypeVar("A")

OF_ONE = frozenset({
    "block_bytes", "guaranteed_blocks", "limits", "max_blocks", "running_limit", "step_prompt_tokens",
    "watermark_blocks",
})  # fmt: skip
"""Figures of settings and limits, which are those of the first replica: a sum would say nothing."""


def merge(answers: Sequence[A]) -> A:
    """Returns one answer for all replicas, of which there is at least one.

    Figures are summed, lists joined, facts those of the smallest pool, blocks of a prompt those of the replica that has
    most of it, and the map of the KV memory is the first replica's with the figures of all.
    """
    first = answers[0]
    merged: Any = first
    match first:
        case EngineStats():
            merged = _sum(answers)
        case EngineReady():
            merged = min(answers, key=lambda facts: facts.num_frames)  # type: ignore[attr-defined]
        case PinList():
            merged = PinList(_each_once(pin for answer in answers for pin in answer.pins))  # type: ignore[attr-defined]
        case SequenceList():
            merged = SequenceList([one for answer in answers for one in answer.sequences])  # type: ignore[attr-defined]
        case KVBlocks():
            merged = max(answers, key=lambda found: sum(found.by_tier.values()))  # type: ignore[attr-defined]
        case Done():
            merged = Done(all(answer.done for answer in answers))  # type: ignore[attr-defined]
        case KVMap():
            stats = _sum([answer.stats for answer in answers])  # type: ignore[attr-defined]
            merged = msgspec.structs.replace(first, stats=stats)
    result: A = merged
    return result


def add_held(stats: EngineStats, held: Mapping[str, int]) -> None:
    """Counts sequences that a front end holds back, by tenant, among those that wait."""
    for tenant, count in held.items():
        stats.waiting += count
        if tenant in stats.tenants:
            stats.tenants[tenant].waiting += count


def _each_once(pins: Any) -> list[Any]:
    by_name = {(pin.tenant, pin.cache_salt, pin.name): pin for pin in reversed([*pins])}
    return [*reversed(by_name.values())]


def _sum(figures: Sequence[Any]) -> Any:
    """Returns structs of one kind added field by field; dicts by key, lists by place."""
    kind = type(figures[0])
    return kind(**{
        name: getattr(figures[0], name)
        if name in OF_ONE or getattr(figures[0], name) is None
        else _add([getattr(each, name) for each in figures])
        for name in kind.__struct_fields__
    })  # fmt: skip


def _add(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, TenantStats):
        return _sum(values)
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _add([value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, list):
        length = max(map(len, values))
        return [sum(value[place] for value in values if place < len(value)) for place in range(length)]
    return sum(values)
