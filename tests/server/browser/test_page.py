"""The page at / in a real Chromium, beside a real server."""

import base64
import json
import re
import struct

import httpx
import pytest

MODEL = "smollm2-135m"
PHONE = {"viewport": {"width": 375, "height": 740}, "has_touch": True}
HOSTILE = """<img src=x onerror="window.hacked=1"> </script><script>window.hacked=2</script>
# <svg onload=window.hacked=3>
[click](javascript:window.hacked=4) [data](data:text/html,<script>window.hacked=5</script>) [fine](https://example.org/)
![picture](https://example.org/p.png) **bold <b onclick=window.hacked=6>x</b>** `<i>code</i>`
| <iframe src=javascript:window.hacked=7></iframe> | b |
|---|---|
| <a href="javascript:window.hacked=8">x</a> | d |
```html
<script>window.hacked=9</script>
"""


ENDLESS = 1900
"""Tokens of an answer that does not end before `end_requests`, however long the page takes."""
MARKED = """() => {
    const over = document.querySelector('.over');
    return over.getContext('2d').getImageData(0, 0, over.width, over.height).data.some(Boolean);
}"""


def generate(page, tokens=ENDLESS, prompt="Once upon a time there was a clockmaker by the sea who " * 3, n=1):
    """Starts a request from within the page, which nobody waits for."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "n": n}
    page.evaluate(
        """body => { fetch('/v1/completions', {method: 'POST', body: JSON.stringify(body),
             headers: {'Content-Type': 'application/json'}}); }""",
        body,
    )


def end_requests(served):
    async def abort():
        await served.llm.abort([request.request_id for request in await served.llm.requests()])

    served.run(abort())


def counted(page, state):
    """Returns how many blocks the legend says are in a state."""
    text = page.locator("#legend li", has_text=state).locator(".count").inner_text()
    return int(text.replace(",", "") or 0)


def wait_until(page, condition, *args):
    page.wait_for_function(condition, arg=args[0] if args else None)


def say(page, text):
    """Sends a message, and waits until it is shown: what stood there before may not be taken for its answer."""
    before = page.locator(".message").count()
    page.fill(".composer textarea", text)
    page.keyboard.press("Enter")
    wait_until(page, "before => document.querySelectorAll('.message').length > before", before)


def wait_for_end(page):
    page.wait_for_selector(".composer >> text=Send")


def set_sampling(page, tokens):
    page.evaluate("document.querySelector('.side details').open = true")
    page.fill("text=Most tokens of an answer", str(tokens))
    page.fill("text=Temperature", "0")


def drawn(page):
    """Returns what the map shows, as a picture."""
    return page.evaluate("document.querySelector('.map canvas').toDataURL()")


def test_the_map_shows_a_request_come_and_go(served, opened, v1):
    calm = {"reduced_motion": "reduce"}  # nothing is drawn over the map but what is pointed at
    with opened(served.url, allowed=["willReadFrequently"], **calm) as page:
        page.wait_for_selector(".map canvas")
        before, hint = drawn(page), page.inner_text("#readout")
        generate(page)
        page.wait_for_selector(".request canvas:not([hidden])")
        wait_until(page, "() => /[1-9]\\d* blocks/.test(document.querySelector('.request .note').textContent)")
        assert counted(page, "In use") > 0
        assert drawn(page) != before
        taken = counted(page, "In use")
        wait_until(page, "taken => Number(document.querySelectorAll('#legend .count')[2].textContent) > taken", taken)
        assert not page.evaluate(MARKED)
        page.hover(".request canvas", position={"x": 4, "y": 4})
        assert re.match(r"Entry 0 \(tokens 1 to 16\) lies in block \d+", page.inner_text("#readout"))
        assert page.evaluate(MARKED)
        end_requests(served)
        page.wait_for_selector("#requests .empty")
        assert not page.evaluate(MARKED), "what has ended is still pointed at"
        assert page.inner_text("#readout") == hint
        assert counted(page, "Cached") > 0
        page.wait_for_selector("#tree .branch i.cached")
        page.locator(".over").focus()
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#readout").startswith("Block 0")


def test_colours_by_tenant_and_sharing(served, opened, v1):
    with opened(served.url) as page:
        generate(page, 800, n=3)
        page.wait_for_selector(".request:nth-child(3)")
        wait_until(
            page, "() => [...document.querySelectorAll('.request .note')].some(one => /shared/.test(one.textContent))"
        )
        pictures = [drawn(page)]
        for choice in ("Tenant", "Sharing"):
            page.click(f"#colour-by >> text={choice}")
            pictures.append(drawn(page))
        assert len(set(pictures)) == 3
        assert "5 or more" in page.inner_text("#legend")
        wait_until(page, "() => document.querySelector('#tree .branch i.shared')")
        end_requests(served)


def test_a_chat_streams_forks_and_resumes(served, opened, v1):
    with opened(served.url) as page:
        page.click("#tab-chat")
        set_sampling(page, 1000)
        say(page, "Tell me a long story about a lighthouse keeper and her three cats.")
        page.wait_for_selector(".message.assistant[aria-busy=true]")
        growing = "least => document.querySelector('.message.assistant .text')?.textContent.length > least"
        wait_until(page, growing, 20)
        first = len(page.inner_text(".message.assistant .text"))
        wait_until(page, growing, first + 20)
        page.click("text=Fork this answer")
        wait_until(page, "() => document.querySelector('.blocks .request .note')?.textContent.includes('shared')")
        assert "shared" in page.inner_text(".events")
        assert page.locator(".talks li").count() == 2
        end_requests(served)
        wait_for_end(page)
        set_sampling(page, 20)
        say(page, "What is her name?")
        wait_for_end(page)
        assert page.locator(".message").count() == 4
        assert re.search(r"\d+ prompt tokens, [1-9]\d* of them found", page.inner_text(".composer .note"))
        page.wait_for_selector(".places >> text=cached in the KV pool")
        page.click(".message:nth-child(2) >> text=Fork")
        wait_until(page, "() => document.querySelectorAll('.message').length === 2")
        page.click(".message:nth-child(1) >> text=Edit")
        assert page.input_value(".composer textarea").startswith("Tell me a long story")
    name = v1.get("/sessions").json()["data"][0]["id"]
    with opened(served.url) as page:
        page.click("#tab-chat")
        page.click(f".talks >> text={name}")
        page.wait_for_selector(".message.assistant .text")
        page.click("[aria-label^='Delete']")
        wait_until(page, "name => !document.querySelector('.talks').textContent.includes(name)", name)


def test_a_prompt_is_pinned_and_what_is_refused_is_told(served, opened, v1):
    with opened(served.url, allowed=["status of 400"]) as page:
        page.click("#tab-chat")
        page.evaluate("document.querySelector('.side details').open = true")
        page.click("text=Pin it")
        assert "Write a system prompt first" in page.inner_text(".bad[role=alert]")
        page.fill("text=System prompt (of", "You are a patient teacher of astronomy, and explain every word. " * 3)
        page.click("text=Pin it")
        page.wait_for_selector(".pins >> text=blocks")
        page.click("#tab-memory")
        wait_until(page, "() => Number(document.querySelectorAll('#legend .count')[4].textContent) > 0")
        assert page.inner_text(".request b").startswith("Pin page: You are")
        page.click("#tab-chat")
        set_sampling(page, 100_000)
        say(page, "Hello")
        wait_until(page, "() => document.querySelector('.bad[role=alert]').textContent.includes('max_tokens')")
        page.click("text=Unpin")
        wait_until(page, "() => !document.querySelector('.pins li')")


def test_hostile_text_runs_nothing(served, opened):
    chunks = [{"id": "c", "choices": [{"delta": {"content": part}}]} for part in re.findall(r"(?s).{1,40}", HOSTILE)]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    with opened(served.url, allowed=["status of 404"]) as page:  # there is no session behind it
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
        page.click("#tab-chat")
        say(page, HOSTILE)
        wait_for_end(page)
        page.wait_for_selector(".message.assistant .text pre")
        for link in page.locator(".text a").all():
            assert link.get_attribute("href") in ("https://example.org/", "https://example.org/p.png")
            assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        inside = page.evaluate("[...document.querySelectorAll('.message .text *')].map(one => one.localName)")
        assert set(inside) <= {
            "p",
            "a",
            "b",
            "br",
            "code",
            "pre",
            "strong",
            "em",
            "h3",
            "div",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "del",
        }
        assert "b" not in inside
        assert page.locator(".message .text a").count() == 4
        page.wait_for_timeout(200)
        assert page.evaluate("window.hacked") is None
        assert "onerror" in page.inner_text(".message.assistant .text")


def test_the_tour_by_keyboard(served, opened):
    with opened(served.url) as page:
        page.locator("#open-tour").focus()
        page.keyboard.press("Enter")
        for step in range(1, 6):
            assert page.inner_text("#tour .note") == f"Step {step} of 5"
            assert page.evaluate("document.querySelectorAll('.toured').length") == 1
            if step in (2, 3, 4):
                wait_until(page, "() => /[1-9]\\d* running/.test(document.querySelector('#tour .status').textContent)")
            page.keyboard.press("ArrowRight" if step < 5 else "ArrowLeft")
        assert page.inner_text("#tour .note") == "Step 4 of 5"
        page.keyboard.press("Escape")
        assert page.is_hidden("#tour")
        assert page.evaluate("document.activeElement.id") == "open-tour"
        page.locator("#tab-memory").focus()
        page.keyboard.press("ArrowRight")
        assert page.is_visible("#chat")
    served.wait_until_idle()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(served, opened, scheme):
    with opened(served.url, color_scheme=scheme, **PHONE) as page:
        generate(page)
        page.wait_for_selector(".request canvas:not([hidden])")
        sizes = "[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]"
        assert page.evaluate(sizes) == [375, 375, 375]
        page.tap("#tab-chat")
        assert page.evaluate(sizes) == [375, 375, 375]
        ink, paper = (
            sum(map(int, re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{name}"))[:3]))
            for name in ("color", "backgroundColor")
        )
        assert (ink < paper) == (scheme == "light")
    end_requests(served)
    served.wait_until_idle()


def million(changed):
    """Returns an event of a pool of a million blocks, all cells of which have changed."""
    frames, per_cell = 1_000_000, 245
    cells = b"".join(
        struct.pack("<7H", (cell * 7 + changed) % 80, (cell + changed) % 90, cell % 40, 0, 0, 1, 2)
        for cell in range(4082)
    )
    return {"tiers": [{"name": "device", "first_frame": 0, "num_frames": frames, "frames_per_cell": per_cell,
                       "cells": base64.b64encode(cells).decode()}]}  # fmt: skip


def test_a_million_blocks_stay_fluid(served, opened, v1):
    with httpx.stream("GET", f"{served.url}/v1/kv_map") as stream:
        first = json.loads(next(line for line in stream.iter_lines() if line)[6:])
    events = [{**first, **million(number)} for number in range(4)]
    follow = """
        const real = window.fetch;
        window.fetch = async (path, options) => {
          if (!String(path).startsWith('/v1/kv_map')) return real(path, options);
          const encoder = new TextEncoder();
          let at = 0;
          const body = new ReadableStream({
            async pull(controller) {
              await new Promise((done) => setTimeout(done, 250));
              const event = EVENTS[at++ % EVENTS.length];
              controller.enqueue(encoder.encode(`data: ${event}\\n\\n`));
            },
          }, { highWaterMark: 0 });
          return new Response(body, { headers: { 'Content-Type': 'text/event-stream' } });
        };
    """
    script = f"const EVENTS = {json.dumps([json.dumps(event) for event in events])};{follow}"
    with opened(served.url, init=script) as page:
        page.wait_for_selector("text=1,000,000 blocks, 245 to a square")
        gaps = page.evaluate(
            """() => new Promise((done) => {
                 const gaps = []; let last = null;
                 const frame = (now) => {
                   if (last !== null) gaps.push(now - last);
                   last = now;
                   if (gaps.length < 120) requestAnimationFrame(frame); else done(gaps);
                 };
                 requestAnimationFrame(frame);
               })"""
        )
        gaps.sort()
        print(f"\nframes with all cells changing four times a second: median {gaps[60]:.1f} ms, p95 {gaps[114]:.1f} ms")
        assert gaps[60] < 25, gaps
        page.hover(".over", position={"x": 50, "y": 50})
        assert "free" in page.inner_text("#readout")


def test_a_key_is_asked_for_and_kept_in_the_tab_only(serving, opened, tmp_path):
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": {"acme": {"api_keys": ["sk-acme-0123456789"]}}}))
    with (
        serving(tenants=path, max_model_len=256, kv_memory="16MiB", max_num_seqs=2) as server,
        opened(server.url, live=False, allowed=["status of 401"]) as page,
    ):
        page.wait_for_selector("#key-dialog[open]")
        assert "no known API key" in page.inner_text("#key-reason")
        page.fill("#key", "sk-acme-0123456789")
        page.click("text=Use it")
        page.wait_for_selector("#live[data-state=live]")
        page.wait_for_selector("#tenants >> text=acme")
        assert page.inner_text("#model") == MODEL
        kept = "[Object.keys(localStorage).length, document.cookie, location.href.includes('sk-')]"
        assert page.evaluate(kept) == [0, "", False]
        page.reload()
        page.wait_for_selector("#live[data-state=live]")
