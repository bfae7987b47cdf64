"""SamplingParams: what is refused, with which words, and that the rest travels between processes unharmed."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.messages import EngineRequest
from pagemill.errors import SamplingParamsError, TokenOutOfVocabularyError, UnknownArgumentError
from pagemill.sampling.params import MAX_LOGPROBS, SamplingParams, check_vocabulary

NAN, INF = float("nan"), float("inf")

WRONG = {
    "n": [0, -1, 1.5, "2", True, None],
    "presence_penalty": [-2.01, 2.01, NAN, INF, "0", None],
    "frequency_penalty": [-2.01, 2.01, NAN, INF, False],
    "repetition_penalty": [0.0, -1.0, 2.01, NAN, INF],
    "temperature": [-0.01, 1.1e6, NAN, INF, "hot", True, None],
    "best_of": [0, True, 1.0, "2"],
    "top_p": [0.0, -0.1, 1.01, NAN, "0.5"],
    "top_k": [-2, 1.0, "5", True, 2**63],
    "min_p": [-0.01, 1.01, NAN],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "stop": [[""], [1], 5, ["a", ""], {"a": 1}, ["a", "\ud800"]],
    "stop_token_ids": [[-1], ["2"], [1.0], [True], 2, "2"],
    "bad_words": [[""], [3], "word", ["\ud800"]],
    "include_stop_str_in_output": [1, None, "yes"],
    "ignore_eos": [0],
    "detokenize": ["no"],
    "skip_special_tokens": [None],
    "max_tokens": [-1, 1.0, "16", True],
    "min_tokens": [-1, 1.0, None],
    "logprobs": [-1, MAX_LOGPROBS + 1, True, 1.0],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, True],
    "logit_bias": [{-1: 0.0}, {1: 101.0}, {1: -101.0}, {1: NAN}, {1: "x"}, {"x": 1.0}, {1.5: 1.0}, {True: 1.0}, [1]],
    "allowed_token_ids": [[], [-1], ["1"], 3],
    "bad_words_token_ids": [[["a"]], [[-1]], [3]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_values_are_named(name, value):
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert error.param == name
    assert error.http_status == 400
    assert name in error.message
    assert "must be" in error.message
    assert "; " in error.message, "the way out is missing"


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 2**63), ("max_tokens", int(4e21)), ("stop_token_ids", [1, 2**64]), ("top_k", 2**63)]
)
def test_what_is_beyond_64_bits_is_told_the_limit(name, value):
    with pytest.raises(SamplingParamsError, match=f"^{name} is .*, and at most {2**63 - 1}; "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 2, "temperature": 1e-6}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"allowed_token_ids": [2], "stop_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_contradictions(options, param):
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2, "temperature": 0.1},
        {"n": 2, "best_of": 2},
        {"best_of": 1, "temperature": 0},
        {"min_tokens": 16},
        {"min_tokens": 100, "max_tokens": None},
        {"top_k": -1},
        {"top_k": 10**9},
        {"seed": -(2**63)},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 2},
        {"temperature": 100},
        {"logit_bias": {0: 100, 1: -100}},
    ],
)
def test_the_limits_themselves_are_allowed(options):
    SamplingParams(**options)


def test_convenient_forms():
    params = SamplingParams(
        stop="END", stop_token_ids=None, bad_words=("a",), seed=-1, logit_bias={"5": 1}, temperature=1
    )
    assert (params.stop, params.stop_token_ids, params.bad_words, params.seed) == (["END"], [], ["a"], None)
    assert params.logit_bias == {5: 1}
    assert isinstance(params.temperature, float)
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams().stop is not SamplingParams().stop


def test_unknown_names_get_a_suggestion():
    with pytest.raises(UnknownArgumentError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1.0)


def test_long_values_are_cut_in_messages():
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(stop=["x" * 10_000, ""])
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, 100]}, "allowed_token_ids"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"bad_words_token_ids": [[1], [2, 100]]}, "bad_words_token_ids"),
    ],
)
def test_tokens_outside_the_vocabulary(options, name):
    check_vocabulary(SamplingParams(**options), 101)
    with pytest.raises(TokenOutOfVocabularyError, match="token 100; this model's tokens are 0 to 99") as caught:
        check_vocabulary(SamplingParams(**options), 100)
    assert caught.value.param == name


valid = st.builds(
    SamplingParams,
    n=st.integers(1, 5),
    temperature=st.floats(0.1, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1000),
    seed=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    max_tokens=st.one_of(st.none(), st.integers(1, 10**6)),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
    logit_bias=st.one_of(st.none(), st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=5)),
    allowed_token_ids=st.one_of(st.none(), st.lists(st.integers(0, 10**6), min_size=1, max_size=5)),
    bad_words_token_ids=st.one_of(st.none(), st.lists(st.lists(st.integers(0, 10**6), max_size=3), max_size=3)),
)


@given(params=valid)
def test_travels_between_processes(params):
    request = EngineRequest(request_id="r", prompt_token_ids=[1], params=params, arrival_s=1.0)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
    assert received.params == params


def test_imports_no_torch():
    code = "import sys, pagemill.sampling.params; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_numbers_of_numpy_and_torch_are_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.5),
        max_tokens=torch.tensor(3),
        stop_token_ids=[np.int64(5)],
        logit_bias={np.int64(7): np.float32(1.0)},
    )
    plain = SamplingParams(temperature=0.5, top_p=0.5, max_tokens=3, stop_token_ids=[5], logit_bias={7: 1.0})
    assert params == plain
    assert type(params.temperature) is float
    with pytest.raises(SamplingParamsError, match="max_tokens is"):
        SamplingParams(max_tokens=np.float64(1.5))
