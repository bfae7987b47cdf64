"""`/v1/completions`: prompts in, text out, whole or as a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from pagemill.errors import InvalidRequestError, PagemillError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.input_processor import Prompt
from pagemill.frontend.outputs import LogprobsOfPosition
from pagemill.sampling.params import SamplingParams
from pagemill.server.errors import error_response
from pagemill.server.events import DONE, event
from pagemill.server.forks import fork
from pagemill.server.generation import Generation, begin
from pagemill.server.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest


class CompletionCall:
    """One call. `run` or, after `prepare_stream`, `stream`; what it started ends with either."""

    def __init__(self, llm: AsyncLLM, request: CompletionRequest, model: str, tenant: str) -> None:
        self._llm = llm
        self._tenant = tenant
        self._request = request
        self._model = model
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_choices = request.n or 1
        self._echoes: list[str] = []
        self._forked = ""
        self._first_tokens: list[str] = []

    async def run(self) -> Completion:
        """Raises `PagemillError` children."""
        generation = await self._start()
        try:
            results = await generation.finish()
        finally:
            await generation.close()
        choices = []
        for position, result in enumerate(results):
            for index, answer in enumerate(result.answers):
                logprobs = _Logprobs(self._request.logprobs, len(self._forked))
                if self._request.echo:
                    logprobs.add_prompt(self._first_tokens[position], result.prompt_logprobs)
                logprobs.add(answer.logprobs or [])
                choices.append(
                    CompletionChoice(
                        index=position * self._num_choices + index,
                        text=self._echo(position) + answer.text,
                        logprobs=logprobs.take(),
                        finish_reason=answer.finish_reason,
                        stop_reason=answer.stop_reason,
                    )
                )
        return self._body(choices).model_copy(update={"usage": generation.usage()})

    async def prepare_stream(self) -> AsyncGenerator[str, None]:
        """The events of the answer, once its first part is there: until then, errors are raised."""
        generation = await self._start()
        return await begin(self._events(generation), generation)

    async def _start(self) -> Generation:
        params = self._request.params()
        if self._request.fork_of is not None:
            generation, self._forked = await fork(self._llm, self._request, params, self._id, self._tenant)
            return generation
        prompts: Sequence[str | list[int]] = self._request.prompts()
        salt = self._request.cache_salt
        if self._request.session_id is not None:
            assert isinstance(params, SamplingParams)
            return await self._start_turn(self._request.session_id, prompts, params)
        salted: list[Prompt] = [
            {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}
            for prompt in prompts
        ]
        generation = await Generation.start(
            self._llm,
            salted,
            params,
            self._num_choices,
            request_id=self._id,
            priority=self._request.priority,
            tenant=self._tenant,
        )
        if self._request.echo:
            tokenizer = await self._llm.tokenizer()
            self._echoes = [
                prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
                for prompt in prompts
            ]
            self._first_tokens = [tokenizer.decode(stream.prompt_token_ids[:1]) for stream in generation.streams]
        return generation

    async def _start_turn(
        self, session_id: str, prompts: Sequence[str | list[int]], params: SamplingParams
    ) -> Generation:
        if len(prompts) > 1 or self._request.echo:
            what = f"{len(prompts)} prompts" if len(prompts) > 1 else "echo"
            raise InvalidRequestError(f"a session takes one prompt and no echo, not {what}", param="session_id")
        salt = self._request.cache_salt or ""
        session = self._llm.session(session_id, cache_salt=salt, tenant=self._tenant)
        stream = await session.submit(prompts[0], params, self._id, priority=self._request.priority)
        return Generation.of([stream], 1)

    async def _events(self, generation: Generation) -> AsyncGenerator[str, None]:
        num_choices = len(generation.streams) * self._num_choices
        logprobs = [_Logprobs(self._request.logprobs, len(self._forked)) for _ in range(num_choices)]
        begun: set[int] = set()
        try:
            yield ""  # for `begin`
            async for position, output in generation.deltas():
                for new in output.outputs:
                    index = position * self._num_choices + new.index
                    text = new.text
                    if index not in begun:
                        text = self._echo(position) + text
                    if self._request.echo and index not in begun:
                        logprobs[index].add_prompt(
                            self._first_tokens[position], generation.results[position].prompt_logprobs
                        )
                    begun.add(index)
                    logprobs[index].add(new.logprobs or [])
                    if not (text or new.finish_reason or new.logprobs):
                        continue
                    choice = CompletionChoice(
                        index=index,
                        text=text,
                        logprobs=logprobs[index].take(),
                        finish_reason=new.finish_reason,
                        stop_reason=new.stop_reason,
                    )
                    yield event(self._body([choice]))
            if self._request.include_usage:
                yield event(self._body([]).model_copy(update={"usage": generation.usage()}))
        except PagemillError as error:
            yield event(error_response(error))
        finally:
            await generation.close()
        yield DONE

    def _echo(self, position: int) -> str:
        """What is sent before what this request has brought."""
        return self._echoes[position] if self._echoes else self._forked

    def _body(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices)


class _Logprobs:
    """Gathers positions into OpenAI's parallel lists; offsets go on across chunks, and begin at `offset`."""

    def __init__(self, wanted: int | None, offset: int) -> None:
        self._wanted = wanted
        self._offset = offset
        self._lists = CompletionLogprobs()

    def add_prompt(self, first_token: str, positions: Sequence[LogprobsOfPosition | None] | None) -> None:
        """An echoed prompt; nothing stands before its first token, which therefore has no probability."""
        if positions:
            self._append(first_token, None, None)
            self.add([position for position in positions if position is not None])

    def add(self, positions: Sequence[LogprobsOfPosition]) -> None:
        for position in positions:
            chosen = next(iter(position.values()))
            likely = {entry.decoded_token: entry.logprob for entry in position.values()}
            self._append(chosen.decoded_token, chosen.logprob, likely)

    def _append(self, token: str, logprob: float | None, likely: dict[str, float] | None) -> None:
        self._lists.tokens.append(token)
        self._lists.token_logprobs.append(logprob)
        self._lists.top_logprobs.append(likely)
        self._lists.text_offset.append(self._offset)
        self._offset += len(token)

    def take(self) -> CompletionLogprobs | None:
        """What has been added since the last call; None if none were asked for."""
        taken, self._lists = self._lists, CompletionLogprobs()
        return None if self._wanted is None else taken
