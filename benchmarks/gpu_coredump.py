"""Programs that break a real GPU, each under `hypo doctor`: what it names of them.

`python benchmarks/gpu_coredump.py [OUT]` with the vendor's torch and Triton; some two minutes. It
prints a table and leaves JSON reports, and one archive of bundles and dumps, in OUT. The programs
are those of `faults/programs/gpu`; `python -m faults gpu` has them among all others.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests" / "support")]

from recorded.core_dumps import cut  # noqa: E402

from faults.judge import Says  # noqa: E402
from faults.program import Program, programs  # noqa: E402
from faults.report import roots_of  # noqa: E402
from hypocenter.watch.gpu_dumps import gpu_dumps  # noqa: E402

SPEED = ROOT / "benchmarks" / "gpu_programs"
MAX_SECONDS, NUM_JOBS = 100, 6
MAX_DUMP_BYTES, MAX_ARCHIVE_BYTES = 24 << 20, 14 << 20


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu-coredump-"))
    begun = time.monotonic()
    with ThreadPoolExecutor(NUM_JOBS) as pool:
        rows = list(pool.map(lambda one: examine(one, work / one.name), faulty_programs()))
    (out / "gpu_coredump.json").write_text(json.dumps(rows, indent=1))
    _archive(work, out / "gpu_coredump.tar.xz")
    print("\n".join(table(rows)))
    print("\n".join(arming_cost()))
    print(f"{time.monotonic() - begun:.0f} seconds in all")


def faulty_programs() -> list[Program]:
    """Those that need a GPU to break it."""
    return [one for one in programs() if one.collection == "gpu"]


def examine(program: Program, work: Path) -> dict[str, Any]:
    """Run one program under the doctor; a row of the table."""
    work.mkdir()
    deadline = program.options if "--deadline" in program.options else ()
    command = [sys.executable, "-m", "hypocenter", "doctor", "--json", *deadline]
    command += ["--out", str(work / "bundle"), "--", *program.command(work)]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(work)}
    begun = time.monotonic()
    ran = None
    with _dumps_kept(work), suppress(subprocess.TimeoutExpired):
        ran = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS,
            check=False,
        )  # fmt: skip
    row: dict[str, Any] = {"program": program.name, "seconds": round(time.monotonic() - begun, 1)}
    (work / "stderr.txt").write_text(ran.stderr if ran else "it took too long")
    (work / "report.json").write_text(ran.stdout if ran else "")
    with suppress(ValueError, OSError, LookupError):
        bundle = json.loads((work / "bundle" / "bundle.json").read_text())
        row |= _stopped(bundle)
    return row | judged_row(program, (work / "report.json").read_text())


def judged_row(program: Program, report: str) -> dict[str, Any]:
    """What a report is worth, and its causes."""
    roots = roots_of(report)
    return {"roots": roots, "says": Says(program.verdict(roots).says).value}


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


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a program: what its report is worth, what was named, and what stopped."""
    yield f"{'program':<18}{'says':<8}{'s':<7}cause | stopped"
    for row in rows:
        root = (row.get("roots") or [{}])[0]
        named = " ".join(str(root.get(key) or "") for key in ("cause", "argument", "line"))
        yield (
            f"{row['program']:<18}{row['says']:<8}{row['seconds']:<7}{named.strip()} | "
            f"{row.get('stopped', '?')} {row.get('known_bits', '')} {row.get('text', '')[:40]}"
        )


def arming_cost() -> Iterator[str]:
    """What healthy launches take with dumps armed and without, by turns, with no doctor at all."""
    with gpu_dumps(os.environ) as dumps:
        for turn in range(2):
            for name, variables in (("plain", {}), ("armed", dumps.variables)):
                ran = subprocess.run(
                    [sys.executable, str(SPEED / "healthy_launches.py")],
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
