"""One frame of `pagemill top`: a picture as lines that fit into a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from rich.text import Text

from pagemill.cli.top_map import legend, map_lines
from pagemill.cli.top_picture import Picture
from pagemill.cli.wording import printable
from pagemill.engine.kv_map import KVTable
from pagemill.engine.stats import TenantStats

TIERS = {"device": "KV pool", "host": "Host memory, streamed", "disk": "Disk, streamed"}
BAR = 10
"""Characters of a bar."""
LONGEST_TENANT = 16


class View(NamedTuple):
    """The window, and what the user has chosen. status: beside the title."""

    width: int = 80
    height: int = 24
    sort: str = "arrival"
    status: str = ""
    keys: bool = False
    ascii_only: bool = False


class Row(NamedTuple):
    """A request or pin as its line says it."""

    name: str
    tenant: str
    blocks: int
    shared: int
    tokens: int
    computed: int
    kind: str

    @classmethod
    def of(cls, table: KVTable) -> Row:
        groups = max(1, len(table.frames))
        shared = sum(int((np.frombuffer(one, "<i4") > 1).sum()) for one in table.holders)
        held = sum(len(one) // 4 for one in table.frames) + table.first_entry * groups
        name = f"{table.name} · {table.index}" if table.index else table.name
        kind = "pin" if table.kind == "pin" else "runs" if table.running else "waits"
        return cls(printable(name), printable(table.tenant), held, shared, table.num_tokens, table.num_computed, kind)

    @property
    def progress(self) -> str:
        if self.kind != "runs":
            return "pinned" if self.kind == "pin" else "waiting"
        if self.computed >= self.tokens - 1:
            return "generating"
        share = self.computed / self.tokens
        return f"prompt {100 * share:3.0f} %"


SORTS: dict[str, Callable[[Row], object] | None] = {
    "arrival": None,
    "blocks": lambda row: -row.blocks,
    "tokens": lambda row: -row.tokens,
    "tenant": lambda row: row.tenant,
}
"""Orders of the requests; the server's own is that of their arrival."""


def frame(picture: Picture, title: str, view: View) -> list[Text]:
    """Returns the lines of a window, none of which is too long."""
    head = [_title(title, view), *_figures(picture)]
    foot = [_keys(view)] if view.keys else []
    room = view.height - len(head) - len(foot)
    maps = _maps(picture, view, max(3, room * 2 // 5))
    tiers = _tiers(picture)
    tenants = _tenants(picture, view, max(1, room // 5))
    requests = _requests(picture, view, max(0, room - len(maps) - len(tiers) - len(tenants)))
    body = [*maps, *tiers, *tenants, *requests][: max(0, room)]
    if foot:
        body += [Text()] * max(0, room - len(body))
    lines = [*head, *body, *foot][: view.height]
    for line in lines:
        line.truncate(view.width, overflow="ellipsis")
    return lines


def _title(title: str, view: View) -> Text:
    line = Text("pagemill top", style="bold").append(f"  {printable(title)}", style="not bold")
    return line.append(f"  {view.status}", style="not bold reverse") if view.status else line


def _figures(picture: Picture) -> list[Text]:
    stats = picture.stats
    per_token, first = picture.time_per_token_s, picture.first_token_s
    generated, taken = picture.per_second("generated_tokens"), picture.per_second("prompt_tokens")
    return [
        Text(
            f"{stats.running} running, {stats.waiting} waiting  {generated:,.0f} tokens/s, {taken:,.0f} of prompts/s  "
            f"{_ms(per_token)}/token   first {_ms(first)}"
        ),
        Text(
            f"hit rate {_percent(stats.prefix_hit_tokens, stats.prefix_queried_tokens)}   "
            f"waste {_percent(stats.slots_reserved - stats.slots_written, stats.slots_reserved)}   "
            f"{stats.preemptions:,} preempted   {stats.evictions:,} evicted   {stats.copies:,} copied on write"
        ),
    ]


def _maps(picture: Picture, view: View, most_lines: int) -> list[Text]:
    lines = [legend(picture, view.ascii_only)]
    for tier in picture.tiers:
        if not tier.num_frames:
            continue
        room = max(1, (most_lines - 2) if tier.name == "device" else 1)
        drawn, blocks = map_lines(picture, tier, view.width, room, view.ascii_only)
        each = f", {blocks:,} to a mark" if blocks > 1 else ""
        size = f" of {picture.block_size} tokens" if tier.name == "device" else ""
        lines.append(Text(f"{TIERS.get(tier.name, tier.name)}: {tier.num_frames:,} blocks{size}{each}", style="bold"))
        lines += drawn
    return lines


def _tiers(picture: Picture) -> list[Text]:
    stats = picture.stats
    held = [f"{name} {blocks:,} blocks" for name, blocks in stats.tier_blocks.items()]
    if not held and not stats.blocks_streamed:
        return []
    line = Text("Tiers: ", style="bold")
    moved = f"{picture.per_second('blocks_saved'):,.0f} saved/s, {picture.per_second('blocks_loaded'):,.0f} loaded/s"
    return [line.append(f"{', '.join([*held, f'{stats.blocks_streamed:,} streamed'])}; {moved}", style="not bold")]


def _tenants(picture: Picture, view: View, most: int) -> list[Text]:
    found = sorted(picture.stats.tenants.items(), key=lambda item: -item[1].blocks_active - item[1].blocks_cached)
    if not found:
        return []
    shown = found[:most]
    more = f"   and {len(found) - len(shown):,} more" if len(found) > len(shown) else ""
    width = min(LONGEST_TENANT, max(len(name) for name, _ in shown))
    return [
        Text(f"Tenants{more}", style="bold"),
        *(_tenant(printable(name), one, picture.stats.frames, width, view) for name, one in shown),
    ]


def _tenant(name: str, one: TenantStats, frames: int, width: int, view: View) -> Text:
    held = one.blocks_active + one.blocks_cached
    most = frames if one.max_blocks is None else min(one.max_blocks, frames)
    limits = [f"of {most:,}"] if one.max_blocks is not None else []
    limits += [f"{one.guaranteed_blocks:,} guaranteed"] if one.guaranteed_blocks else []
    words = f" {one.blocks_active:,} in use, {one.blocks_cached:,} cached{''.join(f', {limit}' for limit in limits)}"
    return Text(f"{_cut(name, width):{width}} {_bar(held, most, view)}{words}; {one.running} run, {one.waiting} wait")


def _requests(picture: Picture, view: View, room: int) -> list[Text]:
    rows = [Row.of(table) for table in picture.tables]
    if (key := SORTS[view.sort]) is not None:
        rows.sort(key=key)  # type: ignore[arg-type]
    count = f"Requests, by {view.sort}"
    if not rows:
        return [Text(f"{count}: none", style="bold")][:room]
    shown = rows[: max(0, room - 1)]
    more = picture.num_tables - len(shown)
    name = max(12, view.width - 53)
    head = f"{count}{f', {more:,} more' if more else ''}"
    columns = f"{'tenant':12} {'blocks':>7} {'shared':>6} {'tokens':>9} {'progress':>12}"
    head = f"{_cut(head, name):{name}} {columns}"
    return [Text(head, style="bold"), *(Text(_request(row, name)) for row in shown)][:room]


def _request(row: Row, width: int) -> str:
    return (
        f"{_cut(row.name, width):{width}} {_cut(row.tenant, 12):12} {row.blocks:7,} {row.shared:6,} {row.tokens:9,} "
        f"{row.progress:>12}"
    )


def _keys(view: View) -> Text:
    going = "p goes on" if view.status == "paused" else "p pauses"
    return Text(f"q quits   {going}   s sorts (by {view.sort})", style="dim")


def _bar(part: int, whole: int, view: View) -> str:
    full = min(BAR, round(BAR * part / max(whole, 1)))
    marks: Iterable[str] = "#." if view.ascii_only else "█░"
    filled, empty = marks
    return filled * full + empty * (BAR - full)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "– ms"
    return f"{1000 * seconds:,.{1 if seconds < 0.1 else 0}f} ms"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"
