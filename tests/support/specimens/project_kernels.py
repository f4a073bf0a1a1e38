"""The project's GPU kernels and their specimens. To plan all takes seconds: where asked."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from hypocenter.base import package
from hypocenter.device.offline.specimen import Specimen
from hypocenter.device.triton_lang import triton
from hypocenter.model.offline.specimens import project_specimens, vendor_specimens


@cache
def all_specimens() -> tuple[Specimen, ...]:
    """Each kernel in each form, for every vendor."""
    return project_specimens()


@cache
def first_specimens() -> dict[str, Specimen]:
    """One of each kernel, as NVIDIA's GPUs are launched: a fifth of what all of them take."""
    found: dict[str, Specimen] = {}
    for specimen in vendor_specimens("nvidia"):
        found.setdefault(specimen.name, specimen)
    return found


@cache
def kernels() -> dict[str, Any]:
    """Triton's functions by name, as the modules have them; nothing is planned."""
    found = {}
    for file in package.gpu_kernel_files():
        module = importlib.import_module(package.module_name(file))
        for name, value in vars(module).items():
            if isinstance(value, triton.runtime.jit.JITFunction) and name.endswith("_kernel"):
                found[name] = value
    return found
