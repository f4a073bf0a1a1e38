"""Victims of the fault lab on a real GPU: do symptom and verdict agree with the simulated one's?

Each runs in processes of its own, as in `hypo lab score`, once on the simulated GPU that its file
names and once on the real one; the doctor gets the bundles alone. A real allocator need not fault
where the simulated one does, so what is seen is told, and nothing is forced: a run that goes on in
spite of its defect is made again traced, as a user would who suspects it.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.doctor.causes import Cause
from hypocenter.lab.run import FAULTS, run_child
from hypocenter.lab.score import Examined, Score, score
from hypocenter.lab.victim import victims

#: Those whose defect real hardware has too; what needs sim's streams or options is not here.
VICTIMS = (
    "nan_weight", "block_table_out_of_range", "slot_beyond_cache", "token_beyond_vocabulary",
    "padding_token", "position_beyond_table", "logit_row_out_of_range", "positions_of_two_bytes",
    "positions_of_two_bytes_later", "kernel_casts_slots", "null_weight", "host_pointer",
    "freed_weight", "captured_pointer_freed", "key_offset_overflow", "reused_specialisation",
    "eps_is_one", "scale_inverted", "stride_in_bytes", "rotated_twice", "stale_slot",
    "foreign_block", "token_is_vocabulary_size", "gate_without_mask", "block_table_refused",
    "grid_over_limit", "grid_product", "endless_loop",
)  # fmt: skip
# Where runs are recorded by themselves; a GPU cannot write to a file on a disk.
_SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None
NUM_JOBS, SECONDS, CPU_SECONDS, FEWEST = 10, 150.0, 120, 10


def lab(device: str) -> dict[str, Any]:
    """Run them all, several at a time; wants every verdict as on sim, and no finding on a twin.

    A verdict that is wrong on both agrees; how many are right is told beside that.
    """
    rows: list[dict[str, Any]] = []
    problems: list[dict[str, Any]] = []
    for row in _rows(device, time.monotonic() + SECONDS):
        (problems if "problem" in row else rows).append(row)
    return summary(rows, problems)


def summary(rows: list[dict[str, Any]], problems: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals and table of what `examine` found; `problems` are the victims that told nothing."""
    rows.sort(key=lambda row: VICTIMS.index(row["victim"]))
    num_symptoms = sum(row["symptom_agrees"] for row in rows)
    num_verdicts = sum(row["verdict_agrees"] for row in rows)
    false_findings = [row["victim"] for row in rows if row["twin_found"]]
    is_content = num_verdicts == len(rows) >= FEWEST and not false_findings and not problems
    return {
        "ok": is_content,
        "num_victims": len(rows),
        "num_symptoms_agree": num_symptoms,
        "num_verdicts_agree": num_verdicts,
        "num_verdicts_right": sum(row["is_right"] for row in rows),
        "false_findings": false_findings,
        "problems": problems,
        "table": table(rows),
        "victims": rows,
    }


def _rows(device: str, until: float) -> Iterator[dict[str, Any]]:
    # The first to run on the device compiles for all others; meanwhile they run on sim.
    warm = threading.Thread(target=_warm_up, args=(device,))
    warm.start()
    pool = ProcessPoolExecutor(
        NUM_JOBS, mp_context=multiprocessing.get_context("spawn"), initializer=_bound
    )
    futures = {pool.submit(examine, name, device): name for name in VICTIMS}
    try:
        for future in as_completed(futures, timeout=max(until - time.monotonic(), 1.0)):
            name = futures.pop(future)
            try:
                yield future.result()
            except Exception as error:  # the others must still be told of
                yield {"victim": name, "problem": f"{type(error).__name__}: {error}"[:500]}
    except TimeoutError:
        for name in futures.values():
            yield {"victim": name, "problem": "no time left"}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        warm.join()


def _bound() -> None:
    """Whatever a victim does, each process ends after so much work."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def _warm_up(device: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hypo-lab-", dir=_SHARED) as folder:
        run_child(victims(["eps_is_one"])[0], Path(folder), twin=True, device=device)


def examine(name: str, device: str) -> dict[str, Any]:
    """One victim on sim and on `device`, both diagnosed and compared."""
    with tempfile.TemporaryDirectory(prefix="hypo-lab-", dir=_SHARED) as folder:
        simulated = _scored(name, "", Path(folder) / "sim")
        real = _scored(name, device, Path(folder) / "real")
    return compare(simulated, *real)


def _scored(name: str, device: str, folder: Path) -> tuple[Score, str]:
    """The score, and the last words of the run that is scored."""
    victim = victims([name])[0]
    needs_twin = bool(device) or victim.symptom == "differs"
    traced = replace(victim, symptom="differs")
    outcome = run_child(victim, folder / "victim", twin=False, device=device)
    healthy = outcome
    if needs_twin:
        declared = traced if device else victim
        healthy = run_child(declared, folder / "twin", twin=True, device=device)
    if victim.symptom in FAULTS and outcome.bundle is None:
        outcome = run_child(traced, folder / "again", twin=False, device=device)
        victim = traced
    one = Examined(victim=victim, outcome=outcome, healthy=healthy)
    return score(one, with_twin=bool(device)), outcome.last_words()


def compare(simulated: tuple[Score, str], real: Score, words: str) -> dict[str, Any]:
    """What was seen on both, and whether it is the same."""
    sim = simulated[0]
    is_same = sim.found == real.found or (_right(sim) and _right(real))
    return {
        "victim": sim.victim,
        "symptom_sim": sim.observed,
        "symptom": real.observed,
        "symptom_agrees": sim.observed == real.observed,
        "why": _why(sim.observed, real.observed, victims([sim.victim])[0].cause, words),
        "found_sim": sim.found,
        "found": real.found,
        "verdict_agrees": is_same,
        "is_right": _right(real),
        "proof": real.proof,
        "seconds": round(real.seconds, 2),
        "twin_found": list(real.twin.found),
        "twin_symptom": real.twin.observed,
        "last_words": words[:300],
    }


def _right(one: Score) -> bool:
    return one.class_right and one.kernel_named and one.argument_named


# Inferred from what torch and the kernels do, not measured.
_HARMLESS = {
    Cause.USE_AFTER_FREE: "probably torch kept memory that a launch still refers to",
    Cause.CAPTURED_POINTER: "probably torch kept memory that a launch still refers to",
    Cause.PROGRAM_RACE: "probably the order of the programs there",
    Cause.MISSING_MASK: "probably the order of the programs there",
}


def _why(sim: str, real: str, cause: Cause, words: str) -> str:
    """Why a real GPU shows the same defect differently, as far as its outcome tells."""
    if sim == real:
        return ""
    if real == "error":
        return f"refused before the launch: {words}"[:160]
    if cause in _HARMLESS:
        return _HARMLESS[cause]
    if sim == "crash":
        return "the memory that was hit is mapped there, so nothing faulted"
    if real == "crash":
        return "the memory that was hit is not mapped there"
    return "probably other numbers in the memory that was read"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One line per victim, and one for all."""
    lines = [f"{'victim':28} {'sim':9} {'GPU':9} {'symptom':8} {'verdict':8} root cause on the GPU"]
    for row in rows:
        symptom, verdict = (
            "agrees" if row[key] else "differs" for key in ("symptom_agrees", "verdict_agrees")
        )
        told = row["found"] or "(none)"
        if not row["verdict_agrees"]:
            told += f"; on sim: {row['found_sim'] or '(none)'}"
        if row["why"]:
            told += f" [{row['why']}]"
        if row["twin_found"]:
            told += f"; TWIN: {', '.join(row['twin_found'])}"
        lines.append(
            f"{row['victim']:28} {row['symptom_sim']:9} {row['symptom']:9} {symptom:8} "
            f"{verdict:8} {told}"
        )
    return lines


def main() -> int:
    """By itself: benchmarks/gpu_lab.py DEVICE prints the table."""
    import sys

    found = lab(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    print("\n".join(found.pop("table")))
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
