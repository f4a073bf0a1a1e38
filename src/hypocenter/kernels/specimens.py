"""Every specimen of the project: what `SPECIMENS` of the files of GPU kernels name.

Imports those files, and so needs Triton; launches and compiles nothing.
"""

from __future__ import annotations

import importlib
import pkgutil

from hypocenter import kernels
from hypocenter.device.specimen import Specimen
from hypocenter.errors import IntegrityError


def project_specimens() -> tuple[Specimen, ...]:
    """All specimens, by file and then in the file's own order.

    Raises HypoError without Triton, IntegrityError for a file of GPU kernels that names none.
    """
    found: list[Specimen] = []
    for module in pkgutil.iter_modules(kernels.__path__):
        if not module.name.endswith("_gpu"):
            continue
        named = getattr(
            importlib.import_module(f"{kernels.__name__}.{module.name}"), "SPECIMENS", None
        )
        if not named:
            raise IntegrityError(
                f"kernels/{module.name}.py has no SPECIMENS, so none of its kernels is checked "
                "against the limits of any GPU; name at least one launch of each kernel"
            )
        found.extend(named)
    return tuple(found)
