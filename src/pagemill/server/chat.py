"""`/v1/chat/completions`: a conversation in, the assistant's next turn out, whole or as a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from pagemill.errors import InvalidRequestError, PagemillError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.outputs import Logprob, LogprobsOfPosition
from pagemill.sampling.params import SamplingParams
from pagemill.server.errors import error_response
from pagemill.server.events import DONE, event
from pagemill.server.forks import fork
from pagemill.server.generation import Generation, begin
from pagemill.server.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TopLogprob,
)


class ChatCall:
    """One call: `run`, or `prepare_stream` for the events of a streamed answer."""

    def __init__(self, llm: AsyncLLM, request: ChatCompletionRequest, model: str, tenant: str) -> None:
        self._llm = llm
        self._tenant = tenant
        self._request = request
        self._model = model
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._forked = ""

    async def run(self) -> ChatCompletion:
        """Raises `PagemillError` children."""
        generation = await self._start()
        try:
            (result,) = await generation.finish()
        finally:
            await generation.close()
        choices = [
            ChatChoice(
                index=index,
                message=AnswerMessage(content=self._forked + answer.text),
                logprobs=self._logprobs(answer.logprobs),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
            )
            for index, answer in enumerate(result.answers)
        ]
        return ChatCompletion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=generation.usage()
        )

    async def prepare_stream(self) -> AsyncGenerator[str, None]:
        """The events of the answer, once its first part is there: until then, errors are raised."""
        generation = await self._start()
        return await begin(self._events(generation), generation)

    async def _start(self) -> Generation:
        try:
            return await self._submit()
        except InvalidRequestError as error:
            names = {"prompt": "messages", "logprobs": "top_logprobs"}
            if self._request.max_tokens is None and self._request.max_completion_tokens is not None:
                names["max_tokens"] = "max_completion_tokens"
            if (name := names.get(error.param or "")) is not None:  # the engine's name for what has another one here
                error.message = error.message if name == "messages" else error.message.replace(str(error.param), name)
                error.param = name
            raise

    async def _submit(self) -> Generation:
        params = self._request.params()
        if self._request.fork_of is not None:
            generation, self._forked = await fork(self._llm, self._request, params, self._id, self._tenant)
            return generation
        assert self._request.messages is not None
        messages = [message.for_template() for message in self._request.messages]
        salt = self._request.cache_salt or ""
        if self._request.session_id is not None:
            assert isinstance(params, SamplingParams)
            session = self._llm.session(self._request.session_id, cache_salt=salt, tenant=self._tenant)
            stream = await session.submit_chat(messages, params, self._id, priority=self._request.priority)
            return Generation.of([stream], 1)
        prompt = await self._llm.render_chat(messages, cache_salt=salt)
        return await Generation.start(
            self._llm,
            [prompt],
            params,
            self._request.n or 1,
            request_id=self._id,
            priority=self._request.priority,
            tenant=self._tenant,
        )

    async def _events(self, generation: Generation) -> AsyncGenerator[str, None]:
        begun: set[int] = set()
        try:
            yield ""  # for `begin`
            async for _, output in generation.deltas():
                for new in output.outputs:
                    if new.index not in begun:
                        begun.add(new.index)
                        first = ChunkChoice(index=new.index, delta=Delta(role="assistant", content=self._forked))
                        yield event(self._chunk([first]))
                    if not (new.text or new.finish_reason or new.logprobs):
                        continue
                    choice = ChunkChoice(
                        index=new.index,
                        delta=Delta(content=new.text) if new.text else Delta(),
                        logprobs=self._logprobs(new.logprobs),
                        finish_reason=new.finish_reason,
                        stop_reason=new.stop_reason,
                    )
                    yield event(self._chunk([choice]))
            if self._request.include_usage:
                yield event(self._chunk([]).model_copy(update={"usage": generation.usage()}))
        except PagemillError as error:
            yield event(error_response(error))
        finally:
            await generation.close()
        yield DONE

    def _chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=choices)

    def _logprobs(self, positions: Sequence[LogprobsOfPosition] | None) -> ChatLogprobs | None:
        """The chosen token of each position, with as many of the most likely ones as were asked for."""
        if positions is None:
            return None
        wanted = self._request.top_logprobs or 0
        content = []
        for position in positions:
            entries = list(position.values())
            likely = [_top(entry) for entry in entries if entry.rank <= wanted]
            likely.sort(key=lambda entry: -entry.logprob)
            content.append(TokenLogprob(**_top(entries[0]).model_dump(), top_logprobs=likely))
        return ChatLogprobs(content=content)


def _top(entry: Logprob) -> TopLogprob:
    token = entry.decoded_token
    return TopLogprob(token=token, logprob=entry.logprob, bytes=None if "\ufffd" in token else list(token.encode()))
