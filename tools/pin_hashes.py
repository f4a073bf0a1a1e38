"""Writes hashes/: the pins with the sha256 of each file that setup may install.

    python -m tools.pin_hashes

One file for each part that is installed by itself (base, an extra, what a script adds), in pip's
form: `pip install --require-hashes --no-deps -r hashes/base.txt`. Which packages belong to a part
follows from pyproject.toml and from what each package asks for. The pins stand in constraints.txt,
those of the part `clients` in constraints-clients.txt. The index is the one that pip is configured
with; where they lie is not written. Nothing is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
HASHES = ROOT / "hashes"

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
#: Versions 2.x of glibc whose wheels are taken, newest first.
GLIBC = range(41, 4, -1)

#: Each vendor builds its own, under hashes of its own.
TORCH = "torch"
#: Pinned for the CPU build; any other torch build brings the one that belongs to it.
TRITON = "triton"
#: Have no wheels: their source distributions are built.
BUILT = frozenset({"llama-cpp-python", "rouge-score", "sqlitedict", "word2number"})
#: What scripts install beside the package and its extras.
BY_SCRIPTS = {
    "fuzz": ("atheris",),  # scripts/test-fuzz
    "peers": ("scikit_build_core", "cmake", "ninja"),  # scripts/test-peers
    "clients": (  # scripts/test-clients
        "openai", "lm-eval[api]", "litellm", "langchain-openai", "schemathesis", "pytest",
        "pydantic-ai-slim[openai]", "anthropic", "ollama", "llama-index-llms-litellm",
        "llama-index-llms-ollama", "llama-index-embeddings-litellm", "model-serving-minefield",
    ),
    "ray-tests": ("ray[serve]", "aiohttp", "pytest", "hypothesis"),  # scripts/test-ray
}  # fmt: skip
#: Parts that do not resolve beside the others have pins of their own.
PIN_FILES = {
    "clients": "constraints-clients.txt",
    "eval": "constraints-clients.txt",
    "ray": "constraints-ray.txt",
    "ray-tests": "constraints-ray.txt",
}


@dataclass
class Package:
    """A pinned version: what it asks for and the hashes of its files."""

    requires: list[str] = field(default_factory=list)
    hashes: set[str] = field(default_factory=set)


def read_pins(text: str) -> dict[str, str]:
    """The lines `name==version`, by the name in its one normal spelling."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(line.split("==")[0]): line for line in lines}


def pin_file(part: str) -> str:
    """The file that has the pins of a part."""
    return PIN_FILES.get(part, "constraints.txt")


def roots(pyproject: Mapping[str, object]) -> dict[str, list[str]]:
    """What each part asks for by itself."""
    project = pyproject["project"]
    build = pyproject["build-system"]
    assert isinstance(project, dict)
    assert isinstance(build, dict)
    return {
        "build": ["pip", *build["requires"]],
        "base": project["dependencies"],
        **project["optional-dependencies"],
        **{part: list(names) for part, names in BY_SCRIPTS.items()},
    }


def members(asked: Iterable[str], requires: Mapping[str, Sequence[str]], machine: str) -> set[str]:
    """The packages that these requirements lead to on such a machine, a vendor's own left out."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    # (requirement, the package that asks, the extra it was asked with)
    waiting = [(line, "", "") for line in asked]
    while waiting:
        line, asks, extra = waiting.pop()
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if not _applies(wanted, machine, extra):
            continue
        if asks == TORCH and (name == TRITON or name not in requires):
            continue
        if name not in requires:
            raise SystemExit(f"pin_hashes: {line!r} is wanted; add its pin to the constraints")
        found.add(name)
        new = {(name, each) for each in ("", *wanted.extras)} - seen
        seen |= new
        waiting += [(line, name, extra) for _, extra in new for line in requires[name]]
    return found


def _applies(wanted: Requirement, machine: str, extra: str) -> bool:
    """Whether any Python that is supported asks for it on Linux."""
    return wanted.marker is None or any(
        wanted.marker.evaluate(
            {
                "python_version": python, "python_full_version": f"{python}.0", "extra": extra,
                "platform_machine": machine, "platform_system": "Linux", "sys_platform": "linux",
                "os_name": "posix", "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }
        )
        for python in PYTHONS
    )  # fmt: skip


def part_text(part: str, names: Mapping[str, str], packages: Mapping[str, Package]) -> str:
    """The file of a part: `names` maps each package to the requirement, marker included."""
    lines = [
        f"# The part `{part}`: pins of {pin_file(part)}, written by `python -m tools.pin_hashes`.",
        "# Wheels for CPython 3.11 to 3.14 on Linux, x86_64 and aarch64, or the sources.",
    ]
    if TORCH in names:
        lines += [
            f"# {names[TORCH]} has no hash: each vendor's build has its own, and brings what only",
            "# that build needs.",
            f"# without a hash: {names[TORCH]}",
        ]
    for name in sorted(names):
        if name != TORCH:
            parts = [
                names[name],
                *(f"    --hash=sha256:{h}" for h in sorted(packages[name].hashes)),
            ]
            lines += ["", " \\\n".join(parts)]
    return "\n".join(lines) + "\n"


def look_up(pins: Mapping[str, str]) -> dict[str, Package]:
    """What the index has of each pin, by pip itself: one question for each Python and machine."""
    packages = {name: Package() for name in pins}
    for name in BUILT & set(pins):
        _note(_report([pins[name]], ["--no-binary", name]), packages)
    for machine in MACHINES:
        for python in PYTHONS:
            wanted = {name: line for name, line in pins.items() if name not in BUILT}
            while isinstance(
                answer := _report(list(wanted.values()), _target(python, machine)), str
            ):
                print(f"pin_hashes: no {answer} for Python {python} on {machine}", file=sys.stderr)
                del wanted[canonicalize_name(answer.split("==")[0])]
            _note(answer, packages)
    for name, package in packages.items():
        if not package.hashes:
            raise SystemExit(f"pin_hashes: the index has no file of {pins[name]} that is wanted")
    return packages


def _target(python: str, machine: str) -> list[str]:
    tags = [f"manylinux_2_{minor}" for minor in GLIBC] + ["manylinux2014", "manylinux1", "linux"]
    places = [option for tag in tags for option in ("--platform", f"{tag}_{machine}")]
    return ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *places]


def _report(lines: Sequence[str], options: Sequence[str]) -> list[dict[str, object]] | str:
    """Pip's own report of what it would install, or the one pin that it finds no file for."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip = [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
            "--no-deps", "--target", folder, "--report", str(report), *options, *lines,
        ]  # fmt: skip
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode == 0:
            found: list[dict[str, object]] = json.loads(report.read_text())["install"]
            return found
    missing = re.search(r"No matching distribution found for (\S+==\S+)", done.stderr)
    if missing is None:
        raise SystemExit(f"pin_hashes: pip failed:\n{done.stderr}")
    return missing[1]


def _note(report: list[dict[str, object]] | str, packages: Mapping[str, Package]) -> None:
    if isinstance(report, str):
        raise SystemExit(f"pin_hashes: the index has no source distribution of {report}")
    for item in report:
        about, source = item["metadata"], item["download_info"]
        assert isinstance(about, dict)
        assert isinstance(source, dict)
        package = packages[canonicalize_name(about["name"])]
        package.requires = about.get("requires_dist", [])
        package.hashes.add(source["archive_info"]["hashes"]["sha256"])


def main() -> None:
    HASHES.mkdir(exist_ok=True)
    parts = roots(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    for name in sorted(set(map(pin_file, parts))):
        _write({part: parts[part] for part in parts if pin_file(part) == name}, ROOT / name)


def _write(parts: Mapping[str, Sequence[str]], file: Path) -> None:
    """The files of those parts that have their pins in `file`."""
    pins = read_pins(file.read_text())
    packages = look_up(pins)
    requires = {name: package.requires for name, package in packages.items()}
    for part, asked in parts.items():
        of = {machine: members(asked, requires, machine) for machine in MACHINES}
        names = {
            name: pins[name] + _marker([m for m in MACHINES if name in of[m]])
            for name in set().union(*of.values())
        }
        (HASHES / f"{part}.txt").write_text(part_text(part, names, packages))


def _marker(machines: Sequence[str]) -> str:
    if len(machines) == len(MACHINES):
        return ""
    return " ; " + " or ".join(f"platform_machine == '{machine}'" for machine in machines)


if __name__ == "__main__":
    main()
