"""The arguments of an application for Ray Serve: who may ask it, and what is refused by name."""

import pytest

from pagemill.distributed.plan_arguments import OF_ONE_ENGINE, OF_PROXIES, SECRET, plan_of
from pagemill.engine.messages import Peering
from pagemill.errors import ConfigError

MODEL = {"model": "smollm2-135m"}


def test_keys_of_the_environment_count():
    plan = plan_of(MODEL, {"PAGEMILL_API_KEY": "k", "PAGEMILL_ADMIN_API_KEY": "a"})
    assert (plan.access.api_key, plan.access.admin_api_key) == (["k"], ["a"])
    assert plan_of({**MODEL, "api_key": ["given"]}, {"PAGEMILL_API_KEY": "k"}).access.api_key == ["given"]


@pytest.mark.parametrize("environment", [{}, {"PAGEMILL_ADMIN_API_KEY": "a"}])
def test_without_a_key_nobody_is_served_unless_that_is_said(environment):
    with pytest.raises(ConfigError, match="no API key"):
        plan_of(MODEL, environment)
    assert plan_of({**MODEL, "allow_unauthenticated": True}, environment).access.allow_unauthenticated


@pytest.mark.parametrize("name", [*OF_PROXIES, *OF_ONE_ENGINE, "no_such_setting"])
def test_what_has_no_effect_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=name):
        plan_of({**MODEL, name: 1}, {"PAGEMILL_API_KEY": "k"})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("served_model_name", 123, "is 123; it must be a text or a list of texts"),
        ("served_model_name", ["a", 1], "it must be a text or a list of texts"),
        ("tenants", 7, "is 7; it must be the path of a file"),
        ("engine_resources", "abc", "is 'abc'; it must be an object"),
        ("front_end_resources", [1], "it must be an object"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(name, value, words):
    with pytest.raises(ConfigError, match=words) as refused:
        plan_of({**MODEL, name: value}, {"PAGEMILL_API_KEY": "k"})
    assert refused.value.param == name


def test_replicas_are_a_number_or_two():
    keys = {"PAGEMILL_API_KEY": "k"}
    assert plan_of({**MODEL, "replicas": 3}, keys).replicas == 3
    assert plan_of({**MODEL, "min_replicas": 1, "max_replicas": 4}, keys).replicas == (1, 4)
    for wrong in ({"replicas": 0}, {"min_replicas": 2}, {"min_replicas": 3, "max_replicas": 2}):
        with pytest.raises(ConfigError, match="replicas"):
            plan_of({**MODEL, **wrong}, keys)


def test_a_queue_has_an_end_in_each_replica_without_a_tenants_file():
    plan = plan_of({**MODEL, "max_waiting": 7}, {"PAGEMILL_API_KEY": "k"})
    assert plan.all_settings()["tenants"]["default"].max_waiting == 7
    assert plan.engine_config().tenants["default"].max_waiting == 7


def test_replicas_give_each_other_blocks_unless_that_is_switched_off():
    keys = {"PAGEMILL_API_KEY": "k"}
    one, other = (plan_of({**MODEL, "replicas": 3}, keys) for _ in range(2))
    assert one.peering().host == ""
    assert one.peering().secret != other.peering().secret
    assert one.peering().secret.hex() not in repr(one)
    assert repr(one.peering().secret) not in repr(one)
    given = plan_of({**MODEL, "replicas": 3, "kv_transfer_host": "10.0.0.7"}, {**keys, SECRET: "ours" * 8})
    assert given.peering() == Peering(b"ours" * 8, "10.0.0.7")
    assert plan_of({**MODEL, "replicas": 3, "kv_transfer": False}, keys).peering() is None
    assert plan_of({**MODEL, "replicas": 1}, keys).peering() is None
    assert plan_of({**MODEL, "replicas": 3, "prefill_replicas": 2}, keys).prefill_replicas == 2
    for wrong in ({"prefill_replicas": 3}, {"prefill_replicas": 1, "kv_transfer": False}, {"prefill_replicas": "x"}):
        with pytest.raises(ConfigError, match="prefill_replicas"):
            plan_of({**MODEL, "replicas": 3, **wrong}, keys)


def test_an_unknown_routing_is_refused():
    with pytest.raises(ConfigError, match="'fastest'; it must be least-work or round-robin"):
        plan_of({**MODEL, "routing": "fastest"}, {"PAGEMILL_API_KEY": "k"})


def test_what_keeps_replicas_from_finding_blocks_is_refused():
    keys = {"PAGEMILL_API_KEY": "k"}
    with pytest.raises(ConfigError, match=r"kv_transfer_host is 0\.0\.0\.0, by which no replica finds another"):
        plan_of({**MODEL, "replicas": 3, "kv_transfer_host": "0.0.0.0"}, keys)
    with pytest.raises(ConfigError, match=f"{SECRET} has 5 bytes; it needs at least 32"):
        plan_of({**MODEL, "replicas": 3}, {**keys, SECRET: "short"})
    alone = {**MODEL, "replicas": 3, "prefill_replicas": 1, "enable_prefix_caching": False}
    with pytest.raises(ConfigError, match="prefill_replicas is 1, but enable_prefix_caching is off"):
        plan_of(alone, keys).engine_config()
