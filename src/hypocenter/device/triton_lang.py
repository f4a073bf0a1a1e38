"""The only import of Triton: what GPU kernels are written with.

Files that import this one are imported only when a GPU, its simulation or a check of kernels is
asked for; the base install has no Triton.
"""

from __future__ import annotations

from typing import Any

from hypocenter.errors import MissingPackage

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingPackage("running or checking GPU kernels", "triton") from error

__all__ = ["interpreter", "tl", "triton"]


def interpreter() -> Any:
    """The module of Triton's interpreter; `device/interpret/interpret.py` stands on it."""
    import triton.runtime.interpreter

    return triton.runtime.interpreter
