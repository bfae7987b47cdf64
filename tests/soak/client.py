"""One random client of a server: what it does depends on its seed alone, and every answer that it gets is judged."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any, Protocol
from urllib.parse import quote

import httpx
from tests.soak.asked import (
    CHATS,
    FORMS,
    GARBAGE,
    KNOWN,
    MESSAGES,
    RESPONSES,
    SCRIPTS,
    SHORT,
    STREAMED,
    TURN,
    Refused,
    broken_off,
    joined,
    num_choices,
    whole,
)

LATER = frozenset({429, 503, 0})
"""Refusals after which the same may be asked again; 0 is that of a stream which had begun."""
PATIENCE_S = 60.0
"""In which what was refused for a while must be answered."""
MOST_CONVERSATIONS = 3
FLOOD = 12
"""Requests at once."""
NOW = struct.pack("ii", 1, 0)
"""Linger for no time: the connection is reset."""


class Gone(Exception):
    """The server was not there, or broke off."""


class Wrong(Exception):
    """An answer that should be another one."""


class Fate(Protocol):
    """What else happens to the server."""

    url: str
    is_over: threading.Event

    def was_away(self, since_s: float) -> bool:
        """Returns whether the server had been stopped at some time since then."""

    def was_disturbed(self, since_s: float) -> bool:
        """Returns whether server or engine had been stopped, or the pool small, at some time since then."""

    def knew(self, key: str, since_s: float) -> tuple[bool, bool]:
        """Returns whether the server knew a key all the time since then, and whether it did at any time."""


class Client:
    """A tenant's client, until `fate` is over."""

    def __init__(self, number: int, seed: int, key: str, fate: Fate, answers: dict[str, Any]) -> None:
        """answers: those to `KNOWN` requests by name, and to each turn of each of `SCRIPTS`."""
        self._name, self._key, self._fate, self._answers = f"c{number}", key, fate, answers
        self._random = random.Random(seed * 1000 + number)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._sessions: dict[str, tuple[int, int]] = {}
        """Script and turns of sessions."""
        self._responses: list[tuple[str, int, int]] = []
        """Ids of responses, with script and turns."""
        self._numbers = iter(range(1 << 30))
        self._ways = {
            self.known: 30, self.formed: 8, self.call: 4, self.turn: 16, self.fork_session: 3, self.leave_turn: 4,
            self.end_session: 2, self.respond: 10, self.forget: 2, self.hang_up: 10, self.reset: 5, self.fork: 5,
            self.be_late: 4, self.pin: 3, self.garble: 6, self.break_http: 3, self.flood: 1,
        }  # fmt: skip

    def run(self) -> None:
        while not self._fate.is_over.is_set() and len(self.wrong) < 5:
            (way,) = self._random.choices([*self._ways], [*self._ways.values()])
            try:
                way()
                self.counts[way.__name__] += 1
            except (Gone, Refused) as refused:  # both have been judged
                self.counts[f"{type(refused).__name__} {getattr(refused, 'status', '')}".strip()] += 1
                self._fate.is_over.wait(0.2)
            except Exception as error:
                self.wrong.append(f"{self._name} {way.__name__}: {type(error).__name__}: {error!s:.1500}")
        self._fate.is_over.wait()
        self._tidy()

    # What it does

    def known(self) -> None:
        name = self._random.choice([*KNOWN])
        path, body = KNOWN[name]
        salt = {"cache_salt": self._name} if path in STREAMED and self._random.random() < 0.2 else {}
        self._compare(name, self._ask(path, {**body, **salt}), self._answers[name])

    def formed(self) -> None:
        path, body, check = self._random.choice(FORMS)
        seed = self._random.randrange(1 << 30)
        choices, _ = self._ask(path, {**body, "seed": seed, "temperature": 1.0})
        for choice in choices:
            if choice["end"][0] == "stop":
                check(choice["text"])

    def call(self) -> None:
        """Calls a function with random arguments: they must follow its schema."""
        path, body = KNOWN["call"]
        ((choice,), _) = self._ask(path, {**body, "temperature": 1.0, "seed": self._random.randrange(1 << 30)})
        if choice["end"][0] == "tool_calls":
            ((name, arguments),) = choice["calls"]
            numbers = json.loads(arguments)
            if (name, {*numbers}) != ("add", {"left", "right"}) or not all(0 <= n <= 99 for n in numbers.values()):
                raise Wrong(f"called {name} with {arguments}")

    def turn(self) -> None:
        """Says the next turn of a session; what was answered once must be there ever after."""
        name = self._session()
        script, turn = self._sessions[name]
        if turn == len(SCRIPTS[script]):
            self._delete(f"/v1/sessions/{name}")
            del self._sessions[name]
            return
        said, id_ = self._say(name, script, turn), []
        try:
            answer = self._ask(CHATS, said, beside={409}, ids=id_)
        except (Gone, Refused):
            self._look(name, script, turn, id_)
            raise
        self._sessions[name] = (script, turn + 1)
        self._compare(f"turn {turn} of {name}", answer, self._answers[f"{CHATS} {script} {turn}"])

    def leave_turn(self) -> None:
        """Hangs up in a turn, which then leaves no trace, or was over before."""
        name = self._session()
        script, turn = self._sessions[name]
        if turn < len(SCRIPTS[script]):
            id_: list[str] = []
            self._leave(CHATS, self._say(name, script, turn), id_)
            self._look(name, script, turn, id_)

    def fork_session(self) -> None:
        name = self._session()
        if self._sessions[name][1]:
            child = f"{self._name}-{next(self._numbers)}"
            self._call("POST", f"/v1/sessions/{name}/fork", {"session_id": child}, beside={409})
            self._sessions[child] = self._sessions[name]

    def end_session(self) -> None:
        name = self._session()
        if self._sessions[name][1]:
            self._delete(f"/v1/sessions/{name}")
        del self._sessions[name]

    def respond(self) -> None:
        """Goes on from a response, or begins with one."""
        longest = [at for at in self._responses if at[2] < len(SCRIPTS[at[1]])]
        script, turn, before = self._random.randrange(len(SCRIPTS)), 0, {}
        if longest and self._random.random() < 0.8:
            name, script, turn = self._random.choice(longest)
            before = {"previous_response_id": name}
        body = {"input": SCRIPTS[script][turn], "max_output_tokens": TURN["max_tokens"], "temperature": 0, **before}
        id_: list[str] = []
        answer = self._ask(RESPONSES, body, ids=id_)
        self._compare(f"response {turn} of {script}", answer, self._answers[f"{RESPONSES} {script} {turn}"])
        self._responses.append((id_[0], script, turn + 1))

    def forget(self) -> None:
        """Reads a response again, and forgets it."""
        if self._responses:
            name, script, turn = self._responses.pop(self._random.randrange(len(self._responses)))
            kept = whole(RESPONSES, self._call("GET", f"{RESPONSES}/{name}").json())
            self._compare(f"kept {name}", kept, self._answers[f"{RESPONSES} {script} {turn - 1}"])
            self._delete(f"{RESPONSES}/{name}")

    def hang_up(self) -> None:
        """Leaves a stream after some events, or an answer after some time."""
        path, body = KNOWN[self._random.choice(["story", "samples", "prompts", "chats", "response", "form"])]
        self._leave(path, body, [])

    def reset(self) -> None:
        """Does as a client that is killed does."""
        path, body = KNOWN[self._random.choice(["story", "prefix", "beams", "chats", "vectors"])]
        with self._socket() as connection:
            connection.sendall(self._head(path, body))
            connection.settimeout(self._random.choice([0.01, 0.1, 0.5]))
            with suppress(TimeoutError):
                connection.recv(2000)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NOW)

    def be_late(self) -> None:
        """Gives an answer little time: it comes whole, or not at all."""
        name = self._random.choice(["story", "samples", "prompts", "chats", "response", "vectors"])
        path, body = KNOWN[name]
        timeout = self._random.choice([0.01, 0.2, 1.0])
        try:
            answer = self._ask(path, {**body, "timeout": timeout}, beside={408, 0})
        except Refused as refused:
            if refused.status not in (408, 0):
                raise
            return
        self._compare(name, answer, self._answers[name])

    def fork(self) -> None:
        """Branches a running answer; both go on to the same text."""
        path, body = KNOWN["story"]
        all_of_it = self._answers["story"][0][0]["text"]
        with closing(self._events(path, {**body, "stream": True})) as events:
            first = next(events)
            asked = {"fork_of": first["id"], "max_tokens": self._random.choice([1, 8]), "temperature": 0}
            try:
                choices, _ = self._ask(path, {**asked, "ignore_eos": True}, beside={404})
            except Refused as refused:
                if refused.status != 404:
                    raise
                return
            said = choices[0]["text"]
            if said[: len(all_of_it)] != all_of_it[: len(said)]:
                raise Wrong(f"a fork says {said!r} where the answer says {all_of_it!r}")

    def pin(self) -> None:
        """Pins a prefix, asks for it, and takes the pin away; an engine that was stopped may have lost it."""
        name, began_s = f"{self._name} {next(self._numbers)}", time.monotonic()
        body = {"name": name, "prompt": SHORT, "cache_salt": self._name, "expires_s": 600}
        self._call("POST", "/v1/pins", body, beside={400})
        path, asked = KNOWN["branch"]
        self._compare("pinned", self._ask(path, {**asked, "cache_salt": self._name}), self._answers["branch"])
        self._delete(f"/v1/pins/{quote(name)}?cache_salt={self._name}", missing=lambda: self._fate.was_away(began_s))

    def garble(self) -> None:
        method, path, body, status = self._random.choice(GARBAGE)
        try:
            self._call(method, path, body, beside={status})
        except Refused as refused:
            if refused.status in (status, *LATER, 401):
                return
            raise Wrong(f"{method} {path} {body!r:.100} was refused with {refused}, not {status}") from None
        raise Wrong(f"{method} {path} {body!r:.100} was answered")

    def break_http(self) -> None:
        """Sends bytes that are no request, or half of one."""
        pieces = [b"\0" * 100, b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n"]
        with self._socket() as connection:
            path, body = KNOWN["chat"]
            head = self._head(path, body)
            connection.sendall(self._random.choice([*pieces, head[: self._random.randrange(len(head))]]))
            connection.settimeout(0.2)
            with suppress(TimeoutError):
                connection.recv(2000)

    def flood(self) -> None:
        """Asks much at once: each is answered rightly, or told when to come again."""
        path, body = KNOWN[name := self._random.choice(["story", "samples", "chat", "vectors"])]
        streams = [self._random.random() < 0.5 for _ in range(FLOOD)]

        def ask(stream: bool) -> int:
            try:
                self._compare(name, self._ask(path, body, stream=stream), self._answers[name])
            except Refused as refused:
                return refused.status
            except Gone:
                return 0
            return 200

        with ThreadPoolExecutor(FLOOD) as pool:
            self.counts.update(f"flood {status}" for status in pool.map(ask, streams))

    # How it asks

    def _ask(
        self, path: str, body: dict[str, Any], *, stream: bool | None = None, beside: Collection[int] = (),
        ids: list[str] | None = None,
    ) -> Any:  # fmt: skip
        """Returns what an answer says, whole or streamed. ids: takes the answer's id."""
        if stream is None:
            stream = self._random.random() < 0.5
        ids = [] if ids is None else ids
        if not stream or path not in STREAMED or "stream" in body:
            answer = self._call("POST", path, body, beside).json()
            ids.append(answer.get("id", ""))
            return whole(path, answer)
        with closing(self._events(path, {**body, "stream": True}, beside, ids)) as events:
            return joined(path, events, num_choices(body))

    def _events(
        self, path: str, body: dict[str, Any], beside: Collection[int] = (), ids: list[str] | None = None
    ) -> Iterator[Any]:
        with self._served(beside), self._http() as http, http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise refusal(response)
            done = path in (RESPONSES, MESSAGES)
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if (broken := broken_off(event)) is not None:
                        raise broken
                    if ids == []:
                        within = {RESPONSES: "response", MESSAGES: "message"}.get(path)
                        ids.append((event[within] if within else event).get("id", ""))
                    yield event
                done = done or line == "data: [DONE]"
            if not done:
                raise Wrong("a stream ended without [DONE]")

    def _call(self, method: str, path: str, body: Any = None, beside: Collection[int] = ()) -> httpx.Response:
        with self._served(beside), self._http() as http:
            given = {"content": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
            response = http.request(method, path, headers={"Content-Type": "application/json"}, **given)
            if response.status_code >= 400:
                raise refusal(response)
            return response

    @contextmanager
    def _served(self, beside: Collection[int] = ()) -> Iterator[None]:
        """Judges what goes wrong meanwhile. beside: statuses of refusals that may come."""
        began_s = time.monotonic()
        try:
            yield
        except Refused as refused:
            self._judge(refused, beside, began_s)
            raise
        except httpx.TimeoutException as error:
            raise Wrong(f"no answer came: {type(error).__name__}") from None
        except (httpx.TransportError, OSError) as error:
            if not self._fate.was_away(began_s):
                raise Wrong(f"the connection broke: {type(error).__name__}: {error}") from None
            raise Gone from None
        if not self._fate.knew(self._key, began_s)[1]:
            raise Wrong("a key was taken that is gone")

    def _judge(self, refused: Refused, beside: Collection[int], began_s: float) -> None:
        status = refused.status
        expected = status in beside or status == 429
        expected |= status in (503, 0) and self._fate.was_disturbed(began_s)
        expected |= status == 401 and not self._fate.knew(self._key, began_s)[0]
        self.counts[f"refused {status}"] += 1
        if faults := refused.faults() + ["it should not have been refused"] * (not expected):
            self.wrong.append(f"{self._name}: {refused!s:.600}: {', '.join(faults)}")

    def _leave(self, path: str, body: dict[str, Any], ids: list[str]) -> None:
        if self._random.random() < 0.7:
            with closing(self._events(path, {**body, "stream": True}, {409}, ids)) as events:
                for _ in range(self._random.choice([1, 1, 2, 5, 9])):
                    if next(events, None) is None:
                        return
            return
        began_s = time.monotonic()
        try:
            with self._http() as http:
                http.post(path, json=body, timeout=self._random.choice([0.01, 0.1, 0.4]))
        except httpx.TimeoutException:
            pass
        except httpx.TransportError as error:
            if not self._fate.was_away(began_s):
                raise Wrong(f"the connection broke: {error}") from None

    def _session(self) -> str:
        """Returns the name of one of its sessions, or of a new one."""
        if len(self._sessions) < MOST_CONVERSATIONS or self._random.random() < 0.05:
            self._sessions[f"{self._name}-{next(self._numbers)}"] = (self._random.randrange(len(SCRIPTS)), 0)
        return self._random.choice([*self._sessions])

    def _say(self, name: str, script: int, turn: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": SCRIPTS[script][turn]}], "session_id": name, **TURN}

    def _look(self, name: str, script: int, turn: int, ids: list[str]) -> None:
        """Looks whether a turn that broke off was kept, once it has ended. If it cannot be known, another session
        takes the place of this one."""
        del self._sessions[name]
        self._fate.is_over.wait(0.2)
        running = self._call("GET", "/v1/requests").json()["data"]
        if any(one["id"] in ids or not ids for one in running):
            return
        try:
            turns = self._call("GET", f"/v1/sessions/{name}", beside={404}).json()["num_turns"]
        except Refused as refused:
            if refused.status != 404:
                return
            turns = 0
        if turns not in (turn, turn + 1):
            raise Wrong(f"session {name} has {turns} turns, not {turn} or one more")
        if ids and turns == turn:
            self._sessions[name] = (script, turn)

    def _delete(self, path: str, missing: Any = lambda: False) -> None:
        """Deletes something. missing: says whether it may be gone."""
        try:
            self._call("DELETE", path, beside={409} | ({404} if missing() else set()))
        except Refused as refused:
            if refused.status == 404 and missing():
                return
            raise

    def _tidy(self) -> None:
        """Deletes what it keeps, now that all is calm."""
        for name, (_, turn) in self._sessions.items():
            if turn:
                self._call("DELETE", f"/v1/sessions/{name}")
        for name, *_ in self._responses:
            self._call("DELETE", f"{RESPONSES}/{name}")

    def _compare(self, name: str, answer: Any, right: Any) -> None:
        if answer != right:
            raise Wrong(f"{name} was answered {answer!r:.600} instead of {right!r:.600}")

    def _http(self) -> httpx.Client:
        return httpx.Client(
            base_url=self._fate.url, headers={"Authorization": f"Bearer {self._key}"}, timeout=PATIENCE_S
        )

    @contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        """Opens a connection, which the server may break."""
        url, began_s = httpx.URL(self._fate.url), time.monotonic()
        try:
            connection = socket.create_connection((url.host, url.port or 0), timeout=5)
        except OSError as error:
            if not self._fate.was_away(began_s):
                raise Wrong(f"no connection was made: {error}") from None
            raise Gone from None
        with connection, suppress(ConnectionResetError, BrokenPipeError):
            yield connection

    def _head(self, path: str, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        lines = f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"
        head = "\r\n".join([*lines, f"Authorization: Bearer {self._key}", f"Content-Length: {len(content)}", "", ""])
        return head.encode() + content


def refusal(response: httpx.Response) -> Refused:
    """Returns a response of a status from 400 on as an error."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return Refused(response.status_code, body, response.headers)
