"""A replica's engine among its front ends, without Ray: what each sees, in which order, and what ends with it."""

import asyncio
import time

import msgspec

from pagemill import SamplingParams
from pagemill.config import config_for
from pagemill.distributed.messages import OUTBOUND, Batch
from pagemill.distributed.replica import EngineReplica
from pagemill.engine.messages import EngineRequest, StepOutputs
from pagemill.engine.queries import Answer, Question, SequencesQuery, SetTenant
from pagemill.engine.wire import encode
from pagemill.hub import resolve_model
from pagemill.tenant_limits import TenantLimits


def batch(*messages):
    return encode(Batch(time.monotonic(), [msgspec.Raw(encode(each)) for each in messages]))


def request(request_id, tokens=900, **more):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=[1, 2, 3], params=params, arrival_s=time.monotonic(), **more
    )


class Replica(EngineReplica):
    """One that nobody but its test ends: Ray Serve awaits what a collection would only call."""

    def __del__(self):
        pass


class FrontEnd:
    def __init__(self, replica, name):
        self.replica, self.name, self.numbers = replica, name, iter(range(1, 100))
        self.stream = replica.outputs(name, "r")

    async def send(self, *messages):
        await self.replica.send(self.name, next(self.numbers), batch(*messages), "r")

    async def wait_for(self, matches):
        async for data in self.stream:
            for message in OUTBOUND.decode(data).messages:
                if (found := matches(message)) is not None:
                    return found

    async def ask(self, number, query):
        await self.send(Question(number, query))
        return await self.answer(number)

    async def answer(self, number):
        return await self.wait_for(
            lambda message: message.answer if isinstance(message, Answer) and message.id == number else None
        )


async def scenario(replica):
    one, other = FrontEnd(replica, "one"), FrontEnd(replica, "other")
    for each in (one, other):
        await each.wait_for(lambda message: message)  # its facts
    # A question goes before a request behind it: the tenant is known by then.
    await one.send(Question(1, SetTenant("team", TenantLimits())), request("q#1", tenant="team"))
    assert "team" in (await one.answer(1)).tenants
    error = await one.wait_for(
        lambda message: (message.outputs[0].error or False) if isinstance(message, StepOutputs) else None
    )
    assert error is False
    assert [each.request_id for each in (await one.ask(2, SequencesQuery())).sequences] == ["q#1"]
    assert (await other.ask(1, SequencesQuery())).sequences == []
    await other.send(request("short#1", 1))
    await other.wait_for(
        lambda message: True if isinstance(message, StepOutputs) and message.outputs[0].finish_reason else None
    )
    await one.stream.aclose()  # the front end is gone
    deadline = time.monotonic() + 10
    while (stats := await replica.stats()).running:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert stats.generated_tokens < 900


def test_front_ends_see_their_own_requests_which_end_with_them():
    async def run():
        settings = {"kv_memory": "64MiB", "max_model_len": 1024, "num_threads": 1}
        config = config_for("a replica", "smollm2-135m", settings)
        config.model = str(resolve_model("smollm2-135m"))
        replica = object.__new__(Replica)
        await replica.__init__(config, None)
        try:
            await scenario(replica)
        finally:
            await EngineReplica.__del__(replica)

    asyncio.run(run())
