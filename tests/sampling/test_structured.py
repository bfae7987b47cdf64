"""Structured outputs: what may be asked, what is refused and how fast, and masks over logits."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pagemill import SamplingParams, StructuredOutputsParams
from pagemill.errors import InvalidRequestError, SamplingParamsError
from pagemill.namespace import Namespace
from pagemill.sampling import grammar, grammar_cache, grammar_rows
from pagemill.sampling.cpu_kernels import CpuSamplingKernels
from pagemill.sampling.grammar import GrammarChecker, lark_of
from pagemill.sampling.grammar_cache import Grammars
from pagemill.sampling.grammar_rows import GrammarRows
from pagemill.sampling.params import MAX_LOGPROBS
from pagemill.sampling.roomy_threads import RoomyThread
from pagemill.sampling.sampler import Sampler
from pagemill.sampling.structured import MAX_CHARACTERS, MAX_CHOICES
from pagemill.sampling.torch_kernels import TorchSamplingKernels
from pagemill.text.tokenizer import Tokenizer
from waiting import wait_until

NONE = np.zeros(0, np.int32)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_path("smollm2-135m")


@pytest.fixture(scope="module")
def checker(tokenizer):
    return GrammarChecker(tokenizer.special_tokens, tokenizer.missing_characters)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json_object": False}, "nothing"),
        ({"choice": []}, f"1 to {MAX_CHOICES} texts"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"1 to {MAX_CHOICES} texts"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": ["a" * (MAX_CHARACTERS // 2)] * 3}, f"at most {MAX_CHARACTERS}"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, f"at most {MAX_CHARACTERS}"),
        ({"json": {"description": "a" * 2**20}}, f"at most {MAX_CHARACTERS}"),
        ({"json": {"const": "\ud800"}}, "cannot be written as JSON"),
        ({"json": {"const": {1, 2}.__len__}}, "cannot be written as JSON"),
        ({"json": 5}, "must be a JSON schema"),
        ({"regex": 5}, "regex is 5"),
        ({"structural_tag": "x"}, "write a grammar instead"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": ["a", "\udfff"]}, "surrogate"),
        ({"json_object": True, "disable_additional_properties": True}, '"additionalProperties": false'),
        ({"nope": 1}, "no argument 'nope'"),
        ({"regex": "a", "disable_any_whitespace": True}, "leave it out"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "contradict"),
    ],
)
def test_refuses_what_says_nothing_or_too_much(given, said):
    with pytest.raises(InvalidRequestError, match=said) as refused:
        SamplingParams(structured_outputs=given)
    assert refused.value.param == "structured_outputs"


def test_takes_dicts_and_keeps_what_it_was_given():
    schema = {"type": "object", "properties": {"a": {"const": "é"}}}
    params = SamplingParams(structured_outputs={"json": schema})
    assert params.structured_outputs == StructuredOutputsParams(json=schema)
    assert json.loads(params.structured_outputs.json) == schema


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"json": {"type": "wrong"}}, "Invalid type: wrong"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[]"}, "is an object"),
        ({"json": "false"}, "is an object"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "unsatisfiable"),
        ({"json": {"$ref": "#"}}, "no text ends it"),
        ({"json": {"$ref": "http://example.com/schema"}}, "does not fetch"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_object": True, "whitespace_pattern": "("}, "unclosed group"),
        ({"grammar": 'start: "a" other'}, "unknown name"),
        ({"grammar": "start: start"}, "no text ends it"),
        ({"grammar": 'root ::= "a'}, "cannot be compiled"),
        ({"grammar": "start: <|nothing|>"}, "unknown special token"),
        ({"choice": ["yes", "a\U00040000"]}, r"'\\U00040000' in the choice 'a.+tokens cannot write"),
        ({"choice": ["\x04"]}, r"'\\x04' in the choice"),
        ({"json": {"enum": ["\U00040000"]}}, r"'\\U00040000' in the enum"),
        ({"json": {"items": {"const": {"a": ["\U00050000b"]}}}}, r"'\\U00050000' in the const"),
        ({"json": {"properties": {"\U00040000": {"type": "null"}}}}, r"'\\U00040000' in the properties"),
    ],
)
def test_says_what_does_not_compile(checker, given, said):
    with pytest.raises(SamplingParamsError, match=said) as refused:
        checker.check(StructuredOutputsParams(**given), Namespace())
    assert refused.value.param == "structured_outputs"
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    "given",
    [
        {"choice": ["é", "𝄞", "🙂", "漢"]},
        {"json": {"const": "\x04", "description": "\U00040000"}},
        {"json": {"properties": {"const": {"type": "null"}, "enum": {"enum": [True]}}}},
    ],
)
def test_takes_what_the_tokens_can_write(checker, given):
    """In JSON, a control character is written with an escape."""
    checker.check(StructuredOutputsParams(**given), Namespace())


def accepts(lark, text):
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    ids = [*text.encode()]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_classes_of_an_expression_are_ascii():
    lark = lark_of(StructuredOutputsParams(regex=r"\d[\d.]+\s\w"))
    assert accepts(lark, "12.5 x")
    for wrong in ("१2.5 x", "12.5\u205fx", "12.5 é"):
        assert not accepts(lark, wrong)
    assert accepts(lark_of(StructuredOutputsParams(regex=r"\p{Nd}")), "१")


def test_formats_that_nobody_enforces_say_nothing(checker):
    properties = {
        "format": {"type": "string", "format": "path"},
        "default": {"type": "string", "format": "password"},
        "day": {"type": "string", "format": "date"},
        "kind": {"enum": [{"format": "path"}]},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    asked = StructuredOutputsParams(json=schema)
    checker.check(asked, Namespace())
    answer = {"format": "/", "default": "", "day": "2026-11-28", "kind": {"format": "path"}}
    assert accepts(lark_of(asked), json.dumps(answer))
    for name, value in (("day", "tomorrow"), ("kind", {})):
        assert not accepts(lark_of(asked), json.dumps(answer | {name: value}))
    checker.check(StructuredOutputsParams(json={"items": {"format": "path"} | _nested(50)}), Namespace())


def _nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _chain(length):
    definitions = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{length}": {"type": "string"}}}


HOSTILE = {
    "nested schema": {"json": _nested(500)},
    "chain of references": {"json": _chain(1500)},
    "wide schema": {"json": {"properties": {f"f{i}": {"type": "string"} for i in range(2000)}}},
    "product of alternatives": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{i} {j}": {}}} for j in range(6)]} for i in range(8)]}
    },
    "chain of rules": {
        "grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3000)) + '\na3000: "x"'
    },
    "doubled terminals": {
        "grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"'
    },
    "nested parentheses": {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    "nested GBNF": {"grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000},
    "long GBNF": {"grammar": "root ::= " + "[a-z] " * 10000},
    "nested expression": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "huge repetition": {"regex": "((a{1000}){1000}){1000}"},
    "ranges of repetitions": {"regex": "(a{1,1000}){1,1000}"},
    "huge lengths": {
        "json": {"type": "array", "minItems": 10**9, "maxItems": 10**9, "items": {"type": "string", "maxLength": 10**9}}
    },
    "huge minimum": {"json": {"type": "string", "minLength": 10**6}},
    "many alternatives": {"json": {"anyOf": [{"const": i} for i in range(3500)]}},
    "ambiguous rules": {"grammar": 'start: e\ne: e e | "a" | '},
    "recursion on the right": {"grammar": 'start: e\ne: "a" e | '},
    "many terminals": {
        "grammar": f"start: ({' | '.join(f'T{i}' for i in range(300))})*\n"
        + "\n".join(f"T{i}: /a{{{i},{i + 3}}}/" for i in range(300))
    },
    "exponential automaton": {"regex": "(a|b)*a(a|b){400}"},
    "long expression": {"regex": "ab" * (MAX_CHARACTERS // 2)},
    "long pattern": {"json": {"type": "string", "pattern": "(a{1000}){1000}"}},
    "long constant": {"json": {"const": "a" * (MAX_CHARACTERS - 20)}},
    "many choices": {"choice": [f"choice {i}" for i in range(MAX_CHOICES)]},
}


def new_grammars(tokenizer) -> Grammars:
    grammars = Grammars(tokenizer.to_json, tokenizer.vocab_size, [tokenizer.eos_token_id])
    grammars.compiled(StructuredOutputsParams(choice=["the vocabulary is read"]), b"")
    return grammars


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return new_grammars(tokenizer)


def compile_beside_a_thread(grammars, asked) -> tuple[bool, float, float]:
    """Returns whether it compiles, its processor time, and the most of it between two turns of another thread."""
    gaps, ended = [], threading.Event()

    def tick():
        last = time.process_time()
        while not ended.wait(0.002):
            gaps.append(time.process_time() - last)
            last = time.process_time()

    other, begin, compiles = threading.Thread(target=tick), time.process_time(), True
    other.start()
    try:
        grammars.compiled(asked, b"")
    except SamplingParamsError:
        compiles = False
    took = time.process_time() - begin
    ended.set()
    other.join()
    return compiles, took, max(gaps, default=0.0)


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_demands_end_soon_and_hold_nobody_up(grammars, tokenizer, what):
    """Each is compiled or refused within a second or two of processor time. Other threads go on meanwhile: little of
    that time passes between two of their turns. What compiles costs little per token. On a busy machine the other
    thread may wait for a processor, so it has three tries."""
    asked = StructuredOutputsParams(**HOSTILE[what])
    compiles, took, gap = compile_beside_a_thread(grammars, asked)
    for _ in range(2):
        if gap >= max(0.2, took / 2):
            compiles, took, gap = compile_beside_a_thread(new_grammars(tokenizer), asked)
    assert took < 4, took
    assert gap < max(0.2, took / 2)
    if compiles:
        rows, begin, choice = GrammarRows(grammars, 1), time.thread_time(), np.random.default_rng(1)
        rows.add(0, asked, b"", NONE)
        for _ in range(20):
            if rows.failures([0], [0]):
                break
            rows.append([0], [int(choice.choice(np.flatnonzero(unpacked(rows, grammars.vocab_size))))])
        assert time.thread_time() - begin < 2


def unpacked(rows, size):
    return rows.allows(np.zeros(size, np.int64), np.arange(size))


def test_an_answer_that_takes_too_long_to_follow_fails(tokenizer, monkeypatch):
    """What ambiguous rules take grows with each token; llguidance counts its items, not its time."""
    monkeypatch.setattr(grammar_rows, "WORK_AHEAD_S", 0.01)
    monkeypatch.setattr(grammar_rows, "WORK_S", 1e-4)
    asked = SamplingParams(temperature=0.0, structured_outputs=HOSTILE["ambiguous rules"])
    sampler = make_sampler(tokenizer, CpuSamplingKernels(), [asked, SamplingParams(structured_outputs={"regex": "a*"})])
    logits = torch.zeros(2, tokenizer.vocab_size)
    logits[:, tokenizer.encode("a")] = 9.0
    for _ in range(300):
        failed = sampler.sample(logits.clone(), np.arange(2)).failed
        if failed:
            break
    assert set(failed) == {0}
    assert "ms a token" in str(failed[0])


def test_answers_do_not_use_up_the_automaton_that_they_share(tokenizer, monkeypatch):
    """Looking at what may come makes four times as many states as what comes. Two rows at once, two rows later."""
    limits = LLParserLimits(max_lexer_states=1000, precompute_large_lexemes=False, verbose_errors=False)
    monkeypatch.setattr(grammar, "LIMITS", limits)
    asked = SamplingParams(structured_outputs={"json": {"type": "string", "maxLength": 1600}})
    sampler, rows = make_sampler(tokenizer, CpuSamplingKernels(), [asked, asked]), np.arange(2)
    sentences = "The quick brown fox jumps over the lazy dog. " * 9, "A dog is no fox, and who could tell? " * 9
    texts = [tokenizer.encode(f'"{text}') for text in sentences]
    for _ in range(2):
        for tokens in zip(*texts, strict=False):
            logits = torch.zeros(2, tokenizer.vocab_size)
            logits[rows, tokens] = 99.0
            sampled = sampler.sample(logits, rows)
            assert sampled.failed == {}
            assert sampled.token_ids == [*tokens]
        for row in rows:
            sampler.add_row(row, asked, 0, NONE, NONE)


def test_an_answer_that_cannot_be_followed_fails_alone(tokenizer, monkeypatch):
    asked = SamplingParams(structured_outputs={"regex": "[a-z]{20}"})
    sampler, rows = make_sampler(tokenizer, CpuSamplingKernels(), [asked, asked]), np.arange(2)
    token = tokenizer.encode("a")[0]
    go_on = grammar_rows.Followed.go_on
    broken = sampler._grammars._followed[0]  # noqa: SLF001

    def breaking(followed, tokens, mask):
        if followed is broken:
            raise RuntimeError("can't start new thread")
        return go_on(followed, tokens, mask)

    monkeypatch.setattr(grammar_rows.Followed, "go_on", breaking)
    for _ in range(3):
        logits = torch.zeros(2, tokenizer.vocab_size)
        logits[:, token] = 99.0
        sampled = sampler.sample(logits, rows)
        assert sampled.token_ids[1] == token
    assert set(sampled.failed) == {0}
    assert "RuntimeError: can't start new thread" in str(sampled.failed[0])


def test_a_row_that_is_given_again_has_no_failure_of_its_predecessor(tokenizer, monkeypatch):
    asked, row = StructuredOutputsParams(choice=["yes", "no"]), 0
    rows = GrammarRows(new_grammars(tokenizer), 1)

    class GivenAgain(SamplingParamsError):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            rows.remove(row)
            rows.add(row, asked, b"", np.empty(0, np.int32))

    monkeypatch.setattr(grammar_rows, "SamplingParamsError", GivenAgain)
    rows.add(row, asked, b"", np.array(tokenizer.encode("maybe"), np.int32))
    assert rows.failures([5], [row]) == {}
    assert rows.failures([5], [row]) == {}


@pytest.fixture
def compiling(monkeypatch):
    """The grammars that have begun to be compiled, and what holds them up while it is clear."""
    begun, go_on = [], threading.Event()
    compile_grammar = grammar_cache.compile_grammar

    def compiles(vocabulary, lark):
        begun.append(lark)
        assert go_on.wait(10)
        return compile_grammar(vocabulary, lark)

    monkeypatch.setattr(grammar_cache, "compile_grammar", compiles)
    yield begun, go_on
    go_on.set()


def test_grammars_are_kept_apart_by_namespace_and_bounded(tokenizer, monkeypatch, compiling):
    """Another namespace's grammar is compiled again; one that is held is never dropped."""
    monkeypatch.setattr(grammar_cache, "MAX_GRAMMARS", 3)
    begun, go_on = compiling
    grammars = Grammars(tokenizer.to_json, tokenizer.vocab_size, [tokenizer.eos_token_id])
    asked = [StructuredOutputsParams(choice=[f"choice {i}"]) for i in range(6)]
    held = [grammars.prepare(each, b"a") for each in asked]
    assert not any(future.done() for future in held)
    assert [grammars.prepare(each, b"a") for each in asked] == held
    go_on.set()
    for _ in range(2):
        for each, future in zip(asked, held, strict=True):
            assert grammars.compiled(each, b"a") is future.result()
    assert len(begun) == 6
    held.clear()
    grammars.compiled(asked[5], b"b")
    grammars.compiled(asked[5], b"a")
    assert len(begun) == 7
    grammars.compiled(asked[0], b"a")  # dropped when one of another namespace came
    assert len(begun) == 8


def test_one_thread_compiles_what_somebody_still_waits_for(tokenizer, compiling):
    begun, go_on = compiling
    before = threading.enumerate()
    grammars = Grammars(tokenizer.to_json, tokenizer.vocab_size, [tokenizer.eos_token_id])
    held = [grammars.prepare(StructuredOutputsParams(choice=[f"{i}"]), b"") for i in range(20)]
    (thread,) = (each for each in threading.enumerate() if each not in before)
    wait_until(lambda: begun, "nothing is compiled")
    del held[1:-1]
    go_on.set()
    assert len({future.result(10) for future in held}) == len(begun) == 2
    del grammars, held
    thread.join(10)
    assert not thread.is_alive()


def test_a_thread_that_could_not_start_is_started_by_the_next(monkeypatch):
    thread, start = RoomyThread(), threading.Thread.start

    def fail(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        thread.submit(lambda: 1)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert thread.submit(lambda: 2).result(10) == 2


def test_verdicts_are_kept_apart_by_namespace(checker, monkeypatch):
    asked, compiled = StructuredOutputsParams(choice=["kept apart"]), []
    compile_grammar = grammar.compile_grammar
    monkeypatch.setattr(grammar, "compile_grammar", lambda *given: compiled.append(1) or compile_grammar(*given))
    for space in (Namespace("a"), Namespace("a"), Namespace("b"), Namespace("a", "salt")):
        checker.check(asked, space)
    assert len(compiled) == 3


def make_sampler(tokenizer, kernels, params):
    sampler = Sampler(len(params), tokenizer.vocab_size, kernels, (tokenizer.eos_token_id,), tokenizer.to_json)
    for row, asked in enumerate(params):
        sampler.add_row(row, asked, row, NONE, NONE)
    return sampler


@pytest.mark.parametrize("kernels", [CpuSamplingKernels(), TorchSamplingKernels()], ids=["kernels", "torch"])
def test_greedy_rows_take_the_best_allowed_token(tokenizer, kernels):
    """With logits, and from the argmax alone where that is allowed."""
    greedy = SamplingParams(temperature=0.0, structured_outputs={"choice": ["green tea", "grey", "42"]})
    whole, short = make_sampler(tokenizer, kernels, [greedy] * 3), make_sampler(tokenizer, kernels, [greedy] * 3)
    rows, texts = np.arange(3), [[], [], []]
    assert short.only_argmax(rows)
    for seed in range(12):
        logits = torch.randn(3, tokenizer.vocab_size, generator=torch.Generator().manual_seed(seed))
        argmax = logits.argmax(-1).numpy()
        wrong = short.forbidden(argmax, rows)
        argmax[wrong] = short.best_allowed(logits[torch.from_numpy(wrong)], rows[wrong])
        assert whole.sample(logits, rows).token_ids == short.take_argmax(argmax, rows).token_ids
        for text, token in zip(texts, argmax.tolist(), strict=True):
            text.append(token)
    assert {tokenizer.decode(text, skip_special_tokens=True) for text in texts} <= {"green tea", "grey", "42"}


@pytest.mark.parametrize("kernels", [CpuSamplingKernels(), TorchSamplingKernels()], ids=["kernels", "torch"])
def test_masks_compose_with_other_constraints(tokenizer, kernels):
    yes, no = (tokenizer.encode(text) for text in ("yes", "no"))
    assert len(yes) == len(no) == 1
    form = {"choice": ["yes", "no"]}
    params = [
        SamplingParams(structured_outputs=form, logit_bias={yes[0]: 100.0}),
        SamplingParams(structured_outputs=form, allowed_token_ids=no),
        SamplingParams(structured_outputs=form, allowed_token_ids=[5]),
        SamplingParams(structured_outputs=form, logprobs=MAX_LOGPROBS),
        SamplingParams(structured_outputs=form, min_tokens=5, logit_bias={yes[0]: 100.0}),
        SamplingParams(),
    ]
    sampler, rows = make_sampler(tokenizer, kernels, params), np.arange(len(params))
    logits = torch.randn(len(params), tokenizer.vocab_size, generator=torch.Generator().manual_seed(1))
    logits[:, yes[0]] = logits[:, no[0]] = 20.0
    model = torch.log_softmax(logits, -1)
    sampled = sampler.sample(logits.clone(), rows)
    assert sampled.token_ids[0] == yes[0]
    assert sampled.token_ids[1] == no[0]
    assert sampled.exhausted == [2]
    entry = sampled.logprobs[3]
    assert entry.token_ids[0] in (yes[0], no[0])
    np.testing.assert_allclose(entry.logprobs, model[3, entry.token_ids].numpy(), atol=1e-4)
    assert len(entry.token_ids) == 1 + MAX_LOGPROBS  # of the model's distribution, what is forbidden included
    again = sampler.sample(logits.clone(), rows[[0, 4, 5]])
    assert again.token_ids[0] == tokenizer.eos_token_id
    assert again.exhausted == [1]  # the answer is complete and must not end


def test_a_model_or_tokenizer_that_cannot_is_refused(tokenizer):
    asked = SamplingParams(structured_outputs={"choice": ["a"]})

    def refusal(sampler):
        with pytest.raises(SamplingParamsError) as refused:
            sampler.prepare(asked).result(10)
        return str(refused.value)

    kernels = CpuSamplingKernels()
    assert "end-of-sequence" in refusal(Sampler(1, tokenizer.vocab_size, kernels, (), tokenizer.to_json))
    assert "tokenizer" in refusal(Sampler(1, tokenizer.vocab_size, kernels, (2,), lambda: "{}"))
