"""Look-up in other answers finds what a search of all texts of the namespace finds, and nothing of another's."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.answer_cache import ANCHOR, DEPTH, NAMESPACE_SHARE, PLACES, AnswerCache
from pagemill.scheduling.sequence import Precedence, Request, Sequence
from pagemill.scheduling.suffix_drafting import SuffixDrafter
from pagemill.speculative_config import SpeculativeConfig

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def cache_of(requests: int = 1000, tokens: int = 10_000) -> AnswerCache:
    return AnswerCache(requests, tokens, dict.fromkeys(range(ANCHOR, DEPTH + 1), 0.5), {})


def longest(texts: list[list[int]], tokens: list[int], most: int = 1 << 30) -> tuple[int, list[int]]:
    """Looks at every place, the latest first: how much before it is the same, and what follows there."""
    best, follows, places = 0, [], 0
    for text in reversed(texts):
        for place in range(len(text), ANCHOR - 1, -1):
            length = 0
            while length < min(place, len(tokens), DEPTH) and text[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length >= ANCHOR:
                places += 1
                if places <= most and place < len(text) and length > best:
                    best, follows = length, text[place:]
    return best, follows


@settings(max_examples=200, deadline=None)
@given(
    added=st.lists(st.tuples(st.integers(0, 1), TOKENS, TOKENS), max_size=6),
    tokens=TOKENS,
    requests=st.integers(1, 5),
    most=st.sampled_from([40, 120, 400]),
)
def test_the_longest_suffix_of_the_namespace_is_found_within_the_bounds(added, tokens, requests, most):
    """The model keeps whole texts by namespace; what it forgets is forgotten."""
    cache = cache_of(requests, most)
    kept: list[tuple[int, list[int]]] = []
    share = int(NAMESPACE_SHARE * most)

    def held(space: int | None = None) -> int:
        return sum(len(text) + 1 for root, text in kept if space in (None, root))

    for space, prompt, answer in added:
        sequence = prompt + answer
        cache.add(b"%d" % space, sequence, len(prompt))
        kept.append((space, (prompt[-DEPTH:] + answer)[-(share - 1) :]))
        while held(space) > share:
            kept.remove(next(one for one in kept if one[0] == space))
        while held() > most or len(kept) > requests:
            del kept[0]
        assert (cache.num_tokens, cache.num_requests) == (held(), len(kept))
        for asked in (0, 1):
            found = cache.of(b"%d" % asked)
            texts = [text for root, text in kept if root == asked]
            length, place = found.find(tokens, -1)
            assert len(found) == held(asked)
            assert (length, found.following(place, 99) if length else []) == longest(texts, tokens, PLACES)


def test_a_place_beyond_the_latest_is_kept_while_it_goes_on():
    cache, common = cache_of(), [1, 2, 3]
    cache.add(b"a", [7, 7, 7, *common, 8, 9], 0)
    for token in range(PLACES):
        cache.add(b"a", [20 + token, *common, 5, 6], 0)
    found = cache.of(b"a")
    assert found.following(found.find([7, 7, 7, *common], -1)[1], 2) == [5, 6]
    length, place = found.find([7, 7, 7, 1], -1)
    assert (length, found.following(place + 2, 2)) == (4, [8, 9])
    assert found.find([7, 7, 7, *common], place + 2) == (6, place + 2)


def running(root: bytes, tokens: list[int]) -> Sequence:
    request = Request("r", tokens[:1], SamplingParams(max_tokens=50), 0, 0, 0.0, root, 4096)
    request.max_len = 100
    return Sequence(request, 0, Precedence(0.0, 0, 0), tokens)


def proposals(root: bytes, others: list[tuple[bytes, list[int]]]) -> list[int]:
    drafter = SuffixDrafter(SpeculativeConfig(method="suffix"))
    for tokens in (1, 1, 3, 5, 9, 17):
        drafter.note_step(tokens, tokens - 1, tokens - 1, 0.01, None)
    for other, answer in others:
        drafter.answers.add(other, answer, 0)
    sequence = running(root, [5, 6, 7, 8])
    (drafts,) = drafter.propose({sequence: 8}, 1, 512, 1.0, 0).get(sequence, [[]])
    return drafts


def test_another_namespaces_answers_are_never_drafted_nor_what_they_have_taught():
    mine, others = [(b"a", [6, 7, 8, 1, 2])], [(b"b", [5, 6, 7, 8, 3, 4])]
    assert proposals(b"a", mine) == proposals(b"a", mine + others) == [1, 2]
    assert proposals(b"a", others) == []
    cache = cache_of()
    cache.add(b"a", [1, 2, 3], 0)
    cache.add(b"b", [1, 2, 3], 0)
    cache.of(b"b").chances[4] = 0.0
    assert cache.of(b"a").chances[4] == cache.of(b"c").chances[4] == 0.5


def test_what_is_kept_is_bounded_and_freed():
    cache = cache_of(tokens=4000)
    for index in range(300):
        cache.add(b"%d" % (index % 7), list(range(index, index + 90)), 0)
        assert cache.num_tokens <= 4000
    assert all(len(cache.of(b"%d" % space)) <= 1000 for space in range(7))
    cache.clear()
    assert (cache.num_tokens, cache.num_requests, cache.of(b"0").find([1, 2, 3], 5)) == (0, 0, (0, -1))


def test_a_kept_token_takes_at_most_200_bytes_however_many_have_been_forgotten():
    draw, most = random.Random(0), 20_000
    tracemalloc.start()
    try:
        cache = cache_of(tokens=4 * most)
        for _ in range(150):
            cache.add(b"a", [draw.randrange(50_000) for _ in range(400)], 0)
        assert most - 401 <= cache.num_tokens <= most
        assert tracemalloc.get_traced_memory()[0] < 200 * most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_short_texts_are_kept_and_forgotten(length):
    cache = cache_of(requests=1)
    cache.add(b"a", list(range(length)), 0)
    cache.add(b"a", [4, 5, 6, 7], 0)
    assert cache.num_tokens == 5
    found = cache.of(b"a")
    assert found.following(found.find([4, 5, 6], -1)[1], 3) == [7]
