"""The application for Ray Serve, as Ray gets it. Needs pagemill[ray], and no cluster."""

import pytest

pytest.importorskip("ray", reason="pagemill[ray] is not installed")

from pagemill.config import EngineConfig
from pagemill.distributed.app import ENDING_S, application
from pagemill.distributed.plan import FleetPlan
from pagemill.frontend.process_client import KEEPING_TIMEOUT_S


@pytest.mark.parametrize(("settings", "keeping_s"), [({}, 0), ({"kv_disk_memory": "1GiB"}, KEEPING_TIMEOUT_S)])
def test_only_replicas_with_a_disk_have_time_to_write_to_it(monkeypatch, settings, keeping_s):
    monkeypatch.setattr(FleetPlan, "engine_config", lambda plan: EngineConfig(model=plan.model))
    plan = FleetPlan(model="m", names=["m"], settings=settings, replicas=2)
    front_end = application(plan)._bound_deployment  # noqa: SLF001
    engines = front_end.init_args[0]._bound_deployment  # noqa: SLF001
    least_s = plan.limits.drain_timeout + ENDING_S
    ends_s = [each._deployment_config.graceful_shutdown_timeout_s for each in (front_end, engines)]  # noqa: SLF001
    assert ends_s == [least_s, least_s + keeping_s]
