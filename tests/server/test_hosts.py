"""Names and sites: a page of another site gets nothing of a local server, and CORS is for those that were named."""

import httpx
import pytest
from starlette.datastructures import Headers

from pagemill.errors import ConfigError, HostNotAllowedError
from pagemill.server.access.hosts import AllowedHosts
from pagemill.server.access.server_access import ServerAccess

SITE = "https://app.example.com"


def refused(hosts, method="GET", **headers):
    """What the refusal names, None if there is none."""
    try:
        hosts.check(method, Headers(headers))
    except HostNotAllowedError as error:
        return error.param


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "a.localhost:1",
        "127.0.0.1:8000",
        "192.168.1.4",
        "[::1]:8000",
        "[::1]",
        "",
        "here:9",
    ],
)
def test_addresses_localhost_and_given_names_are_allowed(host):
    assert refused(AllowedHosts(["Here", ""]), host=host) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "evil.here", "x/", "::1:x", "a b"]
)
def test_other_names_are_refused(host):
    assert refused(AllowedHosts(["here"]), host=host) == "Host"


def test_a_name_may_stand_for_many():
    assert refused(AllowedHosts(["*.example.com"]), host="a.b.example.com.") is None
    assert refused(AllowedHosts(["*.example.com"]), host="example.com") == "Host"
    assert refused(AllowedHosts(["*.example.com"]), host="badexample.com") == "Host"
    assert refused(AllowedHosts(["*"]), host="any") is None


def test_a_page_of_another_site_changes_nothing():
    hosts = AllowedHosts(["llm.example.com"], [SITE])
    for origin in ("https://evil.example", "null", "chrome-extension://abc", "", "http://["):
        assert refused(hosts, "POST", host="127.0.0.1:8000", origin=origin) == "Origin"
        assert refused(hosts, "GET", host="127.0.0.1:8000", origin=origin) is None
    for origin in ("http://127.0.0.1:8000", "http://127.0.0.1:3000", SITE, "https://llm.example.com"):
        assert refused(hosts, "POST", host="127.0.0.1:8000", origin=origin) is None
    assert refused(AllowedHosts([], ["*"]), "DELETE", host="localhost", origin="https://any.example") is None


def test_a_local_server_without_keys_is_asked_by_its_address(served):
    with httpx.Client(base_url=served.url) as http:
        assert http.get("/v1/models", headers={"Host": "localhost"}).status_code == 200
        answer = http.get("/v1/models", headers={"Host": "rebound.example"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        assert "--allowed-hosts rebound.example" in answer.json()["error"]["message"]
        assert http.get("/health", headers={"Host": "rebound.example"}).status_code == 403
        answer = http.post("/v1/completions", json={"prompt": "Hi"}, headers={"Origin": "https://evil.example"})
        assert answer.status_code == 403
        assert "--allowed-origins https://evil.example" in answer.json()["error"]["message"]
        asks = {"Origin": SITE, "Access-Control-Request-Method": "POST"}
        assert "access-control-allow-origin" not in http.options("/v1/completions", headers=asks).headers


def test_named_sites_may_ask_and_read_refusals(serving):
    access = ServerAccess(api_key=["sk-a"], allowed_origins=[SITE], allowed_hosts=["llm.example.com"])
    with (
        serving(access=access, max_model_len=128, max_num_seqs=2, kv_memory="8MiB") as server,
        httpx.Client(base_url=server.url, headers={"Origin": SITE}) as http,
    ):
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        before = http.options("/v1/completions", headers=asks)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == SITE
        assert "authorization" in before.headers["access-control-allow-headers"]
        refusal = http.get("/v1/models")
        assert refusal.status_code == 401
        assert refusal.headers["access-control-allow-origin"] == SITE
        key = {"Authorization": "Bearer sk-a"}
        answer = http.get("/v1/models", headers=key)
        assert answer.headers["access-control-allow-origin"] == SITE
        exposed = answer.headers["access-control-expose-headers"]
        assert exposed.startswith("Retry-After, X-Should-Retry, X-Request-Id, Request-Id, x-ratelimit")
        other = http.get("/v1/models", headers={**key, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert http.get("/v1/models", headers={**key, "Host": "llm.example.com"}).status_code == 200
        assert http.get("/v1/models", headers={**key, "Host": "other.example"}).status_code == 403


def test_flags_take_a_json_list_too():
    access = ServerAccess.read({"allowed_origins": [f'["{SITE}", "null"]', "http://a:1"]}, {})
    assert access.allowed_origins == [SITE, "null", "http://a:1"]
    with pytest.raises(ConfigError, match=r"allowed_methods has '\[1\]', which is no JSON list of texts"):
        ServerAccess.read({"allowed_origins": ["*"], "allowed_methods": ["[1]"]}, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allowed_origins": ["https://a.example/"]}, "without a path"),
        ({"allowed_origins": ["a.example"]}, "an origin is a scheme"),
        ({"allowed_origins": ["*"], "allow_credentials": True}, "every site could act"),
        ({"allow_credentials": True}, "allow_credentials is True without allowed_origins"),
        ({"allowed_methods": ["GET"]}, "without allowed_origins"),
        ({"allowed_hosts": ["http://x"]}, "allowed_hosts has 'http://x', .* without scheme, port and path"),
        ({"allowed_hosts": ["here", "x:8000"]}, "allowed_hosts has 'x:8000', which matches no request"),
        ({"allowed_hosts": ["x/v1"]}, "allowed_hosts has 'x/v1'"),
        ({"allowed_hosts": ["a,b"]}, "allowed_hosts has 'a,b'"),
        ({"allowed_hosts": ["a.*"]}, "allowed_hosts has 'a.*'"),
    ],
)
def test_settings_that_open_too_much_or_nothing_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServerAccess(**settings)


def test_names_and_addresses_are_allowed_hosts():
    ServerAccess(allowed_hosts=["", "*", "*.example.com", "llm_1.example.com", "127.0.0.1", "::1"])
