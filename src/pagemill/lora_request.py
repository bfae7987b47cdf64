"""LoRARequest: names a LoRA adapter, as vLLM does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pagemill.errors import InvalidRequestError, shown

LONGEST_NAME = 256
MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter in a folder that PEFT has written.

    Within one engine a name, a number and a path belong together: another adapter needs a name and a number of its own.
    Raises `InvalidRequestError`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        name, number, path = self.lora_name, self.lora_int_id, self.lora_path
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise _refused("lora_name", name, f"1 to {LONGEST_NAME} printable characters")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 < number <= MAX_NUMBER:
            raise _refused("lora_int_id", number, f"an integer from 1 to {MAX_NUMBER}")
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise _refused("lora_path", path, "the folder of an adapter")
        object.__setattr__(self, "lora_path", os.fspath(path))


def check_lora_request(value: Any) -> LoRARequest | None:
    """Returns what a caller gave as `lora_request`. Raises `InvalidRequestError` for anything else."""
    if value is None or isinstance(value, LoRARequest):
        return value
    raise InvalidRequestError(
        f"lora_request is {shown(value)}; it must be None or LoRARequest(name, number, path)", param="lora_request"
    )


def _refused(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {shown(value)}; it must be {wanted}", param="lora_request")
