"""Paths of CPU instructions: what each needs of a machine, and what it leaves unused.

`config.INSTRUCTIONS` names those that can be asked for. Features are spelled as LLVM does.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Set
from functools import cache

from hypocenter.base.errors import UsageError
from hypocenter.settings.environment import Environment

NEEDED: dict[str, tuple[str, ...]] = {
    "avx512-bf16": ("avx512f", "avx512vnni", "avx512bf16"),
    "avx512-vnni": ("avx512f", "avx512vnni"),
    "avx512": ("avx512f",),
    "avx-vnni": ("avx2", "fma", "avxvnni"),
    "avx2": ("avx2", "fma"),
    "plain": (),
}
#: What is taken from a machine that has more than a path may use: beginnings of names.
_BEYOND = {
    "avx512-bf16": (),
    "avx512-vnni": ("avx512bf16", "avx512fp16", "avx10", "amx"),
    "avx-vnni": ("avx512", "avx10", "amx"),
    "avx2": ("avx512", "avx10", "amx", "avxvnni"),
    "plain": (
        "avx", "amx", "fma", "f16c", "xop", "sse3", "ssse3", "sse4", "vaes", "vpclmul", "gfni",
    ),
}  # fmt: skip


@cache
def asked_for() -> str:
    """The path of instructions that was asked for; empty: whatever the machine has."""
    return Environment.read().instructions


def is_fast_in_bf16(cpu: str) -> bool:
    """Whether a processor, named as LLVM spells it, has something of `vdpbf16ps`.

    An Emerald Rapids has prompts 0.75 times as fast by it as by the two fused steps that do the
    same; on a Zen 4 iree-org/iree (pull request 15089) found twice the rate of f32.
    """
    return cpu.startswith("znver")


def fastest(features: Set[str], *, with_bf16: bool) -> str:
    """The path that kernels take with these features; `with_bf16`: `vdpbf16ps`, where it is one."""
    for path, needed in NEEDED.items():
        if path == "avx512-bf16" and not with_bf16:
            continue
        if needed and features >= set(needed):
            return path
    return "neon" if platform.machine() in ("aarch64", "arm64") else "plain"


def limit_features(name: str, features: Mapping[str, bool]) -> dict[str, bool]:
    """Features of a machine, less those that the path asked for leaves out.

    Raises UsageError where it lacks one that the path needs.
    """
    for needed in NEEDED[name]:
        if not features.get(needed):
            raise UsageError(f"HYPO_INSTRUCTIONS is {name}, but this CPU has no {needed}")
    return {
        feature: has and not feature.startswith(_BEYOND[name]) for feature, has in features.items()
    }
