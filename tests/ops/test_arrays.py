"""Arrays that the kernels take are checked: another dtype, shape or spacing is refused by name before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

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
