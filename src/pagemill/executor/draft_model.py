"""DraftModel: a smaller model that proposes the next tokens of rows, before the step in which they are verified.

Its keys and values lie in the same frames as the model's, in further layers of a group with full attention, so that
all that happens to a block (shared, forked, copied, evicted, offloaded, kept for a session) happens to both. They are
not always there: the model computes tokens for which nobody wants drafts, and the draft model takes these in when a row
is to draft again. A token whose key is NaN in its first layer is one that it has not taken in. So a block may be
completed after it was published: with the bits that it would have had at once.

Whatever the drafts are, verification samples from the model (`verification`), with a random number for each position.
A draft is drawn from the draft model's distribution with the same one: the nearer that is to the model's, the more
often both draws are the same token.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.attention.interface import LayerCache
from pagemill.executor.draft_source import Asked, asked_of, with_drafts
from pagemill.executor.rows import Inputs, Rows
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layer_groups import LayerGroups
from pagemill.kvcache.layout import FrameShape
from pagemill.models.decoder import Decoder
from pagemill.sampling.sampler import Sampler
from pagemill.scheduling.step_plan import DraftWork, StepPlan


class DraftLayers(NamedTuple):
    """States where a draft model's layers lie: several in each place, the first in that of the pool's layer `first`.

    shape: of its own keys and values. groups: the pool's.
    """

    shape: FrameShape
    groups: LayerGroups
    first: int
    per_place: int

    @property
    def group(self) -> int:
        return self.groups.place(self.first)[0]


class DraftCaches:
    """Gives the draft model its layers' keys and values in the pool."""

    def __init__(self, pool: DevicePool, layers: DraftLayers, count: int) -> None:
        self._layers = []
        for layer in range(count):
            pack, index = divmod(layer, layers.per_place)
            place = layers.groups.place(layers.first + pack)[1]
            self._layers.append(pool.packed_layer(layers.shape, place, index))

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]


class DraftModel:
    """Implements `DraftSource` by a smaller model.

    _known int32 [rows]: so many leading tokens at least have their keys and values; none behind an edited table entry
    _marked int32 [rows]: from the last token on, all places up to here have marks; none behind an edited table entry
    """

    def __init__(self, decoder: Decoder, layers: DraftLayers) -> None:
        self.decoder = decoder
        self._layers = layers

    def begin(self, pool: DevicePool, rows: Rows, sampler: Sampler) -> None:
        """Takes its places in the pool, once. The sampler knows how each row's tokens are chosen."""
        self._sampler = sampler
        self._rows = rows
        self._known = np.zeros(len(rows.tokens), dtype=np.int32)
        self._marked = np.zeros_like(self._known)
        self._first_streamed = pool.first_streamed
        self._caches = DraftCaches(pool, self._layers, len(self.decoder.spec.layers))
        first = self._caches.layer(0)
        self._marks = first.key[:, 0] if first.key_scale is None else first.key_scale[:, 0].view(torch.float32)
        """[frames, block_size, ...]: one element of each token's key, or its scale: of 4 bits, the upper half of it."""
        while self._marks.dim() > 2:
            self._marks = self._marks[..., 0]

    def apply(self, plan: StepPlan) -> None:
        """Follows a plan's edits of tables: what lies in the new frames is not known."""
        work = plan.work
        if not len(work.edit_group):
            return
        mine = work.edit_group == self._layers.group
        edited, begin = work.edit_row[mine], work.edit_index[mine] * self._rows.block_size
        np.minimum.at(self._known, edited, begin)
        np.minimum.at(self._marked, edited, begin)

    def note_step(self, plan: StepPlan, inputs: Inputs, hidden: Tensor, tokens: list[list[int]]) -> None:
        """Marks those of the model's query tokens that this one has not taken in. Steps without drafts mark the rest of
        a row's last block too, so that the next ones seldom have anything to mark; behind drafts there may be keys of
        wrong ones, which the next step marks."""
        unmarked = inputs.positions >= np.maximum(self._known, self._marked)[inputs.rows]
        if not unmarked.any():
            return
        slots, size = inputs.slots[self._layers.group], self._rows.block_size
        unmarked &= slots >= 0
        found = [slots[unmarked]]
        last: NDArray[np.int32] = np.empty(0, np.int32)
        if not len(plan.draft_tokens):
            last = inputs.query_start[1:] - 1
            last = last[unmarked[last]]
            found += [np.arange(slot + 1, (slot // size + 1) * size) for slot in slots[last].tolist()]
        slots = np.concatenate(found)
        frames, offsets = (self._rows.to_device(part) for part in np.divmod(slots, size))
        self._marks[frames, offsets] = torch.nan
        self._marked[inputs.rows[last]] = (inputs.positions[last] // size + 1) * size

    def propose(self, plan: StepPlan) -> tuple[StepPlan, set[int], DraftWork]:
        self._known[plan.rows] = np.minimum(self._known[plan.rows], plan.starts)
        if not len(plan.draft_tokens):
            return plan, set(), DraftWork()
        asked = asked_of(plan)
        drafting, work = self._draft(asked, plan.catch_up)
        plan, withdrawn = with_drafts(plan, asked, drafting, self._rows.tokens)
        without = set(asked.samples[~drafting].tolist())
        return plan, without, work._replace(withdrawn=withdrawn)

    def _draft(self, asked: Asked, catch_up: int) -> tuple[NDArray[np.bool_], DraftWork]:
        """Puts drafts behind each row's last token, if all before that can be taken in now.

        catch_up: the most tokens that are, but for one of each row, branches' among them. Returns which rows have
        drafts.
        """
        begin = time.perf_counter()
        rows, origins, starts, counts = asked.rows, asked.origins, asked.starts, asked.counts
        ranks, own = asked.ranks, np.flatnonzero(asked.rows == asked.origins)
        missing, taken = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        drafting = np.zeros(len(rows), np.bool_)
        for index in own.tolist():
            missing[index] = count = self._missing(int(rows[index]), int(starts[index]))
            if count > 1:
                count = min(count, catch_up)
                catch_up -= count
            taken[index] = max(0, count)
            drafting[index] = count == missing[index] >= 0
        self._begin_branches(asked, missing, taken, drafting, catch_up)
        lens = (taken + drafting).astype(np.int32)
        some = np.flatnonzero(lens)
        caught_up = int(taken[missing > 1].sum())
        if not len(some):
            return drafting, DraftWork()
        inputs = self._rows.inputs(rows[some], self._known[rows[some]], lens[some])
        hidden = self._forward(inputs)
        self._known[rows[some]] += lens[some]
        self._marked[rows[some]] = 0
        last = inputs.query_start[1:][drafting[some]] - 1
        rows, origins, starts, counts = rows[drafting], origins[drafting], starts[drafting], counts[drafting]
        ranks = ranks[drafting]
        if not len(rows):
            return drafting, DraftWork(caught_up=caught_up, catch_up_s=time.perf_counter() - begin)
        self._rows.tokens[rows, starts + 1] = self._choose(hidden, last, origins, 0, ranks[:, 0])
        work = DraftWork()
        if caught_up:
            now = time.perf_counter()
            work, begin = DraftWork(caught_up=caught_up, catch_up_s=now - begin), now
        passes, total = (0, 0) if caught_up else (1, len(rows))
        for depth in range(1, int(counts.max())):
            going = counts > depth
            at = starts[going] + depth
            inputs = self._rows.inputs(rows[going], at, np.ones(len(at), dtype=np.int32))
            hidden = self._forward(inputs)
            chosen = self._choose(hidden, None, origins[going], depth, ranks[going, depth])
            self._rows.tokens[rows[going], at + 1] = chosen
            passes, total = passes + 1, total + len(at)
        self._known[rows] = starts + counts
        return drafting, work._replace(passes=passes, rows=total, seconds=time.perf_counter() - begin)

    def _begin_branches(
        self,
        asked: Asked,
        missing: NDArray[np.int64],
        taken: NDArray[np.int64],
        drafting: NDArray[np.bool_],
        catch_up: int,
    ) -> None:
        """Lets the branches of rows that are drafting draft too, if they can take in what their rows have to in the
        block that they do not share, of which they have a copy.

        missing, taken: how many tokens each has to take in, and does. catch_up: as of `_draft`.
        """
        going = set(asked.rows[drafting].tolist())
        for index in np.flatnonzero(asked.rows != asked.origins).tolist():
            row, origin, start = int(asked.rows[index]), int(asked.origins[index]), int(asked.starts[index])
            shared = start // self._rows.block_size * self._rows.block_size
            self._known[row] = known = max(int(self._known[origin]), shared)
            count = start - known
            if origin in going and (count <= 1 or count <= catch_up):
                catch_up -= count if count > 1 else 0
                missing[index] = taken[index] = count
                drafting[index] = True

    def _missing(self, row: int, start: int) -> int:
        """Returns how many of a row's tokens before `start` it has to take in, from `_known` on; -1 if it cannot: they
        lie outside the pool, where it does not write."""
        size, known = self._rows.block_size, int(self._known[row])
        if known == start:
            return 0
        first = known // size
        frames = self._rows.tables[self._layers.group, row, first : -(-start // size)].astype(np.int64)
        if (frames >= self._first_streamed).any():
            return -1
        marks = torch.isnan(self._marks[self._rows.to_device(frames)]).cpu().numpy()
        holes = np.flatnonzero(marks.reshape(-1)[known - first * size : start - first * size])
        self._known[row] = known = known + int(holes[0]) if len(holes) else start
        return start - known

    def _forward(self, inputs: Inputs) -> Tensor:
        if len(inputs.rows) > 1:  # rows that share a block take in the same tokens
            slots = inputs.slots[self._layers.group]
            first = np.unique(slots, return_index=True)[1]
            others = np.ones(len(slots), dtype=bool)
            others[first] = False
            slots[others] = -1
        return self.decoder.forward(inputs.token_ids(), inputs.batch(self._layers.group), self._caches)

    def _choose(
        self,
        hidden: Tensor,
        which: NDArray[np.int32] | None,
        rows: NDArray[np.int32],
        ahead: int,
        ranks: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Returns a token for each of `rows`, `ahead` behind its next, from these hidden states; any, if there is none.

        which: each row's; None: they are one for each. ranks: behind so many better ones.
        """
        if which is not None and len(which) < hidden.shape[0]:
            hidden = hidden[self._rows.to_device(which.astype(np.int64))]
        found = self.decoder.argmax(hidden) if not ranks.any() and self._sampler.only_argmax(rows) else None
        if found is None:
            found = self._sampler.guess(self.decoder.logits(hidden), rows, ahead, ranks)
        return np.maximum(found, 0)
