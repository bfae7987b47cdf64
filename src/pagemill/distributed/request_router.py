"""NamedReplicaRouter: Ray Serve's request router for engines. A call goes to the replica that it names.

Which replica that is has been decided before, by the `Router`, from what only a front end knows: tokens, and what
replicas hold. Ray Serve still says which replicas there are, and this class passes it on to whoever watches.

A call that names its replica does not pass Ray Serve's routing tasks, since these lose calls (2.55.1;
ray-project/ray, pull request 66325). A task takes a call from `_pending_requests_to_route`, then forgets those that are
done at the head of `_pending_requests_to_fulfill`, and ends if there are now more tasks than calls left. The call that
it has taken is in no queue of calls to route then, and no other task looks for it, unless `FIFOMixin` gives a replica
to any call that waits. Without that mixin Ray's own base class loses calls, whatever `choose_replicas` does.
"""

from __future__ import annotations

import asyncio

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pagemill.distributed import listing
from pagemill.errors import EngineDeadError

AGAIN_S = 0.05
"""Seconds after which a call that a replica has rejected, or that broke off, is sent to it again."""


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
        """Returns all replicas, for a call that names none."""
        return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Returns the replica that a call names, at once. Raises `EngineDeadError` if it is not there."""
        name = pending_request.kwargs.get("replica")
        if name is None:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_retry:
            await asyncio.sleep(AGAIN_S)
        for replica in self.curr_replicas.values():
            if replica.replica_id.unique_id == name:
                return replica
        raise EngineDeadError(f"replica {name} is gone")
