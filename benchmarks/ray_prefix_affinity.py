"""Drives the prefix-affinity router of Ray Serve LLM over modelled replicas: its own class and prefix tree, no cluster.

It compares prompts as texts. Here a prompt's text has one letter for each block of 512 tokens, so that texts begin
alike where prompts do. Its tree is an actor in a cluster; here calls to it are calls of the same class in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

DEPLOYMENT = DeploymentID("Engine", "modelled")
FIRST_LETTER = 0x10000


class _Calls:
    """Is an actor's handle to its caller: `handle.method.remote(...)`, whose result `ray.get` returns."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._target, name))


class _Replica:
    """As much of Ray's `RunningReplica` as routing reads."""

    max_ongoing_requests = 1_000_000
    node_id = availability_zone = ""
    multiplexed_model_ids: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Returns what a replica has to do at first."""
        return 0


class RayPrefixAffinity:
    """Chooses among `replicas` numbered ones. imbalanced: the difference in requests under way from which it looks at
    these alone; infinite by Ray's default."""

    def __init__(self, replicas: int, imbalanced: float = float("inf")) -> None:
        prefix_aware_router.ray = SimpleNamespace(get=lambda value: value)
        self._loop = asyncio.new_event_loop()
        self._replicas = [_Replica(str(number)) for number in range(replicas)]
        self._loop.run_until_complete(self._start(imbalanced))

    async def _start(self, imbalanced: float) -> None:
        self._router = prefix_aware_router.PrefixCacheAffinityRouter(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self._router.initialize_state(imbalanced_threshold=imbalanced, tree_actor=_Calls(PrefixTree()))
        self._router.update_replicas(self._replicas)

    def choose(self, blocks: Sequence[int], under_way: Sequence[int]) -> int:
        """Returns the number of the replica that a prompt of these blocks goes to. under_way: requests of each."""
        return self._loop.run_until_complete(self._choose(blocks, under_way))

    async def _choose(self, blocks: Sequence[int], under_way: Sequence[int]) -> int:
        for replica, count in zip(self._replicas, under_way, strict=True):
            self._router.replica_queue_len_cache.update(replica.replica_id, count)
        text = "".join(chr(FIRST_LETTER + block) for block in blocks)
        metadata = RequestMetadata(request_id="", internal_request_id="", call_method="chat")
        request = PendingRequest(args=[SimpleNamespace(prompt=text)], kwargs={}, metadata=metadata)
        for ranked in await self._router.choose_replicas(self._replicas, request):
            if ranked:
                chosen = min(ranked, key=lambda one: under_way[int(one.replica_id.unique_id)])
                self._router.on_request_routed(request, chosen.replica_id, None)
                return int(chosen.replica_id.unique_id)
        raise RuntimeError("it has chosen nobody")
