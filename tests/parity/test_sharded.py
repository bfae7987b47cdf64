"""A model in parts has the bits of the whole: the same kernels sum each output over all of its inputs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import rank_process
import torch
from random_models import CASES, SIZES
from rank_process import load_part
from test_one_call import BY_NAME, hidden_states, steps_of
from threaded_ranks import on_ranks

from harness import load_on
from pagemill.errors import ConfigError
from pagemill.executor import shared_memory
from pagemill.executor.shared_memory import SharedExchange
from pagemill.models.decoder import Decoder
from pagemill.models.sharding import Sharding, SummingLinear, check_heads, cut
from pagemill.ops.torch_ops import TorchLinear

EACH = [case.name for case in CASES if not case.model_type.startswith("deepseek")]
"""Latent attention runs on one rank only."""


def run(decoder, steps, prompts, kv_dtype=None):
    """Hidden states and logits of every step."""
    states = hidden_states(type(decoder).forward, decoder, steps, prompts, kv_dtype)
    return states, [decoder.logits(each) for each in states]


def check_bits(folder, case, ranks, kv_dtype=None, **settings):
    prompts = case.prompts()
    settings["max_model_len"] = case.max_model_len
    whole = load_on("cpu", folder, **settings).decoder
    steps = steps_of(prompts)
    expected = run(whole, steps, prompts, kv_dtype)
    found, meeting = on_ranks(
        ranks, lambda exchange: run(load_part(exchange, folder, Decoder, **settings).decoder, steps, prompts, kv_dtype)
    )
    for rank in found:
        for ours, theirs in zip(rank, expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
    return len(steps), meeting


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", EACH)
def test_bits(name, ranks, tmp_path):
    """4 heads, 2 KV heads: with four ranks, two have the same."""
    BY_NAME[name].save(tmp_path)
    check_bits(tmp_path, BY_NAME[name], ranks, dtype="float32")


@pytest.mark.parametrize(
    ("settings", "kv_dtype"),
    [({"dtype": "bfloat16"}, None), ({"dtype": "float16"}, None), ({"dtype": "bfloat16", "quantization": "int8"}, None),
     ({"dtype": "float32"}, torch.int8)],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bits_of_every_form(settings, kv_dtype, ranks, tmp_path):
    """Sizes that are no multiple of a panel, cut into parts that are none; several pieces, wide batches."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 6 if ranks < 4 else 2, "hidden_size": 396,
             "intermediate_size": 722, "vocab_size": 163, "num_hidden_layers": 2}  # fmt: skip
    case = dataclasses.replace(BY_NAME["llama-bias"], lengths=(270, 20))
    case = dataclasses.replace(case, settings=case.settings | sizes | {"max_position_embeddings": 512})
    case.save(tmp_path)
    check_bits(tmp_path, case, ranks, kv_dtype, **settings)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bits_through_shared_memory(ranks, tmp_path, monkeypatch):
    """Processes whose C++ calls exchange by themselves, all families one after the other."""
    dtypes = {name: ("bfloat16", "float32", "float16")[place % 3] for place, name in enumerate(EACH)}
    for name in EACH:
        BY_NAME[name].save(tmp_path / name)
    memory = shared_memory.make_memory()
    arguments = [part for pair in dtypes.items() for part in pair]
    command = [sys.executable, rank_process.__file__]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    others = [
        subprocess.Popen([*command, str(rank), str(ranks), str(memory), str(tmp_path), *arguments],
                         pass_fds=[memory], env=environment)
        for rank in range(1, ranks)
    ]  # fmt: skip

    def check():
        for other in others:
            if other.poll():
                raise RuntimeError("a rank has failed")

    try:
        exchange = SharedExchange(0, ranks, memory, check)
        for name, dtype in dtypes.items():
            case = BY_NAME[name]
            states, logits, kind = rank_process.run_part(exchange, tmp_path, name, dtype)
            whole = load_on("cpu", tmp_path / name, dtype=dtype, max_model_len=case.max_model_len).decoder
            assert kind is type(whole)
            for ours, theirs in zip(
                (states, logits), run(whole, rank_process.few_steps(case), case.prompts()), strict=True
            ):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert [other.wait(30) for other in others] == [0] * len(others)
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.parametrize("place_bytes", [64, 640, 1 << 16])
def test_gathering_in_any_number_of_turns(place_bytes, monkeypatch):
    """Random parts, of none to many bytes, in places of any size: each rank gets what all gave."""
    monkeypatch.setattr(shared_memory, "_BYTES", 4096 + 2 * place_bytes)
    memory, size = shared_memory.make_memory(), 3
    exchanges = [SharedExchange(rank, size, os.dup(memory)) for rank in range(size)]
    os.close(memory)
    random = np.random.default_rng(0)
    rounds = []
    for _ in range(200):
        widths, rows = random.integers(0, 20, size).tolist(), int(random.integers(0, 40))
        rounds.append((widths, [torch.from_numpy(random.integers(0, 256, (rows, w), np.uint8)) for w in widths]))

    def take_part(exchange):
        return [exchanges[exchange.rank].all_gather(parts[exchange.rank], widths) for widths, parts in rounds]

    found, _ = on_ranks(size, take_part)
    for rank in found:
        for whole, (_, parts) in zip(rank, rounds, strict=True):
            assert torch.equal(whole, torch.cat(parts, dim=1))


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(shared_memory, "_BYTES", 4096 + 2 * 64)
    exchange = SharedExchange(0, 1, shared_memory.make_memory())
    with pytest.raises(ValueError, match="a row does not fit"):
        exchange.all_gather(torch.zeros(2, 65, dtype=torch.uint8), [65])
    with pytest.raises(ValueError, match="each rank has a width"):
        exchange.all_gather(torch.zeros(2, 8, dtype=torch.uint8), [4, 4])


def test_a_rank_that_waits_asks_whether_the_others_will_come():
    asked = []

    def check():
        asked.append(True)
        if len(asked) == 2:
            raise RuntimeError("rank 1 has ended")

    exchange = SharedExchange(0, 2, shared_memory.make_memory(), check)
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        exchange.all_gather(torch.zeros(1, 8), [8, 8])


@pytest.mark.parametrize(("name", "embedding"), [("llama3", "tied"), ("llama-bias", "its own")])
def test_collectives_are_counted(name, embedding, tmp_path):
    """Four in a layer, one for the embedding, one for logits: none is for nothing, none is forgotten."""
    BY_NAME[name].save(tmp_path)
    steps, meeting = check_bits(tmp_path, BY_NAME[name], 2, dtype="float32")
    layers, hidden, heads = SIZES["num_hidden_layers"], SIZES["hidden_size"], SIZES["num_attention_heads"]
    in_layer = [heads * SIZES["head_dim"], hidden, SIZES["intermediate_size"], hidden]
    of_steps = [2 * hidden, *in_layer * layers]
    assert [sum(widths) for widths in meeting.widths] == of_steps * steps + [SIZES["vocab_size"]] * steps


def check_sums(folder, case, ranks, **settings):
    """Runs a model whose parts' products are added up. Returns the steps, rank 0's and the whole's results."""
    prompts, settings = case.prompts(), settings | {"max_model_len": case.max_model_len}
    steps = steps_of(prompts)[:6]
    expected = run(load_on("cpu", folder, **settings).decoder, steps, prompts)

    def part(exchange):
        sharding = Sharding(exchange, exchange)
        return run(load_part(exchange, folder, Decoder, sharding, **settings).decoder, steps, prompts)

    found, meeting = on_ranks(ranks, part)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][0], other[0], strict=True))
    return len(steps), meeting, found[0], expected


@pytest.mark.parametrize(("name", "ranks"), [("llama3", 2), ("llama-bias", 4), ("qwen3-moe", 2)])
def test_sums_over_parts(name, ranks, tmp_path):
    """Two in a layer, a mixture's too, and one for the embedding; logits are gathered. Numbers are nearly the whole's,
    and the same on all ranks."""
    BY_NAME[name].save(tmp_path)
    steps, meeting, found, expected = check_sums(tmp_path, BY_NAME[name], ranks, dtype="float32")
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)
    layers, hidden = SIZES["num_hidden_layers"], SIZES["hidden_size"]
    assert meeting.sums == [hidden] * (2 * layers + 1) * steps
    assert [sum(widths) for widths in meeting.widths] == [SIZES["vocab_size"]] * steps


def test_weights_in_few_bits_are_cut_by_outputs_and_keep_their_bits(tmp_path):
    BY_NAME["llama3"].save(tmp_path)
    steps, meeting, found, expected = check_sums(tmp_path, BY_NAME["llama3"], 2, dtype="float32", quantization="int8")
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(meeting.sums) == steps  # of the embedding, where a sum has one part
    assert len(meeting.widths) == (4 * SIZES["num_hidden_layers"] + 1) * steps


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_of_exact_parts_has_the_bits_of_one(ranks):
    random = torch.Generator().manual_seed(0)
    weight = torch.randint(-64, 64, (24, 48), generator=random).float()
    x = torch.randint(-64, 64, (5, 48), generator=random).float()

    def work(exchange):
        inputs = Sharding(exchange).part(48, 4)
        part = TorchLinear(weight[:, inputs], torch.ones(24) if exchange.rank == 0 else None)
        return SummingLinear(exchange, part)(x[:, inputs])

    for found in on_ranks(ranks, work)[0]:
        assert torch.equal(found, TorchLinear(weight, torch.ones(24))(x))


def test_heads_that_cannot_be_shared_are_refused():
    spec = load_spec_of(heads=9, kv_heads=3)
    for ranks in (1, 3, 9):
        check_heads(spec, ranks)
    with pytest.raises(
        ConfigError, match=r"is 2, but models with latent attention \(deepseek_v2\) run on one rank only"
    ):
        check_heads(load_spec_of(heads=4, kv_heads=1, latent=True), 2)
    for ranks in (2, 4, 6, 18):
        with pytest.raises(
            ConfigError, match=f"is {ranks}, but the model has 9 attention heads and 3 KV heads.* 1, 3, 9"
        ):
            check_heads(spec, ranks)


def load_spec_of(heads, kv_heads, latent=None):
    fields = {"num_heads": heads, "num_kv_heads": kv_heads, "latent": latent, "family": "deepseek_v2"}
    return SimpleNamespace(**fields)


def test_parts_follow_one_another():
    for size in (1, 7, 96, 163):
        for ranks in (1, 2, 3, 5):
            parts = cut(size, ranks)
            assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
            assert (parts[0].start, parts[-1].stop) == (0, size)
            sizes = [part.stop - part.start for part in parts]
            assert max(sizes) - min(sizes) <= 1
