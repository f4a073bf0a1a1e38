"""Programs that break a real GPU, each under `hypo doctor`: what it names of them.

`python benchmarks/gpu_coredump.py [OUT]` with the vendor's torch and Triton; some two minutes. It
prints a table and leaves JSON reports, and one archive of bundles and dumps, in OUT. The programs
know nothing of this package; what is right about each stands in `TRUTH`.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]

from core_dumps import cut  # noqa: E402

from hypocenter.watch.gpu_dumps import gpu_dumps  # noqa: E402

PROGRAMS = ROOT / "benchmarks" / "gpu_programs"
MAX_SECONDS, NUM_JOBS, DEADLINE_SECONDS = 100, 6, 8
MAX_DUMP_BYTES, MAX_ARCHIVE_BYTES = 24 << 20, 14 << 20


class Truth(NamedTuple):
    """`text` stands in the line at fault; one of `arguments` is to blame, if any is."""

    kernel: str
    text: str
    arguments: tuple[str, ...] = ()
    is_hang: bool = False


TRUTH = {
    "pair_positions": Truth("rotate", "tl.pointer_type(tl.int32)", ("pos_ptr",)),
    "tail_mask": Truth("double", "tl.store(out_ptr", ("out_ptr",)),
    "freed_graph_input": Truth("scale", "tl.load(x_ptr", ("x_ptr",)),
    "offset_overflow": Truth("copy_rows", "row * columns", ("x_ptr",)),
    "far_index": Truth("embed", "tl.load(table_ptr", ("ids_ptr",)),
    "vector_gather": Truth("pick", "tl.load(values_ptr", ("ids_ptr",)),
    "wild_bin": Truth("count", "tl.atomic_add", ("bins_ptr",)),
    "row_stride": Truth("row_sums", "row * stride", ("stride", "x_ptr")),
    "kept_pointers": Truth("via", "tl.load(p + d)", ("ptrs_ptr",)),
    "embedding_range": Truth("index", ""),
    "compiled": Truth("triton_", ""),
    "cuda_source": Truth("scatter", "out[ids[i]]"),
    "spin_lock": Truth("spin", "v == 0", is_hang=True),
    "out_of_resources": Truth("product", ""),
}


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu-coredump-"))
    begun = time.monotonic()
    with ThreadPoolExecutor(NUM_JOBS) as pool:
        rows = list(pool.map(lambda name: examine(name, work / name), TRUTH))
    (out / "gpu_coredump.json").write_text(json.dumps(rows, indent=1))
    _archive(work, out / "gpu_coredump.tar.xz")
    print("\n".join(table(rows)))
    print("\n".join(arming_cost()))
    print(f"{time.monotonic() - begun:.0f} seconds in all")


def examine(name: str, work: Path) -> dict[str, Any]:
    """Run one program under the doctor; a row of the table."""
    work.mkdir()
    truth, program = TRUTH[name], PROGRAMS / f"{name}.py"
    command = [
        sys.executable,
        "-m",
        "hypocenter",
        "doctor",
        "--json",
        "--out",
        str(work / "bundle"),
    ]
    command += ["--deadline", str(DEADLINE_SECONDS)] if truth.is_hang else []
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(work)}
    begun = time.monotonic()
    ran = None
    with _dumps_kept(work), suppress(subprocess.TimeoutExpired):
        ran = subprocess.run(
            [*command, "--", sys.executable, str(program)],
            cwd=work, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS,
            check=False,
        )  # fmt: skip
    row: dict[str, Any] = {"program": name, "seconds": round(time.monotonic() - begun, 1)}
    (work / "stderr.txt").write_text(ran.stderr if ran else "it took too long")
    (work / "report.json").write_text(ran.stdout if ran else "")
    with suppress(ValueError, OSError, LookupError):
        report = json.loads((work / "report.json").read_text())
        bundle = json.loads((work / "bundle" / "bundle.json").read_text())
        row |= _stopped(bundle) | _cause(report)
    return row | _judged(row, truth, program)


def _stopped(bundle: dict[str, Any]) -> dict[str, Any]:
    stops = bundle.get("gpu_stops") or []
    if not stops:
        return {"stopped": ""}
    warps = stops[0]["warps"]
    wrong = [warp for warp in warps if warp["is_error"] or warp["exception"]]
    warp = (wrong or warps or [None])[0]
    frames = warp["frames"] if warp else []
    place = f"{Path(frames[0]['file']).name}:{frames[0]['line']}" if frames else "no line"
    what = stops[0]["exception"] or "on request"
    kernel = warp["kernel"] if warp else "no warp"
    return {
        "stopped": f"{kernel} {place} {what}",
        "text": frames[0].get("text", "") if frames else "",
        "stopped_kernel": kernel,
        "stopped_line": frames[0]["line"] if frames else None,
        "block": warp["block"] if warp else None,
        "known_bits": hex((warp.get("access") or {}).get("known_bits", 0)) if warp else "",
    }


def _cause(report: dict[str, Any]) -> dict[str, Any]:
    roots = report["roots"]
    if not roots:
        return {"cause": "", "kernel": "", "argument": "", "line": None}
    root = roots[0]
    return {
        "cause": root["cause"],
        "sentence": root["sentence"],
        **{key: root.get(key) or "" for key in ("kernel", "argument", "file")},
        "line": root.get("line"),
    }


def _judged(row: dict[str, Any], truth: Truth, program: Path) -> dict[str, Any]:
    lines = program.read_text().splitlines()
    right = {at for at, text in enumerate(lines, 1) if truth.text and truth.text in text}
    named = {row.get("kernel") or "", row.get("stopped_kernel") or ""}
    at = {row.get("line"), row.get("stopped_line")}
    return {
        "kernel_right": any(truth.kernel in kernel for kernel in named),
        "line_right": bool(right & at) or truth.text in row.get("text", "") if truth.text else None,
        "argument_right": row.get("argument") in truth.arguments if truth.arguments else None,
        "proven": bool(row.get("cause")),
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a program: what stopped, what was named, what of it is right."""
    yield f"{'program':<18}{'kernel':<8}{'line':<6}{'arg':<6}{'proven':<8}{'s':<7}cause | stopped"
    for row in rows:
        marks = [
            {True: "yes", False: "NO", None: "-"}[row[key]]
            for key in ("kernel_right", "line_right", "argument_right", "proven")
        ]
        named = f"{row.get('cause', '?')} {row.get('argument', '')} {row.get('line') or ''}"
        yield (
            f"{row['program']:<18}{marks[0]:<8}{marks[1]:<6}{marks[2]:<6}{marks[3]:<8}"
            f"{row['seconds']:<7}{named} | {row.get('stopped', '?')} {row.get('known_bits', '')}"
            f" {row.get('text', '')[:40]}"
        )


def arming_cost() -> Iterator[str]:
    """What healthy launches take with dumps armed and without, by turns, with no doctor at all."""
    with gpu_dumps(os.environ) as dumps:
        for turn in range(2):
            for name, variables in (("plain", {}), ("armed", dumps.variables)):
                ran = subprocess.run(
                    [sys.executable, str(PROGRAMS / "healthy_launches.py")],
                    env={**os.environ, **variables}, capture_output=True, text=True, check=False,
                )  # fmt: skip
                said = ran.stdout.split() or ["?", "?"]
                yield f"{name} ({turn}): {said[0]} us a launch, {said[-1]} ms a product"


@contextmanager
def _dumps_kept(folder: Path) -> Iterator[None]:
    """Within, a second name is given to each dump that appears below `folder`; the doctor removes
    its own."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            for path in folder.glob("hypo-gpu-*/*.nvcudmp"):
                with suppress(OSError):
                    os.link(path, folder / path.name)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _archive(work: Path, archive: Path) -> None:
    """Everything but what is too large; dumps without the code of kernels that did not run."""
    for path in work.glob("*/*.nvcudmp"):
        with suppress(OSError, struct.error):
            path.write_bytes(cut(path.read_bytes()))
    with tarfile.open(archive, "w:xz", preset=1) as tar:
        for path in sorted(work.rglob("*")):
            is_small = path.is_file() and path.stat().st_size < MAX_DUMP_BYTES
            if is_small and archive.stat().st_size < MAX_ARCHIVE_BYTES:
                tar.add(path, path.relative_to(work))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OUT", "gpu-coredump")))
