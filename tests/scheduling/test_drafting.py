"""N-gram look-up finds what a search of all places finds, and the control drafts where that pays."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.draft_control import BranchShape, Candidate, DraftControl
from pagemill.scheduling.drafting import Drafting, Match, NgramTable, first_chance, first_chances
from pagemill.scheduling.model_draft_control import ModelDraftControl
from pagemill.scheduling.model_drafting import ModelDrafter
from pagemill.scheduling.sequence import Precedence, Request, Sequence
from pagemill.scheduling.speculation import TAKEN_IN
from pagemill.scheduling.step_plan import DraftWork

LENGTHS = range(2, 5)


def latest(tokens: list[int], lengths: range) -> Match | None:
    """Looks at every place."""
    for length in reversed(lengths):
        for position in range(len(tokens) - 1, length - 1, -1):
            if tokens[position - length : position] == tokens[-length:]:
                return Match(length, position)
    return None


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    answers=st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=3),
    shortest=st.integers(1, 3),
    more=st.integers(0, 2),
    slices=st.integers(1, 9),
)
def test_the_latest_place_of_the_longest_ngram_is_found(prompt, answers, shortest, more, slices):
    """Whatever the sequences of a request have in common, and in whatever slices it is taken in."""
    lengths = range(shortest, shortest + more + 1)
    shared = NgramTable(0, lengths)
    for answer in answers:
        drafting, tokens = Drafting(len(prompt), lengths, shared, first_chances(lengths)), list(prompt)
        for token in answer:
            tokens.append(token)
            while taken := drafting.take_in(tokens, slices):
                assert taken <= slices
            assert drafting.match(tokens) == latest(tokens, lengths)


def test_nothing_is_drafted_before_all_is_taken_in():
    drafting, tokens = (
        Drafting(8, LENGTHS, NgramTable(0, LENGTHS), first_chances(LENGTHS)),
        [1, 2, 3, 4] * 2 + [1, 2, 3, 4],
    )
    assert drafting.take_in(tokens, 10) == 10
    assert drafting.match(tokens) is None
    assert drafting.take_in(tokens, 10) == 1
    assert drafting.match(tokens) == Match(4, 8)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2, 3, 4, 5]),
        ([9, 7, 7, 7], [7] * 7),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], [3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_drafts_go_on_as_before_and_repeat_what_repeats(tokens, drafts):
    drafting = Drafting(1, LENGTHS, NgramTable(0, LENGTHS), first_chances(LENGTHS))
    drafting.take_in(tokens, 99)
    assert drafting.draft(tokens, drafting.match(tokens), 7) == drafts


def test_a_chance_follows_what_was_right_and_comes_back_slowly():
    common = first_chances(LENGTHS)
    drafting, match = Drafting(1, LENGTHS, NgramTable(0, LENGTHS), common), Match(3, 1)
    first = drafting.chance(match)
    for _ in range(5):
        drafting.draft([1, 2, 3, 4], match, 4)
        drafting.verified(4, 4)
    assert first < 0.97 < drafting.chance(match)
    for _ in range(9):
        drafting.draft([1, 2, 3, 4], match, 1)
        drafting.verified(1, 0)
    assert drafting.chance(match) < 0.02
    assert drafting.chance(Match(2, 1)) == first_chance(2) < first, "other lengths have chances of their own"
    for _ in range(20):
        drafting.draft([1, 2, 3, 4], match, 0)
    assert 0.05 < drafting.chance(match) < 0.2
    later = Drafting(1, LENGTHS, NgramTable(0, LENGTHS), common)
    assert drafting.chance(match) < later.chance(match) < first, "another sequence begins with what was learned"
    for _ in range(20_000):
        drafting.draft([1, 2, 3, 4], match, 0)
    assert drafting.chance(match) == pytest.approx(first, rel=1e-3)


def test_a_long_prompt_is_taken_in_without_a_stall():
    """The best of three: a slice is bounded work."""
    tokens = [random.Random(0).randrange(50_000) for _ in range(32_000)]
    slices = []
    for _ in range(3):
        drafting, longest = Drafting(len(tokens), LENGTHS, NgramTable(0, LENGTHS), first_chances(LENGTHS)), 0.0
        while True:
            begin = time.process_time()
            if not drafting.take_in(tokens, TAKEN_IN):
                break
            longest = max(longest, time.process_time() - begin)
        slices.append(longest)
    assert min(slices) < 0.02  # 2 to 4 ms on a calm machine


def run(control: DraftControl, rows: int, cost_s: float, chance: float, steps: int, noise: float = 0.0):
    """Drives a control whose steps take 10 ms for each row of a batch that is full, or 10 ms and `cost_s` per draft.

    Returns tokens per second beside those without drafts, and the drafts per row of the last steps.
    """
    draw = random.Random(1)
    base, total_s, tokens, lengths = 0.01, 0.0, 0, []
    for _ in range(steps):
        candidates = [Candidate(chance, 8) for _ in range(rows)]
        if control.pays(1.0, rows):
            control.choose(candidates, rows, 512)
        drafts = sum(one.count for one in candidates)
        seconds = (base + cost_s * drafts) * draw.uniform(1 - noise, 1 + noise)
        accepted = [next((i for i in range(one.count) if draw.random() >= chance), one.count) for one in candidates]
        control.note_step(rows + drafts, drafts, seconds, sum(accepted))
        total_s += seconds
        tokens += rows + sum(accepted)
        lengths.append(drafts / rows)
    return tokens / total_s / (rows / base), sum(lengths[-50:]) / 50


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("rows", "share", "chance", "gain", "drafts"),
    [
        (1, 0.05, 0.95, 3.0, (7, 8)),
        (1, 0.1, 0.5, 1.3, (1, 5)),
        (1, 0.3, 0.05, 0.97, (0, 0.3)),
        (8, 0.05, 0.9, 1.15, (0.5, 8)),
        (64, 1 / 64, 0.6, 0.97, (0, 0.1)),
        (64, 1 / 300, 0.95, 1.3, (2, 8)),
    ],
)
def test_drafts_are_as_many_as_pay(rows, share, chance, gain, drafts, noise):
    """share: what a further token costs of a step without drafts."""
    measured, length = run(DraftControl(), rows, share * 0.01, chance, 600, noise)
    assert measured >= gain - noise / 2
    assert drafts[0] <= length <= drafts[1]


@pytest.mark.parametrize("rows", [1, 8])
def test_drafts_that_are_always_wrong_lose_a_hundredth_whatever_was_hoped_for(rows):
    """And where they are right again, that is found out."""
    control, base, each, total_s = DraftControl(), 0.01, 0.0005, 0.0
    for _ in range(1000):
        candidates = [Candidate(0.9, 8) for _ in range(rows)]
        if control.pays(1.0, rows):
            control.choose(candidates, rows, 512)
        drafts = sum(one.count for one in candidates)
        control.note_step(rows + drafts, drafts, base + each * drafts, 0)
        total_s += base + each * drafts
    assert 1.002 < total_s / (1000 * base) < 1.02
    assert run(control, rows, each, 0.9, 600)[0] > (2 if rows == 1 else 1.1)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("rows", "share", "cost", "true_cost", "chance", "gain", "drafts"),
    [
        (1, 0.03, 0.1, 0.1, 0.95, 2.3, (5, 8)),
        (1, 0.03, 0.1, 0.1, 0.5, 1.15, (1, 3)),
        (1, 0.03, 1.0, 1.0, 1.0, 0.97, (0, 0.1)),
        (1, 0.03, 0.1, 1.0, 0.9, 0.97, (0, 0.1)),
        (64, 1 / 64, 0.1, 0.1, 0.9, 0.97, (0, 0.1)),
        (8, 0.03, 0.1, 0.1, 0.95, 1.5, (2, 8)),
    ],
    ids=["right", "half right", "its own draft", "dearer than it seems", "64 at once", "8 at once"],
)
def test_passes_of_a_draft_model_count(rows, share, cost, true_cost, chance, gain, drafts, noise):
    """cost: what it is taken to cost at first. true_cost: what a pass costs of a step of so many rows."""
    draw, control = random.Random(1), ModelDraftControl(cost)
    base, total_s, tokens, lengths = 0.01, 0.0, 0, []
    for _ in range(600):
        candidates = [Candidate(chance, 8) for _ in range(rows)]
        if control.pays(1.0, rows):
            control.choose(candidates, rows, 512)
        counts = [one.count for one in candidates]
        passes = [sum(count > depth for count in counts) for depth in range(max(counts))]
        spent = sum(true_cost * base * (1 + share * (going - rows)) for going in passes)
        seconds = base * (1 + share * sum(counts)) * draw.uniform(1 - noise, 1 + noise)
        accepted = [next((i for i in range(count) if draw.random() >= chance), count) for count in counts]
        control.note_work(DraftWork(len(passes), sum(passes), spent))
        control.note_step(rows + sum(counts), sum(counts), seconds, sum(accepted))
        total_s += seconds + spent
        tokens += rows + sum(accepted)
        lengths.append(sum(counts) / rows)
    assert tokens / total_s / (rows / base) >= gain - noise / 2
    assert drafts[0] <= sum(lengths[-50:]) / 50 <= drafts[1]


def test_what_a_draft_model_has_to_take_in_is_worth_it_only_in_a_long_answer():
    def wanted(prompt_len: int, answer: int, max_tokens: int = 1000) -> bool:
        drafter = ModelDrafter(8, 0.1, takes_in=True)
        for tokens in (1, 1, 3, 5, 9, 17):
            drafter.note_step(
                tokens, tokens - 1, tokens - 1, 0.02 + 0.0002 * tokens, DraftWork(caught_up=100, catch_up_s=0.01)
            )
        request = Request("r", [5] * prompt_len, SamplingParams(max_tokens=max_tokens), 0, 0, 0.0, b"", 4096)
        request.max_len = prompt_len + max_tokens
        sequence = Sequence(request, 0, Precedence(0.0, 0, 0), [5] * (prompt_len + answer))
        return bool(drafter.propose({sequence: 8}, 1, 512, math.inf, 0))

    assert wanted(20, 2)
    assert not wanted(1000, 2)
    assert wanted(1000, 60)
    assert not wanted(1000, 60, max_tokens=70)


def test_a_step_that_took_long_by_accident_does_not_end_drafting():
    control = DraftControl()
    for _ in range(2):
        control.note_step(1, 0, 0.01, 0)
    control.note_step(5, 4, 1.0, 0)
    assert run(control, 1, 0.0005, 0.9, 600)[0] > 2


def test_drafts_keep_to_the_limits():
    control = DraftControl()
    candidates = [Candidate(0.9, 8), Candidate(0.5, 2)]
    assert not control.pays(1.0, 2), "nothing has been measured"
    for tokens in (2, 2, 6, 10, 18, 34, 66):
        control.note_step(tokens, tokens - 2, 0.01 + 0.0001 * tokens, tokens - 2)
    control.choose(candidates, 2, 3)
    assert [one.count for one in candidates] == [3, 0]
    candidates = [Candidate(0.9, 8), Candidate(0.5, 2)]
    control.choose(candidates, 2, 99)
    assert [one.count for one in candidates] == [8, 2]
    candidates = [Candidate(0.9, 8)]
    control.choose(candidates, 1, 99, limit_s=0.01055)
    assert 2 <= candidates[0].count <= 5


def branched(share: float, chance: float, turn: float, most: int, steps: int = 1500) -> tuple[float, float]:
    """Drives a control over one sequence whose drafts come from heads that cost nothing.

    share: what a further token costs of a step. turn: the chance that the next likeliest token is right where all
    likelier ones are wrong. Returns tokens in the time of a plain step, and branches per step, of the last two thirds.
    """
    draw, control, base = random.Random(1), ModelDraftControl(0.0, most), 0.01
    seconds_s, tokens, branches = 0.0, 0, 0
    for step in range(steps):
        one = Candidate(chance, 4)
        if control.pays(1.0, 1):
            control.choose([one], 1, 512)
        right = next((i for i in range(one.count) if draw.random() >= chance), one.count)
        accepted, tried, gained = right, 0, 0
        for shape in sorted(one.branches):
            assert shape.depth < shape.length <= one.count
            if shape.depth == right and not gained:
                tried += 1
                assert shape.rank == tried, "the likelier ones first"
                if draw.random() < turn:
                    further = range(shape.depth + 1, shape.length)
                    gained = 1 + next((i for i, _ in enumerate(further) if draw.random() >= chance), len(further))
        computed, accepted = sum(1 + shape.length for shape in one.branches), right + gained
        control.branches.note(tried, gained > 0)
        extra = one.count + computed
        seconds = base * (1 + share * extra) * draw.uniform(0.98, 1.02)
        control.note_work(DraftWork(branched=computed, gained=gained))
        control.note_step(1 + extra, extra, seconds, accepted)
        if step > steps // 3:
            seconds_s, tokens, branches = seconds_s + seconds, tokens + 1 + accepted, branches + len(one.branches)
        if one.count and not one.branches:
            control.branches.note_none()
    return tokens / seconds_s * base, branches / (steps - steps // 3)


def test_drafts_branch_where_a_further_token_costs_next_to_nothing():
    for chance, turn, gain in ((0.4, 0.5, 1.2), (0.6, 0.4, 1.12)):
        chain, none = branched(0.002, chance, turn, most=0)
        tree, several = branched(0.002, chance, turn, most=6)
        assert none == 0
        assert several > 2
        assert tree > gain * chain


@pytest.mark.parametrize(("share", "turn"), [(0.06, 0.3), (0.2, 0.6), (0.01, 0.0)])
def test_drafts_do_not_branch_where_that_does_not_pay(share, turn):
    chain, _ = branched(share, 0.5, turn, most=0)
    tree, several = branched(share, 0.5, turn, most=6)
    assert several < 0.2
    assert tree > 0.98 * chain


def test_branches_keep_to_the_limits():
    def chosen(
        most: int, left: int, limit_s: float = math.inf, ramped: bool = True, rows: int = 99
    ) -> list[BranchShape]:
        control, one = ModelDraftControl(0.0, most), Candidate(0.5, 3)
        for tokens in (1, 1, 3, 5, 9, 17, 33):
            control.note_step(tokens, tokens - 1, 0.01 + 1e-6 * tokens, tokens - 1)
        for computed in (4, 8, 16, 32) if ramped else ():
            control.note_work(DraftWork(branched=computed, gained=1))
            control.note_step(2 + computed, 1 + computed, 0.01 + 1e-6 * (2 + computed), 1)
        control.choose([one], 1, left, limit_s, rows)
        assert one.count + sum(1 + shape.length for shape in one.branches) <= left
        return one.branches

    assert [len(chosen(most, 99)) for most in (0, 1, 3)] == [0, 1, 3]
    assert chosen(1, 99) == [BranchShape(0, 1, 3)]
    assert [len(chosen(9, left)) for left in (3, 6, 7, 99)] == [0, 0, 1, 9]
    assert len(chosen(9, 99, limit_s=0.010012)) <= 2
    assert len(chosen(9, 99, ramped=False)) == 1, "the first step with branches has few"
    assert [len(chosen(9, 99, rows=rows)) for rows in (0, 1, 5)] == [0, 1, 5]
