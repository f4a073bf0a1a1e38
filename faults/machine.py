"""Programs of `programs/` and kernels of `hip/` as AMD's machine code: what `hypo check --on` says.

Executed by our emulator of the machine code; not hardware. Truth is that of the program itself;
`hypo check` names what it saw by a kind, and no fix, so four claims are judged and not five.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from faults.judge import Root, Verdict, judged
from faults.program import Program, programs
from faults.report import environment_of, json_of, without_folder
from faults.row import Again, Case, Platform, Role, Row
from faults.truth import Truth

#: Of one run: machine code is slow here, and slower beside other work.
_SECONDS = 900
_OUTSIDE = ("out of bounds",)
#: HIP kernels, each beside the launches of it and those of its healthy twin.
HIP = Path(__file__).parent / "hip"
#: Faults as people make them: what `hypo check` calls the access that it sees, of which it does not
#: yet know why it was made, and the tensors that are accessed. Kernel and line are in the program.
PLANTED: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "causal_convolution": (_OUTSIDE, ("x_ptr",)),
    "embedding_row": (_OUTSIDE, ("table_ptr",)),
    "empty_residual": (("null pointer", *_OUTSIDE), ("residual_ptr",)),
    "even_heuristic": (_OUTSIDE, ("x_ptr", "y_ptr", "out_ptr")),
    "fresh_accumulator": (("uninitialised read",), ("out_ptr",)),
    "grid_too_large": (_OUTSIDE, ("x_ptr",)),
    "half_as_wide": (_OUTSIDE, ("out_ptr",)),
    "half_scales": (_OUTSIDE, ("scales_ptr",)),
    "histogram_race": (("race",), ("bins_ptr",)),
    "last_bin": (_OUTSIDE, ("bins_ptr",)),
    "norm_tail": (_OUTSIDE, ("x_ptr",)),
    "padded_slot": (_OUTSIDE, ("cache_ptr",)),
    "position_behind_table": (_OUTSIDE, ("cos_ptr",)),
    "quantised_tail": (_OUTSIDE, ("codes_ptr",)),
    "shifted_in_place": (("race",), ("x_ptr", "out_ptr")),
    "sliced_rows": (_OUTSIDE, ("x_ptr",)),
    "stencil_edge": (_OUTSIDE, ("x_ptr",)),
    "stride_in_bytes": (_OUTSIDE, ("x_ptr",)),
    "tail_not_written": (("never written",), ("out_ptr",)),
    "workspace_for_fewer": (_OUTSIDE, ("partial_ptr",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCase(Case):
    """A program with a fault and its twin, or a healthy one."""

    program: Program
    platforms: frozenset[Platform] = frozenset({Platform.EMULATED})
    collection: str = "machine"

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.program.name

    def run(self, platform: Platform, work: Path) -> list[Row]:
        if self.program.is_healthy:
            return [self._row(work / self.name, Role.HEALTHY)]
        roles = [Role.FAULT, *([Role.TWIN] if self.program.has_twin else [])]
        return [self._row(work / f"{self.name}-{role}", role) for role in roles]

    def named_again(self, work: Path, without: Collection[str]) -> Again | None:
        return None

    def _row(self, folder: Path, role: Role) -> Row:
        command = self.program.command(folder, twin=role is Role.TWIN)[1:]
        begun = time.monotonic()
        code, report = _check(command, folder)
        row = row_of(self, role, code, report, round(time.monotonic() - begun, 1))
        roots = without_folder(row.roots, folder / "program")
        return msgspec.structs.replace(row, roots=roots)

    def verdict(self, roots: Collection[Root] | None) -> Verdict:
        """What the findings are worth."""
        program = self.program
        kinds, arguments = PLANTED[program.name]
        wanted: Truth = dataclasses.replace(program.truth, causes=kinds, arguments=arguments)
        guilty = list(wanted.places(program.file.name, program.text))
        return judged(list(roots or ()), wanted, guilty, has_fix=False)


def row_of(
    case: MachineCase,
    role: Role,
    code: int | None,
    report: Mapping[str, Any] | None,
    seconds: float,
) -> Row:
    """What the report of a run is worth; without one nothing is."""
    roots = None if report is None else [root_of(one) for one in report["findings"]]
    problems = ["no report"] if report is None else list(_unexecuted(report))
    if code not in (0, 4):
        problems.append(f"exit code {code}")
    row = Row(
        collection=case.collection,
        name=case.name,
        platform=Platform.EMULATED,
        role=role,
        seconds=seconds,
        exit_code=code,
        roots=roots,
        problems=problems,
    )
    return row.with_verdict(case.verdict(roots)) if role is Role.FAULT else row


def hip_truths() -> dict[str, Truth]:
    """What is right of each HIP kernel with a planted fault, as `hip/truth.toml` has it."""
    rows = tomllib.loads((HIP / "truth.toml").read_text())
    return {
        name: Truth(
            causes=(row["kind"],),
            kernels=(name,),
            arguments=(row["argument"],),
            lines=(row["line"],),
        )
        for name, row in rows.items()
    }


def hip_verdict(name: str, findings: Iterable[Mapping[str, Any]]) -> Verdict:
    """What the findings of a launch of a HIP kernel are worth; its twin's lines are not guilty."""
    file, truth = HIP / f"{name}.hip", hip_truths()[name]
    faulty, twin, _ = file.read_text().partition(f"{name}_healthy(")
    assert twin, f"{file} has no healthy twin"
    guilty = list(truth.places(str(file), faulty))
    return judged([root_of(one) for one in findings], truth, guilty, has_fix=False)


def machine_cases() -> Iterator[MachineCase]:
    """Planted faults that machine code shows, and every healthy program."""
    for one in programs():
        is_planted = one.collection == "programs" and one.name in PLANTED
        runs_here = Platform.CPU in one.platforms and not one.beside
        if is_planted or (one.is_healthy and runs_here):
            yield MachineCase(program=one)


def _check(command: list[str], folder: Path) -> tuple[int | None, dict[str, Any] | None]:
    """Exit code, None where it took too long, and what `hypo check --json` wrote."""
    file, *words = command
    line = [sys.executable, "-m", "hypocenter", "check", "--json", "--on", "gfx942", file]
    try:
        ran = subprocess.run(
            [*line, *(["--", *words] if words else [])], cwd=folder, env=environment_of(),
            capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, None
    (folder / "report.json").write_text(ran.stdout)
    (folder / "stderr.txt").write_text(ran.stderr)
    return ran.returncode, json_of(ran.stdout)


def root_of(finding: Mapping[str, Any]) -> Root:
    """A finding in the form in which causes are judged: its line, and the one that launched it."""
    site, launched = (finding["sites"] or [None])[0], finding["launched_at"]
    place = f"{launched['file']}:{launched['line']}" if launched else None
    return {
        "cause": finding["kind"],
        "kernel": finding["kernel"],
        "argument": finding["argument"],
        "file": site["file"] if site else None,
        "line": site["line"] if site else None,
        "culprit": {"place": place},
        "sentence": finding["detail"],
    }


def _unexecuted(report: Mapping[str, Any]) -> Iterator[str]:
    """Launches that did not run as machine code, and a file that did not come to its end."""
    for launch in report["launches"]:
        if why := launch.get("unexecuted"):
            yield f"{launch['kernel']} was not executed: {why}"
    if report["error"]:
        yield f"ended early: {report['error']}"
    if not report["launches"]:
        yield "nothing was launched"
