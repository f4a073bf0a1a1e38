"""Programs of their own that have a fault, as people write them, and healthy ones.

Each file of `programs/` says at its end what is right about it, as TOML between `# /// truth` and
`# ///`; one without causes is healthy. The doctor gets the text before that. A program that knows
the word `right` runs as its healthy twin with it; one whose fix is in the table is its own twin
with the fix in it. A fix that the report has as data is applied: what it mends may not be found
again.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from faults.judge import Root, Verdict, judged, refuted
from faults.report import (
    MAX_SECONDS,
    ROOT,
    environment_of,
    files_of,
    lost_of,
    roots_of,
    run_doctor,
    told_of,
    with_edits,
    without_folder,
)
from faults.row import Again, Case, Platform, Role, Row
from faults.truth import Fix, Truth
from hypocenter.base.errors import EXIT_ERROR, EXIT_OK, UsageError

FOLDER = ROOT / "faults" / "programs"
_BEGIN, _END = "# /// truth\n", "# ///\n"
#: What is asked for without a GPU, where Triton's interpreter runs it, unless it may hang or is
#: refused before it runs.
_SUSPECT = ("--suspect",)
_KEEPS_OPTIONS = "--deadline"
#: What the table says beside the truth itself: for people, and for the run.
_FOR_PEOPLE = frozenset({"title", "why", "class", "sources", "symptom", "origin_kernel"})
_CARD = frozenset({Platform.CARD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Case):
    """One file. `options` are those of `hypo doctor` that a user would take on a GPU.

    `beside` is a folder of `programs/` that stands first on PYTHONPATH.
    """

    name: str
    file: Path
    truth: Truth
    platforms: frozenset[Platform]
    options: tuple[str, ...] = ("--again",)
    beside: str = ""
    fix_old: str = ""
    fix_new: str = ""
    #: Whether something of a healthy run is recorded on a CPU. Of Inductor's C++ nothing is: the
    #: doctor then ends as where it could examine nothing, and must not say that all is well.
    is_recorded_on_cpu: bool = True
    collection: str = field(default="programs")

    @property
    def text(self) -> str:
        """What the doctor gets: the program without its truth."""
        return self.file.read_text("utf-8").partition(_BEGIN)[0].rstrip("\n") + "\n"

    @property
    def is_healthy(self) -> bool:
        return self.collection == "healthy"

    @property
    def has_twin(self) -> bool:
        return bool(self.fix_old) or '"right" in sys.argv' in self.text

    def run(self, platform: Platform, work: Path) -> list[Row]:
        if self.is_healthy:
            return [self._healthy(platform, work / self.name, Role.HEALTHY)]
        twins = [Role.TWIN] if self.has_twin else []
        return [
            self._fault(platform, work / self.name),
            *(self._healthy(platform, work / f"{self.name}-right", role) for role in twins),
        ]

    def named_again(self, work: Path, without: Collection[str]) -> Again | None:
        from hypocenter.doctor.doctor import diagnose
        from hypocenter.record.bundle import load

        folder = work / self.name / "bundle"
        if self.is_healthy or not folder.is_dir():
            return None
        found = diagnose(load(str(folder)), allow_source=True, without=without)
        roots = [told_of(root) for root in msgspec.to_builtins(found.roots)]
        return Again.of(found, self.verdict(roots).says == "right")

    def verdict(self, roots: list[Root] | None) -> Verdict:
        """What the causes of a report on it are worth."""
        places = list(self.truth.places(self.file.name, self.text))
        for file in files_of(roots or ()):
            if (text := self._written_text(file)) is not None:
                places += self.truth.places(str(file), text)
        return judged(roots, self.truth, places)

    def _written_text(self, file: Path) -> str | None:
        """What a file holds that the program wrote, as it does for a compiler: a part of its own
        text. None of any other file. A report has "~" for the folder of the user."""
        file = file.expanduser()
        if file.name == self.file.name or not file.is_file():
            return None
        text = file.read_text("utf-8", errors="replace")
        return text if text.strip() and text in self.text else None

    def command(self, folder: Path, *, twin: bool = False) -> list[str]:
        """Its text is written below the folder; a twin is told to be right, or has its fix."""
        file = folder / "program" / self.file.name
        file.parent.mkdir(parents=True)
        is_patched = twin and self.fix_old
        file.write_text(
            self.text.replace(self.fix_old, self.fix_new) if is_patched else self.text, "utf-8"
        )
        return [sys.executable, str(file), *(["right"] if twin and not is_patched else [])]

    def _fault(self, platform: Platform, folder: Path) -> Row:
        command = self.command(folder)
        row, roots = self._run(command, platform, folder, Role.FAULT)
        verdict = self.verdict(roots)
        mended, whole = self._mended(roots, platform, folder, Path(command[1]))
        if mended is False:
            verdict = refuted(verdict)
        row = row.with_verdict(verdict, is_seen=self.truth.is_seen)
        return msgspec.structs.replace(row, mended=mended, whole=whole)

    def _healthy(self, platform: Platform, folder: Path, role: Role) -> Row:
        """It ends by itself, and no cause is told; without --suspect there is no report at all."""
        command = self.command(folder, twin=role is Role.TWIN)
        row, _ = self._run(command, platform, folder, role)
        problems = list(row.problems)
        is_recorded = self.is_recorded_on_cpu or platform is not Platform.CPU
        wanted = EXIT_OK if is_recorded else EXIT_ERROR
        if row.exit_code != wanted:
            problems.append(f"exit code {row.exit_code} instead of {wanted}")
        return msgspec.structs.replace(row, problems=problems)

    def _run(
        self, command: list[str], platform: Platform, folder: Path, role: Role
    ) -> tuple[Row, list[Root] | None]:
        options = self._options(platform)
        begun = time.monotonic()
        code, report, _ = run_doctor(command, folder, options, self._environment(platform, folder))
        roots = without_folder(roots_of(report), folder / "program")
        row = Row(
            collection=self.collection,
            name=self.name,
            platform=platform,
            role=role,
            options=options,
            seconds=round(time.monotonic() - begun, 1),
            exit_code=code,
            roots=roots,
            problems=() if role is Role.FAULT else lost_of(report),
        )
        return row, roots_of(report)

    def _options(self, platform: Platform) -> tuple[str, ...]:
        is_kept = not self.options or self.options[0] == _KEEPS_OPTIONS
        return self.options if platform is Platform.CARD or is_kept else _SUSPECT

    def _environment(self, platform: Platform, folder: Path) -> dict[str, str]:
        first = [FOLDER / self.beside] if self.beside else []
        given = environment_of(*first) | {"TMPDIR": str(folder)}
        if self.beside:
            given["TRITON_CACHE_DIR"] = str(folder / "cache")
        if platform is not Platform.CARD:
            given["TRITON_INTERPRET"] = "1"
        return given

    def _mended(
        self, roots: list[Root] | None, platform: Platform, folder: Path, file: Path
    ) -> tuple[bool | None, bool | None]:
        """What becomes of it when the fix of the first cause is applied, where that is data."""
        text = with_edits(file, (roots or [{}])[0].get("edits") or ())
        if text is None or not roots:
            return None, None
        mended = folder / "mended"
        mended.mkdir()
        (mended / file.name).write_text(text)
        command = [sys.executable, str(mended / file.name)]
        environment = self._environment(platform, mended)
        code, report, _ = run_doctor(command, mended, self._options(platform), environment)
        left = roots_of(report) or []
        is_mended = not any(_is_same_place(root, roots[0]) for root in left)
        is_whole = code == 0 and not left
        if self.fix_old:  # its twin has the same input
            twin = self.command(mended, twin=True)
            is_whole = is_whole and _printed(command, environment) == _printed(twin, environment)
        return is_mended, is_whole


def _is_same_place(root: Mapping[str, Any], was: Mapping[str, Any]) -> bool:
    return all(root[key] == was[key] for key in ("kernel", "argument", "line"))


def _printed(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS, check=False
    )
    return ran.returncode, ran.stdout


# -- what runs it ---------------------------------------------------------------------------------


def interpreter_problem(interpreter: str, numpy: str) -> str:
    """Why a Triton with this text of its interpreter cannot run programs with this NumPy; or "".

    Until 3.6 a loop over a tensor's number says int(array([n])), which NumPy 2.4 refuses.
    """
    major, minor = (int(part) for part in numpy.split(".")[:2])
    if (major, minor) < (2, 4) or "int(self.handle.data)" not in interpreter:
        return ""
    return (
        f"this Triton's interpreter cannot count loops with NumPy {numpy}, so healthy programs "
        "fail in it; install NumPy below 2.4, or run on a card (--platform card)"
    )


def require_interpreter() -> None:
    """Raises UsageError where Triton's interpreter cannot run the programs."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return
    text = (Path(found.origin).parent / "runtime" / "interpreter.py").read_text("utf-8")
    if problem := interpreter_problem(text, metadata.version("numpy")):
        raise UsageError(problem)


# -- what there is --------------------------------------------------------------------------------


def programs(folder: Path = FOLDER) -> list[Program]:
    """All of them, by the name of their file; raises ValueError for a truth that is none."""
    files = sorted((*folder.glob("*.py"), *folder.glob("*/*.py")))
    return [read(file, folder) for file in files if not _is_helper(file)]


def read(file: Path, folder: Path = FOLDER) -> Program:
    """The program in a file; raises ValueError for a truth that is none."""
    table = truth_in(file)
    is_healthy = not table.keys() & {"causes"}
    if unknown := table.keys() - _FOR_PEOPLE - _KEYS:
        raise ValueError(f"{file}: {sorted(unknown)[0]!r} is no word of a truth")
    names = ("causes", "kernels", "arguments", "lines")
    told: dict[str, Any] = {name: tuple(table.get(name, ())) for name in names}
    default = Fix()
    fix = Fix(table.get("fix", default.says), table.get("never", default.never))
    needs_gpu = table.get("needs_gpu", False)
    room = file.parent.relative_to(folder).as_posix()
    return Program(
        name=file.stem,
        file=file,
        truth=Truth(**told, fix=fix, undecided=table.get("undecided", "")),
        platforms=_CARD if needs_gpu else frozenset({Platform.CPU, Platform.CARD}),
        options=tuple(table.get("options", _SUSPECT if is_healthy else ("--again",))),
        beside=table.get("beside", ""),
        fix_old=table.get("fix_old", ""),
        fix_new=table.get("fix_new", ""),
        is_recorded_on_cpu=table.get("is_recorded_on_cpu", True),
        collection="healthy" if is_healthy else "programs" if room == "." else room,
    )


_KEYS = frozenset(
    {
        "causes", "kernels", "arguments", "lines", "fix", "never", "options", "needs_gpu",
        "beside", "fix_old", "fix_new", "is_recorded_on_cpu", "undecided",
    }
)  # fmt: skip


def truth_in(file: Path) -> dict[str, Any]:
    """The table at the end of a program; empty where there is none."""
    _, begin, rest = file.read_text("utf-8").partition(_BEGIN)
    if not begin:
        return {}
    lines = rest.removesuffix(_END).splitlines()
    if not rest.endswith(_END) or not all(line.startswith("# ") for line in lines):
        raise ValueError(f"{file}: its truth has a line that is no comment, or does not end")
    return tomllib.loads("\n".join(line[2:] for line in lines))


def _is_helper(file: Path) -> bool:
    """Whether others import it, and nobody runs it."""
    return (
        file.name in ("cuda_library.py", "sitecustomize.py")
        or file.parent.name == "broken_compiler"
    )
