"""Reading, checking and rounding in pieces gives what the whole gives, on any number of threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagemill import _kernels
from pagemill.errors import CorruptWeightsError
from pagemill.models.loading.checkpoint import Checkpoint, MappedFile
from pagemill.models.loading.hf_folder import read_safetensors_header
from pagemill.models.loading.pieces import each_piece, piece_threads, quantize_pieces
from pagemill.ops.quantized import quantize_int8


class _Stored(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path, self.files = path, [MappedFile(path)]
        self.tensors = read_safetensors_header(self.files[0])


@pytest.fixture(params=[1, 3])
def threads(request):
    before = _kernels.num_threads()
    _kernels.set_num_threads(request.param)
    yield request.param
    _kernels.set_num_threads(before)


def test_pieces_cover_everything_once(threads):
    seen, names = torch.zeros(1001, dtype=torch.int64), set()
    all_there = threading.Barrier(threads)

    def count(begin: int, end: int) -> None:
        if threading.current_thread().name not in names:
            names.add(threading.current_thread().name)
            all_there.wait(30)
        seen[begin:end] += 1

    with piece_threads():
        each_piece(1001, 7, count)
    assert (seen == 1).all()
    assert len(names) == threads
    assert "MainThread" not in names


def test_what_a_piece_raises_is_raised_and_threads_are_given_back():
    before = torch.get_num_threads()

    def fail(begin: int, end: int) -> None:
        raise ValueError(f"piece at {begin}")

    with pytest.raises(ValueError, match="piece at 0"), piece_threads():
        each_piece(10, 2, fail)
    assert torch.get_num_threads() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pagemill-load")]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_tensors_of_many_pieces_are_read_as_stored(tmp_path, threads, stored, wanted):
    weight = torch.randn(1021, 1500).to(stored)
    save_file({"before": torch.zeros(3), "weight": weight}, tmp_path / "w.safetensors")
    out = torch.full(weight.shape, torch.nan, dtype=wanted)
    with piece_threads():
        _Stored(tmp_path / "w.safetensors").read_into("weight", out)
    assert torch.equal(out, weight.to(wanted))


def test_a_file_that_became_shorter_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"weight": torch.randn(1021, 1500)}, path)
    stored = _Stored(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    with piece_threads(), pytest.raises(CorruptWeightsError, match="became shorter"):
        stored.read_into("weight", torch.empty(1021, 1500))


@pytest.mark.parametrize("columns", [64, 576, 1500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_in_pieces_gives_the_bits_of_the_whole(threads, columns, dtype):
    weight = (torch.randn(1021, columns) * torch.rand(1021, 1) ** 8).to(dtype)
    weight[5] = 0
    whole = quantize_int8(weight.float())
    with piece_threads():
        pieces = quantize_pieces(weight)
    assert torch.equal(pieces.values, whole.values)
    assert torch.equal(pieces.scales, whole.scales)
