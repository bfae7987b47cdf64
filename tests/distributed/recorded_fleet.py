"""A fleet whose links to replicas are recorded instead of being Ray's."""

import asyncio
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from pagemill import SamplingParams
from pagemill.config import EngineConfig
from pagemill.distributed import fleet as fleet_module
from pagemill.distributed.fleet import Fleet
from pagemill.engine.messages import (
    EngineReady,
    EngineRequest,
    SequenceOutput,
)
from pagemill.engine.queries import StatsQuery
from pagemill.engine.stats import EngineStats, TenantStats
from pagemill.errors import EngineDeadError, EngineStoppedError, InvalidRequestError
from pagemill.frontend.supervisor import RestartLimits
from pagemill.tenant_limits import TenantLimits

FACTS = EngineReady(
    vocab_size=100, max_model_len=256, max_num_seqs=4, longest_sequence=256, tenants=["default"], block_size=16,
    num_frames=64, kv_bytes=1 << 20, kv_memory=1 << 20, eos_token_ids=[0], hidden_size=8, model="m", kv_format="f",
)  # fmt: skip


def stats(count=0, **more):
    """Returns statistics in which so much has been counted, of one tenant."""

    def of(kind, **more):
        needed = {field.name: 0 for field in msgspec.structs.fields(kind) if field.required}
        return kind(**needed | more)

    tenant = of(TenantStats, preemptions=count, running=1, tier_blocks={}, max_blocks=None, limits=TenantLimits())
    counted = {"steps": count, "stalled_s": float(count), "fetches_failed": {"cut": count}}
    return of(EngineStats, **counted, accepted_per_position=[count], running=1, tenants={"team": tenant}, **more)


class RecordedLink:
    """Stands for a `ReplicaLink`, and records what its user sends: there is no replica behind it. answers: clear it to
    hold back answers. refusal: the error that is the answer to all that is asked. count, num_frames: how much its
    engine has counted, and the frames of its pool."""

    opened: ClassVar[list] = []

    def __init__(self, name, front_end, handle, user):
        self.name, self._user = name, user
        self.death, self.facts, self.closing, self.engine_died = None, None, False, False
        self.sent, self.asked, self.answers = [], [], asyncio.Event()
        self.answers.set()
        self.count, self.num_frames, self.refusal = 0, 64, None
        self.opened.append(self)

    def come(self):
        self.facts = msgspec.structs.replace(FACTS, peer_address=f"{self.name}:1")
        self._user.note_facts(self, self.facts)

    def send(self, message):
        if getattr(message, "prompt_token_ids", [])[:1] == [99]:
            raise InvalidRequestError("this cannot be encoded")
        self.sent.append(message)

    async def ask(self, query):
        self.asked.append(query)
        await self.answers.wait()
        if self.death is not None:
            raise self.death
        if self.refusal is not None:
            raise self.refusal
        return stats(self.count, frames=self.num_frames) if isinstance(query, StatsQuery) else FACTS

    async def close(self):
        self.die("closed")

    def die(self, why="killed", *, engine_died=False):
        self.death, self.engine_died = EngineDeadError(why), engine_died
        self._user.note_end(self)

    def bring(self, request_id, **more):
        output = SequenceOutput(request_id=request_id, index=0, new_token_ids=[7], **more)
        self._user.note_outputs(self, [output])

    @property
    def requests(self):
        return [each.request_id for each in self.sent if isinstance(each, EngineRequest)]


def request(request_id, first=1, **more):
    return EngineRequest(
        request_id=request_id, prompt_token_ids=[first] * 20, params=SamplingParams(max_tokens=9), arrival_s=0.0, **more
    )


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Handle:
    """The deployment's, of which nothing is called but what makes Ray Serve list the replicas."""

    class wait_ready:
        @staticmethod
        async def remote(replica):
            pass


def run(monkeypatch, scenario, restarts=None, names=("a",), prefill_replicas=0):
    """Runs a scenario with a fleet of these replicas, which have come."""
    monkeypatch.setattr(fleet_module, "ReplicaLink", RecordedLink)
    monkeypatch.setattr(RecordedLink, "opened", [])

    async def all_of_it():
        fleet = Fleet(EngineConfig(model="m"), Handle, "round-robin", restarts or RestartLimits(), prefill_replicas)
        loading = asyncio.create_task(fleet.load(lambda done, total: None))
        await settle()
        fleet.note_listed({*names})
        for link in [*RecordedLink.opened]:
            link.come()
        await asyncio.wait_for(loading, 5)
        await settle()
        received = []
        frontend = SimpleNamespace(
            received=received, receive=received.extend, num_sent_again=0, made_pins=SimpleNamespace(requests=list)
        )
        running = asyncio.create_task(fleet.run(frontend))
        await settle()
        await scenario(fleet, {link.name: link for link in RecordedLink.opened}, frontend)
        await fleet.close()
        with pytest.raises(EngineStoppedError):
            await running

    asyncio.run(all_of_it())


async def failures(frontend):
    await settle()
    return [each for each in frontend.received if each.error is not None]
