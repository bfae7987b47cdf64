"""Engines whose blocks have sunk to disk: requests go to the replica whose disk holds their prefix."""

import asyncio
import time

import pytest
from benchmarks.fleet_here import fleet_of, replicas_here

from pagemill.config import EngineConfig
from pagemill.distributed import fleet as fleet_module
from pagemill.distributed.replica import split_digests
from pagemill.distributed.routing import Router
from pagemill.engine.messages import EngineRequest, name_in_memory, name_on_disk
from pagemill.memory.digest import extend_chain, namespace_root
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams
from shallow import FRAME_BYTES

LENGTH, BLOCKS = 200, 12
POOL, HOST = 30, 6
"""Frames: of three prompts and less than one."""


class PlacingRouter(Router):
    """Sends requests named "replica:…" to that replica, and others where the router says."""

    def route(self, request_id, asked, at=None):
        name = request_id.partition(":")[0]
        return super().route(request_id, asked, name if name in self.replicas else at)


@pytest.fixture(autouse=True)
def placing(monkeypatch):
    monkeypatch.setattr(fleet_module, "Router", PlacingRouter)


def asked(name, prompt):
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())


def names(facts, prompt, kind):
    chain = []
    root = namespace_root(Namespace(), facts.fingerprint, facts.kv_format_name, facts.numerics)
    extend_chain(chain, root, prompt, facts.block_size)
    return {kind(digest) for digest in chain}


def told(fleet, name):
    known = set()
    for held in fleet.held[name]:
        known.difference_update(split_digests(held.removed))
        known.update(split_digests(held.stored))
    return known


async def until_on_disk(fleet, homes):
    """Waits until replicas have told that these prompts are on their disks; then nothing of them is in memory."""
    deadline_s = time.monotonic() + 60
    for home, prompt in homes:
        while not names(fleet.facts, prompt, name_on_disk) <= told(fleet, home):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)
        assert not names(fleet.facts, prompt, name_in_memory) & told(fleet, home)


async def figures(fleet, name):
    """Returns a figure of each replica's."""
    return {each: getattr(await replica.stats(), name) for each, replica in fleet.replicas.items()}


async def ask(fleet, name, prompt):
    """Returns which replica has answered, and how many tokens of the prompt it has found."""
    before = await figures(fleet, "generated_tokens")
    answer = await fleet.answer(asked(name, prompt))
    after = await figures(fleet, "generated_tokens")
    return next(each for each in after if after[each] > before[each]), answer.num_cached_tokens


def prompt_of(number):
    return [*range(1000 + number * LENGTH, 1000 + (number + 1) * LENGTH)]


def config(model, folder, **more):
    return EngineConfig(
        model=str(model), dtype="float32", max_model_len=352, max_num_seqs=2,
        kv_memory=POOL * FRAME_BYTES, kv_host_memory=HOST * FRAME_BYTES, kv_disk_memory="1GiB",
        kv_disk_path=str(folder), num_threads=1, **more,
    )  # fmt: skip


def test_a_prefix_that_lies_on_a_disk_alone_draws_its_request_there_after_a_restart_too(shallow_path, tmp_path):
    configs = {name: config(shallow_path, tmp_path / name) for name in ("a", "b")}
    homes = {number: "ab"[number % 2] for number in range(4)}
    prompts = [prompt_of(number) for number in homes]

    async def first_life():
        async with replicas_here(configs) as replicas, fleet_of(replicas, configs["a"]) as fleet:
            for number in range(12):
                home = "ab"[number % 2]
                assert await ask(fleet, f"{home}:{number}", prompt_of(number)) == (home, 0)
            await until_on_disk(fleet, [(homes[number], prompts[number]) for number in homes])
            for number in (1, 0, 3, 2):
                assert await ask(fleet, f"again {number}", prompts[number]) == (homes[number], BLOCKS * 16)
            assert all((await figures(fleet, "blocks_loaded")).values())

    async def second_life():
        async with replicas_here(configs) as replicas, fleet_of(replicas, configs["a"]) as fleet:
            await until_on_disk(fleet, [(homes[number], prompts[number]) for number in homes])
            for number in (3, 2, 1, 0):
                assert await ask(fleet, f"later {number}", prompts[number]) == (homes[number], BLOCKS * 16)

    asyncio.run(first_life())
    asyncio.run(second_life())


def test_replicas_that_share_a_folder_both_tell_what_lies_there(shallow_path, tmp_path):
    async def run():
        configs = {name: config(shallow_path, tmp_path) for name in ("a", "b")}
        async with replicas_here(configs) as replicas, fleet_of(replicas, configs["a"]) as fleet:
            for number in range(12):
                await fleet.answer(asked(f"{'ab'[number % 2]}:{number}", prompt_of(number)))
            await until_on_disk(fleet, [(name, prompt_of(number)) for name in ("a", "b") for number in range(2)])

    asyncio.run(run())
