"""Bounds what each KV format may cost in quality: formats that cost more are labelled, and never a default.

`python -m benchmarks.quality --gates` holds every format to it.
"""

from __future__ import annotations

from typing import NamedTuple


class Gate(NamedTuple):
    """Bounds what a format costs.

    within: by how many percent perplexity may differ from that in full precision.
    labelled: by how many SmolLM2-135M's was measured to rise, of a format that is known to miss that; None of others.
    """

    within: float
    labelled: float | None = None


GATES = {
    "int8": Gate(0.2),
    "int4_mixed": Gate(1.0),
    "int8/int4": Gate(1.0, labelled=1.1),
    "fp8_e4m3": Gate(1.0, labelled=1.2),
    "fp8_e5m2": Gate(1.0, labelled=4.6),
    "int4": Gate(1.0, labelled=4.9),
}
"""By the name of the format; of those with narrower elements than any weights have."""


def label_of(format: str) -> str | None:
    """Returns what to say to who takes a format that is labelled, with the way out; None of others."""
    gate = GATES.get(format)
    if gate is None or gate.labelled is None:
        return None
    return (
        f"the KV format {format} costs quality: SmolLM2-135M's perplexity rises by {gate.labelled} %, where "
        f"{gate.within:g} % is the goal; try it on your model first, or take int8 or int4_mixed, which reach theirs"
    )
