"""The CPU as a device: what it is, and how many threads its kernels may use."""

from __future__ import annotations

from hypocenter.device.code_cache import cache_problem
from hypocenter.device.lang import (
    cpu_features,
    instruction_set,
    max_num_threads,
    num_threads,
    set_num_threads,
)

__all__ = [
    "cache_problem",
    "cpu_features",
    "instruction_set",
    "max_num_threads",
    "num_threads",
    "set_num_threads",
]
