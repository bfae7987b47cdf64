"""The end of a fleet on this machine: engines have time to write what they hold to disk, and what is killed is said."""

import contextlib
import sys
from types import SimpleNamespace

import pytest

from pagemill.distributed import driver, local
from pagemill.distributed.plan import FleetPlan
from pagemill.frontend.process_client import KEEPING_TIMEOUT_S
from pagemill.frontend.supervisor import RestartLimits
from pagemill.server.access.limits import ServerLimits


def plan(**settings):
    limits = ServerLimits(drain_timeout=7)
    return FleetPlan(model="m", names=["m"], settings=settings, replicas=2, address=("127.0.0.1", 0), limits=limits)


@pytest.mark.parametrize(("settings", "keeping_s"), [({}, 0), ({"kv_disk_memory": "1GiB"}, KEEPING_TIMEOUT_S)])
def test_engines_with_a_disk_have_as_long_as_in_a_single_server(monkeypatch, settings, keeping_s):
    waited = {}

    class Part:
        def __init__(self, *_):
            pass

        def stop(self, signals, timeout_s):
            waited[type(self)] = timeout_s

    cluster, front_end = type("Cluster", (Part,), {}), type("FrontEnd", (Part,), {})
    monkeypatch.setattr(local, "_Cluster", cluster)
    monkeypatch.setattr(local, "_FrontEnd", front_end)
    for name in ("_live", "_adopt_orphans", "_end_descendants"):
        monkeypatch.setattr(local, name, lambda *_: None)
    monkeypatch.setattr(local, "log_pipe", lambda path: contextlib.nullcontext(str(path)))
    monkeypatch.setattr(local, "os", SimpleNamespace(environ={}))
    local.serve_fleet(plan(**settings), RestartLimits(), print)
    assert waited == {front_end: 7 + local.SHUTDOWN_S, cluster: keeping_s + local.SHUTDOWN_S}


@pytest.mark.parametrize(("keeping_s", "looks", "asked"), [(0, 0, []), (60, 3, ["delete"]), (0.02, None, ["delete"])])
def test_ray_is_shut_down_once_engines_have_written(monkeypatch, keeping_s, looks, asked):
    """Ray Serve's own end waits for 30 s, however long its replicas may take."""
    called, looked = [], []

    def status():
        looked.append(None)
        return SimpleNamespace(applications={} if len(looked) == looks else {driver.APPLICATION: None})

    serve = SimpleNamespace(
        delete=lambda name, _blocking: called.append("delete"), status=status, shutdown=lambda: called.append("end")
    )
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve, shutdown=lambda: called.append("ray")))
    monkeypatch.setattr(driver, "LOOK_S", 0.01)
    driver._stop(keeping_s)  # noqa: SLF001
    assert called == [*asked, "end", "ray"]
    assert looks is None or len(looked) == looks


def test_what_is_killed_at_the_end_is_said(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(local._Cluster, "module", "stubborn_child")  # noqa: SLF001
    cluster = local._Cluster(plan(), str(tmp_path))  # noqa: SLF001
    cluster.begin()
    assert cluster.listen() is None
    cluster.stop(SimpleNamespace(count=0), 0.1)
    cluster._child.end()  # noqa: SLF001
    assert [record.message for record in caplog.records] == [local._Cluster.killed]  # noqa: SLF001
