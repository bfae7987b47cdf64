"""Fixtures of the server's tests."""

import httpx
import pytest


@pytest.fixture(scope="module")
def client(served):
    import openai

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


@pytest.fixture
def v1(served):
    """A client of the API; the sessions and pins that a test has made go with it."""
    with httpx.Client(base_url=f"{served.url}/v1", timeout=60) as v1:
        yield v1
        for salt in ("", "mine"):
            for kind, key in (("sessions", "id"), ("pins", "name")):
                for card in v1.get(f"/{kind}", params={"cache_salt": salt}).json()["data"]:
                    v1.delete(f"/{kind}/{card[key]}", params={"cache_salt": salt})
    served.wait_until_idle()
