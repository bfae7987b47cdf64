"""LayersAhead: has a GPU bring what its next layer attends of streamed frames while it computes this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagemill.kvcache.device_streams import DeviceStreams, Event
from pagemill.kvcache.gpu_frames import runs_of
from pagemill.kvcache.layer_groups import LayerGroups
from pagemill.kvcache.streaming_gpu_frames import StreamingGpuFrames


class LayersAhead:
    """Brings the streamed frames of a step's rows, layer by layer."""

    def __init__(self, frames: StreamingGpuFrames, groups: LayerGroups, streams: DeviceStreams) -> None:
        self._frames = frames
        self._streams = streams
        self._at = [groups.place(layer) for layer in range(groups.num_layers)]

    def step(self, frames: Sequence[NDArray[np.int32]]) -> Callable[[int], None]:
        """Returns a function that is called with each layer's number when that begins: what is computed from then on
        finds the layer's part of the frames.

        frames: by layer group, those that the step reads, counted from the first streamed one.
        """
        runs = [_runs(each) for each in frames]
        following: dict[int, int | None] = {}
        """By layer, the next one that streams."""
        behind: int | None = None
        for layer in reversed(range(len(self._at))):
            following[layer] = behind
            behind = layer if runs[self._at[layer][0]] else behind
        come: dict[int, Event] = {}

        def bring(layer: int) -> None:
            if layer not in come:
                group, place = self._at[layer]
                come[layer] = self._frames.bring(place, runs[group])

        def begin(layer: int) -> None:
            streams, after = bool(runs[self._at[layer][0]]), following[layer]
            if streams:
                bring(layer)
                self._streams.compute.wait_event(come[layer])
            # Layers whose places are an even number apart share slots, which this one is about to read.
            if after is not None and not (streams and self._share(layer, after)):
                bring(after)

        return begin

    def close(self) -> None:
        """Ends nothing: no thread runs."""

    def _share(self, layer: int, other: int) -> bool:
        return (self._at[layer][1] - self._at[other][1]) % 2 == 0


def _runs(frames: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Returns first frame and end of the frames side by side."""
    each = np.unique(frames).tolist()
    return [(each[first], each[end - 1] + 1) for first, end in runs_of(each)] if each else []
