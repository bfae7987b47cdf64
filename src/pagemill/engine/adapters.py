"""Adapters: the LoRA adapters that an engine has loaded, by their numbers. They stay as long as it lives."""

from __future__ import annotations

from pagemill.config import EngineConfig
from pagemill.engine.messages import AdapterInfo
from pagemill.errors import InvalidRequestError, ModelLoadError
from pagemill.executor.interface import Executor
from pagemill.lora_request import LoRARequest


class Adapters:
    """Loads those of the settings at once, before the KV pool takes its share of what memory is left.

    Raises `ModelLoadError` children for one that cannot be loaded.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._config, self._executor = config, executor
        self._loaded: dict[int, AdapterInfo] = {}
        for lora in config.lora_requests():
            self._load(lora, "lora_modules")

    def infos(self) -> list[AdapterInfo]:
        """Returns what is loaded, in the order in which it came."""
        return [*self._loaded.values()]

    def digest(self, number: int) -> bytes:
        """Returns what names an adapter's content; nothing for number 0. Raises `InvalidRequestError`."""
        if not number:
            return b""
        if number not in self._loaded:
            raise InvalidRequestError(f"no adapter has the number {number}; load it first", param="lora_request")
        return self._loaded[number].digest

    def require(self, lora: LoRARequest) -> None:
        """Loads an adapter unless it is loaded. Raises `InvalidRequestError` and `ModelLoadError` children."""
        if not self._config.enable_lora:
            raise InvalidRequestError(
                "this engine serves no LoRA adapters; make it with enable_lora=True (--enable-lora)",
                param="lora_request",
            )
        name, number = lora.lora_name, lora.lora_int_id
        for known in self._loaded.values():
            if (known.name, known.number, known.path) == (name, number, lora.lora_path):
                return
            if known.name == name or known.number == number:
                raise InvalidRequestError(
                    f"adapter {name!r} has number {number} and path {lora.lora_path!r}, but {known.name!r} with number "
                    f"{known.number} is loaded from {known.path!r}; give each adapter a name and a number of its own",
                    param="lora_request",
                )
        if len(self._loaded) >= self._config.max_loras:
            names = ", ".join(repr(known.name) for known in self._loaded.values())
            raise InvalidRequestError(
                f"adapter {name!r} would be one more than max_loras ({self._config.max_loras}): {names} are loaded, "
                f"and stay; raise max_loras",
                param="lora_request",
            )
        self._load(lora, "lora_request")

    def _load(self, lora: LoRARequest, param: str) -> None:
        try:
            facts = self._executor.load_adapter(lora.lora_int_id, lora.lora_path)
        except ModelLoadError as error:
            error.param = error.param or param
            raise
        self._loaded[lora.lora_int_id] = AdapterInfo(lora.lora_name, lora.lora_int_id, lora.lora_path, *facts)
