"""pagemill chat as a person meets it: in a terminal, in a pipe, with a server and with an engine of its own."""

import asyncio
import io
import json

import httpx
import pytest

from cli.terminal import Terminal
from pagemill.cli.chat_commands import run_command
from pagemill.cli.chat_input import LineTurns
from pagemill.cli.chat_server import ServerConversation, first_model
from pagemill.cli.main import main
from pagemill.cli.remote import Remote
from pagemill.errors import ConfigError, InvalidRequestError, RemoteServerError
from pagemill.sampling.params import SamplingParams

MODEL = "smollm2-135m"
SMALL = ["--max-model-len", "256", "--kv-memory", "32MiB", "--max-num-seqs", "8"]


def test_a_conversation_with_a_server_in_a_terminal(served, tmp_path):
    args = ["chat", "--url", served.url, "--session", "ada", "--temperature", "0", "--system", "Be brief."]
    kept = httpx.Client(base_url=f"{served.url}/v1/sessions")
    with Terminal(*args) as terminal:
        assert "session 'ada' begins" in terminal.wait_for_prompt()
        terminal.type("\x1b[200~My name is Ada.\nSay hello.\x1b[201~")  # as terminals mark what is pasted
        terminal.wait_for("\n  Say hello.")
        assert kept.get("/ada").status_code == 404
        terminal.type("\r")
        first = terminal.wait_until(lambda text: text.endswith("\n>") and "hello.\n" in text)
        first = first.rpartition("hello.\n")[2].split(".")[0]
        assert first
        terminal.type("/systm\r")
        terminal.wait_for("there is no command /systm; did you mean /system?")
        terminal.type("/system Be long.\r")
        terminal.wait_for("/reset forgets")
        terminal.type("/help\r")
        terminal.wait_for("/fork NAME leaves")
        terminal.type(f"/save {tmp_path}/ada.json\r")
        terminal.wait_for("3 messages written")
        terminal.type("/fork bob\r")
        terminal.wait_for("session 'bob' goes on from here")
        terminal.type("Write a very long story about a ship.\r")
        terminal.wait_until(lambda text: len(text.partition("about a ship.")[2]) > 40)
        terminal.interrupt()
        terminal.wait_for("(stopped)")
        terminal.type("Say yes.\r")
        terminal.wait_for("> Say yes.\n")
        terminal.type("\x04")  # while the answer comes: it ends the chat after it
        assert terminal.wait_for_end() == 0
        assert "Traceback" not in terminal.text
    messages = json.loads((tmp_path / "ada.json").read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "My name is Ada.\nSay hello."
    assert kept.get("/ada").json()["num_messages"] == 3
    gone_on = kept.get("/bob").json()["messages"]
    asked = [one["content"] for one in gone_on if one["role"] == "user"]
    assert asked[1:] == ["Write a very long story about a ship.", "Say yes."]
    assert gone_on[4]["content"]  # as far as it had come
    with Terminal(*args) as terminal:  # the same command line
        again = terminal.wait_for_prompt()
        assert "session 'ada' goes on after 1 turn, " in again
        assert "> My name is Ada.\n  Say hello." in again
        assert first in again
        terminal.type("/reset\r")
        terminal.wait_for("forgotten")
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
    assert kept.get("/ada").status_code == 404
    kept.delete("/bob")
    kept.close()


def test_a_pipe_has_a_turn_per_line_and_plain_answers(served, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hi.\n\n/hlp\n/fork x\n"))
    with pytest.raises(SystemExit) as ended:
        main(["chat", MODEL, "--url", f"{served.url}/v1", "--temperature", "0", "--max-tokens", "4"])
    asked = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "temperature": 0, "top_p": 0.9}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    written = capsys.readouterr()
    assert written.out == f"{answer}\n"
    assert ended.value.code == 1
    assert "error: there is no command /hlp; did you mean /help?" in written.err
    assert "error: this conversation has no name" in written.err
    assert "(cut short" in written.err
    assert "Ctrl-C" not in written.err


def test_a_conversation_with_an_own_engine():
    with Terminal("chat", MODEL, "--temperature", "0", "--system", "Be brief.", *SMALL) as terminal:
        terminal.wait_for_prompt()
        terminal.type("Say hello to Ada.\r")
        first = terminal.wait_until(lambda text: text.endswith("\n>") and "Ada.\n" in text).rpartition("Ada.\n")[2]
        assert first.removesuffix(">").strip()
        terminal.type("Write a very long story about a ship.\r")
        terminal.wait_until(lambda text: len(text.partition("about a ship.")[2]) > 20)
        terminal.type("/reset\r")  # while the answer comes: it is the next turn
        terminal.interrupt()
        terminal.wait_for("(stopped)")
        terminal.wait_for("forgotten")
        terminal.type("Say hello to Ada.\r")
        last = terminal.wait_until(lambda text: text.endswith("\n>") and text.count("to Ada.\n") == 2)
        assert last.rpartition("Ada.\n")[2] == first
        terminal.type("never sent")
        terminal.wait_until(lambda text: text.endswith("\n> never sent"))
        terminal.interrupt()  # at the prompt it leaves nothing but an empty one
        terminal.wait_until(lambda text: text.endswith("\n> never sent\n>"))
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
        assert terminal.written.endswith(b"\n") or b"\r\n" in terminal.written[-40:]


@pytest.mark.parametrize("leave", ["/exit\r", "\x04"])
def test_what_is_typed_while_the_model_loads_is_sent_once_it_is_loaded(leave):
    with Terminal("chat", MODEL, "--temperature", "0", "--max-tokens", "4", *SMALL) as terminal:
        terminal.wait_for("loading")
        terminal.type(f"Say hello to Ada.\r{leave}")
        assert terminal.wait_for_end() == 0
        assert terminal.text.count("Say hello to Ada.") == 1
        assert "(cut short" in terminal.text.partition("> Say hello to Ada.\n")[2]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "error: no server answers at http://127.0.0.1:9: "),
        (["--url", "nonsense"], "protocol; give http://host:port"),
        (["--url", "http://x", "--block-size", "16"], "--block-size is a setting of an engine of its own"),
        ([], "error: no model is named"),
        (["--session", "a/b"], "error: the session name 'a/b'"),
        ([MODEL, "--session-path", "x"], "error: session_path is 'x', and the conversation has no name"),
    ],
)
def test_an_error_is_one_line(args, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["chat", *args])
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert words in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


class Elsewhere:
    """A server of OpenAI's API that is not pagemill."""

    def __init__(self):
        self.asked = []

    def __call__(self, request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path != "/v1/chat/completions":
            return httpx.Response(404, text="<html>Not Found</html>")
        self.asked.append(json.loads(request.content))
        deltas = [{"reasoning_content": "Hm."}, {"content": "Yes"}, {"content": "."}]
        events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        if self.asked[-1]["messages"][-1]["content"] != "break":
            events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        lines = "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in [*events, {"choices": [], "usage": {}}])
        return httpx.Response(200, text=f": hello\n\n{lines}data: [DONE]\n\n")


async def _talk():
    server = Elsewhere()
    async with Remote("http://x/v1/", "key", httpx.MockTransport(server)) as remote:
        talk = ServerConversation(remote, await first_model(remote), None, "Be brief.", SamplingParams(top_k=3))
        pieces = [piece async for piece in talk.say("One?")]
        with pytest.raises(RemoteServerError, match="ended the answer before its end"):
            _ = [piece async for piece in talk.say("break")]
        _ = [piece async for piece in talk.say("Two?")]
        with pytest.raises(InvalidRequestError, match="stands before all"):
            talk.system = "Be long."
        named = ServerConversation(remote, "m", "ada", None, SamplingParams())
        with pytest.raises(ConfigError, match="keeps no sessions"):
            await named.resume()
    return server.asked, pieces, talk


def test_any_server_is_sent_all_that_was_said():
    asked, pieces, talk = asyncio.run(_talk())
    assert "".join(piece.reasoning for piece in pieces) == "Hm."
    assert "".join(piece.content for piece in pieces) == "Yes."
    assert (asked[0]["model"], asked[0]["top_k"]) == ("m", 3)
    assert "session_id" not in asked[0]
    said = [(message["role"], message["content"]) for message in asked[2]["messages"]]
    assert said == [("system", "Be brief."), ("user", "One?"), ("assistant", "Yes."), ("user", "Two?")]
    assert talk.messages[2]["reasoning_content"] == "Hm."


class CutShort(httpx.AsyncByteStream):
    async def __aiter__(self):
        yield b"{"
        raise httpx.ReadError("the connection is gone")


@pytest.mark.parametrize("status", [200, 503])
def test_an_answer_cut_short_is_an_error_of_its_own(status):
    async def ask():
        cut = httpx.MockTransport(lambda _: httpx.Response(status, stream=CutShort()))
        async with Remote("http://x", None, cut) as remote:
            await remote.models()

    with pytest.raises(RemoteServerError, match="the connection is gone"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ({"data": [{"id": "m"}]}, ["m"]),
        ([{"id": "m"}, {"id": "n"}], ["m", "n"]),
        ({"data": 7}, []),
        ([1], []),
        (7, []),
    ],
)
def test_models_are_listed_in_either_form(listed, names):
    async def ask():
        async with Remote("http://x", None, httpx.MockTransport(lambda _: httpx.Response(200, json=listed))) as remote:
            return await remote.models()

    assert asyncio.run(ask()) == names


def test_what_is_not_unicode_is_not_asked():
    async def ask():
        async with Remote("http://x", None, httpx.MockTransport(Elsewhere())) as remote:
            await remote.ask("/chat/completions", "POST", {"messages": "\udcff"})

    with pytest.raises(InvalidRequestError, match="not Unicode"):
        asyncio.run(ask())


def test_a_line_that_is_not_utf8_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        asyncio.run(LineTurns().read())


def test_a_home_that_nobody_has_is_a_folder_like_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    talk = ServerConversation(Remote("http://x", None), "m", None, None, SamplingParams())
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        asyncio.run(run_command("/save ~nobody-has-it/chat.md", talk))


def test_a_resumed_session_that_is_reset_keeps_its_system_message():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]

    def server(request):
        if request.method == "DELETE":
            return httpx.Response(200, json={})
        return httpx.Response(200, json={"messages": messages, "num_tokens": 9})

    async def resume():
        async with Remote("http://x", None, httpx.MockTransport(server)) as remote:
            talk = ServerConversation(remote, "m", "ada", None, SamplingParams())
            await talk.resume()
            await talk.reset()
            return talk.turn("Who are you?")

    assert asyncio.run(resume()) == [messages[0], {"role": "user", "content": "Who are you?"}]
