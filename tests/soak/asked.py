"""What random clients ask of a server, how its answers are read, whole or streamed, and what an error must have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jsonschema

MODEL = "smollm2-135m"
STORY = "Once upon a time"
SHORT = "The history of paging begins with the Atlas computer in Manchester. " * 4
LONG = SHORT * 3
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
OPERANDS = {"type": "integer", "minimum": 0, "maximum": 99}
FUNCTION = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"left": OPERANDS, "right": OPERANDS},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOLS = [{"type": "function", "function": FUNCTION}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WORDS = "[a-z]{2,6}( [a-z]{2,6}){0,2}"
CITIES = ["Paris", "Manchester", "Par"]
CALL_TOKENS = 60
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
STREAMED = (COMPLETIONS, CHATS, RESPONSES, MESSAGES)
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 0.9, "seed": 3}

KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "story": (COMPLETIONS, {"prompt": STORY, "max_tokens": 40, "ignore_eos": True, **GREEDY}),
    "prefix": (COMPLETIONS, {"prompt": LONG, "max_tokens": 8, **GREEDY}),
    "branch": (COMPLETIONS, {"prompt": f"{LONG}Then", "max_tokens": 12, "logprobs": 2, **GREEDY}),
    "token ids": (COMPLETIONS, {"prompt": list(range(300, 340)), "max_tokens": 8, **SEEDED}),
    "samples": (COMPLETIONS, {"prompt": STORY, "n": 3, "max_tokens": 10, **SEEDED}),
    "best": (COMPLETIONS, {"prompt": STORY, "n": 1, "best_of": 3, "max_tokens": 8, "stream": False, **SEEDED}),
    "prompts": (COMPLETIONS, {"prompt": [STORY, "The sea", LONG], "max_tokens": 6, **GREEDY}),
    "stop": (COMPLETIONS, {"prompt": STORY, "max_tokens": 30, "stop": [".", " the"], **GREEDY}),
    "echo": (COMPLETIONS, {"prompt": STORY, "max_tokens": 3, "echo": True, **GREEDY}),
    "beams": (COMPLETIONS, {"prompt": STORY, "max_tokens": 6, "n": 2, "use_beam_search": True, "stream": False}),
    "scored": (COMPLETIONS, {"prompt": LONG, "max_tokens": 0, "prompt_logprobs": 1, "stream": False}),
    "chat": (CHATS, {"messages": CHAT, "max_tokens": 12, **GREEDY}),
    "chats": (CHATS, {"messages": CHAT, "max_tokens": 8, "n": 2, **SEEDED}),
    "call": (CHATS, {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": CALL_TOKENS, **GREEDY}),
    "form": (CHATS, {"messages": CHAT, "response_format": FORMAT, "max_tokens": 60, **GREEDY}),
    "response": (RESPONSES, {"input": CHAT, "store": False, "max_output_tokens": 10, **GREEDY}),
    "message": (MESSAGES, {"messages": CHAT, "max_tokens": 10, **GREEDY}),
    "vectors": ("/v1/embeddings", {"input": ["A cat.", LONG], "encoding_format": "base64"}),
    "means": ("/v1/embeddings", {"input": "A cat.", "pooling_type": "MEAN"}),
    "tokenize": ("/tokenize", {"prompt": LONG}),
    "detokenize": ("/detokenize", {"tokens": list(range(300, 340))}),
}
"""Requests whose answers never change."""

SCRIPTS = [
    ["My name is Ada.", "What is my name?", "Why?"],
    ["Count to nine.", "Go on.", "And back."],
]
"""What is said in conversations, turn by turn."""
TURN = {"max_tokens": 8, **GREEDY}


def _parsed(text: str) -> None:
    jsonschema.validate(json.loads(text), PERSON)


def _matches(text: str) -> None:
    assert re.fullmatch(WORDS, text), text


def _chosen(text: str) -> None:
    assert text in CITIES, text


FORMS: list[tuple[str, dict[str, Any], Callable[[str], None]]] = [
    (CHATS, {"messages": CHAT, "response_format": FORMAT, "max_tokens": 100}, _parsed),
    (COMPLETIONS, {"prompt": STORY, "structured_outputs": {"json": PERSON}, "max_tokens": 100, "n": 2}, _parsed),
    (COMPLETIONS, {"prompt": STORY, "structured_outputs": {"regex": WORDS}, "max_tokens": 40}, _matches),
    (CHATS, {"messages": CHAT, "structured_outputs": {"choice": CITIES}, "max_tokens": 20, "n": 2}, _chosen),
]
"""Requests whose answers have a form, and what checks the text of one; they are sent with random seeds."""

GARBAGE: list[tuple[str, str, bytes, int]] = [
    ("POST", COMPLETIONS, b"{bad", 400),
    ("POST", COMPLETIONS, b"[]", 400),
    ("POST", COMPLETIONS, b"\xff\xfe", 400),
    ("POST", COMPLETIONS, b"[" * 5000, 400),
    ("POST", COMPLETIONS, b"{}", 400),
    ("POST", COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "a", "temperature": -1}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 1e999}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 100000}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "a", "n": 1000}', 400),
    ("POST", COMPLETIONS, b'{"prompt": [99999999]}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "a", "structured_outputs": {"regex": "("}}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "a", "fork_of": "cmpl-none"}', 400),
    ("POST", COMPLETIONS, b'{"fork_of": "cmpl-none"}', 404),
    ("POST", COMPLETIONS, b'{"prompt": "a", "model": "nobody"}', 404),
    ("POST", COMPLETIONS, json.dumps({"prompt": "word " * 3000}).encode(), 400),
    ("POST", CHATS, b'{"messages": [{"role": "nobody", "content": "a"}]}', 400),
    ("POST", CHATS, b'{"messages": [], "unknown": 1}', 400),
    ("POST", CHATS, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400),
    ("POST", RESPONSES, b'{"input": "a", "previous_response_id": "resp_none"}', 404),
    ("POST", RESPONSES, b'{"input": "a", "background": true}', 400),
    ("POST", MESSAGES, b'{"messages": [{"role": "user", "content": "a"}]}', 400),
    ("POST", MESSAGES, b'{"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}', 400),
    ("POST", MESSAGES, b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "model": "nobody"}', 404),
    ("POST", "/v1/embeddings", b'{"input": []}', 400),
    ("POST", "/tokenize", b'{"prompt": 1}', 400),
    ("POST", "/v1/pins", b'{"name": "", "prompt": "a"}', 400),
    ("GET", "/v1/sessions/nobody", b"", 404),
    ("DELETE", "/v1/pins/nobody", b"", 404),
    ("DELETE", "/v1/responses/resp_none", b"", 404),
    ("GET", "/v1/nothing", b"", 404),
    ("PUT", COMPLETIONS, b"{}", 405),
    ("GET", "/v1/tenants", b"", 403),
    ("POST", "/v1/kv_memory", b'{"kv_memory": "1MiB"}', 403),
]
"""Method, path, body and the status of its refusal."""


class Refused(Exception):
    """An answer that is an error. status: 0 in a stream that had begun."""

    def __init__(self, status: int, body: Any, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body, self.headers = status, body, headers

    @property
    def kind(self) -> str:
        return str(self.body["error"]["type"]) if not self.faults() else ""

    def faults(self) -> list[str]:
        """Returns what a client would miss in this error."""
        body = self.body if isinstance(self.body, dict) else {}
        error, is_anthropics = body.get("error"), body.get("type") == "error"
        fields = {"message", "type"} if is_anthropics else {"message", "type", "param", "code"}
        if not isinstance(error, dict) or {*error} != fields:
            return ["it has neither OpenAI's shape nor Anthropic's"]
        message, kind = error["message"], error["type"]
        kinds = ANTHROPICS_KINDS if is_anthropics else KINDS
        found = []
        if not (isinstance(message, str) and isinstance(kind, str) and kind in kinds.get(self.status, kinds[0])):
            found.append("its type is not its status's")
        if not WAY_OUT.search(str(message)):
            found.append("it names no way out")
        if INSIDES.search(str(message)):
            found.append("it tells of the server's insides")
        if self.status in (429, 503) and not self.headers.get("retry-after", "").isdigit():
            found.append("it does not say when to try again")
        return found


WAY_OUT = re.compile(
    r"\b(ask|begins?|choose|correct|delete|give|go on|leave|lower|make|name|raise|repeat|see|send|set|shorten|sleep|"
    r"start|take|try|unpin|use|wait|write|must be|should be|this server has|known)\b"
)
INSIDES = re.compile(r'Traceback|File "|/(src|site-packages)/|\.py\b| object at 0x|NoneType|/tmp/|Error\(')
KINDS = {
    0: {"service_unavailable_error", "timeout_error"},
    400: {"invalid_request_error"},
    401: {"invalid_request_error"},
    403: {"permission_error"},
    404: {"not_found_error"},
    405: {"invalid_request_error"},
    408: {"timeout_error"},
    409: {"conflict_error"},
    429: {"rate_limit_error"},
    503: {"service_unavailable_error"},
}
ANTHROPICS_KINDS = KINDS | {
    0: {"overloaded_error", "timeout_error"},
    401: {"authentication_error"},
    409: {"invalid_request_error"},
    503: {"overloaded_error"},
}


def whole(path: str, answer: Any) -> Any:
    """Returns what an answer says, without ids, times and what depends on caches."""
    if path == RESPONSES:
        return _items(answer)
    if path == MESSAGES:
        return [block["text"] for block in answer["content"]], answer["stop_reason"]
    if path in (COMPLETIONS, CHATS):
        return [_choice(choice, choice.get("message")) for choice in answer["choices"]], answer.get("prompt_logprobs")
    if path == "/v1/embeddings":
        return [one["embedding"] for one in answer["data"]]
    return answer


def _items(response: Any) -> Any:
    texts = [[part["text"] for part in item.get("content", ())] for item in response["output"]]
    return texts, [item.get("arguments") for item in response["output"]], response["status"]


def _choice(choice: Any, message: Any) -> dict[str, Any]:
    said = choice["text"] if message is None else message["content"]
    calls = [call["function"] for call in (message or {}).get("tool_calls") or ()]
    logprobs = choice.get("logprobs")
    return {
        "text": said or "",
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "end": (choice["finish_reason"], choice["stop_reason"]),
        "logprobs": None if logprobs is None else (logprobs["tokens"], logprobs["token_logprobs"]),
        "prompt": choice.get("prompt_logprobs"),
    }


def broken_off(event: Any) -> Refused | None:
    """Returns the error that an event of a stream tells of, if it does."""
    if "error" in event:
        return Refused(0, event, {})
    if event.get("type") == "response.failed":
        failure = event["response"]["error"]
        error = {"message": failure["message"], "type": "service_unavailable_error", "param": None}
        return Refused(0, {"error": {**error, "code": failure["code"]}}, {})
    return None


def joined(path: str, events: Iterable[Any], count: int) -> Any:
    """Returns what a stream says, as `whole` returns it. count: of its choices."""
    if path == RESPONSES:
        response, said = None, ""
        for event in events:
            said += event["delta"] if event["type"] == "response.output_text.delta" else ""
            response = event.get("response")
        assert response is not None, "a stream of a response ended without it"
        texts, *others = _items(response)
        assert said == "".join(text for item in texts for text in item), "its pieces are not the response"
        return texts, *others
    if path == MESSAGES:
        return _message(events)
    choices = [{"text": "", "calls": [], "end": (None, None), "logprobs": None, "prompt": None} for _ in range(count)]
    for event in events:
        for new in event["choices"]:
            _join(choices[new["index"]], new)
    assert all(choice["end"][0] for choice in choices), f"a stream ended before its answer: {choices}"
    for choice in choices:
        choice["calls"] = [tuple(call) for call in choice["calls"]]
    return choices, None


def _message(events: Iterable[Any]) -> Any:
    texts: list[str] = []
    reason = last = None
    for event in events:
        last = event["type"]
        if last == "content_block_start":
            texts.append("")
        elif last == "content_block_delta":
            texts[event["index"]] += event["delta"]["text"]
        elif last == "message_delta":
            reason = event["delta"]["stop_reason"]
    assert last == "message_stop", f"a stream of a message ended with {last}"
    return texts, reason


def _join(choice: dict[str, Any], new: Any) -> None:
    delta = new.get("delta")
    choice["text"] += (new["text"] if delta is None else delta.get("content")) or ""
    for call in (delta or {}).get("tool_calls") or ():
        if call["index"] == len(choice["calls"]):
            choice["calls"].append([call["function"]["name"], ""])
        choice["calls"][call["index"]][1] += call["function"].get("arguments") or ""
    if new["finish_reason"]:
        choice["end"] = (new["finish_reason"], new["stop_reason"])
    if (logprobs := new.get("logprobs")) is not None:
        tokens, values = choice["logprobs"] or ([], [])
        choice["logprobs"] = (tokens + logprobs["tokens"], values + logprobs["token_logprobs"])


def num_choices(body: Mapping[str, Any]) -> int:
    """Returns how many choices the answer to a body has."""
    prompts = body.get("prompt")
    several = isinstance(prompts, list) and isinstance(prompts[0], str)
    return int(body.get("n", 1)) * (len(prompts) if several and prompts else 1)
