"""Stop strings: compared with searching the whole text, for any way that tokens cut it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.text.stop import StopStrings

SHORT = st.text(alphabet="ab\n", min_size=1, max_size=5)


def expected(text: str, stops: list[str], include: bool, no_stop_before: int = 0) -> tuple[str, str | None]:
    """By plain searching: the match that ends first (the longest of several), cut there."""
    found = []
    for stop in stops:
        at = text.find(stop, max(0, no_stop_before + 1 - len(stop)))
        if at >= 0:
            found.append((at + len(stop), at, stop))
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


@given(
    pieces=st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12),
    stops=st.lists(SHORT, max_size=4),
    include=st.booleans(),
)
def test_equals_searching_the_whole_text(pieces, stops, include):
    checker = StopStrings(stops, include=include)
    text, matched = expected("".join(pieces), stops, include)
    shown = ""
    for piece in pieces:
        shown += checker.add(piece)
        assert text.startswith(shown), "something was shown that has to be taken back"
    shown += checker.finish()
    assert (shown, checker.matched) == (text, matched)


@given(pieces=st.lists(st.text(alphabet="ab", max_size=4), min_size=1, max_size=12), stops=st.lists(SHORT, max_size=3))
def test_holds_back_no_more_than_it_must(pieces, stops):
    """What is held is a beginning of a stop string: every other character has been shown."""
    checker = StopStrings(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += checker.add(piece)
        if checker.matched is None:
            held = text[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in stops)


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=10),
    stops=st.lists(SHORT, min_size=1, max_size=3),
    first=st.integers(0, 10),
)
def test_a_match_before_min_tokens_does_not_count(pieces, stops, first):
    checker = StopStrings(stops)
    shown = "".join(checker.add(piece, can_stop=i >= first) for i, piece in enumerate(pieces)) + checker.finish()
    assert (shown, checker.matched) == expected("".join(pieces), stops, False, len("".join(pieces[:first])))


def test_across_a_token_border():
    checker = StopStrings(["\n\nUser:"])
    assert checker.add("Hi.\n") == "Hi."
    assert checker.add("\nUs") == ""
    assert checker.add("er: more") == ""
    assert checker.matched == "\n\nUser:"
    assert checker.add("after") == checker.finish() == ""


def test_a_false_start_is_shown_as_soon_as_it_is_one():
    checker = StopStrings(["</answer>"])
    assert checker.add("a </ans") == "a "
    assert checker.add("we") == "</answe"[:0]
    assert checker.add("d") == "</answed"
    assert checker.matched is None


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xSTOP")])
def test_the_stop_string_is_kept_only_if_asked_for(include, text):
    checker = StopStrings(["STOP"], include=include)
    assert checker.add("xSTOPy") == text


def test_without_stop_strings_everything_passes():
    checker = StopStrings([])
    assert checker.add("abc") == "abc"
    assert checker.finish() == ""


def test_many_stop_strings_cost_no_more_than_few():
    def seconds(stops):
        checkers = [StopStrings(stops) for _ in range(64)]
        began = time.process_time()
        for checker in checkers:
            for _ in range(50):
                checker.add("some words ")
        return time.process_time() - began

    few, many = (min(seconds([f"{i}\t" for i in range(count)]) for _ in range(3)) for count in (2, 1024))
    assert many < 10 * few
