"""Random schedules of faults between a front end and its replicas: every request ends once, with its own tokens.

Replicas are killed, cut off, slowed down, listed and listed no more; calls are lost, and connections past Ray break,
carry nothing or cannot be made; the front end is restarted. Blocks travel between replicas meanwhile, with partitions
between two of them, slow links, transfers that are cut, stopped, changed or dripping in the middle, and replicas that
tell of blocks that they do not have, or give others. `make test-faults` draws thousands of schedules.
"""

import asyncio
import logging
import os
import random
from collections import Counter, deque

import pytest
from simulated_engine import answer
from simulated_fleet import Client, SimulatedRay, run

from pagemill import SamplingParams
from pagemill.engine.messages import EngineRequest
from pagemill.tenant_limits import TenantLimits

SEEDS = range(int(os.environ.get("PAGEMILL_FAULT_SCHEDULES", "30")))
BUSY_S, QUIET_S = 40.0, 150.0
FAULTS = ["kill", "kill", "cut", "cut", "slow", "lose", "break", "stall", "reach", "add", "unlist", "list", "restart"]
FAULTS += ["part", "part", "fetch", "fetch", "fetch", "throttle", "throttle", "lie"]
RETRYABLE = "EngineRestartingError"
LIMITS = {"team": TenantLimits(max_running=3, guaranteed_blocks=20)}


async def serve(client, draw, mine):
    """Asks for answers, several at once that go on behind another one, and gives some of them up."""
    known, before = deque([[]], maxlen=8), []
    for number in range(mine):
        if draw.random() < 0.2:
            await asyncio.sleep(draw.expovariate(0.2 * mine / BUSY_S))
            before = draw.choice(known)[:110]
        request = EngineRequest(
            request_id=f"q{number}#1",
            prompt_token_ids=before + [draw.randrange(97) for _ in range(draw.randrange(1, 40))],
            params=SamplingParams(n=draw.choice([1, 1, 1, 2]), max_tokens=draw.randrange(1, 100)),
            arrival_s=asyncio.get_running_loop().time(),
            seed=draw.getrandbits(40),
            tenant=draw.choice(["default", "team"]),
            cache_salt=draw.choice(["", "", "salt"]),
        )
        client.submit(request)
        known.append(request.prompt_token_ids + answer(request, 0)[0])
        if draw.random() < 0.1:
            loop = asyncio.get_running_loop()
            loop.call_later(draw.uniform(0, 2), lambda one=request.request_id: give_up(client, one))


def give_up(client, request_id):
    client.asked.pop(request_id, None)
    client.fleet.abort([request_id])


async def disturb(ray, draw, restart):
    """Kills, cuts off, slows down, adds and takes away replicas, and restarts the front end, at random."""
    loop, until_s = asyncio.get_running_loop(), asyncio.get_running_loop().time() + BUSY_S
    while loop.time() < until_s:
        await asyncio.sleep(draw.expovariate(1 / 2.5))
        alive = [peer for peer in ray.peers.values() if not peer.gone.is_set()]
        peer = draw.choice(alive) if alive else None
        what = draw.choice(FAULTS)
        if what == "restart":
            if draw.random() < 0.3:
                await restart()
        elif what == "add" or peer is None:
            if len(alive) < 5:
                await ray.start()
        elif what == "kill":
            peer.kill()
            loop.call_later(draw.uniform(0, 3), lambda one=peer: ray.list(ray.listed - {one.name}))
            if draw.random() < 0.8:
                loop.call_later(draw.uniform(0.5, 5), lambda: asyncio.ensure_future(ray.start()))
        elif what == "cut":
            peer.whole.clear()
            loop.call_later(draw.choice([0.3, 2, 12, 45]), peer.whole.set)
        elif what == "slow":
            peer.delay_s, peer.replica.engine.pace = draw.choice([0.0, 0.05, 0.4]), draw.choice([0.5, 1.0, 4.0])
        elif what == "lose":
            peer.lost = draw.choice([0.0, 0.1, 0.4])
        elif what == "break":
            ray.network.break_off(peer)
            ray.links.break_off(peer.name)
        elif what == "stall":
            peer.flowing.clear()
            loop.call_later(draw.choice([2, 45]), peer.flowing.set)
        elif what == "reach":
            peer.reached = draw.random() < 0.5
        elif what == "part":
            pair = frozenset({peer.name, draw.choice(alive).name})
            ray.links.apart.add(pair)
            loop.call_later(draw.choice([0.3, 2, 12, 45]), ray.links.apart.discard, pair)
        elif what == "fetch":
            ray.links.faults[peer.name] = draw.choice(["cut", "stop", "change", "drip"]), draw.randrange(9000)
        elif what == "throttle":
            bytes_per_s = draw.choice([1e6, 5e3, 1200])
            for each in draw.choice([[peer], alive]):
                each.bytes_per_s = bytes_per_s
        elif what == "lie":
            peer.replica.engine.claims = draw.random() < 0.5
            if peer.blocks is not None:
                peer.blocks.served.lie = draw.choice([None, "another", "none"])
        elif what == "unlist":
            ray.list(ray.listed - {peer.name})
        else:
            ray.list({*ray.listed, peer.name})


async def one_schedule(seed, ray):
    draw, clients = random.Random(seed), []

    async def begin():
        clients.append(Client(ray, LIMITS))
        starting = asyncio.create_task(clients[-1].start())
        while not starting.done():
            await asyncio.sleep(0.1)
            if not any(not ray.peers[name].gone.is_set() for name in ray.listed):
                await ray.start()
        await starting

    async def restart():
        serving[-1].cancel()
        clients[-1].kill()
        await begin()
        serving.append(asyncio.create_task(serve(clients[-1], draw, 20)))

    for _ in range(3):
        await ray.start()
    await begin()
    serving = [asyncio.create_task(serve(clients[-1], draw, 40))]
    await disturb(ray, draw, restart)
    for peer in ray.peers.values():  # the faults end; those that run are listed
        peer.heal()
    await ray.start()
    ray.list({name for name, peer in ray.peers.items() if not peer.gone.is_set()})
    await asyncio.gather(*serving, return_exceptions=True)
    await asyncio.sleep(QUIET_S)
    check(clients[-1], ray)
    await clients[-1].close()
    assert ray.served() >= ray.fetched()["fetched"]
    for peer in ray.peers.values():
        assert peer.replica.engine.wrong == []
        if not peer.gone.is_set():
            assert peer.replica.front_ends == {}
            if peer.blocks is not None:
                peer.blocks.check()
            await peer.replica.engine.close()


def check(client, ray):
    """Sees that every answer is right and ends once, and that nothing is left of any."""
    for request in client.asked.values():
        for index in range(request.params.n):
            at = request.request_id, index
            tokens, reason = answer(request, index)
            assert client.ends.get(at) in (reason, RETRYABLE), (at, client.ends.get(at), request.tenant)
            got = client.tokens.get(at, [])
            assert got == tokens if client.ends[at] == reason else got == tokens[: len(got)]
    fleet = client.fleet
    assert len(fleet._flights) == 0  # noqa: SLF001
    assert fleet._tenancy.count_held() == {}  # noqa: SLF001
    assert fleet._tenancy.shares.guaranteed_here("another") == {"team": 20}, "all is left"  # noqa: SLF001
    for name in fleet._router.replicas:  # noqa: SLF001
        assert fleet._router.work_s(name) < 1e-9  # noqa: SLF001
    for peer in ray.peers.values():
        if not peer.gone.is_set():
            assert peer.replica.engine.running == [], peer.name
            assert len(peer.replica.front_ends) <= 1


def run_schedule(monkeypatch, seed):
    """Returns how many connections past Ray were made, and what became of blocks that were wanted of peers."""
    try:
        ray = SimulatedRay(seed)
        run(monkeypatch, ray, lambda loop: one_schedule(seed, ray))
    except BaseException as error:
        raise AssertionError(f"schedule {seed} went wrong") from error
    return ray.fetched() + Counter(connections=ray.network.made)


@pytest.mark.parametrize("part", range(2))
def test_every_request_ends_once_with_its_own_tokens_whatever_fails(monkeypatch, caplog, part):
    caplog.set_level(logging.CRITICAL)
    came = sum((run_schedule(monkeypatch, seed) for seed in SEEDS[part::2]), Counter())
    assert came.keys() >= {"connections", "fetched", "cut", "missing", "slow"}
