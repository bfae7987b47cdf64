"""Replicas are added by what they tell of themselves: by requests, or by KV memory, whichever takes more."""

import asyncio
from types import SimpleNamespace

import pytest

from pagemill.distributed.autoscaling import by_queue_and_memory
from pagemill.distributed.replica import ScaledReplica
from pagemill.engine.stats import EngineStats


class Replica(ScaledReplica):
    """One of 8 rows and 100 frames, whose engine has such figures."""

    def __init__(self, running, waiting, frames_active):
        figures = {"running": running, "waiting": waiting, "frames": 100, "frames_active": frames_active}
        stats = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 0) | figures)

        async def ask(query):
            return stats

        self._client = SimpleNamespace(ask=ask, facts=SimpleNamespace(max_num_seqs=8))

    def __del__(self):
        pass


def wanted(*replicas, least=1, most=10):
    """Returns how many replicas there are to be where these run, each of which tells what it does as Ray Serve asks."""
    told = [asyncio.run(replica.record_autoscaling_stats()) for replica in replicas]
    context = SimpleNamespace(
        aggregated_metrics={name: {at: each[name] for at, each in enumerate(told)} for name in (told or [{}])[0]},
        current_num_replicas=len(replicas),
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )
    return by_queue_and_memory(context)[0]


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([(0, 0, 0)], 1),
        ([(4, 0, 69)], 1),
        ([(4, 0, 71)], 2),  # by memory alone: half of the rows are free
        ([(1, 0, 90), (1, 0, 90), (1, 0, 90)], 4),
        ([(2, 0, 10), (2, 0, 70)], 2),  # memory counts in sum: 0.8 replicas' worth
        ([(8, 8, 10)], 3),  # by rows, with who waits, though memory is free
        ([(8, 8, 50), (8, 0, 90)], 5),
        ([(8, 800, 10)], 10),
    ],
)
def test_rows_or_memory_ask_for_replicas_whichever_takes_more(replicas, expected):
    assert wanted(*(Replica(*each) for each in replicas)) == expected


def test_the_bounds_hold_and_silence_changes_nothing():
    assert wanted(Replica(0, 0, 100), most=1) == 1
    assert wanted(Replica(0, 0, 0), least=3) == 3
    assert wanted(least=2) == 2
