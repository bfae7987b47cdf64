from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fake_flash_attn
import fake_flashinfer
import pytest
import torch

from pagemill.attention import measured_choice, selection
from pagemill.attention.flash_attn_backend import FA2_SUPPORT, FA3_SUPPORT, Fa2, Fa3
from pagemill.attention.flashinfer_backend import FlashInfer
from pagemill.attention.interface import AttentionBackend
from pagemill.attention.library_backend import LibraryAttention
from pagemill.attention.measured_choice import MeasuredChoice, time_attention
from pagemill.attention.sdpa_operators import HeadShape
from pagemill.attention.selection import candidates, choose_attention
from pagemill.attention.support import AttentionNeeds, Support
from pagemill.attention.torch_backend import TorchAttention
from pagemill.errors import ConfigError

CPU = torch.device("cpu")
H100 = AttentionNeeds(torch.bfloat16, "bfloat16", 16, 32, 8, 128, (None,), None, (9, 0))


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    both = [Fa3(fake_flash_attn.fa3()), Fa2(fake_flash_attn.fa2())]
    monkeypatch.setattr(selection, "flash_attn_libraries", lambda: both)
    monkeypatch.setattr(selection, "flashinfer_libraries", lambda: [FlashInfer(fake_flashinfer.flashinfer())])
    monkeypatch.setattr(selection, "triton_refusal", lambda: None)


def chosen(name: str, needs: AttentionNeeds, fastest: str = "flash_attn") -> AttentionBackend:
    return choose_attention(name, needs, candidates(needs, CPU), lambda backends: fastest)


@pytest.mark.parametrize(
    ("needs", "library"),
    [(H100, "flash_attn_3"), (replace(H100, block_size=256), "flash_attn-2.8.3"),
     (replace(H100, block_size=256, capability=(8, 0)), "flash_attn-2.8.3"), (H100, "flashinfer-0.7")],
)  # fmt: skip
def test_the_version_that_takes_the_blocks_is_taken(needs: AttentionNeeds, library: str) -> None:
    named = "flashinfer" if library.startswith("flashinfer") else "flash_attn"
    for name in (named, "auto"):
        backend = chosen(name, needs, fastest=named)
        assert isinstance(backend, LibraryAttention)
        assert backend.name.startswith(library)
        assert "+triton" in backend.name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": (7, 5)}, "capability 9.0 to 9.0, and this GPU has 7.5; or it needs compute capability 8.0"),
        ({"capability": (8, 0)}, "blocks of 256 tokens, not 16; set block_size 256"),
        (
            {"dtype": torch.float32, "kv_format": "float32"},
            "in float16 or bfloat16, not in float32; set dtype",
        ),
        ({"kv_format": "int8"}, "caches in float16 or bfloat16, not in int8; set kv_cache_dtype"),
        ({"kv_format": "float16"}, "the queries' bfloat16, not in float16; set kv_cache_dtype 'auto'"),
        ({"head_dim": 264}, "multiples of 8 up to 256 dimensions, not 264"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused_with_the_way_out(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=r"^attention_backend 'flash_attn' cannot be used: ") as caught:
        chosen("flash_attn", replace(H100, **change))
    assert reason in str(caught.value)
    assert caught.value.param == "attention_backend"


def test_torchs_own_attention_is_taken_where_an_operator_works(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    works = selection.working_operator
    monkeypatch.setattr(selection, "working_operator", lambda *given: tried.append(given) or works(*given))
    assert type(chosen("triton", H100)).__name__ == "TritonAttention"
    assert not tried, "what is not asked for is not tried"
    backend = chosen("sdpa", H100)
    assert backend.name.startswith(f"sdpa-{torch.__version__}-flash_for_cpu-")
    assert "+triton" in backend.name
    assert tried == [(HeadShape(torch.bfloat16, 32, 8, 128), CPU)]
    monkeypatch.setattr(selection, "working_operator", lambda *_: "none of torch's operators runs: too old")
    with pytest.raises(
        ConfigError, match=r"2048 tokens of a prompt and more, and a step has at most 512; raise max_num"
    ):
        chosen("sdpa", replace(H100, step_tokens=512))
    with pytest.raises(ConfigError, match="'sdpa' cannot be used: none of torch's operators runs: too old; or use"):
        chosen("sdpa", H100)
    assert type(chosen("auto", replace(H100, kv_format="int8"))).__name__ == "TritonAttention"
    for change, reason in (
        ({"capability": (7, 5)}, "capability 8.0, and this GPU has 7.5"),
        ({"kv_format": "int4_mixed"}, "fp8_e4m3 or fp8_e5m2, not in int4_mixed"),
        ({"kv_format": "float16"}, "the queries' bfloat16, not in float16"),
        ({"soft_cap": 30.0}, "no soft cap"),
        ({"head_dim": 20}, "multiples of 8 up to 256 dimensions"),
        ({"value_dim": 64}, "values beside keys"),
    ):
        with pytest.raises(ConfigError, match=f"'sdpa' cannot be used: .*{reason}"):
            chosen("sdpa", replace(H100, **change))


def test_windows_and_soft_caps_are_refused_where_there_are_none() -> None:
    support = Support(windows=False, soft_cap=False)
    assert support.refusal(H100) is None
    assert "no sliding windows" in str(support.refusal(replace(H100, windows=(None, 512))))
    assert "no soft cap" in str(support.refusal(replace(H100, soft_cap=50.0)))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, install in (("flash_attn", "flash-attn"), ("flashinfer", "flashinfer")):
        monkeypatch.setattr(selection, f"{name}_libraries", list)
        with pytest.raises(ConfigError, match=rf"install pagemill\[{install}\]"):
            chosen(name, H100)
    for needs in (H100, replace(H100, capability=(7, 5))):
        assert type(chosen("auto", needs, "triton")).__name__ == "TritonAttention"
    none = choose_attention(
        "auto", replace(H100, soft_cap=30.0), candidates(replace(H100, soft_cap=30.0), CPU), pytest.fail
    )
    assert type(none).__name__ == "TritonAttention", "nothing to measure"


def test_auto_takes_torch_only_as_the_last_resort(caplog: pytest.LogCaptureFixture) -> None:
    assert type(chosen("auto", replace(H100, kv_format="int4"))).__name__ == "TritonAttention"
    assert isinstance(chosen("auto", replace(H100, capability=(7, 0))), TorchAttention)
    assert "capability 7.5, and this GPU has 7.0" in caplog.text
    assert type(chosen("auto", H100, "triton")).__name__ == "TritonAttention"
    assert isinstance(chosen("torch", H100), TorchAttention)
    assert type(chosen("auto", replace(H100, kv_format="int8"), "sdpa")).__name__ == "SdpaAttention"
    for support in (FA2_SUPPORT, FA3_SUPPORT):
        assert support.refusal(replace(H100, capability=None)) == "it needs an NVIDIA GPU; use device 'cuda'"


def no_locks(*_: object) -> None:
    raise OSError(38, "Function not implemented")


def test_a_measurement_is_kept_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast, broken = TorchAttention(), TorchAttention(), TorchAttention()
    slow.name, fast.name, broken.name = "slow", "fast", "broken"
    measured = []

    def time_of(backend: AttentionBackend) -> float:
        measured.append(backend.name)
        if backend is broken:
            raise RuntimeError("no compiler")
        return {"slow": 2.0, "fast": 1.0}[backend.name]

    file = tmp_path / "home" / "attention.json"

    def choice(machine: str = "H100", **backends: AttentionBackend) -> tuple[str, list[str]]:
        measured.clear()
        return MeasuredChoice(file, machine, H100, time_of)(backends), list(measured)

    assert choice(triton=slow, flash_attn=fast) == ("flash_attn", ["slow", "fast"])
    assert choice(triton=slow, flash_attn=fast) == ("flash_attn", [])
    assert choice("H200", triton=slow, flash_attn=fast) == ("flash_attn", ["slow", "fast"])
    assert choice(triton=slow, flash_attn=broken) == ("triton", ["slow", "broken"]), "another version"
    assert choice("H200", triton=slow, flash_attn=fast)[1] == [], "others' times are kept"
    for damage in ("", "{", "[1]", json.dumps({"H100": 3}), json.dumps({"H100": {"slow": "x"}})):
        file.write_text(damage)
        assert choice(triton=slow, flash_attn=fast) == ("flash_attn", ["slow", "fast"])
    with pytest.raises(RuntimeError, match="no attention runs"):
        choice(flash_attn=broken)
    with monkeypatch.context() as patch:
        patch.setattr(measured_choice.fcntl, "flock", no_locks)
        assert choice("H300", triton=slow, flash_attn=fast) == ("flash_attn", ["slow", "fast"])


@pytest.mark.parametrize("kv_format", ["bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_what_is_timed_runs(kv_format: str) -> None:
    needs = AttentionNeeds(torch.bfloat16, kv_format, 256, 2, 1, 16, (None,), None, None)
    assert time_attention(TorchAttention(), needs, CPU) > 0
