"""Sampling said plainly: one row, NumPy, sorted lists and loops. Slow and obvious."""

from __future__ import annotations

import numpy as np


def modified_logits(logits, params, prompt, output, eos):
    """Allowed tokens, bad words, min_tokens, bias, penalties."""
    x = np.array(logits, np.float64)
    if params.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in params.allowed_token_ids:
                x[token] = -np.inf
    for words in params.bad_words_token_ids or []:
        before = words[:-1]
        if not before or list(output[len(output) - len(before) :]) == before:
            x[words[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for token in [*params.stop_token_ids, *eos]:
            x[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(len(x)):
        count = list(output).count(token)
        if count or token in prompt:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * count
        if count:
            x[token] -= params.presence_penalty
    return x


def kept_probabilities(x, params):
    """The distribution that a token is drawn from: temperature, min_p, top_k, top_p, renormalised."""
    x = x / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    kept = p >= params.min_p * p.max()
    if params.top_k > 0 and params.top_k < len(p):
        kept &= x >= np.sort(x)[-params.top_k]
    p = np.where(kept, p, 0.0)
    p /= p.sum()
    if params.top_p < 1.0:
        more_likely = np.array([p[x > x[token]].sum() for token in range(len(p))])
        p = np.where(more_likely < params.top_p, p, 0.0)
    return p / p.sum()
