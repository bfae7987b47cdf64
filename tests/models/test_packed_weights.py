"""Packed weights that are kept on disk: the same bits as without them, found by all that decides them, and checked."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import random
import threading

import pytest
import torch
import xxhash
from gguf import GGMLQuantizationType, quants
from gguf_files import write_gguf
from quantized_folders import quantize_folder
from small_llama import load, logits, save_llama
from transformers import MixtralConfig, MixtralForCausalLM

from harness import load_on
from pagemill import _kernels
from pagemill.errors import ConfigError, CorruptWeightsError
from pagemill.models.loading import file_digest, packed_file
from pagemill.models.loading.checkpoint import MappedFile
from pagemill.models.loading.packed_store import PackedStore
from pagemill.models.sharding import Sharding
from parity.threaded_ranks import on_ranks
from waiting import wait_until

SIZES = {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), attention_bias=True, **SIZES)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


@pytest.fixture
def store(root):
    return PackedStore(root, 64 << 20)


def save_mixtral(folder):
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
                           max_position_embeddings=128, sliding_window=None, initializer_range=0.2)  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def save_gptq(folder):
    save_llama(folder, **SIZES)
    quantize_folder(folder, "gptq")
    return folder


def save_gguf(folder):
    def encode(name, weight):
        return quants.quantize(weight, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0

    return write_gguf(save_llama(folder, **SIZES), folder / "model.gguf", "llama", {}, encode)


@pytest.mark.parametrize(
    ("save", "how"),
    [
        (lambda path: save_llama(path, attention_bias=True, **SIZES), {"dtype": "float32"}),
        (lambda path: save_llama(path, torch.bfloat16, **SIZES), {"dtype": "float32"}),
        (lambda path: save_llama(path, tie_word_embeddings=True, **SIZES), {"dtype": "bfloat16"}),
        (lambda path: save_llama(path, attention_bias=True, **SIZES), {"dtype": "bfloat16", "quantization": "int8"}),
        (save_mixtral, {"dtype": "bfloat16"}),
        (save_gptq, {"dtype": "bfloat16", "quantization": "gptq"}),
        (save_gptq, {"dtype": "float32"}),
        (save_gguf, {"dtype": "bfloat16", "quantization": "gguf"}),
        (save_gguf, {"dtype": "float32"}),
    ],
    ids=["float32", "widened", "tied", "int8", "experts", "gptq", "gptq-exact", "gguf", "gguf-exact"],
)
def test_the_bits_are_those_without_it_and_the_model_is_not_read_again(save, how, tmp_path, store, monkeypatch):
    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(file_digest, "LEAST_KEPT_BYTES", 0)
    monkeypatch.setattr(file_digest, "SETTLED_NS", -1)
    path = save(tmp_path / "model")
    expected = logits(load_on("cpu", path, **how))
    assert torch.equal(logits(load_on("cpu", path, packed=store, **how)), expected)

    def refuse(*arguments):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(MappedFile, "read", refuse)
    again = load_on("cpu", path, packed=store, **how)
    (file,) = store.root.iterdir()
    assert store.mapped_bytes == 2 * file.stat().st_size
    del store
    file.unlink()  # what is mapped stays
    assert torch.equal(logits(again), expected)


def test_a_system_without_huge_pages_serves_as_well(tmp_path, store, monkeypatch, caplog):
    class SmallPages(mmap.mmap):
        def madvise(self, advice, *where):
            if advice == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, "Invalid argument")
            super().madvise(advice, *where)

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    path = save_llama(tmp_path / "model", vocab_size=4096, **SIZES)
    expected = logits(load_on("cpu", path))
    for _ in range(2):
        assert torch.equal(logits(load_on("cpu", path, packed=store)), expected)
    (file,) = store.root.iterdir()
    assert store.mapped_bytes == 2 * file.stat().st_size
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_each_rank_has_its_own_part(folder, store):
    def run(exchange):
        return logits(load_on("cpu", folder, packed=store, sharding=Sharding(exchange)))

    expected = logits(load_on("cpu", folder))
    for _ in range(2):
        assert all(torch.equal(found, expected) for found in on_ranks(2, run)[0])
        assert len([*store.root.iterdir()]) == 2


def test_whatever_decides_the_weights_decides_the_file(folder, store, monkeypatch):
    def load_and_count(**how):
        load_on("cpu", folder, packed=store, **how)
        return len([*store.root.iterdir()])

    assert load_and_count() == 1
    assert load_and_count() == 1
    assert load_and_count(dtype="bfloat16") == 2
    assert load_and_count(dtype="bfloat16", quantization="int8") == 3
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert load_and_count() == 4
    before = _kernels.isa()
    try:
        _kernels.use_isa("generic")
        assert load_and_count() == 5
    finally:
        _kernels.use_isa(before)
    monkeypatch.setattr(_kernels, "sources", "others")
    assert load_and_count() == 5  # asked once per process
    assert load_and_count(hf_overrides={"rope_theta": 5000.0}) == 6


def damages(size):
    """Ways to damage a file of so many bytes, and what is said of it."""
    flips = [(0, "damaged"), (size // 2, "damaged"), (size - 30, "its end"), (size - 60, "index is damaged")]
    for at, said in flips:
        yield lambda content, at=at: content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :], said
    yield lambda content: content[:-1], "its end"
    yield lambda content: content[: size // 2], "its end"
    yield lambda content: b"", "it has 0 bytes"
    yield lambda content: random.Random(0).randbytes(size), "its end"


def test_a_damaged_file_is_made_anew(folder, store, caplog):
    expected = logits(load_on("cpu", folder, packed=store))
    (file,) = store.root.iterdir()
    content = file.read_bytes()
    for damage, said in damages(len(content)):
        file.write_bytes(damage(content))
        caplog.clear()
        assert torch.equal(logits(load_on("cpu", folder, packed=store)), expected)
        (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert said in line
        assert str(file) in line
        assert file.read_bytes() == content


def forge(file, change):
    """Changes the index of a file, with checksums that agree."""
    content = file.read_bytes()
    magic, begin, nbytes, _ = packed_file.TRAILER.unpack(content[-packed_file.TRAILER.size :])
    index = json.loads(content[begin : begin + nbytes])
    change(index["parts"])
    changed = json.dumps(index).encode()
    trailer = packed_file.TRAILER.pack(magic, begin, len(changed), xxhash.xxh3_64_digest(changed))
    file.write_bytes(content[:begin] + changed + trailer)


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.pop("lm_head"),
        lambda parts: parts["lm_head"][0].__setitem__(0, 1 << 20),  # more rows than it has
        lambda parts: parts["lm_head"][0].__setitem__(1, -1),
        lambda parts: parts["lm_head"][0].__setitem__(2, 17),
        lambda parts: parts["lm_head"][0].__setitem__(2, 3),  # coded, which needs patches
        lambda parts: parts["lm_head"][0].__setitem__(3, 1),  # of another dtype
        lambda parts: parts["lm_head"][1][0].__setitem__(0, 1 << 40),
        lambda parts: parts["lm_head"][1][0].__setitem__(0, 1),  # not aligned
        lambda parts: parts["lm_head"][1][0].__setitem__(1, 64),
        lambda parts: parts["lm_head"][1].__setitem__(0, None),
        lambda parts: parts["model.norm"][2].__setitem__(1, 1 << 40),
        lambda parts: parts["model.norm"][1].__setitem__(0, 4),
        lambda parts: parts.__setitem__("model.norm", 3),
    ],
)
def test_nothing_is_used_that_lies_elsewhere(folder, store, caplog, change):
    expected = logits(load_on("cpu", folder, packed=store))
    (file,) = store.root.iterdir()
    content = file.read_bytes()
    forge(file, change)
    assert torch.equal(logits(load_on("cpu", folder, packed=store)), expected)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert file.read_bytes() == content


def test_those_used_longest_ago_make_room(folder, store, caplog):
    files = {}
    for age, dtype in enumerate(("float32", "bfloat16")):
        load_on("cpu", folder, packed=store, dtype=dtype)
        (files[dtype],) = set(store.root.iterdir()) - {*files.values()}
        os.utime(files[dtype], (1000 + age, 1000 + age))
    load_on("cpu", folder, packed=store, dtype="float32")  # it has been used last now
    (store.root / "left.part").write_bytes(bytes(1 << 20))  # of a process that has died
    alone = PackedStore(store.root.with_name("alone"), 64 << 20)
    alone.root.mkdir()
    load_on("cpu", folder, packed=alone, dtype="float16")
    limit = files["float32"].stat().st_size + sum(file.stat().st_size for file in alone.root.iterdir())
    load_on("cpu", folder, packed=PackedStore(store.root, limit), dtype="float16")
    held = {*store.root.iterdir()}
    assert files["float32"] in held
    assert files["bfloat16"] not in held
    assert sum(file.stat().st_size for file in held) <= limit
    needed = next(alone.root.iterdir()).stat().st_size
    with pytest.raises(ConfigError, match=rf"weights_disk_memory is 1000 bytes.* take {needed}; raise it") as caught:
        load_on("cpu", folder, packed=PackedStore(store.root, 1000), dtype="float16")
    assert caught.value.param == "weights_disk_memory"
    assert not [*store.root.glob("*.part")]


def test_two_that_come_at_once_pack_once(store, caplog):
    caplog.set_level("INFO")
    made, results = [], []

    def assemble(keep):
        if not keep.checked:
            made.append(threading.get_ident())
            other.start()
            wait_until(lambda: "waiting for another process" in caplog.text, "the other one does not wait")
        return keep.tensor("weight", lambda: torch.ones(5000))

    def load_too():
        results.append(store.load("key", assemble))

    other = threading.Thread(target=load_too)
    load_too()
    other.join()
    assert len(made) == 1
    assert [result.tolist() for result in results] == [[1.0] * 5000] * 2
    assert [file.name for file in store.root.iterdir()] == ["key.weights"]


def test_what_the_disk_does_not_take_stays_in_memory(folder, store, monkeypatch, caplog):
    expected = logits(load_on("cpu", folder))

    def full(file, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert torch.equal(logits(load_on("cpu", folder, packed=store)), expected)
    assert "packed weights are not kept" in caplog.text
    assert "No space left" in caplog.text
    assert [*store.root.iterdir()] == []
    assert store.mapped_bytes == 0


def test_what_is_wrong_with_a_model_is_said_as_ever(tmp_path, store):
    path = save_llama(tmp_path / "model")
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4:] = b"\xff" * 4  # NaN
    weights.write_bytes(content)
    with pytest.raises(CorruptWeightsError, match="not finite"):
        load_on("cpu", path, packed=store)
    assert [*store.root.iterdir()] == []


def test_other_devices_keep_nothing_and_say_so(folder, store, caplog):
    load(folder, packed=store)
    assert "weights_disk_memory has no effect on cpu" in caplog.text
    assert [*store.root.iterdir()] == []
