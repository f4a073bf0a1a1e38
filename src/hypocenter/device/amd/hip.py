"""HIP C++ to an AMD code object, by clang alone: no ROCm is needed, and nothing of it is used.

`include/hip/hip_runtime.h` declares what kernels take from a runtime. A file with a program of the
host in it (hipMalloc, <<<>>>) does not compile here: keep the kernels in a file of their own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from hypocenter.base.errors import BadCodeObject, HypoError
from hypocenter.base.own_folder import own_folder
from hypocenter.base.package import FOLDER

INCLUDE = FOLDER / "device" / "amd" / "include"
_SECONDS = 120
_OPTIONS = (
    "-x",
    "hip",
    "--offload-device-only",
    "-nogpulib",
    "-nogpuinc",
    "-fdeclspec",
    "-std=c++17",
    "-O3",
    "-g",
    "-fuse-cuid=none",
    "--no-gpu-bundle-output",
)
_NAMES = ("clang++", "clang", *(f"clang-{version}" for version in range(24, 16, -1)))
_VERSION = re.compile(r"clang version (\d+)")
_OLDEST = 17


def find_clang(names: Iterable[str] = _NAMES) -> str:
    """The clang to compile with; raises HypoError with the package to install where none is."""
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        version = _VERSION.search(said.stdout)
        if version is not None and int(version[1]) >= _OLDEST:
            return path
    raise HypoError(
        f"HIP sources need clang {_OLDEST} or later with lld, and none is here: "
        "apt-get install clang-19 lld-19; or give a .hsaco that was compiled elsewhere"
    )


def compile_hip(path: Path, arch: str) -> bytes:
    """The code object of a HIP source for `arch`; raises HypoError without clang, BadCodeObject
    with clang's first error where it does not compile."""
    clang = find_clang()
    with own_folder("hypo-hip-") as folder:
        made = folder / "kernel.co"
        header = ("-isystem", str(INCLUDE), "-include", "hip/hip_runtime.h")
        done = subprocess.run(
            [clang, *_OPTIONS, f"--offload-arch={arch}", *header, "-o", str(made), str(path)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            raise BadCodeObject(str(path), f"does not compile: {_first_error(done.stderr, arch)}")
        return made.read_bytes()


def _first_error(said: str, arch: str) -> str:
    if f"invalid target ID '{arch}'" in said or "unsupported HIP gpu architecture" in said:
        return f"this clang does not know {arch}; a later one may (gfx950: clang 20)"
    errors = [line.strip() for line in said.splitlines() if "error:" in line]
    return errors[0] if errors else (said.strip().splitlines() or ["clang said nothing"])[0]
