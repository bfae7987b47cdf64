"""`/v1/completions`: prompts in, text out."""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from pagemill.errors import InvalidRequestError
from pagemill.frontend.input_processor import Prompt
from pagemill.frontend.outputs import CompletionOutput, LogprobsOfPosition
from pagemill.frontend.request_stream import RequestStream
from pagemill.frontend.session import AsyncSession
from pagemill.sampling.params import SamplingParams
from pagemill.server.protocol.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from pagemill.server.protocol.generation import PromptLogprobs
from pagemill.server.routes.call import Call

IncrementalUTF8 = getincrementaldecoder("utf-8")


class Echo(NamedTuple):
    """A prompt as its answers repeat it."""

    text: str
    first_token: tuple[str, bytes]
    """Its name, and what it writes."""
    logprobs: Sequence[LogprobsOfPosition | None]


class CompletionCall(Call[CompletionRequest]):
    """One completion of one or several prompts."""

    ID, WHOLE, CHUNK = "cmpl-", Completion, Completion

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}
        """Positions at which the text of the next token begins, by choice, kept from its first token on."""
        self._decoders: defaultdict[int, IncrementalDecoder] = defaultdict(partial(IncrementalUTF8, "replace"))
        """By choice, what knows the characters that are whole."""
        self._echoes: dict[int, Echo] = {}
        """Prompts that have been decoded, by position."""

    async def _turn(self, session: AsyncSession, params: SamplingParams) -> RequestStream:
        prompts = self.request.prompts()
        if len(prompts) > 1 or self.request.echo:
            what = f"{len(prompts)} prompts" if len(prompts) > 1 else "echo"
            raise InvalidRequestError(f"a session takes one prompt and no echo, not {what}", param="session_id")
        how: dict[str, Any] = {"priority": self.request.priority, "lora_request": self._lora_request}
        return await session.submit(prompts[0], params, self._id, **how)

    async def _prompts(self) -> list[Prompt]:
        self._tokenizer = await self._llm.tokenizer()
        how = {"cache_salt": self.request.cache_salt, "suffix": self.request.suffix}
        return [
            {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **how}
            for prompt in self.request.prompts()
        ]

    def _chunks(self, position: int, new: CompletionOutput) -> Iterator[str]:
        index, request = position * self._num_choices + new.index, self.request
        more = new.finish_reason or new.logprobs or request.prompt_logprobs is not None or request.return_token_ids
        if index in self._offsets and not more:
            if new.text:
                yield self._text_chunk(index, new.text)
            return
        choice = self._choice(position, new)
        if choice.text or choice.finish_reason or new.logprobs or choice.token_ids:
            yield self._chunk(choice)

    def _text_choice(self, index: int) -> CompletionChoice:
        return CompletionChoice(index=index, text="")

    def _choice(self, position: int, output: CompletionOutput) -> CompletionChoice:
        """Returns a choice with what is new of it; its first part begins with what it goes on from."""
        index, text = position * self._num_choices + output.index, output.text
        positions: list[LogprobsOfPosition | None] = [*(output.logprobs or ())]
        first_token = ("", b"")
        prompt_token_ids = None
        if index not in self._offsets:
            self._offsets[index] = len(self._forked)
            text = self._forked + text
            if self.request.return_token_ids and output.index == 0:
                prompt_token_ids = self._streams[position].prompt_token_ids
            if self.request.echo:
                echo = self._echo(position)
                text, first_token = echo.text + text, echo.first_token
                positions = [*echo.logprobs, *positions]
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=None if self.request.logprobs is None else self._logprobs(index, positions, first_token),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.request.return_token_ids else None,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(position),
        )

    def _prompt_logprobs(self, position: int) -> PromptLogprobs | None:
        """Returns what the request asks of the prompt at `position` beside an echo."""
        return None if self.request.prompt_logprobs is None else self._streams[position].whole().prompt_logprobs

    def _echo(self, position: int) -> Echo:
        """Returns the prompt at `position`, which is decoded once for all its choices."""
        if position not in self._echoes:
            result = self._streams[position].whole()
            text, token_ids = result.prompt, result.prompt_token_ids
            if text is None:
                text = self._tokenizer.decode(token_ids)
            first_token = (token_ids[0], self._tokenizer.decode(token_ids[:1]))
            named = self._name(*first_token), self._written(*first_token)
            self._echoes[position] = Echo(text, named, result.prompt_logprobs or [])
        return self._echoes[position]

    def _logprobs(
        self, index: int, positions: Sequence[LogprobsOfPosition | None], first_token: tuple[str, bytes]
    ) -> CompletionLogprobs:
        """Returns OpenAI's parallel lists. The prompt's first token has no probability: nothing stands before it."""
        lists = CompletionLogprobs()
        for position in positions:
            token, written = first_token
            logprob: float | None = None
            likely: dict[str, float] | None = None
            if position is not None:
                named = [(self._name(token_id, entry.decoded_token), entry) for token_id, entry in position.items()]
                token, chosen = named[0]
                likely = {}
                written, logprob = self._written(next(iter(position)), chosen.decoded_token), chosen.logprob
                for name, entry in named:  # the chosen one first: it is none of those that are written alike
                    likely.setdefault(name, entry.logprob)
            lists.tokens.append(token)
            lists.token_logprobs.append(logprob)
            lists.top_logprobs.append(likely)
            lists.text_offset.append(self._offsets[index])
            self._offsets[index] += len(self._decoders[index].decode(written))
        return lists

    def _name(self, token_id: int, text: str) -> str:
        """Returns a token's text, or where that is no whole characters its bytes, as OpenAI writes them."""
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._written(token_id, text))

    def _written(self, token_id: int, text: str) -> bytes:
        """Returns a token's bytes, which may be a part of a character."""
        return self._tokenizer.token_texts.raw(token_id) if "\ufffd" in text else text.encode()
