"""Forks: sequences that begin from the blocks of a running one, all shared until one of the two writes.

Prompts fork with n sequences, beams fork as their search goes on, and a request may go on from a running sequence.
"""

from __future__ import annotations

import collections.abc as abc
from bisect import insort

from pagemill.sampling.params import TokenLogprobs
from pagemill.scheduling.batch import Entry
from pagemill.scheduling.beam import BeamGroup, Hypothesis
from pagemill.scheduling.sequence import Sequence, Status, by_precedence
from pagemill.scheduling.state import SchedulerState


def after_prompt(state: SchedulerState, parent: Entry, index: int) -> Sequence:
    """Starts the n-th sequence of a request from the prompt's blocks, all shared. Its row is in the plan."""
    origin = parent.sequence
    child = _share(state, origin, parent.end, index, origin.child_rows[index - 1])
    assert child.table is not None
    state.memory.place(child.table, child.row)
    if index == origin.forks:
        origin.child_rows = []
    return child


def _share(state: SchedulerState, origin: Sequence, length: int, index: int, row: int) -> Sequence:
    """Starts a sequence of the same request that shares the first `length` tokens, all of them computed."""
    assert origin.table is not None
    child = Sequence(
        origin.request,
        index,
        origin.precedence._replace(number=index),
        origin.tokens[:length],
        status=Status.RUNNING,
        digests=origin.digests[: length // state.memory.block_size],
        table=state.memory.fork(origin.table, length),
        row=row,
        scheduled=length,
        prefill_len=length,
        num_cached_tokens=origin.num_cached_tokens,
        prompt_logprobs=origin.prompt_logprobs,
        scheduled_s=origin.scheduled_s,
        group=origin.group,
    )
    insort(state.running, child, key=by_precedence)
    state.tenants[origin.request.tenant].running += 1
    state.requests[origin.request.request_id].append(child)
    return child


def _fork_beam(state: SchedulerState, origin: Sequence, tokens: list[int]) -> Sequence:
    """Starts another beam, which goes on with these tokens; in a row kept for it, or that of one that has ended."""
    assert origin.group is not None
    if origin.child_rows:
        row = origin.child_rows.pop()
    else:
        row = state.batch.take_row()
        state.tenants[origin.request.tenant].rows += 1
    child = _share(state, origin, origin.scheduled, origin.group.next_number(), row)
    child.tokens += tokens
    child.prefill_len = len(child.tokens) - 1
    state.name_blocks(child)
    return child


def into(state: SchedulerState, child: Sequence, index: int, siblings: abc.Sequence[Sequence]) -> bool:
    """Lets a request's first sequence begin from the blocks of a running one. Returns False if that cannot be.

    The new one shares all tokens but its last, which is computed again for what follows it. index: of the running one
    among `siblings`, the sequences of its request.
    """
    origin = next((one for one in siblings if one.index == index), None)
    tenant = state.tenants[child.request.tenant]
    if origin is None or origin.table is None or state.batch.num_free < child.num_rows:
        return False
    if not tenant.may_run(child.num_rows):
        return False
    request, length = child.request, len(child.tokens) - 1
    if not 0 < length <= origin.table.length or origin.tokens[: length + 1] != child.tokens:
        return False
    if origin.request.root != request.root or request.params.prompt_logprobs is not None:
        return False
    try:
        child.table = state.memory.fork(origin.table, length)
    except ValueError:  # it has gone on, and given back what its window has left
        return False
    child.scheduled = child.num_cached_tokens = length
    child.scheduled_s = request.arrival_s
    state.seat(child, min(child.most_rows, state.batch.num_free, tenant.max_rows - tenant.rows))
    state.name_blocks(child)
    return True


def _choose(state: SchedulerState, sequence: Sequence, tokens: list[int]) -> None:
    """Lets a running sequence go on with these tokens, whatever was sampled in its row."""
    state.batch.choose(sequence, tokens)
    state.name_blocks(sequence)


def advance_beams(
    state: SchedulerState, group: BeamGroup, sequence: Sequence, candidates: TokenLogprobs | None, now: float
) -> list[tuple[Sequence, Hypothesis]]:
    """Takes in one beam's candidates: with the last of them the best beams fork, and the others end.

    Returns what the search ends with, if it does.
    """
    if group.parked:
        first, *others = group.unpark()
        length = len(sequence.tokens)
        group.beams += [_fork_beam(state, sequence, tokens[length:]) for tokens in others]
        _choose(state, sequence, first[length:])
        return []
    assert candidates is not None
    chosen = group.advance(sequence, candidates)
    if chosen is None:
        return []
    last_use = {beam: place for place, (beam, _) in enumerate(chosen)}
    for beam in group.beams:
        if beam not in last_use:
            state.finish(beam, now)
    if not chosen:
        return group.results()
    group.beams = []
    for place, (beam, token) in enumerate(chosen):
        if last_use[beam] > place:
            group.beams.append(_fork_beam(state, beam, [token]))
        else:
            _choose(state, beam, [token])
            group.beams.append(beam)
    return []
