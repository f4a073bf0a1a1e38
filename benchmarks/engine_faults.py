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
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from corpus_judge import CLAIMS, Fix, judged
from doctor_corpus import MAX_SECONDS, ROOT, json_of, roots_of, run_doctor, with_edits

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
    "deepseek2-v3",
    "granitehybrid",
    "qwen2moe",
    "qwen2-yarn",
    "phi3-longrope-long",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """`old` stands in `file` once, and becomes `new`; the rest is what has to be named.

    One of `causes`, `kernel` as the launch has it, one of `arguments` as the contract or the source
    has it, a line that holds `line` where the report names one of `file`. Empty is anything.
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
        if self.models.is_dir():
            return
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
        if patch.shows not in _FAULTS or patch.good:
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
            is_right = shown == "none" and not roots and exit_code == 0
            return row | {"is_right": is_right, "says": "false" if roots else "silent"}
        return row | judged_patch(roots, patch, source)

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
        package = folder / "src" / "hypocenter"
        if package.is_dir():  # of an earlier call
            return package
        folder.mkdir()
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if patch is not None:
            patch.apply(package)
        return package

    def _run(
        self, run: str, package: Path, folder: Path, options: tuple[str, ...]
    ) -> tuple[int | None, str, str]:
        bundle, said = folder / "bundle", folder / "stderr.txt"
        if bundle.is_dir() and said.is_file():
            return _examined_again(bundle, options, said.read_text("utf-8"))
        program = [sys.executable, str(PROGRAM), run, str(self.models)]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "HYPO_RUN_DIR": str(folder / "runs"),
        }
        return run_doctor(program, folder, options, environment)


def _examined_again(
    bundle: Path, options: tuple[str, ...], said: str
) -> tuple[int | None, str, str]:
    """What the doctor of this source says of a bundle that is there, as `run_doctor` gives it."""
    given = options[options.index("--good") :] if "--good" in options else ()
    command = [sys.executable, "-m", "hypocenter", "doctor", "--json", *given, str(bundle)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS, check=False)
    return ran.returncode, ran.stdout, said


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


def judged_patch(roots: list[dict[str, Any]] | None, patch: Patch, package: Path) -> dict[str, Any]:
    """What `corpus_judge.judged` says of the report on a patch.

    Beside a good run, of what the host runs, the changed line is to be blamed. A fix that the
    report has as data must give the file back as it was. "Make it larger" is none, unless a buffer
    is too small.
    """
    file = package / patch.file
    lines = file.read_text("utf-8").splitlines()
    found = judged(
        roots,
        causes=patch.causes,
        kernel=patch.kernel,
        arguments=patch.arguments,
        lines={at for at, text in enumerate(lines, 1) if patch.line and patch.line in text},
        fix=None if "buffer too small" in patch.causes else Fix(""),
        program=file,
        changed=_changed_lines(patch, file) if patch.is_of_host and patch.wants_good else None,
    )
    given = [_gives_back(root, patch, file) for root in roots or ()]
    if False in given:
        found |= {"fix_right": False, "is_right": False, "says": "false"}
    return found


def _changed_lines(patch: Patch, file: Path) -> set[int]:
    """Those that the patch put in the place of others, and the next: a line that is gone shows
    there."""
    text = file.read_text("utf-8")
    first = text[: text.index(patch.new)].count("\n") + 1
    return set(range(first, first + patch.new.rstrip("\n").count("\n") + 2))


def _gives_back(root: dict[str, Any], patch: Patch, file: Path) -> bool | None:
    """Whether a root's fix makes of the file what it was; None where no data says how."""
    text = with_edits(file, root.get("edits") or ())
    if text is None:
        return None
    was = file.read_text("utf-8").replace(patch.new, patch.old, 1)
    return ast.dump(ast.parse(text)) == ast.dump(ast.parse(was))


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a patch, and the totals."""
    yield f"{'patch':<34}{'says':<8}{'shown':<11}{'s':>6}  found"
    for row in rows:
        root = (row["roots"] or [{}])[0]
        keys = ("cause", "kernel", "argument", "file", "line")
        what = " ".join(str(root.get(key) or "") for key in keys)
        wrong = [claim for claim in CLAIMS if not row.get(f"{claim}_right", True)]
        as_said = row["shown"] in _LIKE.get(row["declared"], (row["declared"],))
        unlike = "" if as_said or not row["declared"] else f" instead of {row['declared']}"
        says = row["says"] if row["declared"] or not row["is_right"] else "quiet"
        yield (
            f"{row['patch']:<34}{says:<8}{row['shown']:<11}"
            f"{row['seconds']:>6}  {what}{f'  {wrong}' if wrong else ''}{unlike}"
        )
    faulty = [row for row in rows if row["declared"]]
    harmless = [row for row in rows if not row["declared"]]
    says = ("right", "vague", "silent", "false")
    yield (
        f"of {len(faulty)}: {', '.join(f'{_num_that(faulty, say)} {say}' for say in says)}; "
        f"{sum(not row['is_right'] for row in harmless)} alarms on {len(harmless)} harmless patches"
    )


def _num_that(rows: list[dict[str, Any]], says: str) -> int:
    return sum(row["says"] == says for row in rows)


def _record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept: how many, and each."""
    faulty = [row for row in rows if row["declared"]]
    harmless = [row for row in rows if not row["declared"]]
    return {
        "num_faults": len(faulty),
        "num_named_rightly": _num_that(faulty, "right"),
        "num_vague": _num_that(faulty, "vague"),
        "num_silent": _num_that(faulty, "silent"),
        "num_false": _num_that(faulty, "false"),
        "num_harmless": len(harmless),
        "num_alarms": sum(not row["is_right"] for row in harmless),
        "patches": rows,
    }


def _rows_before(file: Path, chosen: Iterable[Patch]) -> dict[str, dict[str, Any]]:
    """The rows of an earlier call for the patches that there still are, but these."""
    if not file.is_file():
        return {}
    left = {patch.name for patch in all_patches()} - {patch.name for patch in chosen}
    rows = json.loads(file.read_text("utf-8"))["patches"]
    return {row["patch"]: row for row in rows if row["patch"] in left}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("out", nargs="?", default=os.environ.get("OUT", "engine-faults"))
    parser.add_argument(
        "--only", default="", help="patches, separated by commas; rows of others in OUT stay"
    )
    parser.add_argument(
        "--work", type=Path, help="that of an earlier call: bundles there are examined again"
    )
    parser.add_argument("--jobs", type=int, default=1, help="patches that run at a time")
    options = parser.parse_args()
    out = Path(options.out)
    work = options.work or Path(tempfile.mkdtemp(prefix="engine-faults-"))
    out.mkdir(parents=True, exist_ok=True)
    wanted = set(filter(None, options.only.split(",")))
    chosen = [patch for patch in all_patches() if not wanted or patch.name in wanted]
    file = out / "engine_faults.json"
    bench, rows = Bench(work), _rows_before(file, chosen)
    bench.make_models()
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(bench.good, dict.fromkeys(patch.run for patch in chosen)))
        for patch, row in zip(chosen, pool.map(bench.examine, chosen), strict=True):
            rows[patch.name] = row
            ordered = [rows[one.name] for one in all_patches() if one.name in rows]
            file.write_text(json.dumps(_record(ordered), indent=1) + "\n")
            print(list(table([row]))[-2], flush=True)
    print("\n".join(table(ordered)), f"bundles are in {work}", sep="\n", flush=True)


if __name__ == "__main__":
    main()
