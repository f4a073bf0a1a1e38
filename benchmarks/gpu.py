"""Everything that only real hardware can tell, in one call of under ten minutes.

Each section runs in a process of its own, so that a fault or a hang costs that section alone. What
a section needs and does not find is reported as 'not present'. Results go to
benchmarks/results/gpu-DEVICE-DATE.json, rewritten after every section.

    scripts/gpu                     the GPU that torch sees
    scripts/gpu --dry-run           check every import, print the plan, touch no GPU
    scripts/gpu --only ops,decode   some sections
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 560


@dataclass(frozen=True, slots=True)
class Section:
    """`function` is `module:name`, called with the device's name; `needs` must be there first."""

    name: str
    function: str
    limit_s: int
    needs: tuple[str, ...]
    what: str


_DOOR = (
    "torch",
    "triton",
    "kernel_launch:random_rows",
    "hypocenter.device.gpu.torch_gpu:open_gpu",
    "hypocenter.device.devices:open_device",
    "hypocenter.device.plan:PlanBuilder.add_gpu",
    "hypocenter.kernels.weights.packing:place",
)
_MODEL = ("hypocenter.model.layers.decoder:Decoder", "hypocenter.model.tensors.weights:Weights")
SECTIONS = (
    Section(
        "environment", "gpu:environment", 60, ("torch", "hypocenter.device.limits:present_gpu"),
        "versions, and the limits that the driver reports",
    ),
    Section("ops", "gpu_ops:run", 200, _DOOR, "each op against float64"),
    Section(
        "families", "gpu_families:run", 330, (*_DOOR, "transformers"),
        "each family's small model beside transformers in float32",
    ),
    Section(
        "decode", "gpu_speed:decode", 180,
        (*_DOOR, *_MODEL),
        "copy bandwidth, and batch-1 decode of an 8B-shaped model as a share of it",
    ),
    Section(
        "rows", "gpu_rows:run", 240,
        (*_DOOR, *_MODEL),
        "prompts and batches of an 8B-shaped model, as steps of many rows",
    ),
    Section(
        "overhead", "gpu_speed:overhead", 60, _DOOR,
        "host time of a launch: Triton alone, off, checked, logged",
    ),
    Section(
        "guard", "gpu_guard:run", 300,
        (*_DOOR, "hypocenter.device.guard.guard:guard", "hypocenter.foreign.guarding:Guarding"),
        "foreign programs guarded: findings, twins; guarded against plain kernels",
    ),
    Section("tests", "gpu:tests", 150, ("torch", "pytest"), "the tests marked gpu"),
    Section(
        "marks", "gpu_marks:marks", 60, (*_DOOR, "hypocenter.device.marks"),
        "cost of the recorder's marks in a step",
    ),
    Section(
        "faults", "gpu_faults:run", 175, (*_DOOR, "faults.victim_case:VictimCase"),
        "victims whose defect real hardware has: is each named rightly, and no twin?",
    ),
)  # fmt: skip


def main() -> int:
    options = _options()
    sys.path[:0] = [
        str(ROOT),
        str(ROOT / "benchmarks"),
        str(ROOT / "tests/support"),
        str(ROOT / "src"),
    ]
    if options.section:
        return _run_here(options.section, options.device, Path(options.result))
    chosen = [s for s in SECTIONS if not options.only or s.name in options.only.split(",")]
    if options.dry_run:
        return _dry_run(chosen)
    return _run_all(chosen, options.device or _present_device(), Path(options.out))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="", help="cuda, hip, cuda:1 (default: what torch sees)")
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results"), help="folder")
    parser.add_argument("--dry-run", action="store_true", help="check imports, print the plan")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def missing(section: Section) -> list[str]:
    """What `section` needs and does not find, each with the reason."""
    found = []
    for need in (*section.needs, section.function):
        module, _, names = need.partition(":")
        try:
            place: Any = sys.modules["__main__"] if module == "gpu" else None
            place = place or importlib.import_module(module)
            for name in names.split(".") if names else []:
                place = getattr(place, name)
        except Exception as error:  # whatever an import runs into, it is not there
            found.append(f"{need}: {type(error).__name__}: {error}")
    return found


def _dry_run(chosen: list[Section]) -> int:
    total = sum(section.limit_s for section in chosen)
    print(f"{len(chosen)} sections, {total} s at most one by one, {BUDGET_S} s for all\n")
    for section in chosen:
        gaps = missing(section)
        state = "not present" if gaps else "ready"
        print(f"{section.name:12} {state:12} up to {section.limit_s:3} s  {section.what}")
        for gap in gaps:
            print(f"{'':12} needs {gap}")
    files = _test_files()
    print(f"\ntests marked gpu are in: {', '.join(path.name for path in files) or 'no file'}")
    return 0


def _present_device() -> str:
    try:
        import torch
    except ImportError:
        sys.exit("gpu: torch is not installed; scripts/gpu needs the build of the GPU's vendor")
    if not (torch.version.cuda or torch.version.hip):
        sys.exit(f"gpu: torch {torch.__version__} is the CPU build; --dry-run works without a GPU")
    return "hip" if torch.version.hip else "cuda"


def _run_all(chosen: list[Section], device: str, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    started, report = time.monotonic(), _Report(out, device)
    for section in chosen:
        left = BUDGET_S - (time.monotonic() - started)
        if left < 10:
            result: dict[str, Any] = {"status": "no time left", "ok": False}
        else:
            result = _run_apart(section, device, min(section.limit_s, left))
        report.add(section.name, result)
        print(f"gpu: {section.name}: {result['status']} ({result.get('seconds', 0):.0f} s)")
        print("  " + json.dumps({**result, "table": 0})[:1500], flush=True)
        print("".join(f"  {line}\n" for line in result.get("table", ())), end="", flush=True)
    print(f"gpu: {report.path} after {time.monotonic() - started:.0f} s")
    return report.exit_code


class _Report:
    """The result file, named after the GPU once that is known."""

    def __init__(self, out: Path, device: str) -> None:
        self.out, self.sections = out, {}  # type: Path, dict[str, Any]
        self.device, self.date = device, datetime.date.today().isoformat()
        self.path = out / f"gpu-{device.replace(':', '-')}-{self.date}.json"

    def add(self, name: str, result: dict[str, Any]) -> None:
        self.sections[name] = result
        if product := result.get("product"):
            slug = re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-")
            self.path = self.out / f"gpu-{slug}-{self.date}.json"
        whole = {"device": self.device, "date": self.date, "sections": self.sections}
        # Where the checkout lies is nobody's business.
        self.path.write_text(json.dumps(whole, indent=1).replace(f"{ROOT}/", "") + "\n")

    @property
    def exit_code(self) -> int:
        """0 when every section that is present is content."""
        present = [r for r in self.sections.values() if r["status"] != "not present"]
        return 0 if present and all(result.get("ok") for result in present) else 1


def _run_apart(section: Section, device: str, limit_s: float) -> dict[str, Any]:
    """One section in a process of its own; its status is done, failed, not present or timed out."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--section", section.name, "--device", device]
        try:
            done = subprocess.run(
                [*command, "--result", str(path)], timeout=limit_s, cwd=ROOT,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            raw = error.stdout or b""
            output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
            result = {"status": "timed out", "ok": False, "output": output[-2000:]}
            return result | {"seconds": time.monotonic() - began}
        if path.exists():
            result = json.loads(path.read_text())
        else:
            result = {"status": "failed", "ok": False, "exit_code": code, "output": output[-4000:]}
    return result | {"seconds": round(time.monotonic() - began, 1)}


def _run_here(name: str, device: str, path: Path) -> int:
    """The child's side: run one section and leave its result at `path`."""
    section = next(section for section in SECTIONS if section.name == name)
    if gaps := missing(section):
        path.write_text(json.dumps({"status": "not present", "needs": gaps}))
        return 0
    module, _, function = section.function.partition(":")
    place = sys.modules["__main__"] if module == "gpu" else importlib.import_module(module)
    try:
        result = {"status": "done"} | getattr(place, function)(device)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        result = {"status": "failed", "ok": False, "problem": problem[:2000]}
        result["traceback"] = traceback.format_exc()[-4000:]
    path.write_text(json.dumps(result))
    return 0


# Sections that need no file of their own.


def environment(device: str) -> dict[str, Any]:
    """Versions, and the limits as `present_gpu` reads them."""
    import dataclasses

    import numpy
    import torch
    import triton

    from hypocenter.device.gpu.torch_gpu import open_gpu

    limits = open_gpu(device).limits
    return {
        "ok": True,
        "product": limits.product,
        "limits": dataclasses.asdict(limits),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "numpy": numpy.__version__,
            "runtime": torch.version.hip or torch.version.cuda,
        },
    }


def tests(device: str) -> dict[str, Any]:
    """pytest over the files that hold tests marked gpu, without the options of pyproject.toml."""
    import xml.etree.ElementTree as ElementTree

    files = _test_files()
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider",
             "-c", "/dev/null", f"--rootdir={ROOT}", f"--junitxml={xml}",
             "--continue-on-collection-errors", *map(str, files)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=_child_environ(),
        )  # fmt: skip
        cases = ElementTree.parse(xml).getroot().iter("testcase") if xml.exists() else iter(())
        states: dict[str, list[str]] = {"passed": [], "failure": [], "error": [], "skipped": []}
        for case in cases:
            kinds = [child.tag for child in case if child.tag in states]
            states[kinds[0] if kinds else "passed"].append(f"{case.get('name')}")
    return {
        "ok": done.returncode == 0 and bool(states["passed"]) and not states["skipped"],
        "files": [path.name for path in files],
        "num_passed": len(states["passed"]),
        "failed": states["failure"] + states["error"],
        "skipped": states["skipped"],
        "output": done.stdout[-3000:],
    }


def _child_environ() -> dict[str, str]:
    import os

    parts = [str(ROOT / "src"), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, parts))}


def _test_files() -> list[Path]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in files if "mark.gpu" in path.read_text()]


if __name__ == "__main__":
    sys.exit(main())
