"""NamedReplicaRouter: Ray Serve's request router for engines. A call goes to the replica that it names.

Which replica that is has been decided before, by the `Router`, from what only a front end knows: tokens, and what
replicas hold. Ray Serve still says which replicas there are, and this class passes it on to whoever watches.
"""

from __future__ import annotations

import asyncio

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pagemill.distributed import listing
from pagemill.errors import EngineDeadError

LOOK_S = 0.005
"""Seconds between two looks for calls, while some are being routed."""


class NamedReplicaRouter(RequestRouter):
    """Sends a call to the replica that its argument `replica` names, or to any if that is None. A call to one that
    is not there raises `EngineDeadError`."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes the replicas that Ray Serve lists, and keeps those that have something to end."""
        listed = {replica.replica_id.unique_id for replica in replicas}
        leaving = [
            replica
            for replica in self.curr_replicas.values()
            if replica.replica_id.unique_id in listing.kept and replica.replica_id.unique_id not in listed
        ]
        super().update_replicas([*replicas, *leaving])
        for watcher in listing.watchers:
            watcher(listed)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replica that a call names, as the only choice.

        Where Ray Serve has no call to route, or the caller is gone, any choice makes it look for the next one.
        """
        if pending_request is None or pending_request.future.done():
            await asyncio.sleep(LOOK_S)  # Ray Serve does not wait itself while other calls are under way
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        name = pending_request.kwargs.get("replica")
        if name is None:
            return [candidate_replicas]
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        if not named:
            # A call that waited would keep one of the few places in which Ray Serve routes calls.
            pending_request.future.set_exception(EngineDeadError(f"replica {name} is gone"))
            return [candidate_replicas]
        return [named]
