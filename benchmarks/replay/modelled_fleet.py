"""Runs simulated engines as a fleet: the router that serves chooses, blocks travel, prompts may be computed apart.

Steps, transfers and arrivals happen in one simulated time. What a replica holds, and how long its work takes, reaches
the router after each of its steps, as in `engine.publishing`; that takes no time here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from benchmarks.replay.peer_blocks import Network, PeerBlocks

from pagemill.distributed.route import Asked
from pagemill.distributed.routing import Router, RoutingPolicy
from pagemill.engine.messages import DIGEST_BYTES
from pagemill.memory.digest import extend_chain
from pagemill.planner.replica import Setup
from pagemill.scheduling.pacing import Pacer
from pagemill.scheduling.sequence import SequenceUpdate
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.engine import OUTPUT_TOKENS, ROOT, SimulatedEngine, Step
from pagemill.simulate.simulator import Replay, Served
from pagemill.simulate.step_time import StepModel
from pagemill.simulate.trace import TracedRequest

Choose = Callable[[TracedRequest, Sequence[int]], int]
"""A function that returns the number of the replica that a request goes to, by how many each has under way."""


@dataclass
class Part:
    """Is what one replica does of a request. prefills: it computes the prompt and the first token, and no more."""

    replica: int
    prefills: bool


class Replica:
    """An engine, what it tells the router, and the step that it is in."""

    def __init__(self, engine: SimulatedEngine, peers: PeerBlocks | None, pacer: Pacer) -> None:
        self.engine = engine
        self.peers = peers
        self.pacer = pacer
        self.step: Step | None = None
        self.ends_s = 0.0
        self.computed = 0
        """Tokens of prompts."""

    @property
    def under_way(self) -> int:
        scheduler = self.engine.scheduler
        return scheduler.num_running + scheduler.num_waiting

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Notes a step, as an observer."""
        prompts = plan.num_tokens - plan.num_generating
        self.computed += prompts
        self.pacer.note_step(seconds, prompts, plan.num_generating)


class ModelledFleet:
    """replicas: how many there are. prefill_replicas: those of them that compute prompts alone.

    network: joins them; None: no blocks travel.
    policy: the router's. choose: takes its place, if given; the router then keeps count only.
    """

    def __init__(
        self,
        setup: Setup,
        step_times: StepModel,
        replicas: int,
        *,
        network: Network | None = None,
        prefill_replicas: int = 0,
        policy: RoutingPolicy = "least-work",
        choose: Choose | None = None,
    ) -> None:
        self.outcome = Replay()
        self.router = Router(setup.block_size, policy, prefill_replicas)
        self._choose = choose
        self._size = setup.block_size
        self._parts: dict[int, Part] = {}
        self._chains: dict[int, list[bytes]] = {}
        self._firsts: dict[int, list[int]] = {}
        self._events: list[tuple[float, int, int]] = []
        self._order, tokens = count(), count(OUTPUT_TOKENS)
        memories = [setup.memory(step_times, records_events=True) for _ in range(replicas)]
        self.replicas: list[Replica] = []
        for number, memory in enumerate(memories):
            peers = None if network is None else PeerBlocks(network, number, memories)
            scheduler = setup.scheduler(memory, tier=peers)
            observers = [lambda plan, seconds, number=number: self.replicas[number].note(plan, seconds)]
            engine = SimulatedEngine(
                scheduler, step_times, self._request, observe=observers, tokens=tokens, source=peers
            )
            self.replicas.append(Replica(engine, peers, Pacer(setup.max_num_batched_tokens)))
            self.router.add(str(number), setup.max_num_seqs, str(number))

    def _request(self, number: int) -> TracedRequest:
        return self.outcome.served[number].request

    def run(self, trace: Sequence[TracedRequest]) -> Replay:
        """Serves the trace until all have ended."""
        served, events, deadlines = self.outcome.served, self._events, list[tuple[float, int]]()
        engines = [replica.engine for replica in self.replicas]
        now = 0.0
        while events or len(served) < len(trace):
            arrival_s = trace[len(served)].arrival_s if len(served) < len(trace) else math.inf
            if arrival_s <= (events[0][0] if events else math.inf):
                now, number = max(now, arrival_s), len(served)
                served.append(Served(trace[number]))
                heappush(deadlines, (trace[number].deadline_s, number))
                self._chain(number)
                self._send(number, now)
                continue
            now, _, at = heappop(events)
            for number in self.outcome.end_late(deadlines, now, engines):
                self.router.end(str(number))
            self._wake(at, now)
        self.outcome.end_s = now
        self.outcome.preemptions = sum(engine.scheduler.preemptions for engine in engines)
        assert not any(engine.scheduler.has_work() for engine in engines), "requests wait, and nothing can run"
        return self.outcome

    def _chain(self, number: int) -> None:
        self._chains[number] = []
        extend_chain(self._chains[number], ROOT, self._request(number).prompt(), self._size)

    def _send(self, number: int, now: float) -> None:
        """Sends a request, or what is left of it, where the router says."""
        request, first = self._request(number), self._firsts.get(number, [])
        chain = self._chains[number]
        asked = Asked(
            request.prompt_len + len(first),
            [digest[:DIGEST_BYTES] for digest in chain],
            request.output_len * request.num_sequences,
        )
        route = None
        if not first and request.num_sequences == 1 and request.output_len > 1:
            route = self.router.route_prompt(str(number), asked)
        part = Part(0, prefills=route is not None)
        at = None
        if self._choose is not None:
            at = str(self._choose(request, [replica.under_way for replica in self.replicas]))
        route = route or self.router.route(str(number), asked, at)
        assert route is not None
        part.replica = int(route.replica)
        self._parts[number] = part
        replica = self.replicas[part.replica]
        if replica.peers is not None and route.holder is not None:
            replica.peers.note_held(int(route.holder), chain[: route.held_blocks])
        if not replica.engine.submit(number, most=1 if part.prefills else None, answered=first):
            self.outcome.served[number].refused = True
            self.router.end(str(number))
        elif replica.step is None:
            self._plan_wake(part.replica, now)

    def _plan_wake(self, at: int, when_s: float) -> None:
        heappush(self._events, (when_s, next(self._order), at))

    def _wake(self, at: int, now: float) -> None:
        """Ends the step that a replica is in, if it is over, and begins the next one."""
        replica = self.replicas[at]
        if replica.step is not None:
            if now < replica.ends_s:
                return
            step, replica.step = replica.step, None
            handed_over = [number for update in replica.engine.end(step, now) for number in self._note(update, now)]
            self._tell(at)
            for number in handed_over:
                self._send(number, now)
        step = replica.engine.begin(now)
        if step.plan is None:
            if replica.peers is not None and replica.peers.next_s < math.inf:
                self._plan_wake(at, replica.peers.next_s)
            return
        self.outcome.note_step(step, replica.engine.scheduler.num_running)
        replica.step, replica.ends_s = step, now + step.waits_s + step.seconds
        self._plan_wake(at, replica.ends_s)

    def _note(self, update: SequenceUpdate, now: float) -> list[int]:
        """Takes in what a step brought. Returns the request's number if it is to go on elsewhere."""
        number = update.sequence.request.seed
        goes_on = self._parts[number].prefills and update.finish_reason is not None
        if goes_on:
            update.finish_reason = None
        self.outcome.note(update, now)
        self.router.note_tokens(str(number), len(update.tokens))
        if goes_on:
            self.router.end(str(number), whole=False)
            self._firsts[number] = update.tokens
            return [number]
        if self.outcome.served[number].finished_s is not None:
            self.router.end(str(number))
        return []

    def _tell(self, at: int) -> None:
        """Tells the router what a replica holds, and how long its work takes."""
        replica = self.replicas[at]
        stored, removed = replica.engine.scheduler.memory.take_events()
        short = [[digest[:DIGEST_BYTES] for digest in each] for each in (stored, removed)]
        self.router.note_events(str(at), *short)
        fetch_s = {} if replica.peers is None else {str(peer): line for peer, line in replica.peers.fetch_times.items()}
        pacer = replica.pacer
        self.router.note_times(str(at), pacer.mean_token_s, pacer.plain_s, fetch_s, tokens=pacer.told_tokens)
