"""API keys: each path is open, or needs a key, or an admin's; what is not named needs a key."""

import json

import pytest
from starlette.datastructures import Headers

from pagemill.errors import AuthenticationError, ConfigError, PermissionDeniedError
from pagemill.server.access.api_keys import ApiKeys, Caller
from pagemill.server.access.server_access import ServerAccess
from pagemill.tenant_limits import key_digest, read_tenants_file

CHAT, METRICS, TENANTS = ("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/v1/tenants")
RESIZE, DOCS, NEW = ("POST", "/v1/kv_memory"), ("GET", "/docs"), ("POST", "/comes_later")
SHA256 = f"sha256:{key_digest('sk-a').hex()}"


@pytest.fixture
def tenants(tmp_path):
    """A tenants file of two tenants and an admin, read."""
    path = tmp_path / "tenants.json"
    content = {
        "admin_keys": ["sk-admin"],
        "tenants": {"one": {"api_keys": ["sk-one"]}, "two": {"api_keys": ["sk-two"]}},
    }
    path.write_text(json.dumps(content))
    return read_tenants_file(path)


def asked(keys, request, key=None):
    """Who asks, or the error that refuses."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        return keys.caller(*request, Headers(headers))
    except (AuthenticationError, PermissionDeniedError) as error:
        return type(error)


def test_without_keys_everybody_on_this_machine_is_admin():
    for request in (CHAT, METRICS, TENANTS, RESIZE, DOCS, NEW):
        assert asked(ApiKeys(), request) == asked(ApiKeys(), request, "none") == Caller("default", True)


def test_without_keys_nobody_from_elsewhere_is_admin():
    keys = ApiKeys(None, ServerAccess(allow_unauthenticated=True), on_loopback=False)
    for request in (CHAT, METRICS, DOCS, NEW):
        assert asked(keys, request) == Caller("default", False)
    assert asked(keys, TENANTS) is asked(keys, RESIZE) is PermissionDeniedError
    keys = ApiKeys(None, ServerAccess(admin_api_key=["sk-a"], allow_unauthenticated=True), on_loopback=False)
    assert asked(keys, CHAT) == Caller("default", False)
    assert asked(keys, RESIZE) is AuthenticationError
    assert asked(keys, RESIZE, "sk-a") == Caller("default", True)


@pytest.mark.parametrize("given", ["sk-a", SHA256])
@pytest.mark.parametrize("on_loopback", [True, False])
def test_keys_of_the_command_line(given, on_loopback):
    keys = ApiKeys(None, ServerAccess(api_key=[given, "sk-b"]), on_loopback=on_loopback)
    for request in (CHAT, METRICS, DOCS, NEW, RESIZE, ("GET", "/v1/models"), ("GET", "/openapi.json")):
        assert (
            asked(keys, request) is asked(keys, request, "sk-c") is asked(keys, request, SHA256) is AuthenticationError
        )
    for key in ("sk-a", "sk-b"):
        for request in (CHAT, METRICS, DOCS, NEW):
            assert asked(keys, request, key) == Caller("default", False)
        assert asked(keys, RESIZE, key) is asked(keys, TENANTS, key) is PermissionDeniedError
    for path in ("/", "/health", "/live", "/ready", "/version", "/page/app.js"):
        assert asked(keys, ("GET", path)) == Caller("default", False)


def test_keys_of_tenants_and_of_an_admin(tenants):
    keys = ApiKeys(tenants, ServerAccess(api_key=["sk-a"], admin_api_key=["sk-b"]))
    assert asked(keys, CHAT, "sk-one") == Caller("one", False)
    assert asked(keys, CHAT, "sk-two") == Caller("two", False)
    assert asked(keys, CHAT, "sk-a") == Caller("default", False)
    for request in (METRICS, TENANTS, RESIZE):
        assert asked(keys, request, "sk-one") is asked(keys, request, "sk-a") is PermissionDeniedError
        for admin in ("sk-admin", "sk-b"):
            assert asked(keys, request, admin) == Caller("default", True)


def test_without_an_admin_figures_by_tenant_are_for_none_of_several(tenants):
    keys = ApiKeys(tenants._replace(admin_keys=[]))
    assert asked(keys, METRICS, "sk-one") is PermissionDeniedError
    assert asked(keys, METRICS) is AuthenticationError


def test_a_refusal_says_how_to_get_in():
    with pytest.raises(PermissionDeniedError, match=r"POST /v1/kv_memory .* start the server with --admin-api-key"):
        ApiKeys(None, ServerAccess(api_key=["sk-a"])).caller(*RESIZE, Headers({"authorization": "Bearer sk-a"}))


def test_other_keys_of_a_file_replace_those_before(tenants):
    keys = ApiKeys(tenants, ServerAccess(api_key=["sk-a"]))
    keys.take(tenants._replace(keys={key_digest("sk-new"): "one"}, admin_keys=[]))
    assert asked(keys, CHAT, "sk-new") == Caller("one", False)
    assert asked(keys, CHAT, "sk-one") is asked(keys, RESIZE, "sk-admin") is AuthenticationError
    assert asked(keys, CHAT, "sk-a") == Caller("default", False)
    with pytest.raises(ConfigError, match="also one of tenant 'one'"):
        keys.take(tenants._replace(keys={key_digest("sk-a"): "one"}))
    assert asked(keys, CHAT, "sk-new") == Caller("one", False)


def test_keys_come_from_the_environment_where_no_flag_gives_them():
    environment = {"PAGEMILL_API_KEY": "sk-a", "PAGEMILL_ADMIN_API_KEY": ""}
    assert ServerAccess.read({}, environment) == ServerAccess(api_key=["sk-a"])
    assert ServerAccess.read({"api_key": ["sk-b"]}, environment) == ServerAccess(api_key=["sk-b"])
    with pytest.raises(ConfigError, match="printable ASCII") as refused:
        ServerAccess.read({}, {"PAGEMILL_API_KEY": "sk secret"})
    for given, environment in (({}, {"PAGEMILL_API_KEY": '["sk-secret'}), ({"api_key": ["[sk-secret"]}, {})):
        with pytest.raises(ConfigError, match="api_key has an entry, which is no JSON list") as refused:
            ServerAccess.read(given, environment)
        assert "secret" not in refused.value.message
    several = ServerAccess.read({}, {"PAGEMILL_API_KEY": '["sk-a", "sk-b"]', "PAGEMILL_ADMIN_API_KEY": '["sk-c"]'})
    assert (several.api_key, several.admin_api_key) == (["sk-a", "sk-b"], ["sk-c"])
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.1.7", "::", "fe80::1%eth0"])
def test_an_address_that_others_reach_wants_keys(address, tenants):
    with pytest.raises(ConfigError, match="--allow-unauthenticated"):
        ServerAccess().check_address(address, None)
    with pytest.raises(ConfigError, match="--allow-unauthenticated"):
        ServerAccess(admin_api_key=["sk-a"]).check_address(address, tenants._replace(keys={}))
    ServerAccess(api_key=["sk-a"]).check_address(address, None)
    ServerAccess(allow_unauthenticated=True).check_address(address, None)
    ServerAccess().check_address(address, tenants)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
def test_on_loopback_no_key_is_wanted(address):
    ServerAccess().check_address(address, None)
