"""`pagemill bench --url` against servers of every kind: with a tokenizer, without, without ignore_eos, and none."""

import asyncio
import json

import httpx
import pytest
from typer.testing import CliRunner

from pagemill.cli.app import app
from pagemill.cli.bench import send
from pagemill.cli.bench_report import Report
from pagemill.cli.bench_server import Server
from pagemill.cli.bench_workload import BenchWorkload, make_prompts, make_texts
from pagemill.cli.main import NEEDS_NONE
from pagemill.errors import BenchmarkError, ConfigError

WORKLOAD = BenchWorkload(5, input_len=6, output_len=4, prefix_len=3, request_rate=0, max_concurrency=2, seed=1)
TEXT = "All this happened, more or less. " * 9


class Fake(httpx.AsyncBaseTransport):
    """A server that answers each prompt with as many pieces as it is asked for."""

    def __init__(self, *, tokenizes=True, knows_ignore_eos=True, broken=()):
        self.tokenizes, self.knows_ignore_eos, self.broken = tokenizes, knows_ignore_eos, broken
        self.bodies, self.keys = [], set()
        self.open = self.most_open = 0

    async def handle_async_request(self, request):
        body = json.loads(request.content)
        self.keys.add(request.headers.get("Authorization"))
        if request.url.path == "/tokenize":
            return httpx.Response(200 if self.tokenizes else 404, json={"tokens": [*range(len(body["prompt"]))]})
        assert request.url.path == "/v1/completions"
        if "ignore_eos" in body and not self.knows_ignore_eos:
            return httpx.Response(400, json={"error": {"message": "unknown ignore_eos"}})
        self.bodies.append(body)
        if len(self.bodies) in self.broken:
            return httpx.Response(429, json={"error": {"message": "too many"}})
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        await asyncio.sleep(0.005)
        self.open -= 1
        usage = {"prompt_tokens": 9, "completion_tokens": body["max_tokens"], "prompt_tokens_details": None}
        chunks = [{"choices": [{"text": "a"}]}] * body["max_tokens"] + [{"choices": [], "usage": usage}]
        return httpx.Response(200, text="".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n")


def measure(fake):
    async def run():
        async with Server("http://there:8000/", "m", None, fake) as server:
            prompts = await server.prompts(TEXT, WORKLOAD)
            await server.warm_up(prompts[0])
            samples = await send(prompts, WORKLOAD, lambda _, prompt: server.ask(prompt, WORKLOAD.output_len))
            return Report.of(WORKLOAD, server.those_answered(samples), 2.0, "m", server.notes)

    return asyncio.run(run())


@pytest.mark.parametrize("said", ["<html>", "[]", '{"tokens": []}', '{"tokens": ["a"]}', '{"pieces": [1]}'])
def test_a_server_that_tokenizes_otherwise_gets_texts(said):
    class Other(Fake):
        async def handle_async_request(self, request):
            if request.url.path == "/tokenize":
                return httpx.Response(200, text=said)
            return await super().handle_async_request(request)

    fake = Other()
    assert any("does not tokenize" in note for note in measure(fake).notes)
    assert all(isinstance(body["prompt"], str) for body in fake.bodies)


def test_a_server_that_tokenizes_gets_token_ids():
    fake = Fake()
    report = measure(fake)
    assert [len(body["prompt"]) for body in fake.bodies] == [9] * 6
    assert (report.prompt_tokens, report.output_tokens, report.failed_requests, report.notes) == (45, 20, 0, [])
    assert report.output_tokens_per_s == 10
    assert fake.most_open == 2
    assert "output tokens/s" in [*report.table().columns[0].cells]


def test_another_gets_texts_and_what_it_does_not_know_is_left_out():
    fake = Fake(tokenizes=False, knows_ignore_eos=False)
    report = measure(fake)
    assert [len(body["prompt"]) for body in fake.bodies] == [36] * 6
    assert all("ignore_eos" not in body for body in fake.bodies)
    assert ["characters" in note or "ignore_eos" in note for note in report.notes] == [True, True]


def test_requests_that_fail_are_counted_and_all_of_them_are_an_error():
    report = measure(Fake(broken={3, 4}))
    assert (report.failed_requests, report.output_tokens) == (2, 12)
    assert "2 requests failed; the first: the server refuses with 429: too many" in report.notes
    with pytest.raises(BenchmarkError, match=r"every request failed; the first: .*too many"):
        measure(Fake(broken={2, 3, 4, 5, 6}))


@pytest.mark.parametrize(
    ("flags", "sent"),
    [([], "Bearer of-environment"), (["--api-key", "of-flag"], "Bearer of-flag")],
)
def test_every_request_has_the_key(flags, sent, monkeypatch):
    fake, made = Fake(), httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **given: made(**given | {"transport": fake}))
    given = ["bench", "m", "--url", "http://there", "--num-prompts", "2", *flags]
    result = CliRunner(env={"OPENAI_API_KEY": "of-environment"}).invoke(app, given)
    assert result.exit_code == 0, result.exception
    assert fake.keys == {sent}


def test_the_exit_status_tells_of_failed_requests(monkeypatch):
    made, statuses = httpx.AsyncClient, []
    for broken in ({3}, ()):
        fake = Fake(broken=broken)
        monkeypatch.setattr(httpx, "AsyncClient", lambda fake=fake, **given: made(**given | {"transport": fake}))
        given = ["bench", "m", "--url", "http://there", "--num-prompts", "3"]
        statuses.append(CliRunner().invoke(app, given).exit_code)
    assert statuses == [1, 0]


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("http://127.0.0.1:9", BenchmarkError, "no server answers at http://127.0.0.1:9"),
        ("localhost", ConfigError, "give http://host:port"),
    ],
)
def test_what_is_no_server_is_refused(url, error, words):
    async def ask():
        async with Server(url, "m", None) as server:
            await server.prompts(TEXT, WORKLOAD)

    with pytest.raises(error, match=words):
        asyncio.run(ask())


def test_prompts_are_seeded_pieces_of_the_text():
    assert make_texts(TEXT, WORKLOAD) == make_texts(TEXT, WORKLOAD)
    first, *others = make_prompts([*range(100)], WORKLOAD)
    assert all(other[:3] == first[:3] for other in others)
    with pytest.raises(ConfigError, match="has 5 tokens; a prompt needs 6"):
        make_prompts([*range(5)], WORKLOAD)


def test_no_engine_starts_for_another_server():
    assert [bool(NEEDS_NONE.match(word)) for word in ("--url", "--url=http://a", "-h", "--urls", "m")] == [
        *(True, True, True, False, False)
    ]


def test_prompts_that_an_earlier_run_has_left_in_the_cache_are_told():
    class Warm(Fake):
        async def handle_async_request(self, request):
            answer = await super().handle_async_request(request)
            warm = answer.text.replace(
                '"prompt_tokens_details": null', '"prompt_tokens_details": {"cached_tokens": 90}'
            )
            return httpx.Response(answer.status_code, text=warm)

    assert any("cached by an earlier run: give another --seed" in note for note in measure(Warm()).notes)
    assert not any("earlier run" in note for note in measure(Fake()).notes)
