"""What crosses the line between the front end and the engine core, in either direction.

Plain msgspec structs, so that the same messages serve an engine in this process and one in a child process.
Times are seconds of `time.monotonic()` in the process that took them.
"""

from __future__ import annotations

import msgspec

from pagemill.config import EngineConfig
from pagemill.draft_counts import Drafted
from pagemill.errors import EmptyPromptError, PagemillError, PromptTooLongError, error_of
from pagemill.lora_request import LoRARequest
from pagemill.sampling.params import BeamSearchParams, SamplingParams, TokenLogprobs
from pagemill.sampling.pooling_params import PoolingParams
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits

DIGEST_BYTES = 8
"""Bytes of a digest that routing knows. Two of a million blocks are mistaken for each other with a chance of 3e-8, and
then a request goes where less of it is found."""

TOO_LONG = "is longer than the model's context length"
"""What litellm knows too long prompts by, in the message."""


class Peering(msgspec.Struct, frozen=True):
    """Lets an engine give its blocks to peers, and fetch theirs.

    secret: what peers know each other by. host: the address on which it listens, and at which they find it.
    """

    secret: bytes
    host: str

    def __repr__(self) -> str:
        return f"Peering(host={self.host!r})"


class HeldBlocks(msgspec.Struct, frozen=True):
    """Says that a peer, by its address (host and port), holds the first `num_blocks` blocks of a request's chain."""

    address: str
    num_blocks: int


class Start(msgspec.Struct, tag=True):
    """Load this model. The first message to an engine process."""

    config: EngineConfig
    kv_memory: int | None = None
    """Names the size that the KV pool gets once it has loaded; None: as the config says."""
    tenants: dict[str, TenantLimits] = {}
    """Tenants to set then, beside those of the config."""
    adapters: list[LoRARequest] = []
    """LoRA adapters to load then, beside those of the config."""
    peering: Peering | None = None
    """How it gives blocks to other engines, and fetches theirs; None: it does not."""
    publishes: bool = False
    """Tells whether the engine says which blocks it can find (`Held`)."""


class EngineRequest(msgspec.Struct, tag=True, kw_only=True):
    """One prompt, already tokens. `n` of its parameters may ask for several sequences."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    seed: int | None = None
    """What its random numbers come from where its parameters have no seed; None: the engine draws one."""
    priority: int = 0
    """Smaller is more urgent, as in vLLM."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of one tenant and equal salt."""
    fork_of: tuple[str, int] | None = None
    """A sequence `(request_id, index)` with these tokens, whose blocks it may share if that still runs."""
    in_session: bool = False
    """True for a turn of a session, for which a tenant may have a limit of its own."""
    session: str = ""
    """The name of the session that it is a turn of, for who chooses among engines."""
    beam: BeamSearchParams | None = None
    """Makes it a beam search; `params` then say how many sequences come back, and how they become text."""
    pooling: PoolingParams | None = None
    """Asks for an embedding of the prompt; `params` then ask for no token."""
    tenant: str = DEFAULT_TENANT
    served_elsewhere: dict[str, int] = {}
    """Tokens that other engines have computed, by tenant, since the last request that this engine was told them with:
    tenants share the service of all engines."""
    guaranteed_here: dict[str, int] = {}
    """Blocks of what the fleet guarantees that are a tenant's in this engine, for those where that has changed."""
    is_admitted: bool = False
    """True if `max_waiting` holds where it comes from, over several engines: this one takes it however many wait."""
    adapter: int = 0
    """The number of a loaded LoRA adapter; 0 for none."""
    answered: list[int] = []
    """Tokens of its one sequence that another engine has brought: it goes on behind them, as after a preemption."""
    held: HeldBlocks | None = None
    """Names a peer that holds some of its blocks; None: nobody is known to."""
    pin: str | None = None
    """Name of the pin that its whole prompt becomes; None: it is an ordinary request."""
    pin_expires_s: float | None = None

    @property
    def num_sequences(self) -> int:
        """Returns how many sequences run at once: as many as `n`, or the beams of a search."""
        return self.params.n if self.beam is None else self.beam.beam_width


class AbortRequests(msgspec.Struct, tag=True):
    """Stop these requests and give back all that they hold. Unknown ids are ignored: they may have just finished."""

    request_ids: list[str]


class FinishSequences(msgspec.Struct, tag=True):
    """Sequences that the front end has ended (a stop string came): `(request_id, index)`."""

    sequences: list[tuple[str, int]]


class Shutdown(msgspec.Struct, tag=True):
    """Finish the step, free everything, leave."""


class Failure(msgspec.Struct, tag=True):
    """An error on its way to the front end: a sequence's; a query's, as its answer; or the engine's, as a message."""

    error_type: str
    """The error's class name in `pagemill.errors`."""
    message: str
    param: str | None = None
    """The argument that the error is about."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        return cls(type(error).__name__, str(error), getattr(error, "param", None))

    def to_error(self) -> PagemillError:
        return error_of(self.error_type, self.message, self.param)


class SequenceOutput(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True, gc=False):
    """Tells what one step brought for one sequence."""

    request_id: str
    index: int
    """The number of the sequence among the request's `n`; of a beam search, its place, the best being 0."""
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    """`"stop"`, `"length"`, `"abort"` or `"error"`; None while it runs."""
    stop_reason: int | None = None
    """The stop token that ended it, unless it was the model's end-of-sequence token."""
    error: Failure | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    kv_blocks: tuple[int, int] | None = None
    """Its blocks in the pool, and those that are streamed: with the end, and whenever any are streamed."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Sent once, with the first token, or the end of a request for none. The first position has none."""
    pooled: bytes | None = None
    """The embedding that was asked for, float32. It comes with the end."""
    cumulative_logprob: float | None = None
    """The score of a beam search's result, which comes with all of its tokens."""
    scheduled_s: float = 0.0
    """When the request first entered a step."""
    drafted: Drafted | None = None
    """Says what came of the drafts that the step verified; None if it had none."""


def refusals(request: EngineRequest, error: Exception) -> list[SequenceOutput]:
    """Returns the end of every sequence of a request that the engine refuses."""
    return [
        SequenceOutput(
            request_id=request.request_id,
            index=index,
            new_token_ids=[],
            finish_reason="error",
            error=Failure.of(error),
        )
        for index in range(request.params.n)
    ]


class PinInfo(msgspec.Struct, kw_only=True):
    """A prefix whose blocks are never evicted; its name is one of its namespace, `tenant` and `cache_salt`."""

    name: str
    tenant: str
    cache_salt: str
    num_tokens: int
    num_blocks: int
    """Over all layer groups; those of several pins count in each."""
    expires_in_s: float | None
    """Seconds from now; None: never."""


class SequenceInfo(msgspec.Struct, kw_only=True):
    """A sequence that has not finished, and where its KV blocks lie."""

    request_id: str
    index: int
    running: bool
    """Otherwise it waits, and holds no block."""
    num_tokens: int
    """Tokens of prompt and answer."""
    kv_blocks: dict[str, int]
    """Over all layer groups, shared ones included: those in the pool ("device"), and, where contexts may be longer than
    that, those that are streamed ("host" or "disk")."""


class KVBlocks(msgspec.Struct, tag=True):
    """Counts blocks by tier, over all layer groups; each counts in the highest tier that has it."""

    by_tier: dict[str, int]


class Done(msgspec.Struct, tag=True):
    """Says whether something was done."""

    done: bool


class StepOutputs(msgspec.Struct, tag=True):
    """Carries the outputs of one step."""

    outputs: list[SequenceOutput]


def name_in_memory(digest: bytes) -> bytes:
    """Returns what a block is called in `Held` that is in the pool or in host memory."""
    return digest[:DIGEST_BYTES]


def name_on_disk(digest: bytes) -> bytes:
    """Returns what a block is called in `Held` that is on disk: another part of its digest, since it may be in memory
    too."""
    return digest[DIGEST_BYTES : 2 * DIGEST_BYTES]


class Held(msgspec.Struct, tag=True, omit_defaults=True):
    """Tells which blocks can be found since the last message of its kind, and what work takes."""

    stored: bytes = b""
    """Names of `DIGEST_BYTES` each, joined: of blocks that are in memory now, and of those that are on disk."""
    removed: bytes = b""
    token_s: float = 0.0
    """Seconds that a token of a prompt takes beside others, in the mean; 0: not known yet."""
    tokens: int = 0
    """Tokens of prompts over which that was measured, of late."""
    step_s: float = 0.0
    """Seconds that a step takes in which nothing but answers is computed; 0: not known yet."""
    fetch_s: dict[str, tuple[float, float]] = {}
    """Seconds that fetching blocks of each peer takes, by its address: for all of them, infinite where it is left alone
    now; and for each. Peers of which nothing is known are left out."""
    disk_s: tuple[float, float] | None = None
    """Seconds that loading blocks from disk takes: for all of them, and for each; None: not known yet."""


class LoadProgress(msgspec.Struct, tag=True):
    """States how far loading has come, in the loader's own units. Sent many times before `EngineReady`."""

    done: int
    total: int


class AdapterInfo(msgspec.Struct):
    """A loaded LoRA adapter: its name, number and folder as they were asked for, a digest of its content, and the bytes
    that it takes."""

    name: str
    number: int
    path: str
    digest: bytes
    nbytes: int


class EngineReady(msgspec.Struct, tag=True, kw_only=True):
    """States the engine's facts. Sent when it has loaded, and before the answer to a query that changes them."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    longest_sequence: int
    """Tokens, prompt included, that one sequence can have: `max_model_len`, or fewer where the pool holds no more."""
    tenants: list[str]
    """Names that requests may give as their tenant."""
    block_size: int
    num_frames: int
    kv_bytes: int
    """Counts the pool's own bytes."""
    kv_memory: int
    """Counts the bytes that a `ResizePool` names for the present size: the pool's, and what streamed blocks take beside
    it on a GPU."""
    eos_token_ids: list[int]
    hidden_size: int
    """Numbers of an embedding."""
    has_head: bool = True
    """True if the model can generate; without a head it makes embeddings only."""
    model: str
    """Family, device, dtype of the weights and kernels, in words for people."""
    kv_format: str
    """The format of a block, and where other blocks stream from, in words for people."""
    host_bytes: int = 0
    """Host memory for evicted blocks."""
    num_groups: int = 1
    """Layer groups: a sequence has so many blocks for every `block_size` tokens, at most."""
    adapters: list[AdapterInfo] = []
    """In the order in which they were loaded."""
    fingerprint: bytes = b""
    kv_format_name: str = ""
    numerics: str = ""
    """These three begin the digest of every chain of blocks, see `root_digest`."""
    peer_address: str = ""
    """Host and port at which peers fetch this engine's blocks; empty: they do not."""
    tells_disk: bool = False
    """Whether `Held` tells what is on this engine's disk."""
    disk: str = ""
    """Says in words for people how much room evicted blocks have on disk, and where."""
    warm_up: str = ""
    """Says in words for people what was done before the first step: kernels compiled, decode steps captured."""

    @property
    def description(self) -> str:
        """Returns one line for people: device, dtype, kernels, the pool as it is now, and the warm-up."""
        fit = f", {self.longest_sequence} of max_model_len={self.max_model_len} fit"
        host = f"{self.host_bytes / 2**20:.0f} MiB of host memory" if self.host_bytes else ""
        below = " and ".join(filter(None, (host, self.disk and f"up to {self.disk}")))
        return (
            f"{self.model}; KV pool {self.kv_bytes / 2**20:.0f} MiB: {self.num_frames} blocks of {self.block_size} "
            f"tokens in {self.kv_format}{'' if self.longest_sequence == self.max_model_len else fit}"
            f"{below and f'; {below} for evicted blocks'}"
            f"{self._adapters}{self.warm_up and '; '}{self.warm_up}"
        )

    @property
    def _adapters(self) -> str:
        size = sum(adapter.nbytes for adapter in self.adapters) / 2**20
        return f"; LoRA adapters: {len(self.adapters)} in {size:.0f} MiB" if self.adapters else ""

    def check_prompt_length(self, num_tokens: int, *, answered: bool = True) -> None:
        """Raises `EmptyPromptError` for no token, `PromptTooLongError` for too many.

        answered: whether one must be left for the answer.
        """
        if num_tokens == 0:
            raise EmptyPromptError("the prompt has no tokens; give it at least one", param="prompt")
        if num_tokens > self.max_model_len and not answered:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, which {TOO_LONG}: max_model_len is {self.max_model_len}; shorten "
                f"the prompt or raise max_model_len",
                param="prompt",
            )
        if num_tokens >= self.max_model_len and answered:
            shorten = f"shorten the prompt to {self.max_model_len - 1} tokens or " if self.max_model_len > 1 else ""
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, which with one for the answer {TOO_LONG}: max_model_len is "
                f"{self.max_model_len}; {shorten}raise max_model_len",
                param="prompt",
            )


class PinList(msgspec.Struct, tag=True):
    """Lists the pins, in the order in which they came."""

    pins: list[PinInfo]


class SequenceList(msgspec.Struct, tag=True):
    """Lists the sequences that have not finished, in the order in which their requests came."""

    sequences: list[SequenceInfo]
