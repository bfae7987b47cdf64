"""Executor: all that the engine core knows of a device, or of several that work as one.

Once it is broken as a whole, as when one of several processes is lost, whatever is asked of it raises EngineDeadError.

An executor owns the model, the KV pool, the rows' state (tokens, positions, tables) and the sampling. The core sends it
plans and gets results: it never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill.kvcache.frame_access import FrameAccess
from pagemill.kvcache.kv_format import KVFormat
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.step_plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """States what drafts on the device cost.

    cost: the work of one draft, as a multiple of that of one of the model's tokens.
    most: the most drafts of a sequence in one step; None for any number.
    takes_in: True if all of a sequence's tokens have to be taken in before it has drafts.
    """

    cost: float
    most: int | None
    takes_in: bool


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """States what an executor runs, and what does not change while it lives.

    windows: by layer group, the sliding window in tokens; None for full attention.
    attention_share: the share of attention in a prompt's cost per block, see `DecoderSpec.attention_share`.
    fingerprint, kv_format, numerics: the parts of the digests that name blocks: weights, those of a draft model too;
        bytes of K/V; kernels.
    frame_bytes: memory of one block of one layer group, on all ranks together.
    record_bytes: the size of its record in an offload store. It differs where several ranks have the same KV heads.
    kv: the format in which K and V are stored.
    streams: the tiers, "host" and "disk", in which attention can read frames outside the pool.
    compacts: True if attention gains from frames that are neighbours.
    quantization: how linear layers are held, as `EngineConfig` names it; None: in one dtype.
    description: family, device, weights and kernels, for people.
    drafts: what the device can draft; None: nothing.
    overlaps: True if the next plan should be made, applied and submitted before this step's result is collected.
    counts_steps: True if `Executor.memory` counts what steps need as used, so that the pool may have the rest.
    has_own_memory: True if the device's memory is not the host's.
    has_head: False if the model makes embeddings only.
    streamed_bytes: the device's own memory that a frame outside the pool takes; together they take less than another
        frame's more.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    windows: tuple[int | None, ...]
    attention_share: float
    fingerprint: bytes
    kv_format: str
    numerics: str
    frame_bytes: int
    record_bytes: int
    kv: KVFormat
    streams: tuple[str, ...]
    compacts: bool
    description: str
    quantization: str | None = None
    drafts: DraftFacts | None = None
    overlaps: bool = False
    counts_steps: bool = False
    has_own_memory: bool = False
    has_head: bool = True
    streamed_bytes: int = 0


class ExecutorMemory(NamedTuple):
    """Counts the bytes of the device's memory."""

    free: int
    total: int


class GraphFacts(NamedTuple):
    """Counts the decode steps that are captured as graphs, and the bytes that these take on the device, of several on
    each."""

    number: int
    nbytes: int


class AdapterFacts(NamedTuple):
    """States what an executor knows of a loaded adapter: a digest of its content, and the bytes that it takes."""

    digest: bytes
    nbytes: int


class StepHandle(NamedTuple):
    """Stands for a step that was submitted: its plan, and what the executor needs to know of it."""

    plan: StepPlan
    pending: object


class Executor(Protocol):
    """Carries out step plans. One thread calls it, except for `frames`.

    Plans are applied and submitted in the order in which they were made, and collected in that order. The next plan may
    be made, applied and submitted before the result of this one is collected, but no further one. So its rows read
    tokens that only the device knows; not those of rows whose next token depends on the last one otherwise
    (`SamplingParams.reads_answer`), or that have drafts in this step: these are not in it. A row that turns out to have
    ended, or failed alone, in this step may still be in the next: it must find some token of the vocabulary there, and
    what it brings is not used.

    A step that was submitted behind one that fails as a whole is void: it has no result, and leaves no trace in the
    rows' state. It is collected, which may raise, and its rows are submitted again behind those of the one that failed.
    """

    @property
    def facts(self) -> ExecutorFacts: ...

    @property
    def frames(self) -> FrameAccess:
        """Gives offload stores access to frames; after `allocate`."""

    def memory(self) -> ExecutorMemory: ...

    def allocate(self, num_frames: int, streamed_frames: int = 0, streamed_folder: Path | None = None) -> int:
        """Makes the KV pool, once, with streamed frames beside it, in host memory or in a file in that folder. Returns
        the number of the first streamed frame. Raises KVMemoryError or KVStoreError."""

    def warm_up(self) -> str:
        """Does once, before the first step, what would hold up the steps that need it first, as compiling kernels. May
        take minutes, and logs how far it is. Returns what was done, in words for people; nothing if there was nothing
        to do. Raises EngineDeadError."""

    def graphs(self) -> GraphFacts: ...

    def prepare(self, params: SamplingParams, root: bytes) -> Future[Any] | None:
        """Begins to prepare what sampling by these parameters needs, beside the steps, for the namespace whose chains
        begin in `root`; it stays there while this future is held. Its error is SamplingParamsError for what cannot be.
        None: they need nothing."""

    def load_adapter(self, number: int, path: str) -> AdapterFacts:
        """Loads the adapter that rows name by this number. Raises `ModelLoadError` children, and loads nothing."""

    def apply(self, plan: StepPlan) -> list[int]:
        """Carries out a plan's edits: rows that left, rows that came, tokens, frame copies, block tables. Returns the
        frames that do not hold what was to be copied into them."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Begins to run a plan, or a part of one, whose edits have been applied. A plan without rows brings an empty
        result."""

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for a step, and returns its result. Raises what failed the step as a whole; the same rows may then be
        submitted again, in parts, by the tables as they are then."""

    def resize(self, num_frames: int) -> None:
        """Gives the pool another number of frames, after the edits that it takes. Raises KVMemoryError, and changes
        nothing, for more than it can have."""

    def take_loss(self) -> bool:
        """Returns whether a disk has lost what was written to streamed frames since the last call. If so, nothing that
        they hold may be used."""

    def streamed_frames(self, plan: StepPlan) -> Sequence[NDArray[np.int32]]:
        """Returns, by layer group, the streamed frames that the plan's rows read."""

    def close(self) -> None:
        """Ends what runs beside the steps. The offload stores, which use `frames`, have been closed."""
