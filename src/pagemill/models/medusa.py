"""MedusaHeads: heads on a model's hidden states that guess the tokens behind the next one.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024, arXiv 2401.10774,
section 2.1.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from pagemill.ops.interface import Linear


class MedusaHead(NamedTuple):
    """Holds one head: residual blocks, each from hidden to hidden, and a layer from hidden to tokens."""

    blocks: tuple[Linear, ...]
    lm_head: Linear

    @property
    def products(self) -> int:
        """Returns how many products of a weight it takes for one token."""
        return sum(linear.in_features * linear.out_features for linear in (*self.blocks, self.lm_head))


@dataclass(frozen=True)
class MedusaHeads:
    """Holds the heads of a model. Head k guesses the token k + 2 places behind the one whose hidden state it takes.

    tokens: int64 [outputs], the token that each output of a head's last layer stands for; None: they are all tokens.
    """

    heads: tuple[MedusaHead, ...]
    vocab_size: int
    tokens: Tensor | None = None

    @torch.inference_mode()
    def logits(self, head: int, hidden: Tensor) -> Tensor:
        """Returns a head's logits, float32 [rows, vocab], of hidden [rows, hidden], after the model's final norm."""
        blocks, lm_head = self.heads[head]
        for block in blocks:
            hidden = hidden + silu(block(hidden))
        logits = lm_head(hidden).float()
        if self.tokens is None:
            return logits
        out = torch.full((len(hidden), self.vocab_size), -torch.inf, dtype=torch.float32, device=hidden.device)
        return out.index_copy_(1, self.tokens, logits)
