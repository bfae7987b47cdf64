"""Lines of server-sent events end at line feeds alone, however they come."""

import asyncio
import json

import httpx
import pytest

from pagemill.cli.remote import event_lines


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_characters_at_which_text_may_break_stay_within_their_line(size):
    said = [{"text": "one\u2028two\u0085three \x0b\x1c"}, {"text": "näher"}]
    body = "".join(f"data: {json.dumps(each, ensure_ascii=False)}\r\n\n" for each in said).encode() + b"data: [DONE]"

    async def parts():
        for at in range(0, len(body), size):
            yield body[at : at + size]

    async def read():
        return [line async for line in event_lines(httpx.Response(200, content=parts())) if line]

    *lines, last = asyncio.run(read())
    assert [json.loads(line.removeprefix("data: ")) for line in lines] == said
    assert last == "data: [DONE]"
