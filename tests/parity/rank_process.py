"""One rank of random models, as a process: `python rank_process.py rank size descriptor folder case dtype ...` runs the
steps of each case in turn, so that the others can."""

from __future__ import annotations

import sys

from random_models import CASES
from test_one_call import hidden_states, steps_of

from pagemill import _kernels
from pagemill.executor.backend import select_backend
from pagemill.executor.shared_memory import SharedExchange
from pagemill.models.cpu_decoder import cpu_decoder
from pagemill.models.loading import load_model
from pagemill.models.sharding import Sharding


def load_part(exchange, folder, decoder=cpu_decoder, sharding=None, **settings):
    on = select_backend("cpu", 1)
    return load_model(
        folder, device=on.device, ops=on.ops, attention=on.attention, decoder=decoder,
        sharding=sharding or Sharding(exchange), **settings,
    )  # fmt: skip


def few_steps(case):
    """Chunks and single tokens: each is many meetings, and ranks may share a core."""
    return steps_of(case.prompts())[:5]


def run_part(exchange, folder, name, dtype):
    """Hidden states and logits of all steps, and the kind of the decoder."""
    case = next(case for case in CASES if case.name == name)
    decoder = load_part(exchange, f"{folder}/{name}", dtype=dtype, max_model_len=case.max_model_len).decoder
    states = hidden_states(type(decoder).forward, decoder, few_steps(case), case.prompts())
    return states, [decoder.logits(each) for each in states], type(decoder)


if __name__ == "__main__":
    rank, size, descriptor = map(int, sys.argv[1:4])
    exchange = SharedExchange(rank, size, descriptor)
    _kernels.set_num_threads(1)
    for name, dtype in zip(sys.argv[5::2], sys.argv[6::2], strict=True):
        run_part(exchange, sys.argv[4], name, dtype)
