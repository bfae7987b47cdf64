"""Samples with torch operators, on any device; `kernels.py` says what a token is drawn from.

Every result of a row is a function of that row's own numbers. The operations are elementwise ones that IEEE 754 rounds
in one way, exact ones (maximum, comparison, counting, sorting), and reductions within fixed pieces of a row. No path is
chosen by what other rows hold. Cumulative sums are float64.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from pagemill.sampling.kernels import ALL_FORBIDDEN, NOT_FINITE, Bits, Choices, DeviceChoices, Ids, leave_out
from pagemill.sampling.params import TokenLogprobs

_CHUNK = 1 << 21
"""Rows are drawn in chunks of at most this many logits (or one row): bounds the memory."""
_PIECE = 256
"""Probabilities are summed in pieces of this many, then the piece that holds the draw is looked at closely."""
_SHARES = (100, 3000)
"""top_p is looked for among the tokens above (1 - top_p) / share, first for a small share, then for larger ones."""
_WIDTHS = (256, 2048, 16384)
"""Rows are sorted together with others that have about as many candidates, so that one flat row costs only itself."""


class TorchSamplingKernels:
    truncates_on_device = False
    """Says whether `choose_on_device` can follow top_k, top_p and min_p."""

    def mask(self, logits: torch.Tensor, places: Ids, bits: Bits, rows: Ids) -> None:
        allowed = np.unpackbits(bits[rows].view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        index, forbidden = (torch.from_numpy(array).to(logits.device) for array in (places, allowed == 0))
        logits[index] = logits[index].masked_fill(forbidden, -torch.inf)

    def choose(self, logits: torch.Tensor, places: Ids, choices: Choices) -> Ids:
        device = logits.device
        rows = torch.from_numpy(places).to(device)
        chosen = logits[rows]
        tokens = _or_codes(*chosen.max(-1))
        truncated = leave_out(choices.top_k, choices.top_p, choices.min_p)
        drawn = (choices.temperature > 0) & (tokens >= 0).cpu().numpy()
        chunk = max(1, _CHUNK // logits.shape[1])
        for which in (drawn & ~truncated, drawn & truncated):
            same = np.flatnonzero(which)
            for index in (same[i : i + chunk] for i in range(0, len(same), chunk)):
                temperature, top_k, top_p, min_p, u = (torch.from_numpy(c[index]).to(device) for c in choices)
                at = torch.from_numpy(index).to(device)
                scaled = chosen[at] / temperature[:, None]
                probabilities = torch.softmax(scaled, -1)
                tokens[at] = (
                    draw_truncated(scaled, probabilities, top_k, top_p, min_p, u)
                    if truncated[index[0]]
                    else draw(probabilities, u)
                )
        return tokens.cpu().numpy()

    def choose_on_device(
        self, logits: torch.Tensor, choices: DeviceChoices | None, *, truncate: bool = False
    ) -> torch.Tensor:
        """Returns a token for each row of logits, int32 [m]; NOT_FINITE or ALL_FORBIDDEN where there is none.

        logits: float32 [m, vocab]. choices: None if all rows take the argmax. truncate: whether rows that draw have a
        top_k, top_p or min_p; False spares looking for what they keep. Raises ValueError if that is asked for and not
        `truncates_on_device`.
        Waits for nothing, and what it starts depends on shapes alone: a graph may capture it.
        """
        if truncate:
            raise ValueError("torch's operators cannot follow top_k, top_p or min_p without waiting; use choose")
        largest, best = logits.max(-1)
        if choices is not None:
            drawn = choices.temperature > 0
            scaled = logits / torch.where(drawn, choices.temperature, 1.0)[:, None]
            best = torch.where(drawn, draw(torch.softmax(scaled, -1), choices.uniforms), best)
        return _or_codes(largest, best).int()

    def log_probabilities(self, logits: torch.Tensor, places: Ids, tokens: Ids, counts: Ids) -> list[TokenLogprobs]:
        made: list[TokenLogprobs] = []
        chunk = max(1, _CHUNK // logits.shape[1])
        for start in range(0, len(places), chunk):
            part = slice(start, start + chunk)
            raw = torch.log_softmax(logits[torch.from_numpy(places[part]).to(logits.device)], -1)
            made += _log_probabilities(raw, tokens[part], counts[part])
        return made


def _or_codes(largest: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns tokens, or the code of a row that has none. largest: the largest logit of each row."""
    tokens = tokens.masked_fill(largest == -torch.inf, ALL_FORBIDDEN)
    return tokens.masked_fill(~(largest < torch.inf), NOT_FINITE)


def _log_probabilities(raw: torch.Tensor, tokens: Ids, counts: Ids) -> list[TokenLogprobs]:
    """Returns what `log_probabilities` does, from log probabilities `raw` float32 [m, vocab]."""
    own = raw.gather(1, torch.from_numpy(tokens).to(raw.device)[:, None])
    ranks = ((raw > own).sum(-1) + 1).tolist()
    made = [
        TokenLogprobs([token], [value], rank)
        for token, value, rank in zip(tokens.tolist(), own[:, 0].tolist(), ranks, strict=True)
    ]
    counts = np.minimum(counts, raw.shape[1])
    most = int(counts.max(initial=0))
    if most:
        cut = raw.topk(most, dim=-1).values[:, -1]
        for group, values, indices, _ in candidates_above(
            raw, torch.arange(len(raw), dtype=torch.int64, device=raw.device), cut
        ):
            for row, ids, logprobs in zip(group.tolist(), indices.tolist(), values.tolist(), strict=True):
                made[row].token_ids += ids[: counts[row]]
                made[row].logprobs += logprobs[: counts[row]]
    return made


def draw(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns a token from each row, int64 [m], by inverse CDF in vocabulary order.

    probabilities: float32 [m, vocab]. uniforms: float64 [m], in [0, 1).
    """
    pad = -probabilities.shape[1] % _PIECE
    pieces = (F.pad(probabilities, (0, pad)) if pad else probabilities).view(len(probabilities), -1, _PIECE)
    sums = torch.cumsum(pieces.sum(-1).double(), -1)
    target = _below(uniforms * sums[:, -1], sums[:, -1])
    # Not finite, a row's target lies beyond the last piece, and whoever drew it tells of that.
    piece = torch.searchsorted(sums, target[:, None], right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(piece > 0, sums.gather(1, (piece - 1).clamp_(min=0)), 0.0)
    inside = torch.cumsum(pieces.gather(1, piece[:, :, None].expand(-1, -1, _PIECE))[:, 0].double(), -1)
    # The float32 sum of a piece and its float64 cumulative sum differ in the last bits: stay below what is there.
    place = torch.searchsorted(inside, _below(target[:, None] - before, inside[:, -1:]), right=True)
    return (piece * _PIECE + place)[:, 0]


def draw_truncated(
    scaled: torch.Tensor,
    probabilities: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Returns a token from each row, int64 [m], by inverse CDF over the tokens that are kept, most likely first.

    scaled: logits over temperature, float32 [m, vocab]; probabilities: their softmax.
    top_k int64 [m], 0 is off; top_p and min_p float32 [m], 1 and 0 are off; uniforms float64 [m].
    """
    vocab_size = scaled.shape[1]
    largest_logit, largest_p = scaled.amax(-1), probabilities.amax(-1)
    floor = torch.full_like(largest_logit, torch.finfo(torch.float32).min)
    cut = torch.maximum(floor, largest_logit + min_p.log())
    if bool((top_k > 0).any()):
        largest = int(top_k.max())
        kth = scaled.topk(min(largest, vocab_size), dim=-1).values.gather(
            1, (top_k - 1).clamp(0, vocab_size - 1)[:, None]
        )
        cut = torch.where(top_k > 0, torch.maximum(cut, kth[:, 0]), cut)
    tokens = torch.empty_like(top_k)

    closed = (top_k > 0) | (min_p > 0)
    some = closed.nonzero()[:, 0]
    if len(some):
        tokens[some], _ = _draw_above(scaled, probabilities, some, cut, top_p, uniforms, closed=True)
    some = (~closed).nonzero()[:, 0]
    # Only top_p: tokens below (1 - top_p) / vocab cannot matter, and mostly those below (1 - top_p) / 100 do not.
    for share in (*(share for share in _SHARES if share < vocab_size), vocab_size):
        if not len(some):
            break
        cut = torch.maximum(floor, largest_logit + ((1 - top_p) / share / largest_p).log().clamp_(max=0))
        tokens[some], enough = _draw_above(scaled, probabilities, some, cut, top_p, uniforms, closed=False)
        some = some[~enough]
    return tokens


def candidates_above(values: torch.Tensor, rows: torch.Tensor, cut: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Returns the entries of some rows of `values` [m, n] that are not below the row's `cut` [m].

    They come in groups of rows of similar counts: positions in `rows` [r], values [r, c], indices [r, c] and counts
    [r]. The values of a row are sorted, largest first and equal ones by index, and padded with -inf.
    """
    chosen = values if len(rows) == len(values) else values[rows]
    where_row, where_column = torch.where(chosen >= cut[rows][:, None])
    counts = torch.bincount(where_row, minlength=len(rows))
    starts = counts.cumsum(0) - counts
    found = chosen[where_row, where_column]
    groups: list[tuple[torch.Tensor, ...]] = []
    low = -1
    for high in (*_WIDTHS, values.shape[1]):
        group = ((counts > low) & (counts <= high)).nonzero()[:, 0]
        low = max(low, high)
        if not len(group):
            continue
        count = counts[group]
        width = max(1, int(count.max()))
        ranks = torch.arange(width, dtype=torch.int64, device=values.device)
        inside = ranks < count[:, None]
        source = torch.where(inside, starts[group][:, None] + ranks, 0)
        padded = torch.where(inside, found[source], -torch.inf)
        padded, order = padded.sort(dim=-1, descending=True, stable=True)
        groups.append((group, padded, where_column[source.gather(1, order)], count))
    return groups


def _draw_above(
    scaled: torch.Tensor,
    probabilities: torch.Tensor,
    rows: torch.Tensor,
    cut: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    closed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws for `rows` among the entries that are not below `cut`.

    Returns tokens int64 [r], and bool [r]: True if the entries hold as much probability as top_p asks for.
    closed: True if top_p refers to the sum of these entries, False if to the whole row.
    """
    tokens = torch.empty_like(rows)
    enough = torch.ones_like(rows, dtype=torch.bool)
    for group, values, indices, count in candidates_above(scaled, rows, cut):
        row = rows[group]
        ranks = torch.arange(values.shape[1], dtype=torch.int64, device=values.device)
        mass = torch.where(ranks < count[:, None], probabilities[row[:, None], indices], 0.0).double()
        sums = torch.cumsum(mass, -1)
        wanted = top_p[row].double()[:, None]
        last = torch.searchsorted(sums, wanted * sums[:, -1:] if closed else wanted)
        enough[group] = closed | (last < count[:, None])[:, 0]
        last = torch.minimum(last, count[:, None] - 1)
        last = torch.where(wanted >= 1, count[:, None] - 1, last)
        last = (values >= values.gather(1, last)).sum(-1, keepdim=True) - 1
        kept = sums.gather(1, torch.minimum(last, count[:, None] - 1))
        place = torch.searchsorted(sums, _below(uniforms[row][:, None] * kept, kept), right=True)
        tokens[group] = indices.gather(1, place)[:, 0]
    return tokens, enough


def _below(target: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Returns `target`, but less than `total` in any case: a search for the first sum above it then finds one."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
