"""Facts of this machine, as the system and the compiler tell them: CPU, memory, drivers of GPUs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def cpu(root: Path) -> dict[str, Any]:
    from hypocenter.device.cpu import target, threads

    relevant = ("avx2", "fma", "f16c", "avx512", "avxvnni", "amx", "neon", "dotprod", "i8mm", "sve")
    return {
        "model": _proc_value(root / "proc/cpuinfo", "model name") or platform.processor(),
        "architecture": platform.machine(),
        "instruction_set": target.instruction_set(),
        "features": sorted(name for name in target.cpu_features() if name.startswith(relevant)),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "kernel_threads": threads.max_num_threads(),
        "thread_pool": threads.thread_pool(),
    }


def memory(root: Path = Path("/")) -> dict[str, int | None]:
    """Total and available bytes of main memory; None where the system does not say."""
    return {
        f"{key}_bytes": int(found.split()[0]) * 1024 if found else None
        for key, label in (("total", "MemTotal"), ("available", "MemAvailable"))
        for found in [_proc_value(root / "proc/meminfo", label)]
    }


def cache_bytes(root: Path = Path("/")) -> int | None:
    """The last caches of all cores together; None where the system does not say."""
    last: dict[str, tuple[int, int]] = {}
    for cache in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size, cores = (
                (cache / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
            )
            num_bytes = int(size.removesuffix("K")) << 10
            last[f"{level} of {cores}"] = int(level), num_bytes
        except (OSError, ValueError):
            return None
    highest = max((level for level, _ in last.values()), default=0)
    return sum(num_bytes for level, num_bytes in last.values() if level == highest) or None


def _proc_value(path: Path, label: str) -> str:
    """The text after `label:` in a file of /proc; empty when there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() == label), "")
