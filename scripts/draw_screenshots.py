"""Draws the pictures of the page at / for the README and the guide, from a real server in a real Chromium.

They go into docs/images, or into the folder that is named.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "images"
MODEL = "smollm2-135m"
SERVER = [
    str(Path(sys.executable).with_name("pagemill")), "serve", MODEL, "--port", "0", "--kv-memory", "160MiB",
    "--kv-host-memory", "64MiB", "--admin-api-key", "sk-admin",
]  # fmt: skip
TENANTS = {
    "tenants": {
        "books": {"api_keys": ["sk-books"], "guaranteed_blocks": "25%"},
        "films": {"api_keys": ["sk-films"], "max_blocks": "60%"},
    }
}
STORY = "Long ago, in a harbour town by a grey sea, there lived a clockmaker who repaired the clocks of ships. " * 6
ENDS = ("One morning a captain came and", "In winter, when the sea froze,", "Her apprentice, a quiet girl,", "The")
RUN = """([key, body]) => { fetch('/v1/completions', {method: 'POST', body: JSON.stringify(body),
    headers: {'Content-Type': 'application/json', Authorization: `Bearer ${key}`}}); }"""
PIN = """() => fetch('/v1/pins', {method: 'POST', headers: {'Content-Type': 'application/json', Authorization:
    'Bearer sk-books'}, body: JSON.stringify({name: 'house-style', prompt: 'Answer in plain words. '.repeat(20)})})"""


def main() -> None:
    """Starts the server, draws, and ends it."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        sys.exit("error: there is no Chromium; install it (Debian and Ubuntu: apt install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.json"
        tenants.write_text(json.dumps(TENANTS))
        server = subprocess.Popen([*SERVER, "--tenants", str(tenants)], stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            url = next(line.split()[1] for line in server.stderr if " curl " in line).split("/v1/")[0]
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
                draw_memory(browser, url, "light", {"width": 1280, "height": 900}, "page_memory")
                draw_memory(browser, url, "dark", {"width": 390, "height": 844}, "page_phone")
                draw_chat(browser, url)
                browser.close()
        finally:
            server.terminate()
            server.wait()


def open_page(browser: Browser, url: str, key: str, scheme: str, viewport: dict[str, int]) -> Page:
    """Opens the page with an API key."""
    page = browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
    page.add_init_script(f"sessionStorage.setItem('pagemill-api-key', '{key}')")
    page.goto(url)
    page.wait_for_selector("#live[data-state=live]")
    return page


def draw_memory(browser: Browser, url: str, scheme: str, viewport: dict[str, int], name: str) -> None:
    """Draws the memory while requests of two tenants run."""
    page = open_page(browser, url, "sk-admin", scheme, viewport)
    page.evaluate(PIN)
    for number, end in enumerate(ENDS * 2):
        key, n = ("sk-books", 2 if number == 0 else 1) if number % 2 == 0 else ("sk-films", 1)
        body = {"prompt": STORY + end, "max_tokens": 220, "ignore_eos": True, "temperature": 0.9, "n": n}
        page.evaluate(RUN, [key, body])
        page.wait_for_timeout(350)
    page.wait_for_timeout(1500)
    page.screenshot(path=IMAGES / f"{name}.png")
    page.wait_for_timeout(8000)
    page.close()


def draw_chat(browser: Browser, url: str) -> None:
    """Draws a conversation and a fork of its running answer."""
    page = open_page(browser, url, "sk-books", "light", {"width": 1280, "height": 800})
    page.click("#tab-chat")
    page.fill(".composer textarea", "Tell me about lighthouses, and list **three** that are famous.")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.message.assistant .text')?.textContent.length > 250")
    page.click("text=Fork this answer")
    page.wait_for_function("() => document.querySelector('.blocks .request .note')?.textContent.includes('shared')")
    page.wait_for_timeout(1200)
    page.screenshot(path=IMAGES / "page_chat.png")
    page.close()


if __name__ == "__main__":
    main()
