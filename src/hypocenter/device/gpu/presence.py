"""Which GPU a name means, and whether it is there."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

from hypocenter.base.errors import BadSetting, MissingPackage, UsageError
from hypocenter.device.gpu.context import begin_context

_BUILDS = {"cuda": "NVIDIA (CUDA)", "hip": "AMD (HIP)", "cpu": "CPU"}


def find_gpu(name: str) -> tuple[Any, str, int]:
    """The module torch, and vendor and number of the GPU that users call cuda, cuda:1 or hip.

    Raises UsageError when torch is missing or built for another vendor, or when there is no such
    GPU; HypoError for a GPU of an architecture that no kernel is built for.
    """
    vendor, index = vendor_and_index(name)
    if "torch" not in sys.modules:
        begin_context(vendor, index)
    try:
        import torch
    except ImportError as error:
        raise MissingPackage(f"device {name}", "torch") from error
    _refuse_other_vendor(torch, name, vendor)
    _refuse_absent(torch, name, vendor, index)
    return torch, vendor, index


def vendor_and_index(name: str) -> tuple[str, int]:
    """As torch has them. Raises BadSetting for what is no GPU's name."""
    found = re.fullmatch(r"(cuda|hip)(?::([0-9]{1,3}))?", name)
    if not found:
        raise BadSetting("device", name, "must be cuda, cuda:1, hip, hip:1 or the like")
    return found[1], int(found[2] or 0)


def _refuse_other_vendor(torch: Any, name: str, vendor: str) -> None:
    built = "hip" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    if built == vendor:
        return
    way = f"use device {built}" if built == "cpu" else f"use device {built} on such a GPU"
    raise UsageError(
        f"device {name} needs torch's {_BUILDS[vendor]} build, but torch {torch.__version__} is "
        f"the {_BUILDS[built]} build; install the other one, or {way}"
    )


def _refuse_absent(torch: Any, name: str, vendor: str, index: int) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index < count:
        return
    if count:
        seen = f"{vendor}:0" if count == 1 else f"{vendor}:0 to {vendor}:{count - 1}"
        raise UsageError(f"no GPU {name}: torch sees {count}, {seen}")
    visible = "HIP_VISIBLE_DEVICES" if vendor == "hip" else "CUDA_VISIBLE_DEVICES"
    why = str(heard[0].message).strip().split("\n")[0] if heard else "its driver reports none"
    raise UsageError(
        f"no GPU {name}: torch sees none ({why}); check the driver and {visible}, or use device cpu"
    )
