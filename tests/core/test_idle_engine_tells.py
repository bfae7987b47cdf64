"""An engine process without work tells who routes what still comes and goes, and sleeps where nothing does."""

import asyncio
import time
from pathlib import Path

from drive import request

from pagemill.config import EngineConfig
from pagemill.distributed.replica import split_digests
from pagemill.engine.messages import DIGEST_BYTES
from pagemill.engine.queries import BlocksQuery
from pagemill.frontend.process_client import ProcessClient
from pagemill.memory.digest import extend_chain, namespace_root
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams
from pagemill.tenant_limits import TenantLimits
from shallow import FRAME_BYTES

IDLE_S = 2.0
TOLD_S = 30.0
"""Seconds in which what has left is told, on a machine that has other things to do."""
LENGTH, HOST_FRAMES = 200, 5
NAMESPACE = Namespace()


def wakes(pid: int) -> int:
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])


def test_blocks_that_leave_while_nothing_runs_are_told(shallow_path):
    """Cached blocks go to host memory once nobody has used them for two seconds; that has room for some of them."""
    config = EngineConfig(
        model=str(shallow_path), dtype="float32", max_model_len=1024, max_num_seqs=8, kv_memory=200 * FRAME_BYTES,
        kv_host_memory=HOST_FRAMES * FRAME_BYTES, tenants={"default": TenantLimits(idle_timeout_s=IDLE_S)},
    )  # fmt: skip
    told, told_s = set(), [0.0]

    def note(held):
        told.difference_update(split_digests(held.removed))
        told.update(split_digests(held.stored))
        told_s[0] = time.monotonic()

    async def run():
        client = ProcessClient(config, note)
        await client.load(lambda done, total: None)
        try:
            text = [*range(1000, 1000 + LENGTH)]
            client.submit(request("r", text, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)))
            while not any(one.finish_reason for one in await client.receive()):
                pass
            over_s, listening = time.monotonic(), asyncio.create_task(client.receive())
            while told_s[0] <= over_s:
                await asyncio.sleep(0.05)
                assert time.monotonic() < over_s + IDLE_S + TOLD_S, "nothing has been told since"
            await asyncio.sleep(1.0)
            left, before = set(told), wakes(client.pid)
            await asyncio.sleep(1.5)
            assert wakes(client.pid) - before <= 2, "it wakes for the idle timeout alone"
            chain, facts = [], client.facts
            root = namespace_root(NAMESPACE, facts.fingerprint, facts.kv_format_name, facts.numerics)
            extend_chain(chain, root, text, 16)
            found = sum((await client.ask(BlocksQuery(text, *NAMESPACE))).by_tier.values())
            assert 0 < found <= HOST_FRAMES
            assert left == {digest[:DIGEST_BYTES] for digest in chain[:found]}
            listening.cancel()
        finally:
            await client.close()

    asyncio.run(run())
