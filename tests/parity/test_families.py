"""Every family agrees with transformers' dense float32 logits, through paged memory, however its prompts are cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from random_models import CASES, TRAINED, WINDOW, Case, Without, reference_logits

from harness import PagedSequences
from pagemill.attention.torch_backend import TorchAttention
from pagemill.executor.backend import cpu_backend, select_backend, torch_backend
from pagemill.models.decoder import Decoder
from pagemill.models.families import ModelConfig, find_family
from pagemill.models.loading import load_model
from pagemill.models.loading.assemble import Assembler
from pagemill.models.loading.keep import Nothing
from pagemill.models.loading.load import open_checkpoint
from pagemill.ops.torch_ops import TorchOps

TOLERANCE = 1e-4
BACKENDS = {
    f"{on.device}: {on.ops.name}, {on.attention.name}": on
    for on in (
        cpu_backend(),
        torch_backend(torch.device("cpu")),
        *([select_backend("cuda")] if torch.cuda.is_available() else []),
    )
}
GPU = pytest.mark.gpu


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def model(request, tmp_path_factory):
    """(case, folder, prompts, reference logits)."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    case.save(folder)
    prompts = case.prompts()
    return case, folder, prompts, reference_logits(folder, prompts)


@pytest.fixture(params=[pytest.param(name, marks=GPU if "cuda" in name else ()) for name in BACKENDS])
def loaded(request, model):
    case, folder, _, _ = model
    on = BACKENDS[request.param]
    return load_model(
        folder,
        ops=on.ops,
        attention=on.attention,
        decoder=on.decoder,
        device=on.device,
        dtype="float32",
        max_model_len=case.max_model_len,
    )


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_prompts_reach_what_they_must(model):
    """Otherwise the tests below would pass without the features they are about."""
    case, _, prompts, reference = model
    assert torch.cat(reference).std() >= 1
    assert case.name == "phi3-short" or max(map(len, prompts)) > max(3 * TRAINED, 3 * WINDOW)


@pytest.mark.parametrize("way", ["whole", "chunks", "mixed", "token by token"])
def test_logits(model, loaded, way):
    _, _, prompts, reference = model
    sequences = PagedSequences(loaded.decoder, prompts, block_size=8 if way == "chunks" else 16)
    ours = {
        "whole": sequences.run,
        "chunks": lambda: sequences.run(13),
        "mixed": sequences.run_mixed,
        "token by token": lambda: sequences.run(1),
    }[way]()
    assert furthest(ours, reference) <= TOLERANCE


def decoder_without(case: Case, folder, feature: Without) -> Decoder:
    """The decoder with one feature switched off, by its spec or its weights' names."""
    checkpoint = open_checkpoint(folder, {})
    family = find_family(checkpoint.config["model_type"], None)
    spec = feature.spec(family.describe(ModelConfig(checkpoint.config), case.max_model_len))
    names = feature.names(family.names)
    assembling = spec
    if not spec.qk_norm:  # loads the norms, and leaves them unused
        assembling = dataclasses.replace(assembling, qk_norm=any("q_norm" in name for name in checkpoint.tensors))
    if not spec.post_norms:
        assembling = dataclasses.replace(
            assembling, post_norms=bool(names.post_attention_norm and "gemma" in spec.family)
        )
    where = torch.float32, torch.device("cpu")
    assembler = Assembler(checkpoint, assembling, names, TorchOps(), *where, None, None, None, Nothing())
    return Decoder(spec, assembler.assemble(), TorchOps(), TorchAttention(), torch.float32)


def test_every_feature_matters(model):
    """Parity can fail: without a feature the logits move by more than 100 times the tolerance."""
    case, folder, prompts, reference = model
    plain = PagedSequences(decoder_without(case, folder, Without()), prompts).run()
    assert furthest(plain, reference) <= TOLERANCE
    assert case.features
    for name, feature in case.features.items():
        moved = furthest(PagedSequences(decoder_without(case, folder, feature), prompts).run(), reference)
        assert moved > 100 * TOLERANCE, name
