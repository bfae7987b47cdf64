"""Structured outputs on the real model: every finished answer has its form, whatever happens to its request."""

from __future__ import annotations

import itertools
import json
import re
from concurrent.futures import Future

import jsonschema
import pytest
from drive import drive, request
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pagemill import SamplingParams
from pagemill.errors import SamplingParamsError
from pagemill.sampling import grammar_cache
from random_schemas import SCHEMAS

PROMPT = "Answer in JSON:\n"
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 10}, "maxItems": 4},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
SHAPES = [{"json": FORM}, {"regex": "[a-z]{20,40}"}, {"choice": ["yes", "no"]}, {"grammar": 'start: "a" /[0-9]{9}/'}]

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


@pytest.fixture(scope="module")
def engine(make_engine):
    core = make_engine(max_num_seqs=16)
    yield core
    core.close()


def structured(form, **more):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 120, "structured_outputs": form, **more})


def text_of(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("sampled", [structured({"regex": "[a-z]{8,30}"}, max_tokens=8), SamplingParams(max_tokens=8)])
def test_a_seed_gives_the_same_answers_however_long_grammars_take(make_engine, tokenizer, sampled, monkeypatch):
    prompt, answers = tokenizer.encode(PROMPT), []
    form = structured({"regex": "[a-z]{8,31}"}, max_tokens=8)
    for waits in (0, 5):
        core = make_engine(seed=7)
        prepare, polls = core.executor.prepare, itertools.count()

        def late(*given, prepare=prepare, polls=polls, waits=waits):
            if (prepared := prepare(*given)) is not None:
                done = prepared.done
                prepared.done = lambda: next(polls) >= waits and done()
            return prepared

        monkeypatch.setattr(core.executor, "prepare", late)
        answers.append(drive(core, [request("late", prompt, form), request("other", prompt, sampled)]).tokens)
        core.close()
    assert answers[0] == answers[1]


@settings(max_examples=3, phases=[Phase.generate])  # to shrink a failure would take minutes
@given(schemas=st.lists(SCHEMAS, min_size=12, max_size=12), seed=st.integers(0, 1000))
def test_every_finished_answer_parses_and_validates(engine, tokenizer, schemas, seed):
    prompt = tokenizer.encode(PROMPT)
    asked = [
        request(str(i), prompt, structured({"json": schema}, seed=seed + i, max_tokens=90))
        for i, schema in enumerate(schemas)
    ]
    run = drive(engine, asked)
    finished = [i for i in range(len(schemas)) if run.last[str(i), 0].finish_reason == "stop"]
    assert len(finished) >= len(schemas) // 2
    for i in finished:
        jsonschema.validate(json.loads(text_of(tokenizer, run.tokens[str(i), 0])), schemas[i])
    assert [output.error for output in run.last.values() if output.error is not None] == []


def test_preempted_drafted_and_calm_answers_are_the_same(make_engine, engine, tokenizer):
    """Rows with and without grammars, n of 4, in a pool that holds a part of them, in chunks of prompt, with drafts."""
    prompt = tokenizer.encode("One two three four five six seven eight nine ten. " * 4)
    asked = [
        request(f"{i}", [*prompt, i + 10], structured(SHAPES[i % 4], n=4 if i < 2 else 1, seed=i, max_tokens=24))
        for i in range(6)
    ]
    asked.append(request("free", prompt, SamplingParams(temperature=1.0, seed=7, max_tokens=24)))
    tiny = make_engine(kv_memory="13MiB", max_model_len=128, max_num_batched_tokens=32, target_tpot_ms="off", **DRAFTS)
    try:
        small = drive(tiny, asked)
        assert tiny.stats().preemptions > 0
        assert tiny.stats().draft_rows > 0
    finally:
        tiny.close()
    assert drive(engine, asked).tokens == small.tokens
    for i in range(6):
        for index in range(asked[i].params.n):
            text, ended = text_of(tokenizer, small.tokens[f"{i}", index]), small.last[f"{i}", index].finish_reason
            if ended != "stop":
                assert i % 4 == 0
            elif i % 4 == 0:
                jsonschema.validate(json.loads(text), FORM)
            else:
                assert re.fullmatch(["", "[a-z]{20,40}", "yes|no", "a[0-9]{9}"][i % 4], text)


def test_greedy_answers_need_no_logits(engine, tokenizer, monkeypatch):
    prompt = tokenizer.encode("Count: 1, 2, 3, 4,")
    asked = request("a", prompt, structured({"regex": "( [0-9]+,){6}"}, temperature=0.0))
    rows = []
    logits = engine.executor.decoder.logits
    monkeypatch.setattr(
        engine.executor.decoder, "logits", lambda hidden, *more: rows.append(1) or logits(hidden, *more)
    )
    run = drive(engine, [asked])
    assert text_of(tokenizer, run.tokens["a", 0]) == " 5, 6, 7, 8, 9, 10,"
    assert not rows


def test_a_fork_begins_its_own_answer(engine, tokenizer):
    prompt = tokenizer.encode("The colour is")
    first = request("first", prompt, structured({"regex": " [a-z]+"}, max_tokens=4, min_tokens=4, seed=1))
    run = drive(engine, [first])
    fork = request("fork", prompt + run.tokens["first", 0], structured({"choice": ["!", "?"]}), fork_of=("first", 0))
    assert text_of(tokenizer, drive(engine, [fork]).tokens["fork", 0]) in ("!", "?")


def test_drafts_are_held_to_the_grammar(make_engine, engine, tokenizer):
    """The answer repeats the prompt, so that drafts come true; what the grammar forbids is never accepted."""
    prompt = tokenizer.encode("one two three, one two three, one two three, one two three, one two")
    form = {"regex": "( three, one two){6} (three|four)!"}
    asked = [
        request("greedy", prompt, structured(form, temperature=0.0, max_tokens=60, logprobs=1)),
        request("drawn", prompt, structured(form, seed=4, max_tokens=60)),
    ]
    drafting = make_engine(max_num_seqs=4, **DRAFTS)
    try:
        run = drive(drafting, asked)
        assert drafting.stats().accepted_tokens >= 4
    finally:
        drafting.close()
    calm = drive(engine, asked)
    assert (run.tokens, run.logprobs) == (calm.tokens, calm.logprobs)
    assert re.fullmatch(form["regex"], text_of(tokenizer, run.tokens["greedy", 0]))


def test_ends_of_sequence_follow_a_complete_answer_that_ignores_them(engine, tokenizer):
    asked = request("a", tokenizer.encode("Say"), structured({"choice": ["yes"]}, ignore_eos=True, max_tokens=4))
    run = drive(engine, [asked])
    assert text_of(tokenizer, run.tokens["a", 0]) == "yes"
    assert run.tokens["a", 0][-1] in engine.ready.eos_token_ids
    assert run.last["a", 0].finish_reason == "length"


@pytest.mark.parametrize(
    ("stuck", "said", "fine"),
    [
        # A front end cannot tell of an expression; SmolLM2 has no token for a byte of this character.
        (structured({"regex": "a\U00040000"}), "cannot be written with this model's tokens", "a\U0001f642"),
        (structured({"choice": ["yes"]}, min_tokens=9), "min_tokens", "yes"),
    ],
)
def test_what_cannot_be_followed_fails_alone(engine, tokenizer, stuck, said, fine):
    prompt = tokenizer.encode("Say")
    run = drive(engine, [request("stuck", prompt, stuck), request("fine", prompt, structured({"choice": [fine]}))])
    failure = run.last["stuck", 0].error
    assert (failure.error_type, failure.param) == ("SamplingParamsError", "structured_outputs")
    assert said in failure.message
    assert text_of(tokenizer, run.tokens["fine", 0]) == fine


def test_a_request_waits_for_its_grammar_and_can_be_aborted_meanwhile(engine, tokenizer, monkeypatch):
    prompt, ready = tokenizer.encode("Say"), Future()
    monkeypatch.setattr(engine.executor, "prepare", lambda params, root: ready if params.structured_outputs else None)
    engine.add_request(request("gone", prompt, structured({"choice": ["yes"]})))
    engine.add_request(request("kept", prompt, structured({"choice": ["yes"]})))
    with pytest.raises(ValueError, match="is in use"):
        engine.add_request(request("kept", prompt, structured({"choice": ["yes"]})))
    assert engine.has_work()
    engine.add_request(request("free", prompt, SamplingParams(max_tokens=3, ignore_eos=True)))
    assert [len(engine.step()) for _ in range(4)] == [1, 1, 1, 0]
    engine.abort(["gone"])
    ready.set_result(None)
    run = drive(engine, [])
    assert set(run.last) == {("kept", 0)}


def test_a_grammar_that_the_engine_cannot_compile_ends_its_request(engine, tokenizer, monkeypatch):
    prepared = Future()
    monkeypatch.setattr(engine.executor, "prepare", lambda *given: prepared)
    engine.add_request(request("a", tokenizer.encode("Say"), structured({"choice": ["b"]}, n=2)))
    prepared.set_exception(SamplingParamsError("too much", param="structured_outputs"))
    ended = engine.step()
    assert [(one.index, one.finish_reason, one.error.message) for one in ended] == [
        (0, "error", "too much"),
        (1, "error", "too much"),
    ]
    assert not engine.has_work()


def test_a_grammar_is_compiled_once_while_its_request_lives(make_engine, tokenizer, monkeypatch):
    """However many others come, it waits for a row, and is preempted; then it is forgotten."""
    monkeypatch.setattr(grammar_cache, "MAX_GRAMMARS", 2)
    compiled, compile_grammar = [], grammar_cache.compile_grammar
    monkeypatch.setattr(
        grammar_cache, "compile_grammar", lambda *given: compiled.append(given[1]) or compile_grammar(*given)
    )
    core = make_engine(max_num_seqs=3, kv_memory=7 * 737280, max_model_len=64, target_tpot_ms="off")
    prompt = tokenizer.encode("Say")
    forms = [structured({"regex": f"[a-z]{{{100 + i},200}}"}, seed=i, max_tokens=40) for i in range(6)]
    run = drive(core, [request(str(i), prompt, form) for i, form in enumerate(forms)])
    assert {output.finish_reason for output in run.last.values()} <= {"stop", "length"}
    assert core.stats().preemptions > 0
    assert len(compiled) == len(set(compiled)) == len(forms)
    drive(core, [request("again", prompt, forms[0])])
    assert len(compiled) == len(forms) + 1
    core.close()
