"""The only import of Triton: what GPU kernels are written with.

Files that import this one are imported only when a GPU, its simulation or a check of kernels is
asked for; the base install has no Triton.
"""

from __future__ import annotations

import logging
from typing import Any

from hypocenter.base.errors import MissingPackage
from hypocenter.base.package import triton_problem

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingPackage("running or checking GPU kernels", "triton") from error

if problem := triton_problem(triton.__version__):
    logging.getLogger(__name__).warning("%s", problem)

__all__ = ["interpreter", "tl", "triton"]


def interpreter() -> Any:
    """The module of Triton's interpreter; `device/interpret/interpret.py` stands on it."""
    import triton.runtime.interpreter

    return triton.runtime.interpreter
