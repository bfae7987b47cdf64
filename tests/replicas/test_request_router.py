"""The class that routes calls within Ray Serve, alone: Ray's own base class loses calls that come in quick succession.

Needs pagemill[ray], and no cluster.
"""

import asyncio
import random

import pytest

pytest.importorskip("ray", reason="pagemill[ray] is not installed")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from pagemill.distributed import listing
from pagemill.distributed.request_router import NamedReplicaRouter
from pagemill.errors import EngineDeadError

DEPLOYMENT = DeploymentID("Engine", "app")


class Replica:
    """As much of Ray's `RunningReplica` as routing reads."""

    max_ongoing_requests = 10_000

    def __init__(self, name):
        self.replica_id = ReplicaID(name, DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s):
        return 0


def call(number, replica):
    metadata = RequestMetadata(request_id=str(number), internal_request_id=str(number), call_method="send")
    return PendingRequest(args=[], kwargs={"replica": replica}, metadata=metadata)


def routed(router, one):
    """Returns what Ray Serve's handle awaits for a call."""
    return router._choose_replica_for_request(one)  # noqa: SLF001


def run(scenario):
    async def with_router():
        router = NamedReplicaRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        await scenario(router)

    asyncio.run(with_router())


def test_every_call_reaches_the_replica_that_it_names():
    async def scenario(router):
        router.update_replicas([Replica(name) for name in "abc"])
        draw = random.Random(1)

        async def call_often(name):
            for number in range(200):
                await asyncio.sleep(draw.random() * 0.004)
                one = call(f"{name}{number}", name)
                chosen = await asyncio.wait_for(routed(router, one), 5)
                assert chosen.replica_id.unique_id == name

        await asyncio.gather(*map(call_often, "abc"))

    run(scenario)


def test_a_call_to_a_replica_that_is_gone_is_refused_and_one_that_names_none_waits_for_any():
    async def scenario(router):
        anyone = asyncio.create_task(routed(router, call(0, None)))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="replica a is gone"):
            await routed(router, call(1, "a"))
        router.update_replicas([Replica("a")])
        assert (await asyncio.wait_for(anyone, 5)).replica_id.unique_id == "a"
        assert router.num_pending_requests <= 1

    run(scenario)


def test_a_replica_that_is_listed_no_more_is_called_until_it_has_ended_what_it_has(monkeypatch):
    async def scenario(router):
        listed = []
        monkeypatch.setattr(listing, "watchers", [listed.append])
        monkeypatch.setattr(listing, "kept", {"a"})
        router.update_replicas([Replica("a"), Replica("b")])
        router.update_replicas([Replica("b")])
        assert listed == [{"a", "b"}, {"b"}]
        assert (await routed(router, call(0, "a"))).replica_id.unique_id == "a"
        listing.kept.clear()
        router.update_replicas([Replica("b")])
        with pytest.raises(EngineDeadError):
            await routed(router, call(1, "a"))

    run(scenario)
