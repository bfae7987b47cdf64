"""Outputs: what an engine tells its front end of the sequences of a step."""

from __future__ import annotations

from pagemill.engine.messages import Failure, SequenceOutput
from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.sequence import SequenceUpdate


def outputs_of(updates: list[SequenceUpdate], memory: MemoryManager) -> list[SequenceOutput]:
    """Returns what to tell of each sequence. Blocks of those that go on are told while some of any lie streamed."""
    streams = memory.streamed.active > 0
    return [_output(update, memory if streams else None) for update in updates]


def _output(update: SequenceUpdate, memory: MemoryManager | None) -> SequenceOutput:
    sequence, tokens = update.sequence, update.tokens
    output = SequenceOutput(
        request_id=sequence.request.request_id,
        index=sequence.index,
        new_token_ids=tokens,
        logprobs=update.logprobs,
        finish_reason=update.finish_reason,
        stop_reason=update.stop_reason,
        num_cached_tokens=sequence.num_cached_tokens,
        scheduled_s=sequence.scheduled_s or 0.0,
        drafted=update.drafted,
        prompt_logprobs=update.prompt_logprobs,
    )
    if sequence.table is None:
        output.kv_blocks = sequence.residency
    elif memory is not None:
        output.kv_blocks = memory.residency(sequence.table)
    if update.finish_reason is not None and (embedding := sequence.embedding) is not None:
        output.pooled = embedding.tobytes()
    if (hypothesis := update.hypothesis) is not None:
        output.new_token_ids, output.cumulative_logprob = hypothesis.token_ids, hypothesis.cum_logprob
    if update.error is not None:
        output.error = Failure.of(update.error)
    return output
