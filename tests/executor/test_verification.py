"""Verification draws from the target's distribution, whatever is drafted; and a wrong one would be seen."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from chi_squared import chi_squared
from pagemill.executor.verification import drafts_of, verify
from pagemill.memory.work import MemoryWork
from pagemill.sampling.cpu_kernels import CpuSamplingKernels
from pagemill.sampling.params import SamplingParams
from pagemill.sampling.random import uniform
from pagemill.sampling.sampler import Sampler
from pagemill.scheduling.step_plan import StepPlan

VOCAB, SEQUENCES, LENGTH, DRAFTS = 6, 6000, 3, 2
LOGITS = np.random.default_rng(5).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.2
"""Those of a model that sees the last token alone."""
TARGET = np.exp(np.float64(LOGITS)) / np.exp(np.float64(LOGITS)).sum(axis=1, keepdims=True)
DRAFTED_FROM = 0.6 * TARGET + 0.4 / VOCAB
OTHERS = 10**6
"""From this seed on, random numbers have nothing to do with those of sampling."""


def drafts_behind(come, rows, seed):
    """Returns drafts for rows, drawn as a draft model draws them, with the random numbers of a seed."""
    last = np.array([come[row][-1] for row in rows])
    seeds, positions = np.array(rows, np.uint64) + np.uint64(seed), np.array([len(come[row]) - 1 for row in rows])
    drafts = []
    for depth in range(DRAFTS):
        below = np.cumsum(DRAFTED_FROM[last], axis=1)[:, :-1] <= uniform(seeds, positions + depth)[:, None]
        last = below.sum(axis=1)
        drafts.append(last)
    return [each[: LENGTH - len(come[row])] for row, each in zip(rows, np.stack(drafts, 1).tolist(), strict=True)]


def with_branches(drafts):
    """Returns paths: the drafts, one that leaves them at once, and one that leaves that again or has nothing more."""
    first, *more = drafts
    return [drafts, [(first + 1) % VOCAB, *more], [(first + 1) % VOCAB, *((each + 2) % VOCAB for each in more)]]


def plan_of(rows, paths):
    """rows: by sequence. paths: of each sequence the drafts, and those of branches, which run in further rows."""
    of_all = [path for each in paths for path in each]
    counts = np.array([len(path) for path in of_all], np.int32)
    ones, numbers = np.ones(len(of_all), np.int32), np.arange(len(of_all), dtype=np.int32)
    own = np.repeat(rows, [len(each) for each in paths])
    branches = np.array([at > 0 for each in paths for at in range(len(each))])
    return StepPlan(
        step=0, work=MemoryWork.none(), rows=np.where(branches, SEQUENCES + numbers, own), starts=ones,
        query_lens=1 + counts, generates=ones.astype(bool), sample_from=numbers, sample_to=own, branches=branches,
        max_accepted=1 + counts, prompt_logprobs=ones[:0], draft_tokens=np.array(list(chain(*of_all)), np.int32),
        branched=bool(branches.any()),
    )  # fmt: skip


def answers(verifier, seed, paths_of=lambda drafts: [drafts]):
    """Returns the sequences that come of verified drafts, token 0 before each; which share of the first drafts was
    right; and how often a branch was followed."""
    sampler, none = Sampler(SEQUENCES, VOCAB, CpuSamplingKernels()), np.empty(0, np.int32)
    for row in range(SEQUENCES):
        sampler.add_row(row, SamplingParams(temperature=1.0), row, none, none)
    come, right, branched = [[0] for _ in range(SEQUENCES)], 0, 0
    while rows := [row for row, tokens in enumerate(come) if len(tokens) <= LENGTH]:
        paths = [paths_of(drafts) if drafts else [drafts] for drafts in drafts_behind(come, rows, seed)]
        known = [[(come[row][-1], *path)[at > 0 :] for at, path in enumerate(each)]
                 for row, each in zip(rows, paths, strict=True)]  # fmt: skip
        logits = torch.from_numpy(LOGITS[list(chain(*chain(*known)))])
        plan = plan_of(np.array(rows, np.int32), paths)
        found = verifier(plan, lambda places, at, logits=logits: sampler.sample(logits[places], at))
        accepted = iter(found.tokens)
        for row, each in zip(rows, paths, strict=True):
            of_paths = [next(accepted) for _ in each]
            (followed,) = (at for at, tokens in enumerate(of_paths) if tokens)
            assert of_paths[followed][:-1] == each[followed][: len(of_paths[followed]) - 1]
            come[row] += of_paths[followed]
            branched += followed > 0
            right += len(come[row]) > 1 and len(each[0]) == DRAFTS and come[row][1] == each[0][0]
    return np.array(come), right / SEQUENCES, branched


def distances(come):
    """Returns how far the first tokens are from the target, and what follows each token, at the next two places."""
    first = np.bincount(come[:, 1], minlength=VOCAB)
    yield chi_squared(first, TARGET[0] * SEQUENCES)
    for place in range(1, LENGTH):
        pairs = np.zeros((VOCAB, VOCAB))
        np.add.at(pairs, (come[:, place], come[:, place + 1]), 1)
        yield chi_squared(pairs.ravel(), (pairs.sum(axis=1, keepdims=True) * TARGET).ravel())


@pytest.mark.parametrize("seed", [0, OTHERS], ids=["drafts of the same random numbers", "of others"])
def test_what_is_verified_follows_the_targets_distribution(seed):
    come, right, _ = answers(verify, seed)
    assert 0.1 < right < 0.9
    assert (right > 0.5) == (seed == 0)
    assert max(distances(come)) < 1
    tree, _, branched = answers(verify, seed, with_branches)
    assert (tree == come).all(), "each place has its own random number, however it comes to be sampled"
    assert branched > 0.1 * SEQUENCES


def test_a_verifier_that_accepts_too_often_is_seen():
    """Three tenths of the first drafts, whatever the target says."""
    coin = np.random.default_rng(1)

    def credulous(plan, choose):
        found = verify(plan, choose)
        for tokens, drafts in zip(found.tokens, drafts_of(plan), strict=True):
            if drafts and coin.random() < 0.3:
                tokens[:] = drafts[:1]
        return found

    come, *_ = answers(credulous, OTHERS)
    assert max(distances(come)) > 2
