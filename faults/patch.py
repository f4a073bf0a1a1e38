"""Faults planted into the engine's own source, as people commit them, and harmless changes of it.

Each patch of `patches/*.toml` is put into a copy of the source. `patches/program.py` then runs
below `hypo doctor` as a user of that copy would run it. It runs as it is where a fault ends the run
by itself, with `--suspect` where numbers go wrong, and with `--good` of a run before the change
where only the answer tells. After a patch of `harmless.toml` nothing may be named.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from faults.judge import Root, Verdict, judged, refuted
from faults.model import FORMATS, build
from faults.report import (
    ROOT,
    json_of,
    means_the_same,
    roots_of,
    run_doctor,
    told_of,
    with_edits,
    without_folder,
)
from faults.row import Again, Case, Platform, Role, Row
from faults.truth import LARGER, TOO_SMALL, Fix, Truth

TABLES = ROOT / "faults" / "patches"
PROGRAM = TABLES / "program.py"
SOURCE = ROOT / "src" / "hypocenter"
HARMLESS = "harmless"
#: What a patch may show: `none` is a fault that only who looks closely sees.
SHOWS = ("crash", "error", "hang", "nonfinite", "differs", "none")
_FAULTS = ("crash", "error", "hang")
#: How a fault that ends its run may end it: a device's fault may come as an error of Python.
_LIKE = {"crash": ("crash", "error"), "error": ("crash", "error"), "nonfinite": ("nonfinite",)}
_DEADLINE_SECONDS = 20
#: Families whose models the tests make, beside the lab's own.
_FAMILIES = (
    "qwen3moe",
    "gpt-oss",
    "qwen35",
    "deepseek2-lite",
    "deepseek2-v3",
    "granitehybrid",
    "qwen2moe",
    "qwen2-yarn",
    "phi3-longrope-long",
)
_PREPARING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch(Case):
    """`old` stands in `file` once, and becomes `new`; `truth` is what has to be named.

    `program` is what of `RUNS` is run. `good`: it is named beside a good run only, though it does
    more than change the answer.
    """

    name: str
    title: str
    file: str
    program: str
    old: str
    new: str
    truth: Truth
    platforms: frozenset[Platform]
    shows: str = ""
    good: bool = False
    collection: str = "patches"

    @property
    def is_harmless(self) -> bool:
        return not self.truth.is_seen

    @property
    def is_of_host(self) -> bool:
        """Whether code that the host runs is changed, and no kernel's own text."""
        return not self.file.endswith(("_gpu.py", "_cpu.py"))

    @property
    def wants_good(self) -> bool:
        return self.is_harmless or self.good or self.shows == "differs"

    def apply(self, package: Path) -> None:
        """Change the package's copy; raises ValueError where the old text is not there once."""
        path = package / self.file
        text = path.read_text("utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {text.count(self.old)} places in {self.file}")
        path.write_text(text.replace(self.old, self.new), "utf-8")

    def run(self, platform: Platform, work: Path) -> list[Row]:
        bench = Bench(work)
        good, wanted = bench.good(self.program)
        options: tuple[str, ...] = ()
        if self.shows not in _FAULTS or self.good:
            options = ("--suspect",)
        if self.wants_good:
            options += ("--good", str(good))
        if self.shows == "hang":
            options = ("--deadline", str(_DEADLINE_SECONDS))
        folder = work / self.name
        source = bench.copy(folder, self)
        began = time.monotonic()
        code, stdout, stderr = bench.run(self.program, source, folder, options)
        roots, shown = roots_of(stdout), _shown(stdout, stderr, wanted)
        row = Row(
            collection=self.collection,
            name=self.name,
            platform=platform,
            role=Role.HEALTHY if self.is_harmless else Role.FAULT,
            symptom=shown,
            options=[option for option in options if option.startswith("--")],
            seconds=round(time.monotonic() - began, 1),
            exit_code=code,
            roots=without_folder(roots, folder),
            problems=self._problems(shown, code),
        )
        return [row if self.is_harmless else row.with_verdict(self.verdict(roots, source))]

    def named_again(self, work: Path, without: Collection[str]) -> Again | None:
        from hypocenter.doctor.doctor import diagnose
        from hypocenter.record.bundle import load

        folder = work / self.name
        if self.is_harmless or not (folder / "bundle").is_dir():
            return None
        good = load(str(Bench(work).good(self.program)[0])) if self.wants_good else None
        found = diagnose(load(str(folder / "bundle")), good, allow_source=True, without=without)
        roots = [told_of(root) for root in msgspec.to_builtins(found.roots)]
        verdict = self.verdict(roots, folder / "src" / "hypocenter")
        return Again.of(found, verdict.says == "right")

    def verdict(self, roots: list[Root] | None, package: Path) -> Verdict:
        """What the causes of a report are worth.

        Beside a good run, of what the host runs, the changed line is to be blamed. A fix that the
        report has as data must give the file back as it was.
        """
        file = package / self.file
        text = file.read_text("utf-8")
        is_blamed = self.is_of_host and self.wants_good
        verdict = judged(
            roots,
            self.truth,
            list(self.truth.places(str(file), text)),
            self._changed(file, text) if is_blamed else None,
        )
        given = [self._gives_back(root, file) for root in roots or ()]
        return refuted(verdict) if False in given else verdict

    def _changed(self, file: Path, text: str) -> list[tuple[str, int]]:
        """The lines that it put in the place of others, and the next: one that is gone shows
        there."""
        first = text[: text.index(self.new)].count("\n") + 1
        last = first + self.new.rstrip("\n").count("\n") + 1
        return [(str(file), line) for line in range(first, last + 1)]

    def _gives_back(self, root: Root, file: Path) -> bool | None:
        """Whether a cause's fix makes of the file what it was; None where no data says how."""
        text = with_edits(file, root.get("edits") or ())
        if text is None:
            return None
        return means_the_same(text, file.read_text("utf-8").replace(self.new, self.old, 1))

    def _problems(self, shown: str, code: int | None) -> list[str]:
        wanted = self.shows or "none"
        found = [] if shown in _LIKE.get(wanted, (wanted,)) else [f"{shown} instead of {wanted}"]
        if self.is_harmless and code != 0:
            found.append(f"exit code {code}")
        return found


@cache
def patches(table: str) -> tuple[Patch, ...]:
    """Those of one file of the table."""
    rows = tomllib.loads((TABLES / f"{table}.toml").read_text("utf-8"))["patch"]
    return tuple(_patch(row) for row in rows)


def _patch(row: dict[str, Any]) -> Patch:
    """Larger memory is no fix, unless a buffer is too small."""
    claims: dict[str, Any] = {
        name: tuple(row.pop(name, ())) for name in ("causes", "kernels", "arguments", "lines")
    }
    fix = Fix(row.pop("fix", ""), never="" if TOO_SMALL in claims["causes"] else LARGER)
    program = row.pop("run")
    on = Platform.CPU if program.startswith("cpu") else Platform.SIMULATED
    truth = Truth(**claims, fix=fix)
    return Patch(**row, program=program, truth=truth, platforms=frozenset({on}))


def all_patches() -> tuple[Patch, ...]:
    """Faults first."""
    tables = sorted(path.stem for path in TABLES.glob("*.toml"))
    faulty = [patch for table in tables if table != HARMLESS for patch in patches(table)]
    return (*faulty, *patches(HARMLESS))


class Bench:
    """Runs patches below one folder, in which models, copies of the source and bundles lie."""

    def __init__(self, work: Path) -> None:
        self.work, self.models = work, work / "models"

    def make_models(self, names: tuple[str, ...] = ("lab", *_FAMILIES)) -> None:
        """Those that are not there yet."""
        self.models.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name == "lab":
                for kind in FORMATS:
                    (self.models / f"lab-{kind}.gguf").write_bytes(build(kind))
            elif not (self.models / f"{name}.gguf").is_file():
                sys.path.insert(0, str(ROOT / "tests" / "support"))
                from models.families import make_family

                make_family(name, self.models).path.rename(self.models / f"{name}.gguf")

    def good(self, program: str) -> tuple[Path, Any]:
        """The bundle of a run before any change, and its answer; run once."""
        folder = self.work / f"good {program}"
        with _PREPARING:
            if not folder.is_dir():  # of a run that failed the next one is told the same
                self.make_models(("lab",) if _model_of(program) == "lab" else (_model_of(program),))
                source = self.copy(folder, None)
                self.run(program, source, folder, ("--suspect",))
        answer = answer_in((folder / "stderr.txt").read_text("utf-8"))
        if answer is None:
            raise RuntimeError(f"{program}: no answer before any change; see {folder}/stderr.txt")
        return folder / "bundle", answer

    def copy(self, folder: Path, patch: Patch | None) -> Path:
        """The package as it is after the patch."""
        package = folder / "src" / "hypocenter"
        folder.mkdir(parents=True)
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if patch is not None:
            patch.apply(package)
        return package

    def run(
        self, program: str, package: Path, folder: Path, options: tuple[str, ...]
    ) -> tuple[int | None, str, str]:
        command = [sys.executable, str(PROGRAM), program, str(self.models)]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "HYPO_RUN_DIR": str(folder / "runs"),
        }
        return run_doctor(command, folder, options, environment)


def _model_of(program: str) -> str:
    """The family that a run of the program needs; `lab` for the lab's own."""
    from faults.patches.program import RUNS

    model = str(RUNS[program].model)
    return "lab" if model.startswith("lab") else model


def answer_in(text: str) -> Any:
    """The token ids and texts that the program printed, which the doctor passes on."""
    found = [line for line in text.splitlines() if line.startswith('{"token_ids"')]
    return json.loads(found[-1]) if found else None


def _shown(stdout: str, stderr: str, wanted: Any) -> str:
    """What of SHOWS a run showed."""
    answer = answer_in(stderr)
    if answer is not None:
        return "none" if answer == wanted else "differs"
    report = json_of(stdout) or {}
    if report.get("fault_kind") == "hang":
        return "hang"
    if "BadLogits" in stderr or report.get("fault_kind") == "nonfinite":
        return "nonfinite"
    return "crash" if report.get("fault_kind") == "crash" else "error"
