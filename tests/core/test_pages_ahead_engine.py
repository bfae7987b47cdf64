"""Whatever an engine writes to frames, copies too, comes after their pages: else a copy would make a huge page for each
piece of a frame."""

from __future__ import annotations

from drive import drive, request

from pagemill.sampling.params import SamplingParams


def test_copies_come_after_the_pages_of_their_frames(prompts, make_engine, monkeypatch) -> None:
    core = make_engine()
    pages, pool = core.executor.pages, core.executor.pool
    reached, copied = [-1], []
    reach, copy = pages.reach, pool.frames.copy

    def noting_reach(frame: int) -> None:
        reached.append(max(reached[-1], frame))
        reach(frame)

    def noting_copy(source, target):
        copied.extend((frame, reached[-1]) for frame in target.tolist())
        return copy(source, target)

    monkeypatch.setattr(pages, "reach", noting_reach)
    monkeypatch.setattr(pool.frames, "copy", noting_copy)
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=20, ignore_eos=True)
    drive(core, [request("samples", prompts[0][:40], params)])
    assert copied
    assert all(frame <= ready for frame, ready in copied), copied
