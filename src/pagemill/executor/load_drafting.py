"""Loads what drafts on the device: a smaller model beside the model, or heads that were trained for it."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, ModelLoadError, TokenizerError
from pagemill.executor.draft_model import DraftLayers, DraftModel
from pagemill.executor.draft_source import DraftSource
from pagemill.executor.interface import DraftFacts
from pagemill.executor.medusa_drafts import MedusaDrafts
from pagemill.executor.share import Share, frame_shape, other_formats
from pagemill.hub import resolve_model
from pagemill.kvcache.kv_format import KVFormat
from pagemill.kvcache.layer_groups import add_full_layers, group_layers
from pagemill.kvcache.layout import FrameShape, LayoutMaker
from pagemill.models.families import ModelConfig, find_family
from pagemill.models.loading import LoadedModel, load_model, open_checkpoint, read_config
from pagemill.models.loading.medusa import load_medusa
from pagemill.models.spec import DecoderSpec
from pagemill.speculative_config import SpeculativeConfig
from pagemill.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Drafting(NamedTuple):
    """Holds a draft source, the facts about it, and what it changes of the pool: its frames' shape, and the fingerprint
    of what they hold."""

    source: DraftSource
    facts: DraftFacts
    shape: FrameShape
    fingerprint: bytes


def load_drafting(config: EngineConfig, speculation: SpeculativeConfig, share: Share) -> Drafting | None:
    """Loads what drafts beside a model; None where drafts are looked up. Raises as `open_executor`."""
    if speculation.model is None:
        return None
    load = _load_heads if speculation.method == "medusa" else _load_draft_model
    try:
        return load(config, speculation, resolve_model(speculation.model), share)
    except ModelLoadError as error:
        raise type(error)(f"speculative_config: model: {error.message}", param="speculative_config") from error


def _load_heads(config: EngineConfig, speculation: SpeculativeConfig, path: Path, share: Share) -> Drafting:
    """Loads trained heads, quantized like the model, unless it keeps a file's integers. Raises `ModelLoadError`
    children, and ConfigError for more drafts than there are heads."""
    model, backend = share.model, share.backend
    heads = load_medusa(path, model.spec, backend.ops, model.dtype, backend.device, model.quantization)
    if (wanted := speculation.num_speculative_tokens) is not None and wanted > len(heads.heads):
        raise ConfigError(
            f"speculative_config: num_speculative_tokens is {wanted}, but {speculation.model} has {len(heads.heads)} "
            f"heads, which draft a token each; lower it, or leave it out",
            param="speculative_config",
        )
    source = MedusaDrafts(heads, model.spec.hidden_size, model.dtype)
    cost = max(head.products for head in heads.heads) / model.spec.products
    return Drafting(source, DraftFacts(cost, len(heads.heads), takes_in=False), share.shape, model.fingerprint)


def _load_draft_model(config: EngineConfig, speculation: SpeculativeConfig, path: Path, share: Share) -> Drafting:
    """Loads a draft model. Raises as `load_model` does, and ConfigError for one that cannot draft for the model."""
    backend, model, kv, shape, _ = share
    draft = _open_draft_model(config, path, share)
    _check_draft_format(kv, draft.spec)
    layers = place_layers(backend.layout, shape, draft.spec)
    facts = DraftFacts(draft.spec.cost_beside(model.spec), most=None, takes_in=True)
    source = DraftModel(draft.decoder, layers)
    return Drafting(source, facts, replace(shape, groups=layers.groups), joint_fingerprint(model, draft))


def _draft_quantization(quantization: str | None, path: Path, keeps_narrow: bool) -> str | None:
    """Returns how a draft model's layers are held: like the model's, in 8 bits, in its own integers if it has some, or
    in a dtype."""
    if quantization is None or quantization == "int8":
        return quantization
    own = open_checkpoint(path, {}).quantization
    return own if keeps_narrow or own != "fp8" else None


def _open_draft_model(config: EngineConfig, path: Path, share: Share) -> LoadedModel:
    """Loads a draft model, in the dtype of the model and quantized like it, unless it has no integers to keep. Raises
    as `load_model` does, and ConfigError for one that cannot draft for the model."""
    model, backend = share.model, share.backend
    settings = read_config(path)
    declared = find_family(settings["model_type"], settings.get("architectures")).describe(ModelConfig(settings), None)
    draft = load_model(
        path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=min(model.max_model_len, declared.max_position),
        device=backend.device,
        ops=backend.ops,
        attention=backend.attention,
        decoder=backend.decoder,
        quantization=_draft_quantization(model.quantization, path, backend.ops.keeps_narrow),
        packed=share.packed,
    )
    if not draft.has_head:
        raise _refusal("it has no head (lm_head.weight), so it cannot draft; use a model that generates")
    if draft.spec.vocab_size != model.spec.vocab_size:
        raise _refusal(
            f"its vocabulary has {draft.spec.vocab_size} tokens, the model's {model.spec.vocab_size}; both must have "
            f"the same tokenizer"
        )
    if any(layer.window is not None for layer in draft.spec.layers):
        raise _refusal(
            "it has layers with a sliding window, whose keys and values are given up before it may need them; use one "
            "with full attention in all layers"
        )
    try:
        tokenizers = Tokenizer.load(config), Tokenizer.from_path(path)
    except TokenizerError as error:
        logger.warning("nobody checks that the draft model has the model's tokenizer: %s", error.message)
    else:
        if (other := tokenizers[0].difference(tokenizers[1])) is not None:
            raise _refusal(f"its tokenizer is another than the model's: {other}; both must have the same")
    return draft


def place_layers(layout: LayoutMaker, shape: FrameShape, draft: DecoderSpec) -> DraftLayers:
    """Returns where the layers of a draft model go, beside those of the model that has frames of this shape: as many in
    a place of a frame as fit. Raises ConfigError if not even one does."""
    own = frame_shape(draft, group_layers([None]), shape.block_size, replace(shape.format, precise=0))
    room, needed = layout(shape, 1).place_bytes, layout(own, 1).place_bytes
    if needed > room:
        raise _refusal(
            f"keys and values of one of its layers take {needed} bytes per block, more than the model's ({room}), in "
            f"whose place they would lie; use a draft model with fewer KV heads or a smaller head size"
        )
    per_place = room // needed
    groups = add_full_layers(shape.groups, -(-len(draft.layers) // per_place))
    before, after = (room * each.num_places for each in (shape.groups, groups))
    logger.info(
        "with the draft model's keys and values, %d bytes each of %d layers, %d tokens take %d bytes instead of %d",
        needed, len(draft.layers), shape.block_size, after, before,
    )  # fmt: skip
    return DraftLayers(own, groups, shape.groups.num_layers, per_place)


def joint_fingerprint(model: LoadedModel, draft: LoadedModel) -> bytes:
    """Returns the fingerprint of K/V that two models have written."""
    return hashlib.sha256(model.fingerprint + draft.fingerprint).digest()


def _check_draft_format(kv: KVFormat, draft: DecoderSpec) -> None:
    """Raises ConfigError where a draft model's keys and values cannot lie in the model's blocks in this format."""
    why = kv.refusal(draft.head_dim, values_in_keys=draft.latent is not None)
    if why is not None:
        raise _refusal(f"kv_cache_dtype is {kv.name!r}, and {why}; {other_formats(draft)}")


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"speculative_config: the draft model cannot be used: {why}", param="speculative_config")
