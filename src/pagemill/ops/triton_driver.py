"""Says whether this machine can start Triton's kernels."""

from __future__ import annotations

import importlib.util


def triton_refusal() -> str | None:
    """Returns why Triton's kernels cannot be started here, with the way out; None if they can be.

    Triton compiles its access to NVIDIA's driver when it is first used, with the machine's C compiler, and keeps it.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is missing; install triton"
    try:
        from triton import knobs
    except ImportError:  # before 3.4
        return "this Triton is too old; install triton 3.6 or newer"
    from triton.runtime import driver

    if knobs.runtime.interpret:
        return None
    try:
        driver.active.get_current_target()
    except Exception as error:  # a compiler, Python's headers or the driver's library is missing
        return f"Triton cannot start ({error}); install gcc and Python's headers (python3-dev), which it compiles with"
    return None
