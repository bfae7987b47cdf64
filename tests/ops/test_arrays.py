"""Arrays that the kernels take are checked: another dtype, shape or spacing is refused by name before anything runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagemill import _kernels


def choose(**other):
    columns = {
        "logits": np.zeros((2, 8), np.float32),
        "places": np.zeros(2, np.int64),
        "temperature": np.zeros(2, np.float32),
        "top_k": np.zeros(2, np.int64),
        "top_p": np.ones(2, np.float32),
        "min_p": np.zeros(2, np.float32),
        "uniforms": np.zeros(2),
        "tokens": np.full(2, 7, np.int64),
    } | other
    _kernels.choose_tokens(*columns.values())
    return columns["tokens"].tolist()


def test_arrays_that_fit_are_taken():
    assert choose() == [0, 0]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("temperature", np.zeros(2)),
        ("places", np.zeros(2, np.int32)),
        ("top_k", np.zeros(3, np.int64)),
        ("top_p", np.ones((2, 1), np.float32)),
        ("min_p", np.zeros(4, np.float32)[::2]),
        ("uniforms", np.zeros(2, np.float32)),
        ("logits", np.zeros((2, 16), np.float32)[:, ::2]),
        ("logits", np.zeros((2, 16), np.float32)[:, :8]),
    ],
)
def test_other_arrays_are_refused_by_name(name, array):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        choose(**{name: array})


def test_what_is_written_must_be_writable():
    tokens = np.zeros(2, np.int64)
    tokens.flags.writeable = False
    with pytest.raises(TypeError):
        choose(tokens=tokens)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_weights_without_kernels_are_refused(dtype):
    with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
        _kernels.Linear(torch.zeros(4, 8, dtype=dtype), None, 0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("weight", (torch.zeros(8, 4).t(), None, 0)),
        ("bias", (torch.zeros(4, 8), torch.zeros(8), 0)),
        ("scale", (torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 2), torch.zeros(4, 1), None, 4)),
        ("values", (torch.zeros(4, 8, dtype=torch.uint8), None, None, torch.zeros(4, 1).bfloat16(), None, 0)),
        ("scales", (torch.zeros(4, 8, dtype=torch.int8), None, None, torch.zeros(4, 1), None, 0)),
    ],
)
def test_parts_of_a_weight_are_checked_by_name(name, arguments):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        _kernels.Linear(*arguments)


def integers(columns: int):
    groups = torch.zeros(4, columns // 32)
    return torch.zeros(4, columns, dtype=torch.uint8), groups, groups


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("bits must be 4 or 8, not 6", (*integers(64), None, 6)),
        ("whole blocks of 32 values, not 40", (*integers(40), None, 4)),
        (
            "slopes and offsets are given together",
            (integers(32)[0], torch.zeros(4, 1, dtype=torch.int16), None, torch.zeros(4, 1).bfloat16(), None, 0),
        ),
    ],
)
def test_integers_of_a_weight_are_whole(words, arguments):
    with pytest.raises(ValueError, match=words):
        _kernels.Linear(*arguments)


def test_keys_and_values_of_a_cache_are_equal_in_dtype():
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        _kernels.Cache(torch.zeros(2, 1, 8, 4), torch.zeros(2, 1, 8, 4).bfloat16(), None, None)
