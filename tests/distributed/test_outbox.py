"""Messages that have gathered are sent in order, in batches of a bounded size."""

import asyncio

import pytest

from pagemill.distributed import outbox
from pagemill.distributed.messages import OUTBOUND
from pagemill.distributed.outbox import Outbox
from pagemill.engine.messages import Held


@pytest.mark.parametrize(("sizes", "batches"), [
    ([10, 10], [2]),
    ([400, 400, 400, 400, 10], [2, 3]),
    ([5000], [1]),
    ([10, 5000, 10], [1, 1, 1]),
])  # fmt: skip
def test_no_batch_has_more_than_fits_but_for_one_message_alone(monkeypatch, sizes, batches):
    monkeypatch.setattr(outbox, "MOST_BYTES", 1000)

    async def taken():
        box, counts, came = Outbox(), [], []
        for number, size in enumerate(sizes):
            box.put(Held(stored=bytes([number]) * size))
        box.close()
        while (batch := await box.take()) is not None:
            messages = OUTBOUND.decode(batch).messages
            counts.append(len(messages))
            came += [len(message.stored) for message in messages]
        assert came == sizes
        return counts

    assert asyncio.run(taken()) == batches
