"""Requests whose replica dies: one answer goes on, several begin again, nothing is repeated."""

from pagemill import SamplingParams
from pagemill.distributed.flights import Flights
from pagemill.engine.messages import EngineRequest, SequenceOutput


def request(n=1, **more):
    return EngineRequest(
        request_id="q", prompt_token_ids=[1, 2, 3], params=SamplingParams(n=n, max_tokens=9, **more), arrival_s=0.0
    )


def output(tokens, index=0, finish=None):
    return SequenceOutput(request_id="q", index=index, new_token_ids=tokens, finish_reason=finish)


def test_one_answer_goes_on_behind_what_has_come():
    flights = Flights()
    flight = flights.begin(request(prompt_logprobs=1))
    assert flights.to_send(flight, "a").answered == []
    flights.take("a", [output([7, 8])])
    again = flights.to_send(flight, "b")
    assert (again.answered, again.params.prompt_logprobs, again.params.max_tokens) == ([7, 8], None, 9)
    assert flights.take("a", [output([9])]) == []  # what still comes of the first
    (new,) = flights.take("b", [output([9], finish="length")])
    assert new.new_token_ids == [9]
    assert len(flights) == 0


def test_several_answers_begin_again_and_what_has_come_is_left_out():
    flights = Flights()
    flight = flights.begin(request(n=2))
    flights.to_send(flight, "a")
    flights.take("a", [output([7, 8]), output([5], index=1, finish="stop")])
    again = flights.to_send(flight, "b")
    assert again.answered == []
    assert flights.take("b", [output([7]), output([5], index=1, finish="stop")]) == []
    (new,) = flights.take("b", [output([8, 9, 10])])
    assert new.new_token_ids == [9, 10]
    flights.take("b", [output([11], finish="length")])
    assert len(flights) == 0


def test_other_tokens_than_before_end_it_with_an_error_that_says_to_send_it_again():
    flights = Flights()
    flight = flights.begin(request(n=2))
    flights.to_send(flight, "a")
    flights.take("a", [output([7, 8])])
    flights.to_send(flight, "b")
    ends = flights.take("b", [output([6])])
    assert [end.index for end in ends] == [0, 1]
    assert all("send this again" in end.error.message for end in ends)
    assert ends[0].error.error_type == "EngineRestartingError"
    assert len(flights) == 0


def test_a_sequence_that_the_front_end_has_ended_takes_nothing_more():
    flights = Flights()
    flight = flights.begin(request(n=2))
    flights.to_send(flight, "a")
    assert flights.finish([("unknown", 0), ("q", 0)]) == []
    assert flights.take("a", [output([1])]) == []
    assert flights.finish([("q", 1)]) == [flight]
    assert len(flights) == 0


def test_a_request_that_cannot_go_on_ends_only_those_of_its_sequences_that_have_not_ended():
    flights = Flights()
    flight = flights.begin(request(n=2))
    flights.to_send(flight, "a")
    flights.take("a", [output([5], finish="stop")])
    assert [end.index for end in flights.fail(flight, "gone")] == [1]
