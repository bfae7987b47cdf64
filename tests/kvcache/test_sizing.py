from __future__ import annotations

import pytest

from pagemill.errors import ConfigError, KVMemoryError
from pagemill.kvcache.sizing import host_memory, num_frames, parse_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("2g", 2 * GIB),
        ("100PiB", 100 * 2**50),
        ("2PB", 2 * 10**15),
        ("1p", 2**50),
        ("50%", 5 * GIB),
        (0.5, 5 * GIB),
        ("0.5", 5 * GIB),
        (1.0, 10 * GIB),
        ("100%", 10 * GIB),
    ],
)
def test_kv_memory_is_read(value: int | float | str, expected: int) -> None:
    assert parse_memory("kv_memory", value, 10 * GIB) == expected


@pytest.mark.parametrize("value", ["", "many", "5XB", "-1", -1, 0, 1.5, "150%", "0%", 0.0, -0.5, "1eMiB", "nan", "inf"])
def test_what_is_no_size_is_refused_by_name(value: int | float | str) -> None:
    with pytest.raises(ConfigError, match="kv_memory is") as error:
        parse_memory("kv_memory", value, 10 * GIB)
    assert error.value.param == "kv_memory"


def frames(**settings: object) -> int:
    return num_frames(1000, 10**7, free=6 * GIB, total=10 * GIB, **settings)


def test_the_default_takes_40_percent_and_no_more_than_can_be_filled() -> None:
    assert frames() == int(0.4 * 6 * GIB) // 1000
    assert num_frames(1000, 77, free=6 * GIB, total=10 * GIB) == 77


def test_the_three_ways_to_say_it() -> None:
    assert frames(kv_memory="1GiB") == GIB // 1000
    assert frames(kv_memory=0.5) == 3 * GIB // 1000
    assert frames(kv_cache_memory_bytes=GIB) == GIB // 1000
    assert frames(gpu_memory_utilization=0.9) == 5 * GIB // 1000  # 4 of 10 GiB are in use
    assert num_frames(1000, 5, free=6 * GIB, total=10 * GIB, kv_memory="1MB") == 1000  # asked for: not bounded


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kv_memory": "7GiB"}, KVMemoryError),
        ({"kv_memory": 999}, KVMemoryError),
        ({"kv_cache_memory_bytes": 7 * GIB}, KVMemoryError),
        ({"kv_cache_memory_bytes": 0}, ConfigError),
        ({"gpu_memory_utilization": 0.3}, KVMemoryError),
        ({"gpu_memory_utilization": 1.1}, ConfigError),
        ({"gpu_memory_utilization": 0.0}, ConfigError),
    ],
)
def test_what_can_not_be_had_names_setting_and_way_out(settings: dict[str, object], error: type[ConfigError]) -> None:
    with pytest.raises(error) as caught:
        frames(**settings)
    assert caught.value.param == next(iter(settings))
    assert str(next(iter(settings.values()))) in caught.value.message


def test_this_machines_memory() -> None:
    free, total = host_memory()
    assert 0 < free <= total
