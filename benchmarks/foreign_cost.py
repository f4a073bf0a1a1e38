"""What the recorder costs a program that knows nothing of it: microseconds of the host.

`python benchmarks/foreign_cost.py` needs torch. Where there is a GPU, programs launch real kernels,
replay a graph and train layers, alone and under `hypo doctor`, in turn. A step that the host bounds
is also watched by `--suspect` and `--nan`, whose operations are seen by Python and by machine code
(`--watched` measures that alone). Elsewhere launches go through the same hooks to a launcher that
does nothing, and the questions to a driver cost next to nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from hypocenter.foreign import hooks  # noqa: E402
from hypocenter.foreign.recorder import ForeignRecorder  # noqa: E402

NUM_LAUNCHES, NUM_RUNS = 300, 40
NUM_PAIRS = 5
#: Width, rows and layers. An H100 waits for the host in the first one, and the host in the second.
STEPS = (("2048", "8192", "12"), ("4096", "16384", "12"))
#: A step of which the GPU waits for the host throughout.
HOST_BOUND = ("512", "256", "12")
#: How a step is watched, and HYPO_NATIVE: Python sees its operations, or machine code.
WATCHES = tuple((option, native) for option in ("--suspect", "--nan") for native in "01")
NUM_WATCHED_PAIRS = 3
PROGRAMS = ROOT / "benchmarks" / "gpu_programs"

constexpr = int  # what an annotation says is all that counts


def two(x_ptr, out_ptr, n, scale, BLOCK: constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Stands for a Triton kernel."""


def ten(a, b, c, d, e, f, g, h, i, j, n, scale, BLOCK: constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Stands for one with many tensors."""


class Jit:
    """Stands for Triton's JITFunction."""

    def __init__(self, function: Any) -> None:
        self.fn = function

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return grid(options) if callable(grid) else grid

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **options: self.run(*args, grid=grid, warmup=False, **options)


def microseconds(jit: Any, num_tensors: int, step: int = 0, *, are_new: bool = False) -> float:
    """Of a launch; the best of some runs. `step`: a number grows by so much in each launch."""
    found, tensors = [], _tensors(num_tensors)
    for _ in range(NUM_RUNS):
        spent = 0.0
        for number in range(NUM_LAUNCHES):
            tensors = _tensors(num_tensors) if are_new else tensors
            n = number * step
            begun = time.perf_counter()
            jit[(4,)](*tensors, n, 2.0, BLOCK=256)
            spent += time.perf_counter() - begun
        found.append(spent / NUM_LAUNCHES)
    return min(found) * 1e6


def _tensors(number: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.ones(1000) for _ in range(number))


def without_gpu(folder: Path) -> None:
    watched = type("Watched", (Jit,), {"run": Jit.run})
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)  # type: ignore[assignment,return-value]
    hooks._State.knows_limits = True
    hooks._State.recorder = ForeignRecorder(folder / "runs")
    hooks._watch_launches(watched, is_interpreted=False)
    for function, number in ((two, 2), (ten, 10)):
        jit = watched(function)
        plain = microseconds(Jit(function), number)
        for name, took in (
            (f"the same {number} tensors", microseconds(jit, number)),
            (f"the same {number} tensors, another number", microseconds(jit, number, 1)),
            (f"{number} new tensors", microseconds(jit, number, are_new=True)),
        ):
            print(f"{name}: {took - plain:.1f} us more than the launch alone")
    hooks._State.recorder.close()


def on_gpu(folder: Path) -> None:
    """Medians over pairs of runs, one after the other: plain, and under the doctor."""
    what = ("a replay of 20 launches", "a launch with 1 tensor", "a launch with 10 tensors")
    for name, bare, more in zip(what, *in_pairs("graph_speed", folder), strict=True):
        print(f"{name}: {bare:.1f} us plain, {more:.1f} recorded, {more - bare:.1f} more")
    for size in STEPS:
        [[bare], [more]] = in_pairs("train_speed", folder, *size)
        width, num_rows, num_layers = size
        print(
            f"a training step of {num_layers} layers, {num_rows} rows of {width}: "
            f"{bare:.2f} ms plain, {more:.2f} recorded, {more / bare - 1:.1%} more"
        )


def watched(folder: Path) -> None:
    """A step that the host bounds, under each watch; machine code is compiled before."""
    width, num_rows, num_layers = HOST_BOUND
    print(f"a training step of {num_layers} layers, {num_rows} rows of {width}, watched:")
    in_pairs("train_speed", folder, *HOST_BOUND, options=("--nan",), native="1", num_pairs=1)
    for option, native in WATCHES:
        [bare], [more] = in_pairs(
            "train_speed", folder, *HOST_BOUND, options=(option,), native=native,
            num_pairs=NUM_WATCHED_PAIRS,
        )  # fmt: skip
        seen = "machine code" if native == "1" else "Python"
        print(f"  {option}, by {seen}: {bare:.2f} ms plain, {more:.2f} ({more / bare:.2f} x)")


def in_pairs(
    program: str,
    folder: Path,
    *args: str,
    options: tuple[str, ...] = (),
    native: str = "0",
    num_pairs: int = NUM_PAIRS,
) -> tuple[list[float], list[float]]:
    """The numbers that a program prints, plain and recorded: medians of runs by turns."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    plain = [sys.executable, str(PROGRAMS / f"{program}.py"), *args]
    doctor = [sys.executable, "-m", "hypocenter", "doctor", *options, "--out"]
    variables = {**os.environ, "PYTHONPATH": path, "HYPO_NATIVE": native}
    found: dict[str, list[list[float]]] = {"plain": [], "recorded": []}
    for _ in range(num_pairs):
        bundle = tempfile.mkdtemp(dir=folder)
        recorded = [*doctor, f"{bundle}/bundle", "--", *plain]
        for name, command in (("plain", plain), ("recorded", recorded)):
            ran = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300,
                check=True,
            )  # fmt: skip
            # Behind the program's own line may be a report.
            found[name].append([float(number) for number in ran.stdout.splitlines()[0].split()])
    bare, more = (
        [statistics.median(column) for column in zip(*runs, strict=True)] for runs in found.values()
    )
    return bare, more


def main() -> None:
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        if "--watched" in sys.argv[1:]:
            watched(Path(folder))
        elif torch.cuda.is_available():
            on_gpu(Path(folder))
            watched(Path(folder))
        else:
            without_gpu(Path(folder))


if __name__ == "__main__":
    main()
