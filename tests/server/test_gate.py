"""The gate: what is refused is refused before its body is read, and no body is read beyond its limits."""

import asyncio
import json
import socket

import httpx
import pytest

from pagemill.errors import ConfigError, ServerBusyError, TooManyWaitingError
from pagemill.frontend.rates import RateStatus
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.access.gate import Gate
from pagemill.server.access.large_bodies import SMALL_BODY_BYTES, LargeBodies
from pagemill.server.access.limits import ServerLimits
from pagemill.tenant_limits import read_tenants_file


@pytest.fixture(scope="module")
def guarded(serving, tmp_path_factory):
    """A server whose requests need a key."""
    path = tmp_path_factory.mktemp("tenants") / "tenants.json"
    path.write_text(json.dumps({"admin_keys": ["sk-admin"], "tenants": {"one": {"api_keys": ["sk-one"]}}}))
    with serving(tenants=path, max_model_len=128, max_num_seqs=2, kv_memory="8MiB") as server:
        yield server


def answer_to(url: str, request: str) -> str:
    """The head and body that a raw request brings, of which no more is sent."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request.replace("\n", "\r\n").encode())
        received = b""
        while part := connection.recv(65536):
            received += part
            if b"\r\n\r\n" in received and b"}}" in received:
                break
    return received.decode()


POST = "POST /v1/completions HTTP/1.1\nHost: here\nContent-Type: application/json\n"


def test_without_a_key_no_body_is_waited_for(guarded):
    refused = answer_to(guarded.url, f"{POST}Content-Length: 50000000\n\n{{")
    assert refused.startswith("HTTP/1.1 401 ")
    assert '"invalid_api_key"' in refused


def test_a_host_header_does_not_open_a_path(guarded):
    for path in ("/v1/tenants", "/v1/kv_memory", "/v1/models"):
        refused = answer_to(guarded.url, f"GET {path} HTTP/1.1\nHost: x/\n\n")
        assert refused.startswith("HTTP/1.1 401 "), path


def test_the_path_that_routes_see_decides(tmp_path):
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": {"one": {"api_keys": ["sk-one"]}}}))
    keys = ApiKeys(read_tenants_file(path))
    status, _ = asyncio.run(through(Gate(served_path, keys, ServerLimits()), headers=[(b"host", b"x/")]))
    assert status == 401


def test_a_long_body_is_refused_before_it_is_read(guarded):
    key = "Authorization: Bearer sk-one\n"
    refused = answer_to(guarded.url, f"{POST}{key}Content-Length: 8388609\n\n{{")
    assert refused.startswith("HTTP/1.1 413 ")
    assert "8388608" in refused
    assert "--max-body-bytes" in refused


def test_a_long_body_in_chunks_is_refused_when_the_limit_is_reached(guarded):
    def chunks():
        for _ in range(200):
            yield b" " * 65536

    with httpx.Client(headers={"Authorization": "Bearer sk-one"}) as http:
        response = http.post(f"{guarded.url}/v1/completions", content=chunks())
    assert response.status_code == 413


def test_a_length_that_is_said_twice_hides_no_request(guarded):
    """The connection must end: what follows the body by one length lies in it by the other."""
    hidden = "GET /version HTTP/1.1\nHost: here\n\n"
    head = f"{POST}Authorization: Bearer sk-one\nContent-Length: {5 + 40}\nTransfer-Encoding: chunked\n\n"
    answer = answer_to(guarded.url, f"{head}0\n\n{hidden}")
    assert answer.startswith("HTTP/1.1 400 ")
    assert "which each say where its body ends; send one of them" in answer
    assert "connection: close" in answer.lower()
    assert '"version"' not in answer


@pytest.mark.parametrize("given", [["gzip"], ["identity, br"], ["identity", "zstd"]])
def test_an_encoded_body_is_refused_before_it_is_read(given):
    headers = [(b"content-encoding", coding.encode()) for coding in given]
    status, body = asyncio.run(through(gate(), headers, whole=False))
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (415, "invalid_request_error")
    assert f"Content-Encoding is '{', '.join(given)}'" in error["message"]
    assert "send the JSON as it is, without Content-Encoding" in error["message"]
    status, body = asyncio.run(through(gate(), headers, path="/v1/messages"))
    refused = json.loads(body)
    assert (status, refused["type"], refused["error"]["type"]) == (415, "error", "invalid_request_error")


def test_a_body_that_is_said_to_be_as_it_is_is_taken():
    assert asyncio.run(through(gate(), [(b"content-encoding", b"Identity")], body=[b"{}"])) == (200, b"{}")


def test_a_body_may_be_as_long_as_the_limit():
    status, body = asyncio.run(through(gate(max_body_bytes=6), body=[b"abc", b"def"]))
    assert (status, body) == (200, b"abcdef")
    status, body = asyncio.run(through(gate(max_body_bytes=5), body=[b"abc", b"def"]))
    assert status == 413


def test_all_large_bodies_together_have_a_limit_and_small_ones_none():
    large, small = [b"x" * (SMALL_BODY_BYTES + 1)], [b"x" * SMALL_BODY_BYTES]

    async def beside_a_large_one(body):
        """The status of a request that comes while another one's large body is being answered."""
        reached, leave = asyncio.Event(), asyncio.Event()

        async def slow(scope, receive, send):
            if not reached.is_set():
                reached.set()
                await leave.wait()
            await served_path(scope, receive, send)

        gated = gate(slow, max_body_bytes=2 * SMALL_BODY_BYTES, max_bodies_bytes=2 * SMALL_BODY_BYTES)
        first = asyncio.ensure_future(through(gated, body=large))
        await reached.wait()
        status, answer = await through(gated, body=body)
        leave.set()
        assert (await first)[0] == 200
        assert (await through(gated, body=large))[0] == 200, "what is counted is given back"
        return status, answer

    status, answer = asyncio.run(beside_a_large_one(large))
    assert status == 503
    message = json.loads(answer)["error"]["message"]
    assert "--max-bodies-bytes" in message
    assert f"this body has {SMALL_BODY_BYTES + 1} bytes or more, those of other open" in message
    assert f"requests have {SMALL_BODY_BYTES + 1}, and all together may have {2 * SMALL_BODY_BYTES};" in message
    assert asyncio.run(beside_a_large_one(small))[0] == 200


def test_each_tenants_large_bodies_have_their_part():
    large, tenants = 2 * SMALL_BODY_BYTES, 2
    bodies = LargeBodies(ServerLimits(max_body_bytes=large, max_bodies_bytes=5 * large), lambda: tenants)
    bodies.grow("a", 0, large)
    bodies.grow("a", 0, SMALL_BODY_BYTES)
    bodies.grow("a", SMALL_BODY_BYTES, large)
    refusal = rf"'a' have {2 * large}, and all of a tenant together may have {5 * large // 2}; wait for an answer"
    with pytest.raises(TooManyWaitingError, match=refusal):
        bodies.grow("a", 0, large)
    bodies.grow("a", 0, SMALL_BODY_BYTES)
    for _ in range(2):
        bodies.grow("b", 0, large)
    bodies.end("a", large)
    bodies.grow("a", 0, large)
    tenants = 9
    assert bodies.part == large, "one body can always be sent"
    bodies.grow("c", 0, large)
    with pytest.raises(ServerBusyError):
        bodies.grow("d", 0, large)
    tenants = 1
    with pytest.raises(ServerBusyError):
        bodies.grow("a", 0, large)


def test_a_path_without_a_key_takes_no_large_body(guarded):
    refused = answer_to(guarded.url, f"GET /health HTTP/1.1\nHost: here\nContent-Length: {SMALL_BODY_BYTES + 1}\n\n")
    assert refused.startswith("HTTP/1.1 413 ")
    assert "/health takes at most 65536" in refused


def test_as_many_tenants_share_as_have_keys(tmp_path):
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"admin_keys": ["sk-0"], "tenants": {"a": {"api_keys": ["sk-1", "sk-2"]}, "b": {}}}))
    assert (ApiKeys(read_tenants_file(path)).num_tenants, ApiKeys().num_tenants) == (2, 1)


def test_bodies_that_break_off_are_no_longer_counted():
    async def refused_then_taken():
        most = 2 * SMALL_BODY_BYTES
        gated = gate(max_body_bytes=most, max_bodies_bytes=most, request_timeout_s=0.05)
        part = b"x" * (SMALL_BODY_BYTES + 1)
        assert (await through(gated, body=[part], whole=False))[0] == 408
        assert (await through(gated, body=[part, part]))[0] == 413
        return (await through(gated, body=[b"x" * most]))[0]

    assert asyncio.run(refused_then_taken()) == 200


def test_a_body_that_does_not_come_is_not_waited_for():
    status, body = asyncio.run(through(gate(request_timeout_s=0.05), body=[b"abc"], whole=False))
    assert status == 408
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert "0.05 s, but 3 bytes" in error["message"]
    assert "--request-timeout-s" in error["message"]


def test_one_body_may_not_be_longer_than_all_together():
    with pytest.raises(ConfigError, match=r"max_bodies_bytes is 99, less than the 100 of one body \(max_body_bytes\)"):
        ServerLimits(max_body_bytes=100, max_bodies_bytes=99)
    ServerLimits(max_body_bytes=100, max_bodies_bytes=100)


def gate(app=None, **limits) -> Gate:
    return Gate(app or served_path, ApiKeys(None), ServerLimits(**limits))


async def served_path(scope, receive, send):
    """An application that answers with the body that it was given."""
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def test_limits_that_are_known_once_the_model_is_loaded_are_told_of_its_first_answer():
    known, sent = {}, []

    async def load(scope, receive, send):
        known["requests"] = RateStatus(3, 2, 0.5)
        await served_path(scope, receive, send)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    gated = Gate(load, ApiKeys(None), ServerLimits(), rates=lambda _: known)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(gated(scope, receive, send))
    assert (b"x-ratelimit-remaining-requests", b"2") in sent[0]["headers"]


async def through(app, headers=(), body=(b"",), whole=True, path="/v1/completions"):
    """Status and body of the answer to a request whose body comes in these parts, `whole` or with more to come."""
    sent = []
    parts = list(body)

    async def receive():
        if not parts:
            await asyncio.sleep(10)
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts) or not whole}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
