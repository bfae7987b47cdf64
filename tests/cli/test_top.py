"""pagemill top: frames that fit, from real servers and from hostile names."""

import base64
import json

import httpx
import msgspec
import numpy as np
import pytest

from cli.terminal import Terminal
from pagemill.cli.main import main
from pagemill.cli.remote import unreachable
from pagemill.cli.top_frame import View, frame
from pagemill.cli.top_picture import Picture
from pagemill.engine.kv_map import KVTable
from pagemill.errors import RemoteServerError

COLUMNS = ["cached", "active", "shared", "pinned", "loading", "owner", "holders"]


def test_a_frame_of_a_real_server(served, capsys, monkeypatch):
    body = {"prompt": "Hi", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        with Terminal("top", "--url", served.url, "--interval-s", "0.1") as terminal:
            text = terminal.wait_until(lambda text: name[:24] in text and "generating" in text)
            terminal.type("s")
            terminal.wait_for("by blocks")
            terminal.type("p")
            terminal.wait_for("paused")
            terminal.type("q")
            assert terminal.wait_for_end() == 0
        monkeypatch.setenv("COLUMNS", "80")
        once = printed(["top", "--url", served.url, "--once", "--interval-s", "0.1"], capsys)
    assert "1 running, 0 waiting" in text
    assert "KV pool: " in text
    assert "…" not in "".join(line for line in text.splitlines() if "chatcmpl" not in line and "cmpl-" not in line)
    assert "q quits" in text.splitlines()[-1]
    assert len(text.splitlines()) <= 24
    assert name[:24] in once.out
    assert "\x1b" not in once.out
    assert max(map(len, once.out.splitlines())) <= 80
    assert "give --once" in printed(["top", "--url", served.url], capsys, 1).err


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("https://there", httpx.ConnectError("CERTIFICATE_VERIFY_FAILED"), "in SSL_CERT_FILE"),
        ("http://there", httpx.RemoteProtocolError("disconnected."), "disconnected; if it speaks HTTPS, give https://"),
        ("https://there", httpx.RemoteProtocolError("disconnected."), "disconnected; check the address"),
    ],
)
def test_why_a_server_cannot_be_asked_is_said_with_the_way_out(url, error, words):
    assert words in unreachable(url, error)


def test_what_cannot_be_watched_is_refused_in_one_line(capsys):
    said = printed(["top", "--url", "http://127.0.0.1:9", "--once"], capsys, 1).err
    assert said.startswith("error: no server answers at http://127.0.0.1:9: ")
    assert said.count("\n") == 1


def printed(args, capsys, status=None):
    """Returns what a command writes, which ends with this status."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == status
    return capsys.readouterr()


def event(stats, cells, **more):
    """A stream's first event: a pool of as many frames as there are rows of cells."""
    tier = {"name": "device", "first_frame": 0, "num_frames": len(cells), "frames_per_cell": 1}
    return {
        "columns": COLUMNS,
        "block_size": 16,
        "num_tables": 0,
        "tables": [],
        "tiers": [tier | {"cells": base64.b64encode(np.array(cells, "<u2").tobytes()).decode()}],
        "stats": stats,
        "first_token": {"requests": 0, "seconds": 0.0},
        **more,
    }


@pytest.fixture(scope="module")
def stats(served):
    return json.loads(msgspec.json.encode(served.stats()))


def cell(state=None):
    return [int(name == state) for name in COLUMNS]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 3)])
def test_a_frame_fits_whatever_is_named(stats, width, height):
    name = "\x1b[2J\x1b]0;x\x07" + "n" * 300
    tenants = {f"\x1b[31m{number}" * 9: next(iter(stats["tenants"].values())) for number in range(30)}
    tables = [
        KVTable(kind="request", name=name, index=1, tenant=name, running=True, num_tokens=10**6, num_computed=0)
        for _ in range(99)
    ]
    picture = Picture()
    first = event(stats | {"tenants": tenants}, [cell("active")] * 5000, num_tables=5000)
    picture.apply(first | {"tables": msgspec.to_builtins(tables)}, 0.0)
    lines = frame(picture, f"{name} at x", View(width, height, keys=True))
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width
    assert "\x1b" not in "".join(line.plain for line in lines)
    if height >= 24:
        text = "\n".join(line.plain for line in lines)
        assert "more" in text
        assert "Tenants" in text
        assert "prompt   0 %" in text


def test_changes_and_speeds_are_those_of_the_stream(stats):
    picture = Picture()
    picture.apply(event(stats | {"steps": 1}, [cell(), cell("cached"), cell("shared")]), 0.0)
    assert [line.plain for line in frame(picture, "x", View()) if line.plain.startswith("·░▓")]
    changed = np.array([0], "<u2").tobytes()
    news = event(stats | {"steps": 9, "generated_tokens": stats["generated_tokens"] + 40}, [cell("pinned")])
    news["tiers"][0] |= {"num_frames": 3, "changed": base64.b64encode(changed).decode()}
    picture.apply(news | {"first_token": {"requests": 2, "seconds": 0.5}}, 2.0)
    text = "\n".join(line.plain for line in frame(picture, "x", View()))
    assert "█░▓" in text
    assert "20 tokens/s" in text
    assert "first 250 ms" in text
    ascii_text = "\n".join(line.plain for line in frame(picture, "x", View(ascii_only=True)))
    assert "#-s" in ascii_text
    picture.apply(event(stats | {"steps": 0}, [cell()]), 3.0)  # the engine was restarted
    assert picture.per_second("generated_tokens") == 0
    with pytest.raises(RemoteServerError, match="another version"):
        picture.apply({"stats": {}}, 4.0)


def test_a_large_pool_is_summed_up(stats):
    picture = Picture()
    picture.apply(event(stats, [cell("active")] * 4000 + [cell()] * 4000), 0.0)
    lines = frame(picture, "x", View())
    marks = [line.plain for line in lines if set(line.plain) & set("·▒") and "in use" not in line.plain]
    assert (
        sum(map(len, marks)) * int(next(line.plain for line in lines if "to a mark" in line.plain).split()[-4]) >= 8000
    )
    assert "".join(marks).count("▒") == pytest.approx("".join(marks).count("·"), abs=1)


def test_a_stream_that_ends_at_once_shows_nothing(capsys, monkeypatch):
    def server(request):
        return (
            httpx.Response(200, json={"data": []}) if request.url.path == "/v1/models" else httpx.Response(200, text="")
        )

    made = httpx.AsyncClient
    monkeypatch.setattr(
        httpx, "AsyncClient", lambda **given: made(**given | {"transport": httpx.MockTransport(server)})
    )
    said = printed(["top", "--url", "http://x", "--once"], capsys, 1).err
    assert said == "error: http://x ended the stream before its first picture; ask again\n"
