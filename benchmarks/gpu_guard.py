"""Foreign programs under `hypo guard` on a real GPU, and what the guard costs their kernels.

Programs that leave their tensors are found at the right line and survive; their healthy twins raise
no alarm. Kernels are timed by events of the GPU, plain and guarded. `scripts/gpu --only guard` runs
it, and with it the engine's own kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TWINS = ROOT / "tests" / "foreign" / "guarded"
PROGRAMS = ROOT / "faults" / "programs" / "gpu"
SPEED = ROOT / "benchmarks" / "gpu_programs"
NUM_JOBS, MAX_SECONDS = 4, 150
#: A guarded kernel takes at most so many times as long: the goal, which fails no run.
GOAL = 2.5


class Leaves(NamedTuple):
    """What a program does: each of `texts` stands in a line that leaves its tensor.

    `unguarded` is the kernel that has no guarded form.
    """

    texts: tuple[str, ...] = ()
    unguarded: str = ""


#: Programs with a twin: `PROGRAM gpu`, and `PROGRAM gpu right`.
WITH_TWIN = {
    "silent_store": Leaves(("tl.store(out_ptr",)),
    "indexed": Leaves(("return tl.load",)),
    "overflow": Leaves(("x = tl.load(x_ptr",)),
    "tail": Leaves(("tl.store(y_ptr", "tl.load(x_ptr")),
    "between_rows": Leaves(("tl.store(out_ptr",)),
    "listed_pointers": Leaves(("tl.atomic_add",), "add_listed"),
}
#: Programs that break a GPU when they run as they are.
BREAKING = {
    "far_index": Leaves(("tl.load(table_ptr",)),
    "vector_gather": Leaves(("tl.load(values_ptr",)),
    "wild_bin": Leaves(("tl.atomic_add",)),
    "row_stride": Leaves(("tl.load(x_ptr",)),
    "offset_overflow": Leaves(("row * columns",)),
    "pair_positions": Leaves(("tl.load(table_ptr",)),
    # Beyond 2**31 its offset turns negative, and passes the mask of the load too.
    "tail_mask": Leaves(("tl.store(out_ptr", "x = tl.load(x_ptr")),
    "kept_pointers": Leaves((), "via"),
}


def run(device: str) -> dict[str, Any]:
    """All of it; `ok` when every program is told rightly and guarded kernels give equal bits."""
    kind = "gpu" if device.split(":")[0] in ("cuda", "hip") else "cpu"
    wanted: list[tuple[Path, tuple[str, ...], Leaves]]
    wanted = [(TWINS / f"{name}.py", (kind,), truth) for name, truth in WITH_TWIN.items()]
    wanted += [
        (TWINS / f"{name}.py", (kind, "right"), Leaves((), truth.unguarded))
        for name, truth in WITH_TWIN.items()
    ]
    wanted += [(PROGRAMS / f"{name}.py", (), truth) for name, truth in BREAKING.items()]
    with ThreadPoolExecutor(NUM_JOBS) as pool:
        rows = list(pool.map(lambda one: examine(*one), wanted))
    kernels = list(costs("cuda"))
    engine = _engine(device)
    again = proven_again(PROGRAMS / "far_index.py")
    worst = max((row["ratio"] for row in kernels if "ratio" in row), default=None)
    return {
        "ok": all(row["is_right"] for row in (*rows, *kernels, again)) and engine["ok"],
        "worst_ratio": worst,
        "within_goal": worst is not None and worst <= GOAL,
        "programs": rows,
        "again": again,
        "kernels": kernels,
        "engine": engine,
        "table": [*table(rows), *cost_table(kernels)],
    }


# -- programs -------------------------------------------------------------------------------------


def examine(program: Path, words: tuple[str, ...], truth: Leaves) -> dict[str, Any]:
    """Run one program under `hypo guard`; what was told of it, and whether that is right."""
    name = " ".join((program.stem, *words))
    code, out, err = _hypo("guard", "--json", "--", sys.executable, str(program), *words)
    try:
        report = json.loads(out)
    except ValueError:
        return {"program": name, "is_right": False, "problem": f"exit code {code}: {err[-1500:]}"}
    return {"program": name, **judged(report, code, program.read_text().splitlines(), truth, err)}


def judged(
    report: Mapping[str, Any], code: int, lines: list[str], truth: Leaves, err: str
) -> dict[str, Any]:
    """What a report says, and whether it is what the program does."""
    found = report["findings"]
    told = [lines[one["line"] - 1].strip() for one in found if 0 < one["line"] <= len(lines)]
    unguarded = [one["kernel"] for one in report["unguarded"]]
    wrong = []
    if not all(any(text in line for line in told) for text in truth.texts):
        wrong.append("a line at fault is not told")
    if not all(any(text in line for text in truth.texts) for line in told):
        wrong.append("a line is told that is right")
    if code != (4 if truth.texts else report["exit_code"]):
        wrong.append(f"hypo guard ended with exit code {code}")
    if truth.unguarded not in (*unguarded, ""):
        wrong.append(f"{truth.unguarded} is not listed")
    if not truth.unguarded and (unguarded or report["exit_code"] != 0):
        wrong.append(f"it did not survive, or {unguarded} was not guarded")
    return {
        "is_right": not wrong,
        "wrong": wrong,
        "told": told,
        "unguarded": unguarded,
        "exit_code": report["exit_code"],
        "num_launches": report["num_launches"],
        "num_guarded": report["num_guarded"],
        "has_values": [bool(one["values"]) for one in found],
        "said": err[-600:] if wrong else "",
    }


def proven_again(program: Path) -> dict[str, Any]:
    """`hypo doctor --again` of a program that breaks the GPU: is a cause proven, by which run?"""
    with tempfile.TemporaryDirectory(prefix="gpu-guard-") as folder:
        bundle = str(Path(folder) / "bundle")
        command = ("doctor", "--again", "--json", "--out", bundle, "--", sys.executable)
        code, out, err = _hypo(*command, str(program))
    try:
        report = json.loads(out)
    except ValueError:
        return {"program": program.stem, "is_right": False, "problem": err[-1500:]}
    return {
        "program": program.stem,
        "is_right": bool(report["roots"]) and code == 3,
        "cause": report["roots"][0]["cause"] if report["roots"] else "",
        "runs": report["runs"],
    }


def _hypo(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command of hypo."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hypocenter", *words],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
            timeout=MAX_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, "", f"it took longer than {MAX_SECONDS} s"
    return done.returncode, done.stdout, done.stderr


# -- kernels --------------------------------------------------------------------------------------


def costs(
    device: str, scale: int = 1, seconds: Callable[..., float] | None = None
) -> Iterator[dict[str, Any]]:
    """Of each kernel of `gpu_programs/guard_speed.py`: time plain and guarded, and equal bits."""
    for kernel, grid, arguments, options in _module("guard_speed").cases(device, scale):
        try:
            yield _cost(kernel, grid, arguments, options, seconds or event_seconds)
        except Exception as error:  # one kernel's failure is that kernel's row
            problem = f"{type(error).__name__}: {error}"[:600]
            yield {"kernel": kernel.fn.__name__, "is_right": False, "problem": problem}


def _cost(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    options: dict[str, Any],
    seconds: Callable[..., float],
) -> dict[str, Any]:
    import torch

    from hypocenter.foreign.guarding import Guarding

    unguarded: list[tuple[Any, ...]] = []
    given = {**arguments, **options}
    prepared = Guarding(lambda *facts: unguarded.append(facts)).prepare(kernel, (), given)
    if prepared is None:
        return {"kernel": kernel.fn.__name__, "is_right": False, "problem": str(unguarded)}
    tensors = [value for value in arguments.values() if hasattr(value, "data_ptr")]

    def plain() -> None:
        kernel[grid](**given)

    def guarded() -> None:
        prepared.form.fn[grid](**given, **prepared.extra)

    results = []
    for launch in (plain, guarded):
        launch()
        results.append([tensor.clone() for tensor in tensors])
    same = all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*results, strict=True)
    )
    # By turns, so that a clock that changes meanwhile changes both.
    turns = [(seconds(plain), seconds(guarded)) for _ in range(3)]
    plain_s, guarded_s = (statistics.median(times) for times in zip(*turns, strict=True))
    is_clean = not any(prepared.extra["guard__slots"].tolist())
    return {
        "kernel": kernel.fn.__name__,
        "plain_us": plain_s * 1e6,
        "guarded_us": guarded_s * 1e6,
        "ratio": guarded_s / plain_s,
        "is_right": same and is_clean,
    }


def event_seconds(launch: Callable[[], None], num_launches: int = 20) -> float:
    """Seconds of one launch on the GPU, by its own events around several."""
    import torch

    cuda: Any = torch.cuda
    for _ in range(3):
        launch()
    first, last = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    first.record()
    for _ in range(num_launches):
        launch()
    last.record()
    cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / num_launches


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SPEED / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _engine(device: str) -> dict[str, Any]:
    """What the guard costs the engine's own kernels."""
    import gpu_speed

    try:
        return gpu_speed.guard_cost(device)
    except Exception as error:
        return {"ok": False, "problem": f"{type(error).__name__}: {error}"[:1000]}


# -- tables ---------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a program."""
    yield f"{'program':<24}{'right':<7}{'launches':<10}told"
    for row in rows:
        guarded = f"{row.get('num_guarded', '?')}/{row.get('num_launches', '?')}"
        told = row.get("problem") or "; ".join((*row["wrong"], *row["told"]))
        yield f"{row['program']:<24}{'yes' if row['is_right'] else 'NO':<7}{guarded:<10}{told[:80]}"


def cost_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a kernel."""
    yield f"{'kernel':<24}{'right':<7}{'plain us':<12}{'guarded us':<12}ratio"
    for row in rows:
        right = "yes" if row["is_right"] else "NO"
        if "ratio" not in row:
            yield f"{row['kernel']:<24}{right:<7}{row['problem'][:60]}"
            continue
        times = f"{row['plain_us']:<12.1f}{row['guarded_us']:<12.1f}{row['ratio']:.2f}"
        yield f"{row['kernel']:<24}{right:<7}{times}"
