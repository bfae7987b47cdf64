"""LateErrors: what a disk cannot read must not end a step half-way, where other ranks wait for this one's part."""

from __future__ import annotations

from pagemill.errors import KVStoreError
from pagemill.models.decoder import OnLayer


class LateErrors:
    """Is called as each layer begins, in the place of what reads blocks ahead, whose first KVStoreError it keeps."""

    def __init__(self, on_layer: OnLayer) -> None:
        self.first: KVStoreError | None = None
        self._on_layer = on_layer

    @classmethod
    def of(cls, on_layer: OnLayer | None) -> LateErrors | None:
        return None if on_layer is None else cls(on_layer)

    def __call__(self, layer: int) -> None:
        if self.first is None:
            try:
                self._on_layer(layer)
            except KVStoreError as error:
                self.first = error
