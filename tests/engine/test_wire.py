"""Messages cross the socket whole and in order, however the bytes are cut."""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill import errors
from pagemill.config import EngineConfig
from pagemill.engine.messages import AbortRequests, EngineRequest, Failure, FinishSequences, Shutdown, Start
from pagemill.engine.queries import ToEngine
from pagemill.engine.wire import Channel, frame
from pagemill.sampling.params import SamplingParams

REQUEST = EngineRequest(
    request_id="a",
    prompt_token_ids=[1, 2, 3],
    params=SamplingParams(stop=["x"], logit_bias={7: -1.5}, temperature=0.5, seed=3),
    arrival_s=1.5,
    priority=-2,
    cache_salt="salt",
)
MESSAGES = [
    Start(
        EngineConfig(
            model="m", kv_memory=0.5, hf_overrides={"rope": {"factor": 2.0}}, speculative_config={"method": "ngram"}
        )
    ),
    REQUEST,
    AbortRequests(["a", "b"]),
    FinishSequences([("a", 1)]),
    Shutdown(),
]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@given(cuts=st.lists(st.integers(1, 400), max_size=12))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(cuts):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs, ToEngine)
        data = b"".join(frame(message) for message in MESSAGES)
        received = []
        start = 0
        for end in [*sorted({min(cut, len(data)) for cut in cuts}), len(data)]:
            ours.sendall(data[start:end])
            start = end
            received += channel.receive(block=False)
        assert received == MESSAGES
        assert channel.receive(block=False) == []


def test_a_blocking_receive_waits_for_the_rest_of_a_message(pair):
    ours, theirs = pair
    data = frame(REQUEST)
    ours.sendall(data[:10])
    channel = Channel(theirs, ToEngine)
    assert channel.receive(block=False) == []
    threading.Timer(0.05, ours.sendall, [data[10:]]).start()
    assert channel.receive(block=True) == [REQUEST]


def test_the_other_side_gone_is_told_from_nothing_there(pair):
    ours, theirs = pair
    channel = Channel(theirs, ToEngine)
    assert channel.receive(block=False) == []
    ours.close()
    assert channel.receive(block=False) is None
    assert channel.receive(block=True) is None


def test_a_message_larger_than_any_buffer(pair):
    ours, theirs = pair
    large = EngineRequest(request_id="l", prompt_token_ids=[70000] * 500_000, params=SamplingParams(), arrival_s=0.0)
    sender = threading.Thread(target=ours.sendall, args=[frame(large)])
    sender.start()
    assert Channel(theirs, ToEngine).receive(block=True) == [large]
    sender.join()


def test_an_error_of_any_kind_comes_back_as_itself():
    kinds = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.PagemillError)]
    sent = [Failure(cls.__name__, "why", "prompt") for cls in kinds]
    assert [type(failure.to_error()) for failure in sent] == kinds
    assert {(str(failure.to_error()), failure.to_error().param) for failure in sent} == {("why", "prompt")}
