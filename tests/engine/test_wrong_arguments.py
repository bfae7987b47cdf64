"""A seeded random caller: wrong arguments give an answer or an error of the package, never a raw one or a hang.

Each call is a right one with one or two arguments replaced. Arrays and tensors of token ids are right ones too.
"""

import itertools
import random
import signal
from collections import deque

import numpy as np
import pytest
import torch

from pagemill import LLM, BeamSearchParams, PoolingParams, SamplingParams
from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig, config_for
from pagemill.errors import InvalidRequestError, PagemillError, SamplingParamsError
from pagemill.tenant_limits import TenantLimits
from pagemill.text.chat_template import MAX_MESSAGES

MODEL = "smollm2-135m"
CALLS = 950
CALL_S = 10
IDS = [504, 2365, 6354]
ONE = SamplingParams(max_tokens=1, temperature=0)
SEARCH = BeamSearchParams(beam_width=2, max_tokens=1)
MESSAGES = [{"role": "user", "content": "Hi"}]

WRONG = [
    *(None, True, False, -1, 0, 7, 1.5, float("nan"), float("inf"), 2**63, -(2**63) - 1, 10**30, 10**5000),
    *("", "a", "\ud800", "\0", "x" * 5000, b"x", object(), SamplingParams, int, print, Ellipsis, 1j),
    *([], [None], [[]], ["a", 1], [1.5], [10**30], [[1], "b"], (), {}, {"a": 1}, {1: {}}, {1, 2}, frozenset("ab")),
    *(range(3), deque([1]), np.array([1, 2]), np.array([1.5, 2]), np.array([[1, 2], [3, 4]]), np.array(3)),
    *(np.array([]), np.int64(3), np.float32(0.5), np.array(["a"]), np.array([None])),
    *(torch.tensor([1, 2]), torch.tensor([[1, 2]]), torch.tensor(1), torch.tensor([0.5]), torch.tensor([])),
]
ENDLESS = [itertools.count, lambda: itertools.repeat("a"), lambda: (x for x in (1, 2)), lambda: iter(lambda: [1], 0)]


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, max_model_len=256, kv_memory="32MiB", max_num_seqs=4, max_num_batched_tokens=64) as llm:
        yield llm


def any_value(chance):
    value = chance.choice(ENDLESS)() if chance.random() < 0.1 else chance.choice(WRONG)
    shape = chance.random()
    if shape < 0.1:
        return [value]
    if shape < 0.2:
        return {chance.choice(("prompt", "prompt_token_ids", "cache_salt", "role", "content", "max_running")): value}
    return [{"role": "user", "content": value}] if shape < 0.25 else value


def calls(llm):
    """Name, function and right arguments of everything that can be called."""

    def session(**space):
        session = llm.session(**space)
        return [session.kv_blocks, session.token_ids, session.messages, session.fork("copy").delete(), session.delete()]

    def turn(name, cache_salt, tenant, **turn):
        return llm.session(name, cache_salt=cache_salt, tenant=tenant).generate(**turn)

    def chat_turn(name, **turn):
        return llm.session(name).chat(**turn)

    how = {"priority": 0, "tenant": "default"}
    space = {"cache_salt": "", "tenant": "default"}
    chat = {"messages": MESSAGES, "sampling_params": ONE, "use_tqdm": False, **how, "cache_salt": ""}
    template = {"add_generation_prompt": True, "chat_template": None, "tools": None, "documents": None, "mood": "glad"}
    generate = {"prompts": IDS, "sampling_params": ONE, "use_tqdm": False, **how}
    return [
        (LLM, {"model": "no-such-model"}, ["model"]),
        (lambda **given: config_for("LLM", MODEL, given), defaults(EngineConfig), None),
        (SamplingParams, defaults(SamplingParams), None),
        (BeamSearchParams, {"beam_width": 2, "max_tokens": 1, "length_penalty": 1.0, "early_stopping": False}, None),
        (PoolingParams, defaults(PoolingParams), None),
        (llm.embed, {"prompts": IDS, "pooling_params": PoolingParams(), "use_tqdm": False, **how}, None),
        (TenantLimits, defaults(TenantLimits), None),
        *[(llm.generate, generate, ["prompts", "sampling_params", "priority", "tenant"])] * 3,
        (llm.beam_search, {"prompts": IDS, "params": SEARCH, **how}, None),
        *[(llm.chat, {**chat, **template}, [name for name in [*chat, *template] if name != "use_tqdm"])] * 2,
        *[(llm.pin, {"prompt": IDS * 10, "name": "pin", "expires_s": 1.0, **space}, None)] * 2,
        (llm.unpin, {"name": "pin", **space}, None),
        (session, {"name": "talk", **space}, None),
        (turn, {"name": "talk", **space, "prompt": IDS, "sampling_params": ONE, "priority": 0}, None),
        (chat_turn, {"name": "chat", "messages": MESSAGES, "sampling_params": ONE, "priority": 0, **template}, None),
        (llm.sessions, space, None),
        (llm.set_tenant, {"name": "default", "limits": TenantLimits()}, None),
    ]


def defaults(cls):
    return {name: argument.default for name, argument in arguments_of(cls).items() if name != "model"}


def hang(*_):
    raise TimeoutError(f"no answer within {CALL_S} s")


def test_no_call_gives_a_raw_error_or_hangs(llm):
    chance = random.Random(19)
    before = llm.generate([IDS], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)[0].outputs[0].token_ids
    found = []
    usual = signal.signal(signal.SIGALRM, hang)
    try:
        for number in range(CALLS):
            function, right, names = chance.choice(calls(llm))
            replaced = chance.sample(names or list(right), min(len(names or right), chance.randint(1, 2)))
            wrong = {name: any_value(chance) for name in replaced}
            signal.setitimer(signal.ITIMER_REAL, CALL_S)
            try:
                function(**{**right, **wrong})
            except PagemillError:
                pass
            except Exception as error:
                found.append(f"{number}: {function} with { {k: type(v) for k, v in wrong.items()}!s}: {error!r:.300}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            llm.set_tenant("default", TenantLimits())
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert not found, "\n".join(found)
    for pin in llm.pins():
        llm.unpin(pin.name, cache_salt=pin.cache_salt, tenant=pin.tenant)
    assert llm.stats().frames_active == 0
    after = llm.generate([IDS], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)[0].outputs[0].token_ids
    assert after == before


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_arrays_and_tensors_stand_for_lists_of_token_ids(llm, kind):
    def answers(*, of):
        params = SamplingParams(max_tokens=3, temperature=0, allowed_token_ids=of(IDS), stop_token_ids=of([2]))
        outputs = [
            *llm.generate(of(IDS), params, use_tqdm=False),
            *llm.generate([of(IDS), {"prompt_token_ids": of(IDS)}], params, use_tqdm=False),
        ]
        name = of.__name__
        outputs.append(llm.session(name).generate(of(IDS), params))
        pin = llm.pin(of(IDS * 10), name=name)
        llm.unpin(name)
        searched = llm.beam_search(of(IDS), SEARCH)[0].sequences[0].tokens
        return [output.outputs[0].token_ids for output in outputs], pin.num_tokens, searched

    assert answers(of=kind) == answers(of=list)


@pytest.mark.parametrize("endless", ENDLESS)
def test_what_has_no_length_is_no_list(llm, endless):
    with pytest.raises(InvalidRequestError):
        llm.generate(endless(), ONE)
    with pytest.raises(InvalidRequestError):
        llm.beam_search(endless(), SEARCH)
    with pytest.raises(InvalidRequestError):
        llm.pin(endless(), name="a")
    with pytest.raises(InvalidRequestError):
        llm.chat(endless())
    with pytest.raises(SamplingParamsError):
        SamplingParams(stop=endless())


def test_lists_have_a_stated_length(llm):
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_MESSAGES} messages"):
        llm.chat(MESSAGES * (MAX_MESSAGES + 1))
    with pytest.raises(InvalidRequestError, match="at most 65536 prompts"):
        llm.generate([[1]] * 65537)
    for name, value in {
        "stop": ["a"] * 1025,
        "bad_words": ["a"] * 1025,
        "stop_token_ids": [1] * 1025,
        "allowed_token_ids": [1] * (2**20 + 1),
        "logit_bias": dict.fromkeys(range(2**20 + 1), 1),
    }.items():
        with pytest.raises(SamplingParamsError, match=r"a (list|dict) of .*\d+") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name
