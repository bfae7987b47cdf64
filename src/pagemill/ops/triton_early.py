"""Kernels that begin while the one before them ends: programmatic dependent launch, of compute capability 9.0 and
higher.

A kernel that is launched so may start once every program of the one before it has let it (`let_next_begin`) or has
ended. It must not read what that one writes, nor write anything, until `wait_for_previous` returns: then all kernels
before it have ended, and what they wrote is seen. So every program of such a kernel waits, and one that another kernel
follows in the usual way is waited for as ever.
"""

from __future__ import annotations

import triton
import triton.language as tl

EARLY_CAPABILITY = (9, 0)


def launch_options(early: bool) -> dict[str, bool]:
    """Returns the constants with which a kernel that has EARLY is launched."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def let_next_begin(EARLY):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY):
    if EARLY:
        tl.extra.cuda.gdc_wait()
