"""Fleet: the client of several replicas of one engine, and who keeps requests going where one of them dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pagemill.config import EngineConfig
from pagemill.distributed import listing
from pagemill.distributed.answers import Answers, is_loss, repeat
from pagemill.distributed.changes import Changes
from pagemill.distributed.fleet_pins import FleetPins
from pagemill.distributed.fleet_tenancy import FleetTenancy, Wanted
from pagemill.distributed.flights import Flight, Flights
from pagemill.distributed.losses import Losses
from pagemill.distributed.merging import add_held, merge
from pagemill.distributed.peers import Peers
from pagemill.distributed.replica import split_digests
from pagemill.distributed.replica_link import ReplicaLink, is_refusal
from pagemill.distributed.route import Asked
from pagemill.distributed.routing import Router, RoutingPolicy
from pagemill.engine.messages import (
    AbortRequests,
    EngineReady,
    EngineRequest,
    FinishSequences,
    Held,
    SequenceOutput,
    refusals,
)
from pagemill.engine.queries import Query, SetTenant, Unpin
from pagemill.engine.stats import EngineStats
from pagemill.errors import (
    EngineRestartingError,
    EngineStoppedError,
    InvalidRequestError,
    PagemillError,
    TooManyWaitingError,
)
from pagemill.frontend.frontend import Frontend
from pagemill.frontend.supervisor import OUTPUTS_AT_ONCE, RestartLimits
from pagemill.namespace import Namespace

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

LOGGER = logging.getLogger(__name__)

LINK_AGAIN_S = 0.5
"""Seconds after which a replica is tried again that Ray Serve lists, and to which a connection was lost."""
NO_REPLICA_S = 120.0
"""The longest time that requests wait where no replica is left."""

A = TypeVar("A")


class Fleet:
    """A `ServedEngine` of many, and its own `EngineKeeper`. Belongs to one event loop, but for its construction.

    A request goes where the `Router` says. Queries go to all replicas, and their answers become one; what changes an
    engine is done again by each replica that comes later.
    """

    def __init__(
        self,
        config: EngineConfig,
        handle: DeploymentHandle[Any],
        policy: RoutingPolicy,
        restarts: RestartLimits,
        prefill_replicas: int = 0,
    ) -> None:
        """handle: of the replicas' deployment. restarts: how many replicas may be lost before requests wait no more for
        another where none is left. prefill_replicas: how many compute prompts alone."""
        self.ended: PagemillError | None = None
        self.interrupted: EngineRestartingError | None = None
        self.num_restarts = 0
        """Replicas that came after the first have been lost."""
        self._handle = handle
        self._policy = policy
        self._prefill_replicas = prefill_replicas
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._random = random.Random(config.seed)
        self._flights = Flights()
        self._tenancy = FleetTenancy(config.tenants)
        self._links: dict[str, ReplicaLink] = {}
        """Connections that are open, by replica: to those that take requests, and those that end what they have."""
        self._peers = Peers(self._links)
        self._taking_in: set[str] = set()
        """Replicas that are being brought to where the others are."""
        self._listed: set[str] = set()
        self._router: Router | None = None
        self._facts: EngineReady | None = None
        self._changes = Changes()
        self._pins = FleetPins(self._tenancy)
        self._losses = Losses(restarts)
        self._asked = Answers()
        self._patience: asyncio.TimerHandle | None = None
        """Ends the wait for a replica; None while there is one."""
        self._gave_up: str | None = None
        """The reason for which requests do not wait for a replica; None while they do."""
        self._frontend: Frontend | None = None
        self._incoming: asyncio.Queue[list[SequenceOutput]] = asyncio.Queue()
        self._loaded = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int:
        """Process id of this side: the engines are processes of their replicas."""
        return os.getpid()

    @property
    def facts(self) -> EngineReady:
        assert self._facts is not None
        return self._facts

    @property
    def max_num_seqs(self) -> int:
        return sum(link.facts.max_num_seqs for link in self._serving() if link.facts)

    async def load(self, on_progress: Callable[[int, int], None]) -> None:
        """Waits until one replica is there. Raises why there will be none."""
        self._loop = asyncio.get_running_loop()
        listing.watchers.append(self._list_from_router)
        self._keep(self._begin_routing())
        await self._loaded.wait()
        if self.ended is not None:
            raise self.ended

    async def run(self, frontend: Frontend) -> NoReturn:
        """Hands on what replicas bring, until `end`."""
        self._frontend = frontend
        while True:
            outputs = await self._incoming.get()
            if self.ended is not None:
                raise self.ended
            for first in range(0, len(outputs), OUTPUTS_AT_ONCE):
                frontend.receive(outputs[first : first + OUTPUTS_AT_ONCE])
                await asyncio.sleep(0)

    # Requests

    def submit(self, request: EngineRequest) -> None:
        if self.ended is not None:
            raise self.ended
        if request.seed is None and request.params.seed is None:
            request.seed = self._random.getrandbits(63)  # here, so that each replica that it is sent to takes the same
        try:
            self._tenancy.check(request.tenant, self.max_num_seqs)
        except TooManyWaitingError as refusal:
            self._incoming.put_nowait(refusals(request, refusal))
            return
        flight = self._flights.begin(request)
        if self._gave_up is not None:
            self._incoming.put_nowait(self._flights.fail(flight, self._gave_up))
            return
        try:
            self._send(flight)
        except InvalidRequestError:
            self._forget(request.request_id)
            raise

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            flight = self._flights.end(request_id)
            if flight is not None:
                self._tell(flight, AbortRequests([request_id]))
                self._leave(flight)

    def finish(self, sequences: list[tuple[str, int]]) -> None:
        at = [(each, self._flights.get(each[0])) for each in sequences]
        for sequence, flight in at:
            if flight is not None:
                self._tell(flight, FinishSequences([sequence]))
        for flight in self._flights.finish(sequences):
            if flight.began_again:
                self._tell(flight, AbortRequests([flight.asked.request_id]))
            self._leave(flight)

    async def ask(self, query: Query[A]) -> A:
        if (error := self.ended or self.interrupted) is not None:
            raise error
        is_change, asked, answers = Changes.is_one(query), set[str](), dict[str, Any]()
        while links := [link for link in self._serving() if link.name not in asked]:
            asked |= {link.name for link in links}
            answers |= await self._asked.ask(query, links)
            if not is_change and not all(map(is_loss, answers.values())):
                break  # else replicas that have come meanwhile do it too
        refusals = [each for each in answers.values() if isinstance(each, BaseException) and is_refusal(each)]
        good = {name: each for name, each in answers.items() if not isinstance(each, BaseException)}
        if is_change and refusals:
            raise refusals[0]
        if is_change and good:
            self._changes.remember(query)
            if isinstance(query, SetTenant):
                self._tenancy.set_limits(query.name, query.limits)
                for link, end in self._pins.note_limits(query.name, self._serving()):
                    self._keep(repeat(end, link))
                self._send_waiting()
        if isinstance(query, Unpin) and good:
            self._pins.remove(query.name, Namespace(query.tenant, query.cache_salt))
            self._send_waiting()
        if not good:
            raise next(iter(answers.values()), self._restarting("no replica"))
        merged: Any = merge([*good.values()])
        if isinstance(merged, EngineStats):
            merged = self._asked.stats.total(good.keys() | {link.name for link in self._serving()})
            add_held(merged, self._tenancy.count_held())
        answer: A = merged
        return answer

    # Life

    def end(self, error: PagemillError) -> None:
        self.ended = error
        self._incoming.put_nowait([])
        self._loaded.set()

    async def close(self, *, now: bool = False) -> None:
        """Ends the connections. The replicas are Ray Serve's to end, which it does once nothing is open to them."""
        if self.ended is None:
            self.end(EngineStoppedError())
        if self._list_from_router in listing.watchers:
            listing.watchers.remove(self._list_from_router)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(link.close() for link in [*self._links.values()]))

    # What links tell

    def note_facts(self, link: ReplicaLink, facts: EngineReady) -> None:
        """Takes a replica among those that get requests, once it has done what others were told."""
        if self._router is None:
            self._router = Router(facts.block_size, self._policy, self._prefill_replicas)
        if not self._router.knows(link.name):
            self._peers.compare(link.name, facts)
            self._router.add(link.name, facts.max_num_seqs, facts.peer_address)
            self._router.rest(link.name)
        self._admit(link)
        self._refresh()

    def note_held(self, link: ReplicaLink, held: Held) -> None:
        if self._router is not None and self._router.knows(link.name):
            self._router.note_events(link.name, split_digests(held.stored), split_digests(held.removed))
            times = (held.token_s, held.step_s, held.fetch_s, held.disk_s, held.tokens)
            self._router.note_times(link.name, *times)

    def note_outputs(self, link: ReplicaLink, outputs: list[SequenceOutput]) -> None:
        assert self._router is not None
        for end in self._pins.note_outputs(outputs):
            self._keep(repeat(end, link))
        ending = self._flights.ending(link.name, outputs)
        new, handed_over = self._flights.take(link.name, outputs), list[Flight]()
        for output in new:
            if output.new_token_ids:
                self._router.note_tokens(output.request_id, len(output.new_token_ids))
                self._tenancy.note_tokens(output.request_id, output.num_cached_tokens, len(output.new_token_ids))
            if (flight := self._flights.get(output.request_id)) is not None and flight.hands_over:
                handed_over.append(flight)
            if output.finish_reason is not None and self._flights.get(output.request_id) is None:
                self._end(output.request_id)
                ended = ending.get(output.request_id)
                if output.error is not None or (ended is not None and ended.began_again):
                    link.send(AbortRequests([output.request_id]))  # which may still compute some of it
                elif ended is not None and ended.asked.pin is not None:
                    self._pins.note_made(ended.asked, link, self._serving())
        if new:
            self._incoming.put_nowait(new)
        for flight in handed_over:
            self._router.end(flight.asked.request_id, whole=False)
            self._go_on(flight, "no replica goes on")
        if link.name not in self._listed:
            self._close_if_idle(link)

    def note_end(self, link: ReplicaLink) -> None:
        """Lets the requests of a replica that is gone go on elsewhere."""
        if self._links.get(link.name) is not link:
            return
        del self._links[link.name]
        listing.kept.discard(link.name)
        self._taking_in.discard(link.name)
        self._asked.leave(link)
        if self._router is not None and self._router.knows(link.name):
            self._router.remove(link.name)
        if self.ended is not None:
            return
        self._tenancy.shares.forget(link.name)
        self._pins.leave(link.name, self._serving())
        lost = self._flights.at(link.name)
        now = time.monotonic()
        if link.facts is not None and not link.closing:  # else it was tried again before Ray Serve had noticed
            self._losses.note(now)
            LOGGER.error("%s; requests that go on elsewhere: %d", link.death, len(lost))
        self._refresh()
        for flight in lost:
            self._tenancy.note_sent(flight.asked.request_id, None)
            flight.note_loss(now, engine_died=link.engine_died)
        for flight in sorted(lost, key=lambda flight: flight.is_suspect):  # an end lets others begin
            self._go_on(flight, str(link.death))
        self._send_waiting()
        self._check_losses()
        assert self._loop is not None
        self._loop.call_later(LINK_AGAIN_S, self._link_listed)

    # Replicas

    async def _begin_routing(self) -> None:
        """Makes Ray Serve list the replicas: it does so for a handle that is used."""
        await self._handle.wait_ready.remote(replica=None)

    def _list_from_router(self, names: set[str]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.note_listed, names)

    def note_listed(self, names: set[str]) -> None:
        """Takes the names of the replicas that Ray Serve lets take requests."""
        self._listed = names
        self._link_listed()
        for name, link in [*self._links.items()]:
            if name in names:
                self._admit(link)
                continue
            if self._router is not None:
                self._router.rest(name)
            self._close_if_idle(link)
        self._refresh()

    def _link_listed(self) -> None:
        if self.ended is None:
            for name in sorted(self._listed - self._links.keys()):
                listing.kept.add(name)
                front_end = f"{self._name}.{next(self._numbers)}"
                self._links[name] = ReplicaLink(name, front_end, self._handle, self)

    def _admit(self, link: ReplicaLink) -> None:
        """Begins to take a replica among those that get requests, if it is listed and not one of them."""
        if self._router is None or link.facts is None or link.closing or link.name not in self._listed:
            return
        if link.name not in self._router.replicas and link.name not in self._taking_in:
            self._taking_in.add(link.name)
            self._keep(self._take_in(link))

    async def _take_in(self, link: ReplicaLink) -> None:
        """Brings a replica to where the others are; then it gets requests, and what waits first."""
        done = 0
        while change := self._changes.next(done):
            done = change[0]
            await repeat(change[1], link)
        if self._links.get(link.name) is not link:  # it is gone, and another connection may have come
            return
        self._taking_in.discard(link.name)
        if link.closing or link.name not in self._listed:
            return
        assert self._router is not None
        self._router.resume(link.name)
        self._gave_up = None
        self.num_restarts += self._loaded.is_set() and self.num_restarts < self._losses.count
        self._refresh()
        self._pins.bring(link)
        self._loaded.set()
        self._send_waiting()

    def _close_if_idle(self, link: ReplicaLink) -> None:
        """Closes the connection to a replica that takes no more requests, once it has none."""
        if not link.closing and not self._flights.at(link.name):
            link.closing = True
            self._keep(link.close())

    def _serving(self) -> list[ReplicaLink]:
        """Returns the connections to replicas that take requests."""
        names = () if self._router is None else self._router.replicas
        return [self._links[name] for name in names if name in self._links]

    def _refresh(self) -> None:
        """Brings facts up to date, and whether anything can be asked."""
        facts = [link.facts for link in self._serving() if link.facts is not None]
        if facts:
            self._facts = merge(facts)
            self.interrupted = None
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None
        elif self._facts is not None:
            self.interrupted = self._restarting("no replica is left")
            if self._patience is None:
                assert self._loop is not None
                why = f"no replica has come in {NO_REPLICA_S:g} s"
                self._patience = self._loop.call_later(NO_REPLICA_S, self._give_up, why)

    def _check_losses(self) -> None:
        """Lets nothing wait for a replica where none is left and too many have been lost."""
        if not self._serving() and (why := self._losses.too_many(time.monotonic())) is not None:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        """Ends the requests that wait for a replica, and those that come before there is one."""
        LOGGER.error("%s; requests do not wait for one", why)
        self._gave_up = why
        for flight in self._flights.at(None):
            self._tenancy.end(flight.asked.request_id)
            self._incoming.put_nowait(self._flights.fail(flight, why))

    def _restarting(self, why: str) -> EngineRestartingError:
        return EngineRestartingError(f"{why}, and another is being started; send this again")

    # Where requests go

    def _send(self, flight: Flight) -> None:
        """Sends a request to the replica that the router says; it waits while there is none, and for its tenant's own
        limits. Raises `InvalidRequestError`."""
        asked, origin = flight.asked, None
        if asked.fork_of is not None and (forked := self._flights.get(asked.fork_of[0])) is not None:
            origin = forked.replica
        flight.replica, flight.hands_over, route = None, False, None
        if self._router is None:
            return
        pinned = self._pins.pinned(asked.tenant, self.facts)
        place = self._tenancy.place(asked.request_id, Wanted.of(asked, self.facts), self._router.replicas, pinned)
        if place is None:
            return
        work = Asked.of(asked, flight.tokens.get(0, ()) if flight.goes_on else (), self.facts)
        if flight.splits and not place and work.num_tokens + 1 < self.facts.max_model_len:
            route = self._router.route_prompt(asked.request_id, work)
        if not (prefills := route is not None):
            route = self._router.route(asked.request_id, work, place or origin)
        if route is None:
            return
        sent = self._flights.to_send(flight, route.replica, prefills=prefills)
        if flight.num_sent > 1 and self._frontend is not None:
            self._frontend.num_sent_again += 1
        self._tenancy.note_sent(asked.request_id, route.replica)
        self._pins.note_sent(asked, route.replica)
        sent.is_admitted, shares = True, self._tenancy.shares
        sent.served_elsewhere = shares.served_elsewhere(route.replica)
        sent.guaranteed_here = shares.guaranteed_here(route.replica)
        self._links[route.replica].send(self._peers.with_holder(sent, route))

    def _send_waiting(self) -> None:
        """Sends the requests that nobody has, as far as there are replicas and their tenants' limits let them."""
        for flight in self._flights.at(None):
            name = flight.asked.request_id
            still_waits = flight.replica is None and self._flights.get(name) is flight
            if still_waits and not self._tenancy.is_behind(name):
                self._go_on(flight, "no replica is left")

    def _go_on(self, flight: Flight, why: str) -> None:
        """Sends a request that nobody has any more to another replica, or ends it with an error."""
        if flight.is_suspect:
            self._incoming.put_nowait(self._flights.fail(flight, why))
            self._end(flight.asked.request_id)
            return
        try:
            self._send(flight)
        except InvalidRequestError as refusal:  # others that wait go on
            self._forget(flight.asked.request_id)
            self._incoming.put_nowait(refusals(flight.asked, refusal))

    def _tell(self, flight: Flight, message: AbortRequests | FinishSequences) -> None:
        if flight.replica is not None and flight.replica in self._links:
            self._links[flight.replica].send(message)

    def _forget(self, request_id: str) -> None:
        flight = self._flights.end(request_id)
        if flight is not None:
            self._leave(flight)

    def _leave(self, flight: Flight) -> None:
        """Takes a request that has ended out of its replica's work."""
        self._end(flight.asked.request_id)
        link = self._links.get(flight.replica or "")
        if link is not None and link.name not in self._listed:
            self._close_if_idle(link)

    def _end(self, request_id: str) -> None:
        """Ends a request where it is counted, and sends those that its tenant's limits held back."""
        if self._router is not None:
            self._router.end(request_id)
        for held in self._tenancy.end(request_id):
            flight = self._flights.get(held)
            if flight is not None:
                self._go_on(flight, "no replica is left")
                if flight.replica is None:
                    break

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine to its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
