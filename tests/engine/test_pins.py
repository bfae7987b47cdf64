"""Pinned prefixes on the default model: a flood does not evict them, and no bit of an answer changes."""

import math

import pytest

from pagemill import LLM, SamplingParams, errors
from shallow import FRAME_BYTES

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
PREFIX = "You are a patient teacher of astronomy, and answer in one short sentence. " * 6
QUESTION = PREFIX + "Why is the sky dark at night?"


@pytest.fixture(scope="module")
def llm(shallow_path):
    settings = {"dtype": "float32", "max_model_len": 512, "kv_memory": 45 * FRAME_BYTES, "max_num_seqs": 4}
    with LLM(str(shallow_path), check_invariants=True, **settings) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _nothing_stays_pinned(llm):
    yield
    for pin in llm.pins():
        llm.unpin(pin.name, cache_salt=pin.cache_salt, tenant=pin.tenant)
    assert llm.stats().frames_active == 0


def flood(llm):
    llm.generate([[900 + at] * 150 for at in range(8)], SamplingParams(max_tokens=1), use_tqdm=False)


def ask(llm, prompt=QUESTION):
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output


def test_a_pin_survives_a_flood_and_an_unpinned_prefix_does_not(llm):
    flood(llm)
    first = ask(llm)
    assert first.num_cached_tokens == 0
    pin = llm.pin(PREFIX, name="teacher")
    whole = len(llm.tokenizer.encode(PREFIX)) // 16 * 16
    assert (pin.name, pin.num_tokens, pin.num_blocks, pin.expires_in_s) == ("teacher", whole, whole // 16, None)
    assert llm.stats().frames_active == whole // 16
    for _ in range(2):
        flood(llm)
        again = ask(llm)
        assert again.num_cached_tokens == whole
        assert again.outputs == first.outputs
    assert llm.pins() == [pin]
    llm.unpin("teacher")
    assert llm.stats().frames_active == 0
    flood(llm)
    last = ask(llm)
    assert last.num_cached_tokens == 0
    assert last.outputs == first.outputs


def test_a_pin_has_a_namespace_and_can_be_replaced(llm):
    llm.pin(PREFIX, name="a", cache_salt="mine")
    longer = llm.pin({"prompt": PREFIX * 2, "cache_salt": "mine"}, name="a")
    assert llm.pins() == [longer]
    assert ask(llm, {"prompt": QUESTION, "cache_salt": "mine"}).num_cached_tokens >= 80
    with pytest.raises(errors.PinNotFoundError, match="no pin 'a'"):
        llm.unpin("a")


def test_expiry(llm, monkeypatch):
    import time

    now = float(math.ceil(time.monotonic()))  # whole, so that sums are exact
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pin = llm.pin(PREFIX, name="short", expires_s=60)
    assert pin.expires_in_s == 60
    now += 59
    assert len(llm.pins()) == 1
    now += 1
    assert llm.pins() == []
    assert llm.stats().frames_active == 0


def test_limits_are_said_and_leave_room_for_what_was_accepted(llm):
    llm.pin([5] * 300, name="a")
    with pytest.raises(
        errors.PinLimitError, match=r"10 of them new, and \d more may be pinned: max_pinned_share \(0.5\)"
    ):
        llm.pin([6] * 160, name="b")
    with pytest.raises(errors.RequestTooLargeError, match="pins leave 27"):
        llm.generate([7] * 500, SamplingParams(max_tokens=12), use_tqdm=False)
    (output,) = llm.generate([7] * 400, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 27 * 16 + 1 - 400, "as far as the pool goes beside the pin"
    (output,) = llm.generate([5] * 310, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 512 - 310, "what begins with the pin has its blocks beside these"


@pytest.mark.parametrize(
    ("prompt", "how", "words"),
    [
        ("short", {"name": "a"}, "so pin 16 at least"),
        (PREFIX, {"name": ""}, "the pin's name is ''"),
        (PREFIX, {"name": "a/b"}, "without a slash"),
        (PREFIX, {"name": ".."}, "not '.' or '..'"),
        (PREFIX, {"name": "a", "expires_s": 0}, "expires_s is 0; it must be above 0"),
    ],
)
def test_refusals(llm, prompt, how, words):
    with pytest.raises(errors.InvalidRequestError, match=words):
        llm.pin(prompt, **how)


def test_pins_need_the_prefix_cache():
    with LLM("smollm2-135m", enable_prefix_caching=False, max_model_len=128, kv_memory="32MiB") as llm:
        with pytest.raises(errors.InvalidRequestError, match="enable_prefix_caching is False; set it"):
            llm.pin(PREFIX, name="a")
        assert llm.stats().frames_active == 0
