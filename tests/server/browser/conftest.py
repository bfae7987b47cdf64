"""Chromium, and pages in it that note whatever must not happen."""

import contextlib
import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def chromium():
    """The browser, for one file of tests: while it is there, its event loop counts as running, and no other can be."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        if os.environ.get("PAGEMILL_TESTS_NEED_CHROMIUM"):
            pytest.fail("there is no Chromium, and PAGEMILL_TESTS_NEED_CHROMIUM is set; install it")
        pytest.skip("there is no Chromium; install it (Debian: apt install chromium)")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """`with opened(server) as page`: the page at /, live. At the end nothing may have been asked of another host, nor
    have failed in the page."""

    @contextlib.contextmanager
    def open_page(url, *, live=True, allowed=(), init=None, **settings):
        """allowed: parts of console messages that are expected; init: a script that runs first."""
        wrong = []
        page = chromium.new_page(**settings)
        if init is not None:
            page.add_init_script(init)
        page.on("request", lambda request: request.url.startswith(url) or wrong.append(f"asked {request.url}"))
        page.on("pageerror", lambda error: wrong.append(f"failed: {error}"))
        page.on(
            "console",
            lambda message: (
                message.type not in ("error", "warning")
                or any(text in message.text for text in allowed)
                or wrong.append(f"console: {message.text}")
            ),
        )
        page.set_default_timeout(20_000)
        try:
            page.goto(f"{url}/")
            if live:
                page.wait_for_selector("#live[data-state=live]")
            yield page
        finally:
            page.close()
        assert wrong == []

    return open_page
