"""Router: sends each request to the replica where the work left is least, and keeps sessions where their blocks are.

A replica's work is what its requests have yet to compute: tokens of prompts, and tokens that answers are expected to
have, in the seconds that a token takes there: by its own measurement, as far as that is trusted, and else by all
replicas'. A request adds the tokens of its prompt that the replica does not have, or the seconds in which it loads them
from its disk or fetches them from another; and these count for those too that they hold up. So a prefix
draws requests to where it is as long as that saves more than others wait less, and is computed a second time, or
fetched, when its replica has too much to do: what is hot spreads, what is cold does not.

It knows no clock, no engine and no Ray: the same code runs in the simulator.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from pagemill.distributed.block_directory import BlockDirectory, Reach
from pagemill.distributed.route import Asked, Route

RoutingPolicy = Literal["least-work", "round-robin"]
ROUTING_POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)

MAX_SESSIONS = 65_536
"""Sessions whose replica is remembered; of more, those used longest ago are forgotten."""
UNMEASURED_TOKEN_S = 1e-3
"""Seconds of a token where no replica has measured any yet: all are taken to be equal."""
TRUSTED_TOKENS = 1_000_000
"""Tokens of prompts over which a replica's own measurement counts as much as the mean of all. What a token takes hangs
on how long prompts are, so one that has had long ones looks slow for a while."""
FIRST_ANSWER_TOKENS = 128.0
"""Tokens that an answer is expected to have before any has ended."""
LEAST_SPLIT_TOKENS = 128
"""A prompt of which fewer tokens are to be computed is not worth two replicas."""
HOLDS_UP = 0.5
"""A second for a prompt counts as 1 + HOLDS_UP x N seconds, where N is how many usual prompts a replica has yet to
compute, in the mean. About as many more come while the prompt is computed, and wait behind it."""
HELD_UP = 2.0
"""A second by which a prompt holds up an answer under way counts as so many seconds before a first token."""
FADING = 0.05
"""Weight of the last answer's length in the length that is expected, and of the last prompt's in theirs; all earlier
ones have the rest."""


@dataclass
class _Replica:
    """A replica that takes requests. number: its bit in the directory. rows: requests that it computes at once.
    address: where others fetch its blocks; empty: nowhere."""

    name: str
    number: int
    rows: int
    address: str = ""
    token_s: float = 0.0
    """Seconds of a prompt's token, by its own measurement."""
    trust: float = 0.0
    """How much that counts, from 0 to 1, beside what all have measured."""
    step_s: float = 0.0
    fetch_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds in which it fetches blocks, by the address of who has them: for all of a prompt, and for each."""
    mean_fetch_s: tuple[float, float] | None = None
    """Their mean over replicas that are there; None if it has measured none of these."""
    disk_s: tuple[float, float] | None = None
    """Seconds in which it loads blocks from its disk: for all of a prompt, and for each; None: not measured yet."""
    prompt_tokens: int = 0
    """Tokens of prompts that its requests have yet to compute before their first token."""
    answer_tokens: float = 0.0
    """Tokens that its requests' answers are expected to have yet."""
    last_chosen: int = -1
    requests: dict[str, _Request] = field(default_factory=dict)


class _Holder(NamedTuple):
    """The replica that holds most of a prompt, how many of its blocks, and the seconds in which it loads those of them
    that are on its disk."""

    replica: _Replica
    blocks: int
    load_s: float = 0.0


class _Found(NamedTuple):
    """The tokens of a prompt that a replica has, and the seconds in which it loads those of them that are on its disk;
    without these where computing them takes less."""

    tokens: int = 0
    load_s: float = 0.0


NOTHING = _Found()


@dataclass
class _Request:
    replica: _Replica
    claimed: list[bytes]
    prompt_tokens: int
    """Tokens of the prompt that are yet to compute; 0 once the first token has come."""
    most_tokens: int
    answer_tokens: float
    num_answered: int = 0


class Router:
    """Knows the replicas, what they hold and what they have to do. Not thread-safe.

    block_size: tokens of a block. policy: "least-work", or "round-robin" to compare with. prefill_replicas: how many
    replicas compute prompts alone, as long as another is left.
    """

    def __init__(self, block_size: int, policy: RoutingPolicy, prefill_replicas: int) -> None:
        self.directory = BlockDirectory()
        self._block_size = block_size
        self._policy = policy
        self._prefill_replicas = prefill_replicas
        self._prefilling: list[str] = []
        """Replicas that compute prompts alone."""
        self._replicas: dict[str, _Replica] = {}
        self._resting: dict[str, _Replica] = {}
        """Replicas that take no requests now, and may again: they end what they have, and their entries are kept."""
        self._requests: dict[str, _Request] = {}
        self._usual_token_s: float | None = None
        """Holds `_mean_token_s`, until a replica has measured anew."""
        self._usual_fetch_s = self._usual_disk_s = (0.0, 0.0)
        self._prompt_tokens = 0
        """Tokens of prompts that are yet to compute, of all requests."""
        self._usual_prompt_tokens = 0.0
        """Counts those of a request, in the mean."""
        self._sessions: OrderedDict[object, str] = OrderedDict()
        self._expected = FIRST_ANSWER_TOKENS
        self._num_routed = 0

    # Replicas

    @property
    def replicas(self) -> list[str]:
        """Returns the names of the replicas that take requests."""
        return [*self._replicas]

    def add(self, name: str, rows: int, address: str = "") -> None:
        """Takes in a replica that holds nothing. rows: requests that it computes at once. address: where others fetch
        its blocks; empty: nowhere."""
        used = {replica.number for replica in self._everybody()}
        number = next(number for number in range(len(used) + 1) if number not in used)
        self._replicas[name] = _Replica(name, number, rows, address)
        self._assign()
        self._price_fetches()

    def knows(self, name: str) -> bool:
        """Returns whether a replica has been added and not removed."""
        return name in self._replicas or name in self._resting

    def rest(self, name: str) -> None:
        """Gives a replica no more requests, until `resume`. It ends those that it has."""
        if name in self._replicas:
            self._resting[name] = self._replicas.pop(name)
            self._assign()

    def resume(self, name: str) -> None:
        """Gives a replica requests again."""
        if name in self._resting:
            self._replicas[name] = self._resting.pop(name)
            self._assign()

    def remove(self, name: str) -> list[str]:
        """Forgets a replica. Returns its requests that have not ended, which are forgotten too."""
        self.resume(name)
        replica = self._replicas[name]
        left = [*replica.requests]
        for request_id in left:
            self._drop(request_id)
        del self._replicas[name]
        self._assign()
        self._usual_token_s = None
        self._price_fetches()
        self.directory.forget(replica.number)
        return left

    def note_events(self, name: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Notes which blocks a replica holds now, and which no longer."""
        number = self._known(name).number
        self.directory.remove(number, removed)
        self.directory.store(number, stored)

    def note_times(
        self,
        name: str,
        token_s: float,
        step_s: float,
        fetch_s: Mapping[str, tuple[float, float]] | None = None,
        disk_s: tuple[float, float] | None = None,
        tokens: float = math.inf,
    ) -> None:
        """Notes the measured seconds of a prompt's token and of a step that only generates, 0 if not known; of fetching
        blocks, by the address of who has them, for all, infinite where it cannot be reached, and for each; and of
        loading blocks from disk, for all and for each, None if not known.

        tokens: of prompts, over which those of a token were measured.
        """
        replica = self._known(name)
        replica.token_s, replica.step_s = token_s, step_s
        replica.trust = 1 / (1 + TRUSTED_TOKENS / tokens) if token_s and tokens else 0.0
        self._usual_token_s = None
        if (fetch_s := fetch_s or {}) != replica.fetch_s or disk_s != replica.disk_s:
            replica.fetch_s, replica.disk_s = fetch_s, disk_s
            replica.mean_fetch_s = self._mean_fetch_s(replica)
            self._price_unmeasured()

    def work_s(self, name: str) -> float:
        """Returns the seconds of work that a replica has left."""
        return self._work_s(self._known(name))

    # Requests

    def route(self, request_id: str, asked: Asked, at: str | None = None) -> Route | None:
        """Chooses a request's replica, and counts its work there until `end`. Returns None while there is no replica.

        at: the replica that it needs, if that takes requests. Raises ValueError for an id that is under way.
        """
        return self._route(request_id, asked, self._whole(), at)

    def route_prompt(self, request_id: str, asked: Asked) -> Route | None:
        """Chooses the replica that computes a request's prompt and first token, where another is to go on, and counts
        that work. Returns None where one replica is to do all: there is none for prompts, too little is to compute, it
        takes less time than fetching what was computed, or it costs less.

        The cost apart is the work that is left there, with the prompt, and the fetch of what was computed. With one
        replica it is the work left with the prompt, and the prompt's time again: once for the answer that it begins,
        and HELD_UP times for each that it holds up.
        """
        if not self._prefilling:
            return None
        found, holders = self._found(asked), self._holders(asked)
        works = self._works_with(asked, found, holders, [*self._replicas])
        best = self._replicas[min(self._whole(), key=works.__getitem__)]
        own = found.get(best.number, NOTHING)
        left_s = self._left_s(best, asked, own, self._holder_for(best, own, holders))
        at_best_s = works[best.name] + left_s * (1 + HELD_UP * len(best.requests))
        blocks = len(asked.digests) - own.tokens / self._block_size
        fetches = {name: self._fetch_s(best, self._replicas[name], blocks) for name in self._prefilling}
        among = [name for name, each_s in fetches.items() if each_s < min(left_s, at_best_s - works[name])]
        if asked.num_tokens - own.tokens < LEAST_SPLIT_TOKENS or not among:
            return None
        return self._route(request_id, asked._replace(most_tokens=1, session=None), among, None)

    def _route(self, request_id: str, asked: Asked, among: Sequence[str], at: str | None) -> Route | None:
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is under way already")
        if not self._replicas:
            return None
        found, holders = self._found(asked), self._holders(asked)
        if at is not None and at in self._replicas:
            chosen = self._replicas[at]
        elif self._policy == "round-robin":
            chosen = min((self._replicas[name] for name in among), key=lambda replica: replica.last_chosen)
        else:
            chosen = self._least(asked, self._works_with(asked, found, holders, among))
        own = found.get(chosen.number, NOTHING)
        holder = self._holder_for(chosen, own, holders)
        left_s = self._left_s(chosen, asked, own, holder)
        route = Route(chosen.name, own.tokens, self._work_s(chosen) + left_s)
        self._begin(request_id, chosen, asked, round(left_s / self._token_s(chosen)))
        return route if holder is None else route._replace(holder=holder.replica.name, held_blocks=holder.blocks)

    def note_tokens(self, request_id: str, count: int) -> None:
        """Notes that a request's answer has `count` more tokens. Ids that have ended are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._settle_prompt(request)
        request.num_answered += count
        self._expect(request, max(0.0, min(self._expected, request.most_tokens) - request.num_answered))

    def end(self, request_id: str, *, whole: bool = True) -> None:
        """Ends a request, however it ended. Ids that have ended are ignored.

        whole: False if its answer goes on elsewhere, so that its length says nothing.
        """
        request = self._drop(request_id)
        if request is not None and request.num_answered and whole:
            self._expected += FADING * (request.num_answered - self._expected)

    # Inside

    def _known(self, name: str) -> _Replica:
        return self._replicas.get(name) or self._resting[name]

    def _found(self, asked: Asked) -> dict[int, _Found]:
        """Returns which tokens of a prompt are found, by replica's number, for those that have any.

        The last token is computed in any case: its query brings the first one of the answer.
        """
        bits = sum(1 << replica.number for replica in self._replicas.values())
        most, size = max(0, asked.num_tokens - 1), self._block_size
        here = self.directory.find(asked.digests, bits)
        found = {number: _Found(min(blocks * size, most)) for number, blocks in here.items()}
        for number, (blocks, loads) in self._reach(asked, bits).items():
            replica, tokens = self._numbered(number), min(blocks * size, most)
            load_s = self._load_s(replica, loads)
            computed_s = (tokens - found.get(number, NOTHING).tokens) * self._token_s(replica)
            if load_s < computed_s:
                found[number] = _Found(tokens, load_s)
        return found

    def _reach(self, asked: Asked, replicas: int, *, coming: bool = True) -> dict[int, Reach]:
        return self.directory.reach(asked.digests, asked.on_disk, replicas, coming=coming) if asked.on_disk else {}

    def _load_s(self, replica: _Replica, blocks: int) -> float:
        """Returns the seconds in which a replica loads blocks from its disk: as it has measured, or else as others
        have; 0 if nothing is known, so that somebody tries."""
        all_s, block_s = replica.disk_s or self._usual_disk_s
        return all_s + block_s * blocks if blocks else 0.0

    def _holders(self, asked: Asked) -> list[_Holder]:
        """Returns the two replicas, of all that there are, that hold most of a prompt's blocks: one of them at least is
        another than that to which it goes."""
        everybody = sum(1 << replica.number for replica in self._everybody())
        here = self.directory.find(asked.digests, everybody, coming=False)
        held = {number: Reach(blocks, 0) for number, blocks in here.items()}
        held |= self._reach(asked, everybody, coming=False)
        most = sorted(held.items(), key=lambda each: (-each[1].blocks, each[1].loads))[:2]
        replicas = [(self._numbered(number), reach) for number, reach in most]
        return [_Holder(each, blocks, self._load_s(each, loads)) for each, (blocks, loads) in replicas]

    def _holder_for(self, replica: _Replica, found: _Found, holders: list[_Holder]) -> _Holder | None:
        """Returns who holds more of a prompt than a replica has itself."""
        best = next((holder for holder in holders if holder.replica is not replica), None)
        return best if best is not None and best.blocks * self._block_size > found.tokens + self._block_size else None

    def _left_s(self, replica: _Replica, asked: Asked, found: _Found, holder: _Holder | None) -> float:
        """Returns the seconds in which a replica loads what it has of a prompt on disk, and computes what it lacks, or
        fetches blocks and computes the rest, whichever takes less."""
        token_s = self._token_s(replica)
        computed_s = (asked.num_tokens - found.tokens) * token_s
        if holder is None:
            return found.load_s + computed_s
        held_tokens = holder.blocks * self._block_size
        blocks = (held_tokens - found.tokens) / self._block_size
        fetched_s = self._fetch_s(replica, holder.replica, blocks) or math.inf
        fetched_s += holder.load_s + max(0, asked.num_tokens - held_tokens) * token_s
        return found.load_s + min(computed_s, fetched_s)

    def _fetch_s(self, replica: _Replica, holder: _Replica, blocks: float) -> float:
        """Returns the seconds in which a replica fetches blocks of another: measured with that one, or else with others
        that are there, or else by other replicas; 0 if nothing is known."""
        all_s, block_s = replica.fetch_s.get(holder.address) or replica.mean_fetch_s or self._usual_fetch_s
        return all_s + block_s * blocks

    def _mean_fetch_s(self, replica: _Replica) -> tuple[float, float] | None:
        known = [replica.fetch_s[each.address] for each in self._everybody() if each.address in replica.fetch_s]
        lines = [line for line in known if line[0] < math.inf]
        if not lines:
            return (math.inf, 0.0) if known else None
        return _mean(lines)

    def _price_fetches(self) -> None:
        """Takes the means anew, since a replica has come or gone: what was measured with one that is gone says
        nothing."""
        for replica in self._everybody():
            replica.mean_fetch_s = self._mean_fetch_s(replica)
        self._price_unmeasured()

    def _price_unmeasured(self) -> None:
        """Takes the mean of what replicas have measured, for those that have not; zeros if none has."""
        everybody = self._everybody()
        self._usual_fetch_s = _mean([line for each in everybody if (line := each.mean_fetch_s) and line[0] < math.inf])
        self._usual_disk_s = _mean([line for each in everybody if (line := each.disk_s)])

    def _everybody(self) -> tuple[_Replica, ...]:
        return *self._replicas.values(), *self._resting.values()

    def _assign(self) -> None:
        """Chooses the replicas that compute prompts alone: those that did, and the first of the others."""
        names = [name for name in self._prefilling if name in self._replicas]
        names += [name for name in self._replicas if name not in names]
        self._prefilling = names[: min(self._prefill_replicas, len(names) - 1)] if names else []

    def _whole(self) -> list[str]:
        """Returns the replicas that compute more than prompts."""
        return [name for name in self._replicas if name not in self._prefilling]

    def _works_with(
        self, asked: Asked, found: dict[int, _Found], holders: list[_Holder], among: Sequence[str]
    ) -> dict[str, float]:
        """Returns the seconds of work that each of some replicas would have left with a request, where those for the
        request count for whom they hold up too."""
        works, prompts = {}, self._prompt_tokens / max(1.0, self._usual_prompt_tokens)
        counts = 1 + HOLDS_UP * prompts / len(self._replicas)
        for name, replica in ((name, self._replicas[name]) for name in among):
            own = found.get(replica.number, NOTHING)
            left_s = self._left_s(replica, asked, own, self._holder_for(replica, own, holders))
            works[name] = self._work_s(replica) + counts * left_s
        return works

    def _numbered(self, number: int) -> _Replica:
        return next(replica for replica in self._everybody() if replica.number == number)

    def _least(self, asked: Asked, works: dict[str, float]) -> _Replica:
        """Returns the replica with the least work, or a session's own while it has not much more.

        Much is what the session's whole prompt takes, computed or, where that is faster, fetched: a move costs at least
        that once.
        """
        among = [self._replicas[name] for name in works]
        best = min(among, key=lambda replica: (works[replica.name], replica.last_chosen))
        own = self._replicas.get(self._sessions.get(asked.session, "")) if asked.session is not None else None
        if own is not None and own in among:
            whole = _Holder(own, len(asked.digests))
            patience_s = self._left_s(best, asked, NOTHING, whole)
            if works[own.name] <= works[best.name] + patience_s:
                return own
        return best

    def _begin(self, request_id: str, replica: _Replica, asked: Asked, prompt_tokens: int) -> None:
        """Counts a request's work. prompt_tokens: that take as long as what is to be done for its prompt."""
        claimed = self.directory.claim(replica.number, asked.digests)
        request = _Request(replica, claimed, prompt_tokens, asked.most_tokens, 0.0)
        self._requests[request_id] = replica.requests[request_id] = request
        self._prompt_tokens += prompt_tokens
        usual = self._usual_prompt_tokens or prompt_tokens
        self._usual_prompt_tokens = usual + FADING * (prompt_tokens - usual)
        replica.prompt_tokens += request.prompt_tokens
        self._expect(request, min(self._expected, asked.most_tokens))
        replica.last_chosen = self._num_routed
        self._num_routed += 1
        if asked.session is not None:
            self._sessions[asked.session] = replica.name
            self._sessions.move_to_end(asked.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def _drop(self, request_id: str) -> _Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._settle_prompt(request)
            self._expect(request, 0.0)
            del request.replica.requests[request_id]
        return request

    def _settle_prompt(self, request: _Request) -> None:
        """Notes that a request's prompt has been computed, or never will be."""
        self._prompt_tokens -= request.prompt_tokens
        request.replica.prompt_tokens -= request.prompt_tokens
        request.prompt_tokens = 0
        if request.claimed:
            self.directory.settle(request.replica.number, request.claimed)
            request.claimed = []

    def _expect(self, request: _Request, answer_tokens: float) -> None:
        """Notes how many tokens a request's answer is expected to have yet."""
        request.replica.answer_tokens += answer_tokens - request.answer_tokens
        request.answer_tokens = answer_tokens

    def _mean_token_s(self) -> float:
        """Returns the mean of what replicas have measured of a token, each as far as it is trusted."""
        if self._usual_token_s is None:
            trust = sum(each.trust for each in self._everybody())
            told_s = sum(each.trust * each.token_s for each in self._everybody())
            self._usual_token_s = told_s / trust if trust else UNMEASURED_TOKEN_S
        return self._usual_token_s

    def _token_s(self, replica: _Replica) -> float:
        """Returns the seconds that a prompt's token is taken to need at a replica."""
        usual_s = self._mean_token_s()
        return usual_s + replica.trust * (replica.token_s - usual_s)

    def _work_s(self, replica: _Replica) -> float:
        """Returns the seconds of a replica's work: its tokens, and the wait for a row where all are taken.

        A row comes free each time that one of `rows` answers, which take a step for each token, ends.
        """
        tokens_s = (replica.prompt_tokens + replica.answer_tokens) * self._token_s(replica)
        behind = len(replica.requests) + 1 - replica.rows
        return tokens_s + (behind * self._expected * replica.step_s / replica.rows if behind > 0 else 0.0)


def _mean(lines: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the mean of seconds for all and of seconds for each; zeros if there are none."""
    alls, each = zip(*lines, strict=True) if lines else ((0.0,), (0.0,))
    return sum(alls) / len(alls), sum(each) / len(each)
