"""Speculation changes no bit: with drafts looked up, or given and partly wrong, answers are those of plain decoding."""

from __future__ import annotations

import random
from contextlib import contextmanager

import msgspec
import pytest
from drafted import assert_same
from drive import drive, request
from openai.types import CompletionUsage

from harness import FRAME_BYTES
from pagemill import LLM
from pagemill.draft_counts import DraftCounts
from pagemill.errors import NonFiniteLogitsError
from pagemill.executor import local, verification
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.speculation import NgramDrafter
from pagemill.scheduling.suffix_drafting import SuffixDrafter
from pagemill.server.routes.call import usage_of
from pagemill.server.routes.metrics import Metrics

NGRAM = {"method": "ngram", "num_speculative_tokens": 6}
OTHERS = {
    "gguf": {"dtype": "bfloat16", "quantization": "gguf"},
    "int8 cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "mixed cache": {"dtype": "bfloat16", "kv_cache_dtype": "int4_mixed"},
}


class Eager(NgramDrafter):
    """Drafts wherever it finds something, and spoils some of it; or what `answers` says will come."""

    def __init__(self, config, answers=None) -> None:
        super().__init__(config)
        self._random = random.Random(3)
        self._answers = answers

    def propose(self, room, rows, budget, limit_s, branches):
        for each in (1, 1, 3, 5, 9, 17, 33, 65):
            self._control.note_step(each, each - 1, 0.01, each - 1)
        proposed = (
            super().propose(room, rows, budget, limit_s, branches) if self._answers is None else self._known(room)
        )
        for (drafts,) in proposed.values():
            if self._random.random() < 0.3:
                drafts[self._random.randrange(len(drafts))] = 77
        return proposed

    def _known(self, room):
        drafts = {}
        for sequence, most in room.items():
            answer = self._answers[sequence.request.request_id, sequence.index]
            begin = sequence.num_output_tokens
            if coming := answer[begin : begin + min(most, self._random.randint(0, 6))]:
                drafts[sequence] = [coming]
        return drafts


class EagerSuffix(Eager, SuffixDrafter):
    """Looks in other answers too."""


@pytest.fixture(scope="module")
def load(prompts):
    """Requests of many kinds, over text that repeats."""
    joined = [token for prompt in prompts for token in prompt]
    document = joined[:70]
    cases = [
        ("greedy", [*document, *document, *document[:9]], {"temperature": 0.0, "max_tokens": 40}),
        ("seeded", [*document, *document[:20]], {"temperature": 1.0, "seed": 7, "max_tokens": 30}),
        ("filtered", document * 2, {"temperature": 1.1, "top_p": 0.8, "top_k": 40, "seed": 8, "max_tokens": 20}),
        ("forked", [*document, *document[:30]], {"temperature": 0.9, "n": 3, "seed": 10, "max_tokens": 20}),
        ("greedy logprobs", document * 2, {"temperature": 0.0, "logprobs": 2, "max_tokens": 24}),
        (
            "everything",
            joined[20:90] * 2,
            {
                "temperature": 1.2,
                "n": 2,
                "seed": 12,
                "repetition_penalty": 1.2,
                "presence_penalty": 0.6,
                "frequency_penalty": 0.4,
                "logit_bias": {prompts[0][0]: 2.0},
                "bad_words_token_ids": [prompts[1][:1], prompts[2][:2]],
                "min_tokens": 8,
                "logprobs": 3,
                "prompt_logprobs": 2,
                "max_tokens": 40,
            },
        ),
    ]
    for _, _, params in cases:
        params["ignore_eos"] = True
    last = SamplingParams(temperature=0.0, max_tokens=50, stop_token_ids=[document[40]], min_tokens=5)
    requests = [request(name, prompt, SamplingParams(**params)) for name, prompt, params in cases]
    return [*requests, request("stopped", [*document, *document, *document[:9]], last)]


@pytest.fixture(scope="module")
def plain(load, make_engine):
    """What plain decoding gives."""
    return drive(make_engine(), load)


def speculating(make_engine, eager=True, answers=None, **settings):
    core = make_engine(speculative_config=NGRAM, target_tpot_ms="off", **settings)
    if eager:
        core.scheduler.drafter = Eager(core.config.speculative_config, answers)
    return core


def test_by_default_text_is_looked_up_where_no_step_is_planned_ahead(make_engine):
    for late, kind in ((False, NgramDrafter), (True, type(None))):
        core = make_engine(late=late, speculative_config="auto")
        assert type(core.scheduler.drafter) is kind
        core.close()


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 24, "max_num_seqs": 10, "num_threads": 1}, True),
        ({"kv_memory": 18 * FRAME_BYTES, "max_model_len": 256, "enable_prefix_caching": False}, True),
    ],
    ids=["looked up", "small steps", "a tiny pool"],
)
def test_drafts_change_no_bit(plain, load, make_engine, settings, known):
    """Of all requests together: looked up, or taken from what will come."""
    core = speculating(make_engine, answers=plain.tokens if known else None, **settings)
    assert_same(drive(core, load, every=2), plain)
    stats = core.stats()
    assert stats.accepted_tokens > (60 if known else 20)
    assert stats.draft_tokens > stats.accepted_tokens
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert sum(stats.drafted_per_position) == stats.draft_tokens
    assert stats.drafted_per_position[0] == stats.draft_rows
    assert stats.preemptions or "kv_memory" not in settings
    shown = Metrics("m").render(stats, (0, 0)).decode()
    for kind, counts in (("draft", stats.drafted_per_position), ("accepted", stats.accepted_per_position)):
        first = f'num_{kind}_tokens_per_pos_total{{model_name="m",position="0"}} {counts[0]}.0'
        assert f"pagemill:spec_decode_{first}" in shown


def test_drafts_from_other_answers_change_no_bit(plain, load, make_engine):
    """The second time, all has been answered before; for another namespace, it has not."""
    core = make_engine(speculative_config={**NGRAM, "method": "suffix"}, target_tpot_ms="off")
    assert isinstance(core.scheduler.drafter, SuffixDrafter)
    core.scheduler.drafter = EagerSuffix(core.config.speculative_config)
    accepted = []
    for salt in ("", "", "other"):
        before = core.stats().accepted_tokens
        salted = [msgspec.structs.replace(one, cache_salt=salt) for one in load]
        assert_same(drive(core, salted, every=2), plain)
        accepted.append(core.stats().accepted_tokens - before)
    assert accepted[1] > 1.5 * max(accepted[0], accepted[2])
    stats = core.stats()
    assert stats.draft_source_requests == 3 * len(plain.tokens)
    assert stats.draft_source_tokens > 3 * sum(map(len, plain.tokens.values()))
    core.add_request(request("running", [5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)))
    core.step()
    assert not core.reset_prefix_cache()
    assert core.stats().draft_source_tokens == core.stats().draft_source_requests == 0


@pytest.mark.parametrize("name", ["gguf", pytest.param("int8 cache", marks=pytest.mark.slow), "mixed cache"])
def test_drafts_change_no_bit_of_narrow_formats(load, make_engine, name):
    some = [one for one in load if one.request_id in ("greedy", "seeded")]
    expected = drive(make_engine(**OTHERS[name]), some)
    core = speculating(make_engine, answers=expected.tokens, **OTHERS[name])
    assert_same(drive(core, some), expected)
    assert core.stats().accepted_tokens > 20


def test_prefix_hits_and_turns_that_follow_find_only_what_was_accepted(plain, load, make_engine):
    core = speculating(make_engine, answers=plain.tokens)
    assert_same(drive(core, load), plain)
    again = drive(core, load)
    assert again.cached["greedy"] > 0
    assert_same(again, plain)
    turns = [
        request(f"turn {one.request_id}", one.prompt_token_ids + plain.tokens[one.request_id, 0] + [5, 6],
                SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        for one in load
    ]  # fmt: skip
    core.scheduler.drafter = Eager(core.config.speculative_config)
    found = drive(core, turns)
    assert found.cached["turn greedy"] > len(load[0].prompt_token_ids)
    assert found.tokens == drive(make_engine(enable_prefix_caching=False), turns).tokens


def test_the_measured_number_of_drafts_changes_no_bit(plain, load, make_engine):
    assert_same(drive(speculating(make_engine, eager=False), load), plain)


def test_stop_strings_and_sessions_end_where_they_would_without_drafts(prompts, tokenizer):
    document = tokenizer.decode(prompts[0] + prompts[1])
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    found = []
    with LLM("smollm2-135m", dtype="float32", max_model_len=640, kv_memory="96MiB", speculative_config=NGRAM) as llm:
        scheduler = llm.client.core.scheduler
        for name, drafter in (("plain", None), ("drafted", Eager(llm.client.core.config.speculative_config))):
            scheduler.drafter = drafter
            (whole,) = llm.generate(document * 2 + document[:20], params, use_tqdm=False)
            stop = whole.outputs[0].text[30:34]
            stopping = SamplingParams(temperature=0.0, max_tokens=24, stop=[stop], logprobs=1)
            (cut,) = llm.generate(document * 2 + document[:20], stopping, use_tqdm=False)
            session = llm.session(name)
            turns = [session.chat([{"role": "user", "content": text}], params) for text in (document, document)]
            requests = [whole, cut, *turns]
            outputs = [(one.outputs[0], one.prompt_token_ids) for one in requests]
            found.append([(o.token_ids, o.text, o.logprobs, o.finish_reason, o.stop_reason, p) for o, p in outputs])
            usage = CompletionUsage.model_validate_json(usage_of(requests).model_dump_json())
            if drafter is None:
                assert usage.completion_tokens_details is None
        stats = llm.stats()
    assert found[0] == found[1]
    assert found[0][1][3:5] == ("stop", stop)
    counts = [one.metrics.drafts or DraftCounts() for one in requests]
    assert sum(each.num_draft_tokens for each in counts) == stats.draft_tokens
    accepted, details = [each.num_accepted_tokens for each in counts], usage.completion_tokens_details
    assert 10 < sum(accepted) <= stats.accepted_tokens, "the engine does not know of stop strings"
    for one, each in zip(requests, counts, strict=True):
        assert each.num_accepted_tokens == sum(each.num_accepted_tokens_per_pos) <= len(one.outputs[0].token_ids)
        assert each.num_draft_tokens == sum(each.num_draft_tokens_per_pos)
    assert details.accepted_prediction_tokens == sum(accepted)
    assert details.rejected_prediction_tokens == stats.draft_tokens - sum(accepted)


def test_accepting_every_draft_would_be_seen(plain, load, make_engine, monkeypatch):
    def credulous(plan, choose):
        found = verification.verify(plan, choose)
        for tokens, drafts in zip(found.tokens, verification.drafts_of(plan), strict=True):
            tokens[:] = drafts or tokens
        return found

    monkeypatch.setattr(local, "verify", credulous)
    greedy = load[0]
    run = drive(speculating(make_engine, answers=plain.tokens), [greedy])
    assert run.tokens["greedy", 0] != plain.tokens["greedy", 0]


@contextmanager
def failing_choices(core, draw: random.Random):
    """Lets the sampler fail now and then, before it has done anything. The rounds that went well before each fault."""
    sampler, rounds, failed = core.executor.sampler, 0, []
    sample = sampler.sample

    def failing(logits, rows):
        nonlocal rounds
        if draw.random() < 0.25:
            failed.append(rounds)
            raise RuntimeError("the device hiccups")
        rounds += 1
        return sample(logits, rows)

    sampler.sample = failing
    try:
        yield failed
    finally:
        sampler.sample = sample


def test_a_fault_in_the_middle_of_a_verification_changes_no_bit(plain, load, make_engine):
    """Rows are run again that have been sampled for already."""
    core = speculating(make_engine, answers=plain.tokens)
    run = core.executor.run

    def breaking(plan):
        if len(plan.rows) == 1:
            return run(plan)
        with failing_choices(core, draw) as failed:
            failures.append(failed)
            return run(plan)

    failures: list[list[int]] = []
    draw = random.Random(1)
    core.executor.run = breaking
    assert_same(drive(core, load), plain)
    assert sum(any(failed) for failed in failures) > 10, "in the middle"


def test_a_row_without_a_token_behind_accepted_ones_fails_as_it_would_without_drafts(make_engine, prompts, monkeypatch):
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True)
    asked = [request("r", prompts[0], params), request("other", prompts[1], params)]
    expected = drive(make_engine(), asked).tokens
    core = speculating(make_engine, answers=expected)
    sample, drawn = core.executor.sampler.sample, []

    def poisoned(logits, rows):
        """From its tenth token on, the first request's logits are not finite."""
        for place, row in enumerate(rows.tolist()):
            sequence = next((one for one in core.scheduler.state.running if one.row == row), None)
            if sequence is not None and sequence.request.request_id == "r":
                drawn.append(row)
                if len(drawn) > 10:
                    logits[place] = float("nan")
        return sample(logits, rows)

    monkeypatch.setattr(core.executor.sampler, "sample", poisoned)
    run = drive(core, asked)
    assert run.tokens["r", 0] == expected["r", 0][:10]
    assert run.last["r", 0].error.error_type == NonFiniteLogitsError.__name__
    assert run.tokens["other", 0] == expected["other", 0]
