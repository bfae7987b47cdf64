"""Session: one conversation of an `LLM`, which goes on where its last turn ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagemill.engine.messages import BlocksRequest, KVBlocks
from pagemill.engine.outputs import RequestOutput
from pagemill.engine.session_turns import Turn
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams
from pagemill.sessions.store import SessionRecord

if TYPE_CHECKING:
    from pagemill.engine.llm import LLM


class Session:
    """A name for a conversation. It begins with its first turn; a turn that fails leaves no trace.

    Raises `SessionBusyError`, `SessionLimitError`, `SessionNotFoundError` and `InvalidRequestError` children.
    """

    def __init__(self, llm: LLM, name: str, space: Namespace) -> None:
        self.name = name
        self.space = space
        self._llm = llm

    def generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestOutput:
        """Goes on with a text or token ids behind all that the session has. A failed request has its `error`."""
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._run(
            params,
            lambda request_id: self._llm._turns.begin_prompt(
                self.name, self.space, prompt, params, request_id, priority=priority
            ),
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **template: Any,
    ) -> RequestOutput:
        """Answers the new turn's messages alone; those before are the session's. `template` goes to the template."""
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._run(
            params,
            lambda request_id: self._llm._turns.begin_chat(
                self.name, self.space, messages, params, request_id, template, priority=priority
            ),
        )

    @property
    def record(self) -> SessionRecord:
        """The session as it is now."""
        return self._llm._turns.store.get(self.name, self.space)

    @property
    def token_ids(self) -> list[int]:
        """Prompts and answers of all turns, as the model saw and produced them."""
        return self.record.token_ids

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        """The conversation so far; None for a session of plain prompts."""
        return self.record.messages

    @property
    def kv_blocks(self) -> dict[str, int]:
        """The KV blocks that its next turn would find, by the highest tier that has them: "device" (the pool), and, as
        far as there are such tiers, "host" and "disk". What is missing of it would be computed again."""
        answer: KVBlocks = self._llm._engine().kv_blocks(BlocksRequest(self.token_ids, *self.space))
        return answer.by_tier

    def fork(self, name: str) -> Session:
        """Another session that begins as this one is now. They share all blocks that they have in common."""
        self._llm._turns.store.fork(self.name, self.space, name)
        return Session(self._llm, name, self.space)

    def delete(self) -> None:
        """Forgets the conversation; its blocks are evicted like any others that nobody asks for."""
        self._llm._turns.store.delete(self.name, self.space)

    def _run(self, params: SamplingParams, begin: Callable[[str], Turn]) -> RequestOutput:
        turns = self._llm._turns
        turn = begin(self._llm._new_request_id())
        try:
            (output,) = self._llm._run([turn.processed], use_tqdm=False)
            if output.outputs[0].error is None:
                turns.commit(turn, output.outputs[0], params)
        finally:
            turns.release(turn)
        return output
