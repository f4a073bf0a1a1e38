"""What the recorder costs a program that knows nothing of it: microseconds per Triton launch.

Launches of a kernel with two tensors and two numbers, noted and not made; once with the
same tensors, once with new ones each time. Needs torch and Triton, and no GPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/support")]

from gpu_kernels import scale_kernel  # noqa: E402

from hypocenter.foreign.caller import caller_of_now  # noqa: E402
from hypocenter.foreign.recorder import ForeignRecorder  # noqa: E402

NUM_LAUNCHES = 5000


def seconds(recorder: ForeignRecorder, given: Callable[[], tuple[torch.Tensor, ...]]) -> float:
    """Per launch, as the hook makes it but for the questions to a driver; best of three."""
    found = []
    for _ in range(3):
        spent = 0.0
        for _ in range(NUM_LAUNCHES):
            tensors = given()
            started = time.perf_counter()
            caller, site = caller_of_now()
            recorder.record_launch(
                scale_kernel, (*tensors, 1000, 2.0), {"BLOCK": 256}, (4,), "cuda:0", None, "",
                caller, site,
            )  # fmt: skip
            spent += time.perf_counter() - started
        found.append(spent / NUM_LAUNCHES)
    return min(found)


def main() -> None:
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        recorder = ForeignRecorder(Path(folder) / "runs")
        same: Any = SimpleNamespace(tensors=(torch.ones(1000), torch.ones(1000)))
        known = seconds(recorder, lambda: same.tensors)
        new = seconds(recorder, lambda: (torch.ones(1000), torch.ones(1000)))
        recorder.close()
    print(f"{known * 1e6:.1f} us per launch of known tensors")
    print(f"{(new - known) / 2 * 1e6:.1f} us more per tensor that was not seen before")


if __name__ == "__main__":
    main()
