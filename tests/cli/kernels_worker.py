"""A worker of `hypo kernels` that compiles the specimens of the tests, and dies when it is told to.

`WORKER_DIES_AT` numbers the specimen at which its process ends as by a failed assertion of LLVM;
`WORKER_HANGS_AT` the one that is never done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from hypocenter.check import compile_worker
from hypocenter.device.offline import compile
from hypocenter.device.offline.compiled import CompiledKernel
from hypocenter.device.offline.specimen import Specimen


def specimens() -> tuple[Sequence[Specimen], str]:
    from specimens import gpu_specimens

    return gpu_specimens.SPECIMENS, ""


def compile_specimen(specimen: Specimen, arch: str, *, guarded: bool = False) -> CompiledKernel:
    if os.environ.get("WORKER_DIES_AT") == specimen.name:
        print("LLVM ERROR: Cannot select: intrinsic", file=sys.stderr, flush=True)
        os.abort()
    if os.environ.get("WORKER_HANGS_AT") == specimen.name:
        time.sleep(600)
    print("something that a compiler says on stdout")
    return _compile_specimen(specimen, arch, guarded=guarded)


if __name__ == "__main__":
    _compile_specimen = compile.compile_specimen
    compile.compile_specimen = compile_specimen
    compile_worker.serve(specimens)
