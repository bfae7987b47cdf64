"""PoolingParams: how the hidden states of a prompt become one vector. Plain data, sent between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pagemill.arguments import about, check_fields, suggest_arguments
from pagemill.errors import SamplingParamsError


@suggest_arguments
@dataclass(kw_only=True)
class PoolingParams:
    """Parameters of one embedding. Raises `SamplingParamsError` for wrong values, `UnknownArgumentError` for unknown
    names."""

    pooling_type: Annotated[
        Literal["LAST", "MEAN"],
        about(
            "The hidden state of the prompt's last token (LAST), or the mean over all its tokens (MEAN).",
            "as the model was trained for; other ways are not served",
        ),
    ] = "LAST"
    normalize: Annotated[bool, about("Give the vector length 1.", "give True or False")] = True

    def __post_init__(self) -> None:
        if isinstance(self.pooling_type, str):
            self.pooling_type = self.pooling_type.upper()  # type: ignore[assignment]
        check_fields(self, SamplingParamsError)

    @property
    def reads_all_tokens(self) -> bool:
        """True if the hidden state of every token counts, so that none may be skipped."""
        return self.pooling_type == "MEAN"
