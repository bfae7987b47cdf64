"""Markdown that is drawn while it comes looks in the end as if it had come at once."""

import asyncio
import io
import time

import pyte
import pytest
from rich.console import Console

from pagemill.cli.markdown_stream import MarkdownStream, blocks
from pagemill.cli.wording import printable

ANSWER = """# Ships

A *ship* is a **large** boat, see [more](http://x.y/z).

1. one
2. two

| a | b |
|---|---|
| 1 | 2 |

```python
for number in range(3):
    print(number)
```

The end.
"""


def shown(pieces, lines=24, reasoning=""):
    """Returns what is in the window and above it in the end, and all that was written."""
    screen = pyte.HistoryScreen(60, lines, history=1000)
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=60, height=lines, color_system="standard")

    async def stream():
        with MarkdownStream(console) as drawn:
            drawn.add("", reasoning)
            for piece in pieces:
                drawn.add(piece, "")
                drawn.draw()

    asyncio.run(stream())
    pyte.Stream(screen).feed(written.getvalue().replace("\n", "\r\n"))
    above = ["".join(line[at].data for at in range(60)) for line in screen.history.top]
    return "\n".join(line.rstrip() for line in [*above, *screen.display]).rstrip(), written.getvalue()


@pytest.mark.parametrize("lines", [24, 8])
def test_pieces_do_not_change_the_picture(lines):
    whole, _ = shown([ANSWER], lines)
    for words in ("Ships", "large", "http://x.y/z", " 2 two", "print(number)", "The end."):
        assert whole.count(words) == 1
    for length in (1, 7, 40):
        pieces = [ANSWER[at : at + length] for at in range(0, len(ANSWER), length)]
        assert shown(pieces, lines)[0] == whole


def test_a_block_that_is_longer_than_the_window_is_whole_in_the_end():
    code = "```\n" + "".join(f"line {number}\n" for number in range(40)) + "```\n"
    text, _ = shown([code[at : at + 9] for at in range(0, len(code), 9)], lines=12)
    assert [line.strip() for line in text.splitlines() if "line" in line] == [f"line {number}" for number in range(40)]


def test_finished_blocks_are_written_once():
    pieces = [f"Paragraph {number}.\n\n" for number in range(50)]
    text, written = shown(pieces)
    assert text.count("Paragraph") == 50
    assert written.count("Paragraph") <= 5 * 50


def test_reasoning_is_dim_and_before_the_answer():
    text, written = shown(["It is 4."], reasoning="Two and two.")
    assert text.index("Two and two.") < text.index("It is 4.")
    assert "\x1b[2mTwo and two." in written
    assert "\x1b[2mIt is" not in written


def test_an_answer_cannot_steer_the_terminal():
    text, written = shown(["a\x1b]0;title\x07b\x1b[2J\x9b2Jc\r\nd [e](javascript:alert(1))"])
    assert "title" in text
    assert "\x1b]" not in written
    assert "\x1b[2J" not in written
    assert "\x9b" not in written
    assert printable("a\tb\r\nc\x00") == "a\tb\nc\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "number"),
    [("", 1), ("one", 1), ("one\n\ntwo", 1), ("one\n\ntwo\n", 2), ("- a\n- b\n\n2", 1), ("```\na\n\nb\n\n", 1)],
)
def test_a_block_is_finished_when_another_has_begun(text, number):
    assert "\n".join(blocks(text)) == text
    assert len(blocks(text)) == number


def test_a_long_block_takes_linear_time():
    started = time.process_time()
    blocks("word " * 20_000)
    assert time.process_time() - started < 1
