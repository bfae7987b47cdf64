"""A model in parts has the bits of the whole: the same kernels sum each output over all of its inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from random_models import CASES, SIZES
from test_one_call import BY_NAME, hidden_states, steps_of
from threaded_ranks import on_ranks

from harness import load_on
from pagemill.errors import ConfigError
from pagemill.executor.backend import select_backend
from pagemill.models.decoder import Decoder
from pagemill.models.loading import load_model
from pagemill.models.sharding import Sharding, check_heads, cut

EACH = [case.name for case in CASES]


def load_part(exchange, folder, **settings):
    on = select_backend("cpu")
    return load_model(
        folder, device=on.device, ops=on.ops, attention=on.attention, decoder=Decoder, sharding=Sharding(exchange),
        **settings,
    )  # fmt: skip


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
        ranks, lambda exchange: run(load_part(exchange, folder, **settings).decoder, steps, prompts, kv_dtype)
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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", EACH)
def test_bits_through_shared_memory(name, ranks, tmp_path, monkeypatch):
    """The C++ call that exchanges by itself, and operators, in more turns than one: a place holds but a few rows."""
    BY_NAME[name].save(tmp_path)
    monkeypatch.setattr(shared_memory, "_BYTES", 4096 + 2 * 8192)
    memory = shared_memory.make_memory()
    descriptors = iter([memory, *(os.dup(memory) for _ in range(ranks - 1))])
    exchanges = [SharedExchange(rank, ranks, next(descriptors)) for rank in range(ranks)]
    monkeypatch.setattr(threaded_ranks, "ThreadExchange", lambda meeting, rank: exchanges[rank])
    check_bits(tmp_path, BY_NAME[name], ranks, dtype="bfloat16")


@pytest.mark.parametrize(("name", "embedding"), [("llama3", "tied"), ("llama-bias", "its own")])
def test_collectives_are_counted(name, embedding, tmp_path):
    """Four in a layer, one for the embedding, one for logits: none is for nothing, none is forgotten."""
    BY_NAME[name].save(tmp_path)
    steps, meeting = check_bits(tmp_path, BY_NAME[name], 2, dtype="float32")
    layers, hidden, heads = SIZES["num_hidden_layers"], SIZES["hidden_size"], SIZES["num_attention_heads"]
    in_layer = [heads * SIZES["head_dim"], hidden, SIZES["intermediate_size"], hidden]
    of_steps = [2 * hidden, *in_layer * layers]
    assert [sum(widths) for widths in meeting.widths] == of_steps * steps + [SIZES["vocab_size"]] * steps


def test_heads_that_cannot_be_shared_are_refused():
    spec = load_spec_of(heads=9, kv_heads=3)
    for ranks in (1, 3, 9):
        check_heads(spec, ranks)
    for ranks in (2, 4, 6, 18):
        with pytest.raises(
            ConfigError, match=f"is {ranks}, but the model has 9 attention heads and 3 KV heads.* 1, 3, 9"
        ):
            check_heads(spec, ranks)


def load_spec_of(heads, kv_heads):
    return dataclasses.make_dataclass("Spec", [("num_heads", int), ("num_kv_heads", int)])(heads, kv_heads)


def test_parts_follow_one_another():
    for size in (1, 7, 96, 163):
        for ranks in (1, 2, 3, 5):
            parts = cut(size, ranks)
            assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
            assert (parts[0].start, parts[-1].stop) == (0, size)
            sizes = [part.stop - part.start for part in parts]
            assert max(sizes) - min(sizes) <= 1
