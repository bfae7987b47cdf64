"""The turns of sessions: what goes before a turn's tokens, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagemill.engine.messages import AdapterInfo
from pagemill.errors import InvalidRequestError, PromptTooLongError, SamplingParamsError, shown
from pagemill.frontend.input_processor import InputProcessor, Prompt, token_ids_of
from pagemill.frontend.request_state import RequestState, ResponseTurn, Turn
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams
from pagemill.sessions.record import SessionRecord
from pagemill.sessions.store import SessionStore
from pagemill.text.answer.of_model import message_of
from pagemill.text.chat_template import check_messages

MAX_KEPT = 64
"""Characters of JSON that a session's messages and tools may have for each token of `max_model_len`: messages may have
texts that chat templates leave out, which no limit on tokens counts."""


class SessionTurns:
    """Begins and commits the turns of all sessions of one engine."""

    def __init__(self, store: SessionStore, inputs: InputProcessor, model: str) -> None:
        """model: its name, which sessions keep."""
        self.store = store
        self._inputs = inputs
        self._model = model

    def begin(
        self,
        name: str,
        space: Namespace,
        content: Any,
        params: SamplingParams | None,
        request_id: str,
        *,
        template: Mapping[str, Any] | None = None,
        priority: int = 0,
        max_tool_calls: int | None = None,
        calls_only: bool = False,
        on_prompt: Callable[[str, Sequence[Mapping[str, Any]] | None], None] | None = None,
        response: ResponseTurn | None = None,
        adapter: AdapterInfo | None = None,
    ) -> RequestState:
        """Takes a session for one turn, and returns the turn's request: the session's tokens, then those of `content`.

        content: text or token ids; messages if there is a `template`, which goes to the chat template. Without tools in
        it, those of the session's last turn count, unless it is a `response`. max_tool_calls,
        calls_only: see `AnswerFormats.reader`. on_prompt: called with the text and the tools of a turn of messages
        before `params` count, which it may change; what it raises refuses the turn. adapter: a loaded LoRA adapter, to
        which the session belongs from its first turn on.
        Raises what `SessionStore.begin` or `begin_response`, `InputProcessor.process` and the chat template raise; then
        the session is not in use.
        """
        params = _for_one_answer(params)
        if template is not None:
            check_messages(content)
        begun = self._begun(name, space, response, adapter)
        try:
            if response is not None:
                response.on_begin(begun)
            messages = tools = None
            instructions = begun.instructions if response is None else response.instructions
            if template is None:
                text, token_ids = self._prompt(begun, content)
            else:
                tools = _tools(template.get("tools")) or (begun.tools if response is None else None)
                text, history = self._chat(begun, instructions, content, {**template, "tools": tools})
                if on_prompt is not None:
                    on_prompt(text, tools)
                token_ids = _joined(history, self._inputs.encode(text, add_special_tokens=False))
                messages = [*(begun.messages or []), *content]
                if response is None or response.keep:
                    what = f"session {name!r}" if response is None else "the response"
                    self._check_size(what, messages, tools)
            prompt: Prompt = {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": space.cache_salt}
            request = self._inputs.process(
                *(prompt, params, request_id),
                tenant=space.tenant,
                in_session=response is None or response.keep,
                priority=priority,
                adapter=0 if adapter is None else adapter.number,
            )
        except PromptTooLongError as error:
            self.store.release(begun)
            if not begun.token_ids:
                raise
            earlier = f"session {name!r}" if response is None else f"response {response.after!r}"
            raise PromptTooLongError(
                f"{error.message}; {len(begun.token_ids)} of them are those of {earlier}: begin another",
                param=error.param,
            ) from None
        except BaseException:
            self.store.release(begun)
            raise
        if response is None:
            request.asked.session = name
        request.turn = Turn(begun, messages, tools, max_tool_calls, calls_only, instructions, response)
        return request

    def count(
        self,
        name: str,
        space: Namespace,
        messages: Sequence[Mapping[str, Any]],
        response: ResponseTurn,
        encode: Callable[[str], list[int]],
        template: Mapping[str, Any],
    ) -> int:
        """Returns how many tokens the prompt of a response would have; they need not fit `max_model_len`.

        encode: returns the tokens of a text. Raises what it and the chat template raise, and
        `SessionStore.begin_response`.
        """
        begun = self._begun(name, space, response, None)
        try:
            response.on_begin(begun)
            tools = _tools(template.get("tools")) or None
            text, history = self._chat(begun, response.instructions, messages, {**template, "tools": tools})
        finally:
            self.store.release(begun)
        return len(_joined(history, encode(text)))

    def _check_size(self, what: str, messages: list[Any], tools: list[Any] | None) -> None:
        """Raises `InvalidRequestError` for more than a session keeps."""
        size, limit = len(json.dumps([messages, tools], default=dict)), MAX_KEPT * self._inputs.facts().max_model_len
        if size > limit:
            raise InvalidRequestError(
                f"messages and tools of {what} would have {size} characters as JSON; it keeps at most "
                f"{limit}, {MAX_KEPT} for each token of max_model_len; leave out what the chat template leaves out, "
                f"such as earlier reasoning, or begin another",
                param="messages",
            )

    def _begun(
        self, name: str, space: Namespace, response: ResponseTurn | None, adapter: AdapterInfo | None
    ) -> SessionRecord:
        of: dict[str, Any] = {"model": self._model, "tokenizer": self._inputs.tokenizer.fingerprint}
        if adapter is not None:
            of |= {"model": adapter.name, "adapter": adapter.digest}
        if response is None:
            return self.store.begin(name, space, **of)
        return self.store.begin_response(name, space, after=response.after, keep=response.keep, **of)

    def commit(self, request: RequestState) -> None:
        """Appends a turn's answer to its session, unless it is a response that is not kept."""
        turn, (answer,) = request.turn, request.whole().outputs
        assert turn is not None
        content = None if turn.response is None else turn.response.on_end(request)
        if turn.response is not None and not turn.response.keep:
            return
        messages = turn.messages
        if messages is not None:
            detokenized, tokenizer = request.asked.params.detokenize, self._inputs.tokenizer
            text = answer.text if detokenized else tokenizer.decode(answer.token_ids, True)
            reader = tokenizer.answers.reader(
                turn.tools,
                prompt=request.prompt or "",
                answer_id=request.request_id,
                max_calls=turn.max_tool_calls,
                calls_only=turn.calls_only,
            )
            messages = [*messages, message_of(reader, text)]
        token_ids = [*request.prompt_token_ids, *answer.token_ids]
        self.store.commit(turn.begun, token_ids, messages, turn.tools, turn.instructions, content)

    def _prompt(self, begun: SessionRecord, prompt: Any) -> tuple[str | None, list[int]]:
        """Returns the text of a turn, None for one of token ids, and all tokens up to its end."""
        if begun.messages is not None:
            raise InvalidRequestError(
                f"session {begun.name!r} is a conversation, which goes on with messages, not with a prompt",
                param="prompt",
            )
        history = self._history(begun)
        if isinstance(prompt, str):
            token_ids = self._inputs.encode(prompt, add_special_tokens=not begun.num_turns)
            return prompt, [*history, *token_ids]
        if isinstance(prompt, Mapping):
            raise InvalidRequestError(
                f"a session's prompt is text or token ids, not {type(prompt).__name__}; give the text itself, or "
                f"messages to chat()",
                param="prompt",
            )
        return None, [*history, *token_ids_of(prompt)]

    def _chat(
        self,
        begun: SessionRecord,
        instructions: str | None,
        messages: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
    ) -> tuple[str, list[int]]:
        """Returns the text of a turn, and the tokens before it.

        Where the chat template writes earlier turns anew, or tools or instructions are others than before, the text is
        the whole conversation, and no tokens are before it."""
        if begun.num_turns and begun.messages is None:
            raise InvalidRequestError(
                f"session {begun.name!r} was begun with a prompt, and goes on with prompts, not with messages",
                param="messages",
            )
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        tokenizer, earlier = self._inputs.tokenizer, [*system, *(begun.messages or [])]
        goes_on = begun.messages and (begun.tools, begun.instructions) == (template["tools"], instructions)
        text = tokenizer.render_turn(earlier, messages, **template) if goes_on else None
        if text is None:
            return tokenizer.apply_chat_template([*earlier, *messages], **template), []
        return text, self._history(begun)

    def _history(self, begun: SessionRecord) -> list[int]:
        """Returns a session's tokens. An end-of-sequence token that ended the last answer gives way to what follows."""
        ended = begun.token_ids[-1:] and begun.token_ids[-1] in self._inputs.facts().eos_token_ids
        return begun.token_ids[:-1] if ended else begun.token_ids


def _joined(history: list[int], new: list[int]) -> list[int]:
    """Returns tokens and those behind them, which may begin with the end of the last answer."""
    return [*(history[:-1] if history[-1:] == new[:1] else history), *new]


def _tools(given: Any) -> list[Any]:
    """Returns a turn's tools, none for None. Raises `InvalidRequestError` for what is no list."""
    if not isinstance(given, (list, tuple, type(None))):
        raise InvalidRequestError(f"tools is {shown(given)}; it must be a list", param="tools")
    return list(given or ())


def _for_one_answer(params: SamplingParams | None) -> SamplingParams:
    """Returns the parameters of a turn. Raises `InvalidRequestError` where they ask for several answers."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise SamplingParamsError(
            f"a session goes on from one answer, by SamplingParams, not {type(params).__name__}", param="params"
        )
    if params.max_tokens == 0:
        raise InvalidRequestError(
            "max_tokens is 0, but a session goes on from an answer; ask for one token at least", param="max_tokens"
        )
    if params.n != 1:
        raise InvalidRequestError(
            f"n is {params.n}, but a session goes on from one answer; ask for one, or fork the session", param="n"
        )
    return params
