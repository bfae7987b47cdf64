"""Engines with host memory or a disk say at their start where blocks lie, and refuse what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.engine import tiers as engine_tiers
from pagemill.errors import ConfigError
from pagemill.kvcache import host_store
from pagemill.tenant_limits import TenantLimits
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow

SMALL = {"kv_memory": 30 * FRAME_BYTES, "max_model_len": 352, "max_num_seqs": 2, "max_num_batched_tokens": 128,
         "target_tpot_ms": "off"}  # fmt: skip


@pytest.mark.parametrize("compression", ["off", "zstd"])
def test_a_host_tier_below_one_block_is_refused(make_engine, compression):
    with pytest.raises(ConfigError, match="kv_host_memory is 1000, but one block takes"):
        make_engine(**SMALL, kv_host_memory=1000, kv_host_compression=compression)


@pytest.mark.parametrize("path", ["/proc/x", __file__, f"{__file__}/kv", "~nobody-of-this-name/kv"])
def test_a_bad_folder_is_refused_by_its_name(make_engine, path):
    with pytest.raises(ConfigError, match=f"kv_disk_path is '{path}', .*; name another one") as caught:
        make_engine(**SMALL, kv_disk_memory="1GiB", kv_disk_path=path)
    assert caught.value.param == "kv_disk_path"


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_that_would_hold_nothing_is_refused(make_engine, tmp_path, tier):
    setting = {"kv_host_memory": "64MiB"} if tier == "host" else {"kv_disk_memory": "64MiB", "kv_disk_path": tmp_path}
    with pytest.raises(ConfigError, match=r"is '64MiB', but without prefix caching .* leave kv_") as caught:
        make_engine(**SMALL, **{name: str(value) for name, value in setting.items()}, enable_prefix_caching=False)
    assert caught.value.param == f"kv_{tier}_memory"


@pytest.mark.parametrize(
    ("blocks", "free", "gpus", "settings"),
    [
        (30, 60, 0, {}),
        (0, 59, 0, {}),
        (30, 120, 2, {}),
        (0, 119, 2, {}),
        (0, 120, 0, {"own_memory": False}),
        (0, 120, 0, {"enable_prefix_caching": False}),
        (0, 120, 0, {"kv_host_memory": "0"}),
        (10, 0, 9, {"kv_host_memory": 10 * FRAME_BYTES}),
    ],
    ids=str,
)
def test_host_memory_of_the_pools_size_is_the_default_beside_a_gpu(
    make_engine, monkeypatch, blocks, free, gpus, settings
):
    """If half of what is free, shared with the machine's other GPUs, has room for it."""
    monkeypatch.setattr(engine_tiers, "host_memory", lambda: (free * FRAME_BYTES, 1 << 40))
    monkeypatch.setattr(engine_tiers, "num_gpus", lambda: gpus)
    core = make_engine(**SMALL | {"own_memory": True} | settings)
    assert core.ready.host_bytes == blocks * FRAME_BYTES
    assert ("MiB of host memory for evicted blocks" in core.ready.description) == (blocks > 0)
    core.close()


@pytest.mark.parametrize("shared", [False, True])
def test_the_start_says_where_blocks_lie_and_what_the_disk_has_no_room_for(make_engine, tmp_path, caplog, shared):
    settings = {"kv_disk_path": str(tmp_path), "kv_disk_shared": shared, "kv_host_memory": 10 * FRAME_BYTES}
    core = make_engine(**SMALL, **settings, kv_disk_memory="1GiB")
    core.close()
    said = core.ready.description
    assert f" MiB of host memory and up to 1.0 GiB on disk, in {tmp_path} for evicted blocks" in said
    assert not caplog.messages
    make_engine(**SMALL, **settings, kv_disk_memory="100PiB").close()
    assert f"kv_disk_memory is 100PiB, and {tmp_path} has room for" in caplog.text


def test_beside_a_gpu_an_engine_starts_without_host_memory_that_the_system_refuses(make_engine, monkeypatch, caplog):
    def refuse(*given):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(host_store, "private_memory", refuse)
    core = make_engine(**SMALL, own_memory=True)
    assert core.tiers is None
    assert core.ready.host_bytes == 0
    assert "no host memory for evicted KV blocks: the pool has 4 MiB, and" in caplog.text
    core.close()


def test_an_engine_that_is_refused_leaves_no_tier_open(tmp_path, make_engine):
    wrong = {"tenants": {"a": TenantLimits(guaranteed_blocks=10**6)}}
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        with pytest.raises(ConfigError, match="1000000 blocks would be guaranteed"):
            make_engine(**SMALL, kv_disk_memory="20MiB", kv_disk_path=str(tmp_path), **wrong)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
