"""Step times of devices that are not here: by hand, against what is published, and what cannot be is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pagemill.errors import CalibrationError, ConfigError
from pagemill.simulate.roofline import (
    DEVICES,
    ITEMSIZE,
    SHAPES,
    DeviceModel,
    ModelShape,
    Roofline,
    read_device,
    read_shape,
)
from pagemill.simulate.step_time import StepWork

DEVICE = DeviceModel(
    about="a device",
    memory_bytes=200_000,
    bytes_per_s=1e6,
    flop_per_s={"bfloat16": 1e7, "int8": 2e7},
    link_bytes_per_s=1e5,
    efficiency={"memory": 0.5, "kv": 0.5, "products": 0.5, "attention": 0.25, "link": 0.8, "peers": 0.5},
    step_s=0.01,
    row_s=0.001,
    memory_share=0.9,
    working_bytes=10_000,
    sources={},
)
MODEL = ModelShape(
    about="a model",
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden=32,
    intermediate=64,
    gated=True,
    vocabulary=100,
    tied=False,
    positions=0,
    source="",
)


@pytest.mark.parametrize(
    ("dtype", "work", "seconds"),
    [
        # 18,432 weights of layers: 36,864 bytes at 500,000 a second; 36,864 FLOP a token at 5,000,000 a second, so ten
        # tokens take as long as the bytes. The head has 3,200. A key and value have 64 bytes a layer, a pair 128 FLOP.
        ("bfloat16", StepWork(2, 3, 2, 50, 40), 0.012 + 0.073728 + 0.0128 + 40 * 0.000128 + 50 * 0.0000512),
        ("bfloat16", StepWork(1, 20, 0, 0, 0), 0.011 + 20 * 0.0073728),
        ("bfloat16", StepWork(1, 20, 20, 0, 0), 0.011 + 20 * 0.0073728 + 20 * 0.00128),
        # Half the bytes of weights, twice the products; attention and K/V stay in bfloat16.
        ("int8", StepWork(2, 3, 2, 50, 40), 0.012 + 0.036864 + 0.0064 + 40 * 0.000128 + 50 * 0.0000512),
        # Blocks that are only moved need no weights.
        ("bfloat16", StepWork(0, 0, 0, 0, 0), 0.01),
    ],
)
def test_seconds_are_those_by_hand(dtype, work, seconds):
    assert Roofline(DEVICE, MODEL, dtype).seconds(work) == pytest.approx(seconds)


def test_keys_take_as_long_as_their_format_is_read():
    work = StepWork(2, 3, 2, 50, 400)
    slow = replace(DEVICE, kv_formats={"fp8_e4m3": 0.25})
    plain, known, other = (
        Roofline(device, MODEL, "bfloat16", kv).seconds(work)
        for device, kv in ((DEVICE, "fp8"), (slow, "fp8"), (slow, "fp8_e5m2"))
    )
    # A key and value have 32 bytes a layer, at 500,000 a second or a quarter of that.
    assert known - plain == pytest.approx(400 * 3 * 32 / 500_000)
    assert other == plain


def test_the_pool_is_what_the_weights_leave():
    assert MODEL.parameters == 18_432 + 2 * 3_200
    assert Roofline(DEVICE, MODEL, "bfloat16").kv_bytes == 180_000 - 10_000 - 2 * 24_832
    assert Roofline(DEVICE, replace(MODEL, tied=True, positions=10), "int8").kv_bytes == 170_000 - 18_432 - 3_520
    with pytest.raises(ConfigError, match=r"a model in bfloat16 has 0.0 GB of weights; a device leaves"):
        Roofline(replace(DEVICE, memory_bytes=60_000), MODEL, "bfloat16").kv_bytes  # noqa: B018


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("opt-13b", 12.85),
        ("llama-7b", 6.738),
        ("llama-13b", 13.02),
        ("smollm2-135m", 0.1345),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert read_shape(name).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_opt_13b_on_an_a100_is_as_the_paper_says():
    """Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023, section 3 and table 1."""
    roofline = Roofline(read_device("a100-40"), read_shape("opt-13b"), "float16")
    token_bytes = roofline.shape.frame_bytes(16) / 16
    assert token_bytes == 800 * 1024
    assert roofline.weight_bytes / 1e9 == pytest.approx(26, rel=0.02)
    assert roofline.kv_bytes / token_bytes == pytest.approx(15_700, rel=0.1)


@pytest.mark.parametrize("name", json.loads(DEVICES.read_text()))
def test_every_figure_of_a_device_has_its_source(name):
    device = read_device(name)
    sourced = {figure.strip() for names in device.sources for figure in names.split(",")}
    assert sourced == set(asdict(device)) - {"about", "sources"}
    assert all(device.sources.values())
    assert device.flop_per_s["float32"] < device.flop_per_s["bfloat16"] < device.flop_per_s["int8"]
    slow = StepWork(1, 1, 1, 1000, 1000)
    steps = [Roofline(device, read_shape("llama-3-8b"), dtype).seconds(slow) for dtype in ("float32", "bfloat16")]
    assert 1.5 < steps[0] / steps[1] < 2


@pytest.mark.parametrize("name", json.loads(SHAPES.read_text()))
def test_every_shape_has_its_source(name):
    assert read_shape(name).source


def test_own_devices_and_shapes_are_read_from_files(tmp_path):
    for kind, read, value in (("device", read_device, DEVICE), ("shape", read_shape, MODEL)):
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps({"mine": asdict(value)}))
        assert read(str(path)) == value


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"there is no device 'a101'; choose one of a100-40, .*, or give a .json file"
    ):
        read_device("a101")
    with pytest.raises(ConfigError, match="there is no shape 'gpt-5'; choose one of llama-3-8b"):
        read_shape("gpt-5")
    with pytest.raises(ConfigError, match="a device has no rate for float8; choose one of bfloat16, int8"):
        Roofline(DEVICE, MODEL, "float8")
    wrong = asdict(DEVICE)
    for broken in (
        {},
        {"mine": {}},
        {"mine": {**wrong, "efficiency": {"memory": 1.0}}},
        {"mine": {**wrong, "bytes_per_s": 0.0}},
        {"mine": {**wrong, "kv_formats": {"int4": 0.0}}},
        {"mine": {**wrong, "flop_per_s": {"fp4": 1.0}}},
        [],
        [wrong],
        {"mine": [1]},
        "mine",
    ):
        path = tmp_path / "broken.json"
        path.write_text(json.dumps(broken))
        with pytest.raises(
            CalibrationError, match=r"broken.json cannot be read as a device: (it|efficiency|bytes|kv|flop|Obj)"
        ):
            read_device(str(path))
    for name, value, said in (
        ("step_s", -1.0, "step_s is -1.0; it must be 0 or more"),
        ("memory_bytes", "40GB", r"Expected `int`, got `str` - at `\$.memory_bytes`"),
        ("memory_bytes", 1.5, "Expected `int`, got `float`"),
        ("memory_share", 1.2, "memory_share is 1.2; it must be above 0 and at most 1"),
        ("bytes_per_s", float("nan"), "bytes_per_s is nan; it must be above 0"),
        ("link_bytes_per_s", 0, "link_bytes_per_s is 0.0; it must be above 0"),
        ("peers", 0, "peers is 0; it must be 1 or more"),
        ("price_per_hour", -2, "price_per_hour is -2.0; it must be 0 or more, or null"),
        ("sources", ["me"], "Expected `object`, got `array`"),
        ("flop_per_s", {}, "flop_per_s is empty; give the rate of one dtype or more: float32"),
        ("bytes_per_sec", 1.0, "it has bytes_per_sec, which mean nothing; its fields are about, memory_bytes"),
    ):
        path.write_text(json.dumps({"mine": wrong | {name: value}}))
        with pytest.raises(CalibrationError, match=said):
            read_device(str(path))
    for name, value, said in (
        ("layers", 0, "layers is 0; it must be 1 or more"),
        ("kv_heads", 7, "kv_heads is 7; it must be a divisor of heads"),
        ("windows", [16], "windows is .*; it must be null, or for each layer null or 1 or more tokens"),
        ("gated", 1, "Expected `bool`, got `int`"),
    ):
        path.write_text(json.dumps({"mine": asdict(MODEL) | {name: value}}))
        with pytest.raises(CalibrationError, match=said):
            read_shape(str(path))
    assert set(ITEMSIZE) >= set(read_device("h100").flop_per_s)


@pytest.mark.parametrize(
    ("written", "read"), [("80e9", 80 * 10**9), ("8.5e10", 85 * 10**9), ("80000000000.0", 80 * 10**9)]
)
def test_a_device_file_may_write_whole_numbers_with_an_exponent(tmp_path: Path, written: str, read: int) -> None:
    entry = {"h100": json.loads(DEVICES.read_text())["h100"] | {"memory_bytes": "MEMORY"}}
    (tmp_path / "device.json").write_text(json.dumps(entry).replace('"MEMORY"', written))
    assert read_device(str(tmp_path / "device.json")).memory_bytes == read


def test_a_device_file_with_a_broken_number_of_bytes_is_refused(tmp_path: Path) -> None:
    entry = {"h100": json.loads(DEVICES.read_text())["h100"] | {"memory_bytes": 80.5}}
    (tmp_path / "device.json").write_text(json.dumps(entry))
    with pytest.raises(CalibrationError, match="memory_bytes"):
        read_device(str(tmp_path / "device.json"))
