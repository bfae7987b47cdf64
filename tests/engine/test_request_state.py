"""Deltas add up to the whole; stop strings, finish reasons, log probabilities and errors arrive where they belong."""

import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.messages import EngineRequest, Failure, SequenceOutput
from pagemill.errors import NonFiniteLogitsError
from pagemill.frontend.frontend import Frontend
from pagemill.frontend.request_state import RequestState
from pagemill.frontend.worker import Inline
from pagemill.sampling.params import RequestOutputKind, SamplingParams, TokenLogprobs
from pagemill.sessions.store import SessionStore
from pagemill.text.tokenizer import Tokenizer

TEXT = "Paris, the capital — 日本語 and 🙂 é too. STOP here."


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_path("smollm2-135m")


class Running:
    """One request in a front end, with the engine's outputs given by hand. It is the front end's engine client too."""

    def __init__(self, tokenizer, **params):
        asked = SamplingParams(**{"output_kind": RequestOutputKind.DELTA, **params})
        request = EngineRequest(request_id="r", prompt_token_ids=[5, 6], params=asked, arrival_s=1.0)
        self.state = RequestState(request, tokenizer, "prompt")
        self.frontend = Frontend(self, tokenizer, SessionStore(None, 1, None), "model", Inline(), {})
        self.stopped = []
        self.frontend.start(self.state)

    def submit(self, request):
        assert request is self.state.asked

    def finish(self, sequences):
        assert {request_id for request_id, _ in sequences} == {self.state.engine_id}
        self.stopped += sequences

    def give(self, token_ids, index=0, **fields):
        """Returns the requests that have something new."""
        output = SequenceOutput(request_id=self.state.engine_id, index=index, new_token_ids=list(token_ids), **fields)
        return self.frontend.receive([output])


def give_all(running, ids, per_step=1, **last):
    """All tokens; returns the deltas and the indices of the sequences that a stop string ended."""
    deltas = []
    for start in range(0, len(ids), per_step):
        step = ids[start : start + per_step]
        fields = last if start + per_step >= len(ids) else {}
        running.give(step, **fields)
        deltas.append(running.state.take())
    return deltas, [index for _, index in running.stopped]


def text_of(deltas):
    return "".join(output.text for delta in deltas for output in delta.outputs)


@pytest.mark.parametrize("per_step", [1, 3])
def test_deltas_add_up_to_the_whole(tokenizer, per_step):
    running = Running(tokenizer)
    ids = tokenizer.encode(TEXT)
    deltas, stopped = give_all(running, ids, per_step, finish_reason="length")
    whole = running.state.whole()
    assert text_of(deltas) == whole.outputs[0].text == TEXT
    assert list(itertools.chain(*(o.token_ids for d in deltas for o in d.outputs))) == whole.outputs[0].token_ids == ids
    assert not any("\ufffd" in output.text for delta in deltas for output in delta.outputs)
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert whole.outputs[0].finish_reason == "length"
    assert stopped == []


def test_several_steps_between_two_reads_give_one_delta(tokenizer):
    running = Running(tokenizer)
    ids = tokenizer.encode(TEXT)
    for token in ids[:4]:
        running.give([token])
    delta = running.state.take()
    assert delta.outputs[0].token_ids == ids[:4]
    assert running.state.take().outputs == []


def test_cumulative_outputs_hold_all_that_has_come_and_stay_as_they_are(tokenizer):
    running = Running(tokenizer, output_kind=RequestOutputKind.CUMULATIVE, n=2, logprobs=0)
    one, two = tokenizer.encode("Paris is")[:2]
    given = {token: [TokenLogprobs([token], [-1.0], 1)] for token in (one, two)}
    running.give([one], logprobs=given[one], prompt_logprobs=[None])
    first = running.state.take()
    assert [output.token_ids for output in first.outputs] == [[one], []]
    assert running.state.take().outputs == []
    running.give([two], index=1, logprobs=given[two])
    running.give([two], logprobs=given[two], finish_reason="length")
    second = running.state.take()
    assert [output.token_ids for output in second.outputs] == [[one, two], [two]]
    assert [output.text for output in second.outputs] == ["Paris is", " is"]
    assert [len(output.logprobs) for output in second.outputs] == [2, 1]
    assert [len(output.logprobs) for output in first.outputs] == [1, 0]
    assert first.outputs[0].token_ids == [one]
    assert first.prompt_logprobs == second.prompt_logprobs == [None]


def test_final_output_comes_once_at_the_end(tokenizer):
    running = Running(tokenizer, output_kind=RequestOutputKind.FINAL_ONLY)
    ids = tokenizer.encode(TEXT)
    outputs, _ = give_all(running, ids, finish_reason="length")
    assert [len(output.outputs) for output in outputs] == [0] * (len(ids) - 1) + [1]
    assert outputs[-1].outputs[0].text == TEXT


@pytest.mark.parametrize(("include", "expected"), [(False, TEXT[: TEXT.index("STOP")]), (True, "STOP")])
def test_a_stop_string_ends_the_sequence_and_the_engine_is_told(tokenizer, include, expected):
    running = Running(tokenizer, stop=["STOP"], include_stop_str_in_output=include)
    ids = tokenizer.encode(TEXT)
    deltas, stopped = give_all(running, ids)
    output = running.state.whole().outputs[0]
    assert output.text.endswith(expected)
    assert "here" not in output.text
    assert (output.finish_reason, output.stop_reason) == ("stop", "STOP")
    assert stopped == [0]
    assert text_of(deltas) == output.text
    assert running.state.finished
    assert len(output.token_ids) < len(ids)


def test_a_stop_string_that_comes_with_the_engines_own_end_is_not_told_again(tokenizer):
    running = Running(tokenizer, stop=["Paris"])
    running.give(tokenizer.encode("Paris"), finish_reason="length")
    assert running.stopped == []
    assert running.state.whole().outputs[0].finish_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_at_the_end(tokenizer):
    running = Running(tokenizer, stop=["too. STOP there"])
    deltas, _ = give_all(running, tokenizer.encode(TEXT), finish_reason="length")
    assert text_of(deltas) == TEXT


def test_min_tokens_hold_for_stop_strings(tokenizer):
    ids = tokenizer.encode("a a a a a")
    running = Running(tokenizer, stop=["a"], min_tokens=3)
    give_all(running, ids)
    assert len(running.state.whole().outputs[0].token_ids) == 4


def test_the_token_that_stops_is_no_text(tokenizer):
    running = Running(tokenizer, stop_token_ids=[tokenizer.encode(" capital")[0]])
    give_all(running, tokenizer.encode("Paris, the capital"), finish_reason="stop", stop_reason=7)
    output = running.state.whole().outputs[0]
    assert output.text == "Paris, the"
    assert output.stop_reason == 7
    assert len(output.token_ids) == 4


def test_what_comes_after_the_end_is_dropped(tokenizer):
    running = Running(tokenizer, stop=["Paris"])
    running.give(tokenizer.encode("Paris"))
    before = copy.deepcopy(running.state.whole())
    assert before.finished
    assert running.give([5, 5], finish_reason="length") == []
    assert running.state.whole() == before


def test_what_comes_after_the_end_of_one_of_several_sequences_is_dropped(tokenizer):
    running = Running(tokenizer, stop=["Paris"], n=2)
    running.give(tokenizer.encode("Paris"))
    before = copy.deepcopy(running.state.whole())
    running.give([5, 5], finish_reason="length")
    assert running.state.whole() == before


def test_sequences_are_kept_apart_and_in_order(tokenizer):
    running = Running(tokenizer, n=3)
    for index, word in ((2, "two"), (0, "zero"), (1, "one")):
        running.give(tokenizer.encode(word), index=index, finish_reason="length")
    assert [output.text for output in running.state.whole().outputs] == ["zero", "one", "two"]
    assert running.state.finished


def test_log_probabilities(tokenizer):
    running = Running(tokenizer, logprobs=2, prompt_logprobs=1)
    first, second = tokenizer.encode("Paris is")[:2]
    prompt_logprobs = [None, TokenLogprobs([6, 9], [-3.0, -1.0], 5)]
    running.give(
        [first],
        logprobs=[TokenLogprobs([first, second, first], [-2.0, -1.0, -2.0], 2)],
        prompt_logprobs=prompt_logprobs,
    )
    delta = running.state.take()
    (position,) = delta.outputs[0].logprobs
    assert list(position) == [first, second]
    assert (position[first].rank, position[first].decoded_token) == (2, "Paris")
    assert (position[second].rank, position[second].logprob) == (1, -1.0)
    assert delta.prompt_logprobs[0] is None
    assert delta.prompt_logprobs[1][6].rank == 5
    running.give([second], logprobs=[TokenLogprobs([second], [-0.5], 1)])
    delta = running.state.take()
    assert delta.prompt_logprobs is None
    assert delta.outputs[0].cumulative_logprob == -2.5
    assert len(delta.outputs[0].logprobs) == 1
    whole = running.state.whole()
    assert (len(whole.prompt_logprobs), len(whole.outputs[0].logprobs)) == (2, 2)
    running.state.forget_logprobs()
    assert (whole.prompt_logprobs, whole.outputs[0].logprobs) == ([], [])


def test_an_error_keeps_its_type(tokenizer):
    running = Running(tokenizer, n=2)
    running.give([], index=1, finish_reason="error", error=Failure("NonFiniteLogitsError", "NaN", "stop"))
    assert isinstance(running.state.error, NonFiniteLogitsError)
    assert (running.state.error.message, running.state.error.param) == ("NaN", "stop")
    assert not running.state.finished
    assert running.state.whole().outputs[0].error is None


def test_without_detokenizing_there_is_no_text(tokenizer):
    running = Running(tokenizer, detokenize=False)
    running.give(tokenizer.encode("Paris"), finish_reason="length")
    assert running.state.whole().outputs[0].text == ""


@given(ids=st.lists(st.integers(20, 49151), min_size=1, max_size=12), per_step=st.integers(1, 4))
def test_any_tokens_in_any_steps_give_what_decoding_all_gives(tokenizer, ids, per_step):
    running = Running(tokenizer)
    deltas, _ = give_all(running, ids, per_step, finish_reason="length")
    assert text_of(deltas) == tokenizer.decode(ids, skip_special_tokens=True)
