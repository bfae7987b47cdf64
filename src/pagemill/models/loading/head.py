"""Finds a model's head, which makes logits of hidden states: a matrix of its own, the embedding, or none."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from pagemill.models.loading.checkpoint import Checkpoint
from pagemill.models.names import WeightNames
from pagemill.models.spec import DecoderSpec

logger = logging.getLogger(__name__)


class FoundHead(NamedTuple):
    """Holds what a model is described by once its head is found. exists: False for a model that makes embeddings only;
    its embedding stands in for the head, whose logits say nothing."""

    spec: DecoderSpec
    names: WeightNames
    exists: bool = True


def find_head(checkpoint: Checkpoint, spec: DecoderSpec, names: WeightNames) -> FoundHead:
    """Returns where the head is, by what is stored, as transformers does it: a head that differs from the embedding
    counts, although the configuration ties them; of tied ones, either may be stored."""
    embedding, head = f"{names.embedding}.weight", f"{names.lm_head}.weight"
    stored = embedding in checkpoint.tensors, head in checkpoint.tensors
    if not spec.tied_embeddings:
        if checkpoint.is_headless and stored == (True, False):
            return FoundHead(replace(spec, tied_embeddings=True), names, exists=False)
        return FoundHead(spec, names)
    if stored == (False, True):
        return FoundHead(spec, replace(names, embedding=names.lm_head))
    if all(stored) and not checkpoint.stores_alike(embedding, head):
        logger.warning(
            "tie_word_embeddings is true, but %s has a head (%s) that differs from the embedding: it is used",
            *(checkpoint.path, head),
        )
        return FoundHead(replace(spec, tied_embeddings=False), names)
    return FoundHead(spec, names)
