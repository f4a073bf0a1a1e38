"""Faults planted into the engine's own source, as people commit them: what the doctor names.

`python benchmarks/engine_faults.py [OUT]` on the CPU and on simulated GPUs. Each patch of
`engine_faults/*.toml` is put into a copy of the source. `engine_faults/program.py` then runs below
`hypo doctor` as a user of that copy would run it: as it is where a fault ends the run by itself,
with `--suspect` where numbers go wrong, and with `--good` of a run before the change where only
the answer tells. What is named first is held against the truth in the table, and how it showed
against what the table says. After `harmless.toml` nothing may be named. Prints a table, and leaves
it as JSON in OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from doctor_corpus import ROOT, json_of, roots_of, run_doctor

TABLES = ROOT / "benchmarks" / "engine_faults"
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
    "qwen2-yarn",
    "phi3-longrope-long",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """`old` stands in `file` once, and becomes `new`; the rest is what has to be named.

    One of `causes`, `kernel` as part of the kernel's name, a line that holds `line` where the
    report names one of the package, one of `arguments` as argument or tensor. Empty is anything.
    `good`: it is named beside a good run only, though it does more than change the answer.
    """

    name: str
    title: str
    file: str
    run: str
    old: str
    new: str
    shows: str = ""
    good: bool = False
    causes: tuple[str, ...] = ()
    kernel: str = ""
    line: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def is_harmless(self) -> bool:
        return not self.causes

    @property
    def is_of_kernel(self) -> bool:
        """Whether the kernel's own text is changed, and no code that the host runs."""
        return self.file.endswith(("_gpu.py", "_cpu.py"))

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


@cache
def patches(table: str) -> tuple[Patch, ...]:
    """Those of one file of the table."""
    rows = tomllib.loads((TABLES / f"{table}.toml").read_text("utf-8"))["patch"]
    lists = ("causes", "arguments")
    return tuple(
        Patch(**{key: tuple(value) if key in lists else value for key, value in row.items()})
        for row in rows
    )


def all_patches() -> tuple[Patch, ...]:
    """Faults first."""
    tables = sorted(path.stem for path in TABLES.glob("*.toml"))
    faulty = [patch for table in tables if table != HARMLESS for patch in patches(table)]
    return (*faulty, *patches(HARMLESS))


class Bench:
    """Runs patches below one folder, in which models, copies of the source and bundles lie."""

    def __init__(self, work: Path) -> None:
        self.work, self.models = work, work / "models"
        self._good: dict[str, tuple[Path, Any]] = {}

    def make_models(self, names: tuple[str, ...] = ("lab", *_FAMILIES)) -> None:
        self.models.mkdir(parents=True)
        for name in names:
            if name == "lab":
                from hypocenter.lab.model import FORMATS, build

                for kind in FORMATS:
                    (self.models / f"lab-{kind}.gguf").write_bytes(build(kind))
            else:
                sys.path.insert(0, str(ROOT / "tests" / "support"))
                from families import make_family

                make_family(name, self.models).path.rename(self.models / f"{name}.gguf")

    def examine(self, patch: Patch) -> dict[str, Any]:
        """A row of the table."""
        good, wanted = self.good(patch.run)
        options: tuple[str, ...] = ()
        if patch.shows not in _FAULTS:
            options = ("--suspect",)
        if patch.wants_good:
            options += ("--good", str(good))
        if patch.shows == "hang":
            options = ("--deadline", str(_DEADLINE_SECONDS))
        folder = self.work / patch.name
        source = self._copy(folder, patch)
        began = time.monotonic()
        exit_code, stdout, stderr = self._run(patch.run, source, folder, options)
        roots = roots_of(stdout)
        shown = _shown(stdout, stderr, wanted)
        row = {
            "patch": patch.name,
            "title": patch.title,
            "options": [option for option in options if option.startswith("--")],
            "seconds": round(time.monotonic() - began, 1),
            "exit_code": exit_code,
            "declared": patch.shows,
            "shown": shown,
            "roots": _without_folder(roots, source),
        }
        if patch.is_harmless:
            return row | {"is_right": shown == "none" and not roots and exit_code == 0}
        return row | judged(roots, patch, source)

    def good(self, run: str) -> tuple[Path, Any]:
        """The bundle of a run before any change, and its answer."""
        if run not in self._good:
            folder = self.work / f"good {run}"
            source = self._copy(folder, None)
            _, _, stderr = self._run(run, source, folder, ("--suspect",))
            self._good[run] = folder / "bundle", answer_in(stderr)
            if self._good[run][1] is None:
                raise RuntimeError(f"{run}: no answer before any change: {stderr[-1000:]}")
        return self._good[run]

    def _copy(self, folder: Path, patch: Patch | None) -> Path:
        folder.mkdir()
        package = folder / "src" / "hypocenter"
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if patch is not None:
            patch.apply(package)
        return package

    def _run(
        self, run: str, package: Path, folder: Path, options: tuple[str, ...]
    ) -> tuple[int | None, str, str]:
        program = [sys.executable, str(PROGRAM), run, str(self.models)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(package.parent),
            "HYPO_RUN_DIR": str(folder / "runs"),
        }
        return run_doctor(program, folder, options, environment)


def _without_folder(roots: list[dict[str, Any]] | None, package: Path) -> Any:
    """Causes whose files are named as in the repository, and not as in a copy for one run."""
    return json.loads(json.dumps(roots).replace(f"{package.parents[1]}/", ""))


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
    if "BadLogits" in stderr or str(report.get("symptom")).startswith("numbers that are none"):
        return "nonfinite"
    return "crash" if report.get("fault_kind") == "crash" else "error"


def judged(roots: list[dict[str, Any]] | None, patch: Patch, package: Path) -> dict[str, Any]:
    """What of the first cause is right; `is_right` if all of it is.

    Beside a good run the line that a patch of the host's own code changed must be the culprit.
    """
    root = roots[0] if roots else {}
    path, line = Path(root.get("file") or ""), root.get("line")
    is_own = path.name == Path(patch.file).name
    lines = (package / patch.file).read_text("utf-8").splitlines()
    right = [at for at, text in enumerate(lines, 1) if patch.line and patch.line in text]
    named = {root.get("argument") or "", root.get("tensor") or ""}
    found = {
        "cause_right": root.get("cause") in patch.causes,
        "kernel_right": bool(root) and patch.kernel in (root.get("kernel") or ""),
        "line_right": bool(root) and (not right or not is_own or line in right),
        "argument_right": bool(root)
        and (not patch.arguments or bool(named.intersection(patch.arguments))),
    }
    if patch.wants_good and not patch.is_of_kernel:
        found["culprit_right"] = _is_changed_line(root, patch, package)
    return found | {"is_right": all(found.values())}


def _is_changed_line(root: dict[str, Any], patch: Patch, package: Path) -> bool:
    """Whether the culprit lies among the lines that the patch put in the place of others."""
    place = (root.get("culprit") or {}).get("place") or f"{root.get('file')}:{root.get('line')}"
    file, _, line = place.rpartition(":")
    text = (package / patch.file).read_text("utf-8")
    first = text[: text.index(patch.new)].count("\n") + 1
    last = first + patch.new.rstrip("\n").count("\n") + 1  # a line that is gone shows at the next
    return file.endswith(f"hypocenter/{patch.file}") and first <= int(line) <= last


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a patch, and the totals."""
    yield f"{'patch':<34}{'right':<7}{'shown':<11}{'s':>6}  found"
    for row in rows:
        root = (row["roots"] or [{}])[0]
        keys = ("cause", "kernel", "argument", "file", "line")
        what = " ".join(str(root.get(key) or "") for key in keys)
        wrong = [key[:-6] for key in row if key.endswith("_right") and not row[key]]
        wrong = [key for key in wrong if key != "is"]
        as_said = row["shown"] in _LIKE.get(row["declared"], (row["declared"],))
        unlike = "" if as_said or not row["declared"] else f" instead of {row['declared']}"
        yield (
            f"{row['patch']:<34}{'yes' if row['is_right'] else 'NO':<7}{row['shown']:<11}"
            f"{row['seconds']:>6}  {what}{f'  {wrong}' if wrong else ''}{unlike}"
        )
    faulty = [row for row in rows if row["declared"]]
    harmless = [row for row in rows if not row["declared"]]
    yield (
        f"{sum(row['is_right'] for row in faulty)} of {len(faulty)} named rightly; "
        f"{sum(not row['is_right'] for row in harmless)} alarms on {len(harmless)} harmless patches"
    )


def _record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept: how many, and each."""
    faulty = [row for row in rows if row["declared"]]
    harmless = [row for row in rows if not row["declared"]]
    return {
        "num_faults": len(faulty),
        "num_named_rightly": sum(row["is_right"] for row in faulty),
        "num_harmless": len(harmless),
        "num_alarms": sum(not row["is_right"] for row in harmless),
        "patches": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("out", nargs="?", default=os.environ.get("OUT", "engine-faults"))
    parser.add_argument("--only", default="", help="patches, separated by commas")
    options = parser.parse_args()
    out, work = Path(options.out), Path(tempfile.mkdtemp(prefix="engine-faults-"))
    out.mkdir(parents=True, exist_ok=True)
    wanted = set(filter(None, options.only.split(",")))
    chosen = [patch for patch in all_patches() if not wanted or patch.name in wanted]
    bench, rows = Bench(work), []
    bench.make_models()
    for patch in chosen:
        rows.append(bench.examine(patch))
        (out / "engine_faults.json").write_text(json.dumps(_record(rows), indent=1) + "\n")
        print(list(table(rows))[-2], flush=True)
    print("\n".join(table(rows)), f"bundles are in {work}", sep="\n", flush=True)


if __name__ == "__main__":
    main()
