"""The turns of sessions, for `LLM` and `AsyncLLM` alike: what goes before a turn's tokens, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.errors import InvalidRequestError, PromptTooLongError, SamplingParamsError
from pagemill.frontend.input_processor import InputProcessor, Prompt, token_ids_of
from pagemill.frontend.output_processor import RequestState, Turn
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams
from pagemill.sessions.store import SessionRecord, SessionStore
from pagemill.text.chat_template import check_messages
from pagemill.text.chat_turn import turn_text


class SessionTurns:
    """Raises what `InputProcessor`, the chat template and `SessionStore` raise; then the session is not in use."""

    def __init__(self, store: SessionStore, inputs: InputProcessor, model: str) -> None:
        self.store = store
        self._inputs = inputs
        self._model = model

    def begin_prompt(
        self,
        name: str,
        space: Namespace,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        **how: Any,
    ) -> RequestState:
        """The session's tokens, then this text or these token ids."""
        begun = self._begin(name, space, params)
        try:
            if begun.messages is not None:
                raise InvalidRequestError(
                    f"session {name!r} is a conversation, which goes on with messages, not with a prompt",
                    param="prompt",
                )
            history = self._history(begun)
            if isinstance(prompt, str):
                token_ids = self._inputs.tokenizer.encode(prompt, add_special_tokens=not begun.num_turns)
                return self._turn(begun, prompt, [*history, *token_ids], None, params, request_id, how)
            if isinstance(prompt, Mapping):
                raise InvalidRequestError(
                    f"a session's prompt is text or token ids, not {type(prompt).__name__}", param="prompt"
                )
            return self._turn(begun, None, [*history, *token_ids_of(prompt)], None, params, request_id, how)
        except BaseException:
            self.store.release(begun)
            raise

    def begin_chat(
        self,
        name: str,
        space: Namespace,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
        template: Mapping[str, Any],
        **how: Any,
    ) -> RequestState:
        """The session's tokens, then those of the new messages; or, where the chat template writes earlier turns anew,
        all of it rendered and tokenized again."""
        check_messages(messages)
        begun = self._begin(name, space, params)
        try:
            if begun.num_turns and begun.messages is None:
                raise InvalidRequestError(
                    f"session {name!r} was begun with a prompt, and goes on with prompts, not with messages",
                    param="messages",
                )
            tokenizer, earlier = self._inputs.tokenizer, begun.messages or []
            text = turn_text(tokenizer, earlier, messages, **template) if earlier else None
            if text is None:
                text, token_ids = tokenizer.encode_chat([*earlier, *messages], **template)
            else:
                new = tokenizer.encode(text, add_special_tokens=False)
                history = self._history(begun)
                token_ids = [*(history[:-1] if history[-1:] == new[:1] else history), *new]
            return self._turn(begun, text, token_ids, [*earlier, *messages], params, request_id, how)
        except BaseException:
            self.store.release(begun)
            raise

    def commit(self, request: RequestState) -> None:
        """Appends a turn's answer to its session."""
        turn, (answer,) = request.turn, request.whole().outputs
        assert turn is not None
        messages = turn.messages
        if messages is not None:
            detokenized, tokenizer = request.asked.params.detokenize, self._inputs.tokenizer
            text = answer.text if detokenized else tokenizer.decode(answer.token_ids, True)
            messages = [*messages, {"role": "assistant", "content": text}]
        self.store.commit(turn.begun, [*request.prompt_token_ids, *answer.token_ids], messages)

    def release(self, turn: Turn) -> None:
        """The turn leaves no trace."""
        self.store.release(turn.begun)

    def _begin(self, name: str, space: Namespace, params: SamplingParams) -> SessionRecord:
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(
                f"a session goes on from one answer, by SamplingParams, not {type(params).__name__}", param="params"
            )
        if params.n != 1:
            raise InvalidRequestError(
                f"n is {params.n}, but a session goes on from one answer; ask for one, or fork the session", param="n"
            )
        fingerprint = self._inputs.tokenizer.fingerprint
        return self.store.begin(name, space, model=self._model, tokenizer=fingerprint)

    def _history(self, begun: SessionRecord) -> list[int]:
        """An end-of-sequence token that ended the last answer gives way to what follows."""
        ended = begun.token_ids[-1:] and begun.token_ids[-1] in self._inputs.facts().eos_token_ids
        return begun.token_ids[:-1] if ended else begun.token_ids

    def _turn(
        self,
        begun: SessionRecord,
        text: str | None,
        token_ids: list[int],
        messages: list[Mapping[str, Any]] | None,
        params: SamplingParams,
        request_id: str,
        how: Mapping[str, Any],
    ) -> RequestState:
        prompt: Prompt = {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": begun.space.cache_salt}
        try:
            request = self._inputs.process(
                prompt, params, request_id, tenant=begun.space.tenant, in_session=True, **how
            )
        except PromptTooLongError as error:
            raise PromptTooLongError(
                f"{error.message}; {len(begun.token_ids)} of them are those of session {begun.name!r}: begin another",
                param=error.param,
            ) from None
        request.turn = Turn(begun, messages)
        return request
