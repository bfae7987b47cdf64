"""Says how many replicas there should be: Ray Serve's autoscaler asks, with what `EngineReplica` has told it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

TARGET = 0.7
"""Share of its rows, and of its KV pool, that a replica should have in use."""


def by_queue_and_memory(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Returns as many replicas as would be used to `TARGET` by what is there: by rows, with the requests that wait, or
    by KV memory, whichever takes more. Ray Serve keeps it within its bounds, and waits before it follows."""
    told: dict[str, dict[Any, float]] = context.aggregated_metrics or {}
    now = context.current_num_replicas
    if not told.get("rows"):
        return max(now, context.capacity_adjusted_min_replicas), {}
    rows = sum(told["rows"].values()) / len(told["rows"])
    by_rows = (sum(told["running"].values()) + sum(told["waiting"].values())) / rows
    by_memory = sum(told["kv_used"].values())
    wanted = math.ceil(max(by_rows, by_memory) / TARGET)
    return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}
