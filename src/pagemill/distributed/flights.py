"""Flights: the requests that replicas have, what has come of each, and how one goes on where its replica is gone.

On CPU the same request brings the same bits wherever it runs, and every request has a seed by then. So one that is lost
goes on elsewhere, and its caller notices a pause at most. A request for one answer goes on behind the tokens that have
come, which are computed as a prompt is. One for several, or a beam search, begins again, and what has come is expected
to come once more: it is left out, or the request ends with an error if it differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from pagemill.distributed.losses import TOGETHER_S
from pagemill.engine.messages import EngineRequest, SequenceOutput, refusals
from pagemill.errors import EngineRestartingError

MAX_LOSSES = 3
"""Replicas that may be lost under a request, one after another: it may be what they die of."""


@dataclass
class Flight:
    """A request on its way. replica: who has it; None while nobody does."""

    asked: EngineRequest
    replica: str | None = None
    num_sent: int = 0
    num_losses: int = 0
    """Replicas that were lost under it. What is lost together with another is lost to the same, and not to it, unless
    its replica has said that its engine has died."""
    lost_s: float = -math.inf
    """When the last of these was."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of each sequence that have come."""
    repeats: dict[int, int] = field(default_factory=dict)
    """Numbers of tokens that come once more, by sequence."""
    ended: set[int] = field(default_factory=set)
    prefills: bool = False
    """True while its replica computes its prompt and first token alone; another is to go on."""
    hands_over: bool = False
    """True once that has come, until another replica has it."""
    cached_tokens: int | None = None
    """Tokens of its prompt that the first replica to bring a token found."""

    @property
    def splits(self) -> bool:
        """Returns whether one replica can compute its prompt and another the rest: it is at its beginning, and nothing
        but one answer of several tokens is asked."""
        asked, params = self.asked, self.asked.params
        plain = asked.fork_of is None and asked.pin is None and asked.pooling is None and params.prompt_logprobs is None
        return self.goes_on and plain and not self.tokens and (params.max_tokens is None or params.max_tokens > 1)

    @property
    def goes_on(self) -> bool:
        """Returns whether it can go on behind what has come, instead of beginning again."""
        return self.asked.params.n == 1 and self.asked.beam is None

    @property
    def began_again(self) -> bool:
        """Returns whether its replica computes all of its sequences once more, those too that the front end has
        ended."""
        return self.num_sent > 1 and not self.goes_on

    @property
    def is_suspect(self) -> bool:
        """Returns whether so many replicas were lost under it that it is sent to no other."""
        return self.num_losses >= MAX_LOSSES

    def note_loss(self, now: float, *, engine_died: bool) -> None:
        """Counts that its replica is lost now."""
        if engine_died or now - self.lost_s > TOGETHER_S:
            self.num_losses, self.lost_s = self.num_losses + 1, now

    @property
    def has_ended(self) -> bool:
        return len(self.ended) == self.asked.params.n


class Flights:
    """Knows the requests that have not ended, by the engine's id."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, request_id: str) -> Flight | None:
        return self._flights.get(request_id)

    def begin(self, asked: EngineRequest) -> Flight:
        """Takes in a request that nobody has yet."""
        flight = self._flights[asked.request_id] = Flight(asked)
        return flight

    def at(self, replica: str | None) -> list[Flight]:
        """Returns the requests that a replica has, or that nobody has (None), in the order in which they came."""
        return [flight for flight in self._flights.values() if flight.replica == replica]

    def end(self, request_id: str) -> Flight | None:
        """Forgets a request, and returns it; None if it has ended."""
        return self._flights.pop(request_id, None)

    def finish(self, sequences: Iterable[tuple[str, int]]) -> list[Flight]:
        """Notes that a front end has ended sequences, and returns the requests that have ended with them."""
        ended = []
        for request_id, index in sequences:
            flight = self._flights.get(request_id)
            if flight is not None:
                flight.ended.add(index)
                if flight.has_ended:
                    ended.append(flight)
        for flight in ended:
            self._flights.pop(flight.asked.request_id, None)
        return ended

    def take(self, replica: str, outputs: Iterable[SequenceOutput]) -> list[SequenceOutput]:
        """Returns what is new of a step's outputs. Left out are those of requests that have ended, or that another
        replica has by now, and tokens that have come before. A request forgotten has ended, see `get`."""
        return [new for output in outputs for new in self._take(replica, output)]

    def ending(self, replica: str, outputs: Iterable[SequenceOutput]) -> dict[str, Flight]:
        """Returns the requests of which a sequence ends in a replica, by id."""
        ending = (self._flights.get(each.request_id) for each in outputs if each.finish_reason is not None)
        return {one.asked.request_id: one for one in ending if one is not None and one.replica == replica}

    def to_send(self, flight: Flight, replica: str, *, prefills: bool = False) -> EngineRequest:
        """Returns what a replica is asked so that a request goes on there, and notes that it has it.

        prefills: it is to compute the prompt and the first token, and another goes on.
        """
        flight.replica, flight.num_sent, flight.prefills = replica, flight.num_sent + 1, prefills
        asked, come = flight.asked, flight.tokens
        if prefills:
            one = replace(asked.params, max_tokens=1, min_tokens=min(1, asked.params.min_tokens))
            return msgspec.structs.replace(asked, params=one)
        if flight.num_sent == 1 and not come:
            return asked
        asked = msgspec.structs.replace(asked, fork_of=None)  # nothing of another engine's is there
        if flight.goes_on:
            if come.get(0):
                asked.answered, asked.params = [*come[0]], replace(asked.params, prompt_logprobs=None)
        else:
            flight.repeats = {index: len(tokens) for index, tokens in come.items()}
        return asked

    def fail(self, flight: Flight, why: str) -> list[SequenceOutput]:
        """Ends a request that cannot go on. Returns the ends of those of its sequences that have not ended, with an
        error after which it can be sent again."""
        self._flights.pop(flight.asked.request_id, None)
        ends = refusals(flight.asked, EngineRestartingError(f"{why}; send this again"))
        return [end for end in ends if end.index not in flight.ended]

    def _take(self, replica: str, output: SequenceOutput) -> list[SequenceOutput]:
        flight = self._flights.get(output.request_id)
        if flight is None or flight.replica != replica or output.index in flight.ended:
            return []
        come, again = flight.tokens.setdefault(output.index, []), flight.repeats.get(output.index, 0)
        if again:
            repeated, before = output.new_token_ids[:again], come[len(come) - again :]
            if repeated != before[: len(repeated)]:
                return self.fail(flight, "the replica that computed this is gone, and another computes other tokens")
            flight.repeats[output.index] = again - len(repeated)
            output.new_token_ids = output.new_token_ids[again:]
            if output.logprobs is not None:
                output.logprobs = output.logprobs[again:]
            if not output.new_token_ids and output.finish_reason is None:
                return []
        come += output.new_token_ids
        if output.new_token_ids and flight.cached_tokens is None:
            flight.cached_tokens = output.num_cached_tokens
        if flight.cached_tokens is not None:
            output.num_cached_tokens = flight.cached_tokens
        if flight.prefills and output.finish_reason == "length":
            output.finish_reason = output.kv_blocks = flight.replica = None
            flight.prefills, flight.hands_over, flight.num_sent = False, True, flight.num_sent - 1
        if output.finish_reason is not None:
            flight.ended.add(output.index)
            if flight.has_ended:
                del self._flights[output.request_id]
        return [output]
