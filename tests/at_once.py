"""AtOnce: streams of a device that does everything when it is asked to."""

from __future__ import annotations

from contextlib import nullcontext

import torch


class AtOnce:
    """Does on CPU at once what a device would do later, for threads that CheckedDevice does not see."""

    where = torch.device("cpu")

    class Stream:
        def record_event(self):
            return self

        def wait_event(self, event):
            pass

        def query(self):
            return True

        def synchronize(self):
            pass

    compute = Stream()
    driver = None

    def stream(self):
        return self.Stream()

    def use(self, stream):
        return nullcontext()

    def pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def pinned_whole(self, nbytes):
        return self.pinned(nbytes)

    def copy(self, source, target):
        target.copy_(source)

    def synchronize(self):
        pass
