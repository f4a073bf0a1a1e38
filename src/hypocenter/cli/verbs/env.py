"""`hypo env`: every version, CPU feature, device and environment variable that matters here.

Only collects and prints. What is not there is said to be not there, and nothing is loaded but the
compiler's view of the CPU; torch, where present, is asked by a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hypocenter.base import package
from hypocenter.base.cards import gpu_vendors
from hypocenter.cli.machine import cpu, memory
from hypocenter.cli.output import show, show_json
from hypocenter.settings.environment import (
    FOREIGN_PREFIXES,
    FOREIGN_VARIABLES,
    KNOWN,
    SECRETS,
    Environment,
)

DEPENDENCIES = (
    "numpy", "numba", "llvmlite", "tbb", "tokenizers", "llguidance", "jinja2", "msgspec",
    "huggingface_hub", "safetensors", "cyclopts", "rich",
)  # fmt: skip
OPTIONAL = ("torch", "triton", "starlette", "uvicorn", "prometheus-client")

_ASK_TORCH = """
import json, torch
vendor = "hip" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
names = []
if torch.cuda.is_available():
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"vendor": vendor, "devices": names}))
"""
TORCH_SECONDS = 60


def env(*, as_json: bool) -> None:
    """Print the report, as a list or as one JSON object."""
    report = collect()
    if as_json:
        show_json(report)
    else:
        show(_text(report))


def collect(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, Any]:
    """The report as plain data. `root` is where /dev, /proc and /sys are looked for."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "hypocenter": package.version(),
    }
    versions |= {name: _version(name) for name in (*DEPENDENCIES, *OPTIONAL)}
    torch = _ask_torch() if versions["torch"] else None
    gpus = gpu_vendors(root)
    return {
        "versions": versions,
        "torch": torch,
        "platform": platform.platform(),
        "cpu": cpu(root),
        "memory": memory(root),
        "devices": {"cpu": True, "gpu_vendors": gpus, "torch": torch["devices"] if torch else []},
        "cache": _cache(environ),
        "records": _records(environ),
        "environment": _variables(environ),
        "warnings": _warnings(torch, versions["triton"], gpus, environ),
    }


def torch_problem(torch_vendor: str, gpus: list[str]) -> str:
    """What is wrong with a torch of that build beside these GPUs; empty when nothing is."""
    wanted = {"amd": "hip", "nvidia": "cuda"}
    if not gpus or torch_vendor in {wanted[vendor] for vendor in gpus}:
        return ""
    have = {"hip": "AMD (HIP)", "cuda": "NVIDIA (CUDA)", "cpu": "CPU"}[torch_vendor]
    return (
        f"torch is the {have} build, but the GPU here is from {' and '.join(gpus)}; "
        "install torch from the index that the vendor's instructions name"
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ask_torch() -> dict[str, Any]:
    """Vendor and devices of the torch that is installed; a driver fault must not end us."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return {"vendor": "unknown", "devices": [], "problem": f"torch does not load: {error}"}
    return answer


def _cache(environ: Mapping[str, str]) -> dict[str, str]:
    from hypocenter.device.cpu.kept_files import cache_problem

    return {"folder": str(Environment.read(environ).cache_dir), "problem": cache_problem()}


def _records(environ: Mapping[str, str]) -> str | None:
    """The folder that runs record into; None where they do not."""
    environment = Environment.read(environ)
    return str(environment.run_dir) if environment.record else None


def _variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Ours with their value or None; of the others those that are set."""
    shown: dict[str, str | None] = {name: environ.get(name) for name in KNOWN}
    shown |= {name: "set, not shown" for name in SECRETS if name in environ}
    for name in sorted(environ):
        if name in FOREIGN_VARIABLES or name.startswith(FOREIGN_PREFIXES):
            shown[name] = environ[name]
    for name in FOREIGN_VARIABLES:
        shown.setdefault(name, None)
    return shown


def _warnings(
    torch: dict[str, Any] | None,
    triton: str | None,
    gpus: list[str],
    environ: Mapping[str, str],
) -> list[str]:
    problems = [package.triton_problem(triton)] if triton else []
    if torch is not None:
        problems.append(torch.get("problem", ""))
        if torch["vendor"] != "unknown":
            problems.append(torch_problem(torch["vendor"], gpus))
    if cache := _cache(environ)["problem"]:
        problems.append(f"kernels are compiled anew each time: {cache}")
    return [problem for problem in problems if problem]


def _text(report: dict[str, Any]) -> str:
    cpu = report["cpu"]
    lines = ["versions"]
    for name, version in report["versions"].items():
        build = f" ({report['torch']['vendor']} build)" if name == "torch" and version else ""
        lines.append(f"  {name:<18} {version or 'not installed'}{build}")
    lines += ["cpu", f"  {'model':<18} {cpu['model']} ({cpu['architecture']})"]
    lines.append(f"  {'instruction set':<18} {cpu['instruction_set']}")
    lines.append(f"  {'features':<18} {' '.join(cpu['features'])}")
    lines.append(
        f"  {'threads':<18} {cpu['kernel_threads']} of {cpu['thread_pool']} for kernels; "
        f"{cpu['usable_cores']} of {cpu['cores']} cores usable"
    )
    gib = {key: f"{(value or 0) / 2**30:.1f} GiB" for key, value in report["memory"].items()}
    lines.append(f"  {'memory':<18} {gib['available_bytes']} free of {gib['total_bytes']}")
    lines += ["devices", "  cpu"]
    lines += [f"  {vendor} driver is loaded" for vendor in report["devices"]["gpu_vendors"]]
    lines += [f"  {name}" for name in report["devices"]["torch"]]
    lines += ["kernel cache", f"  {report['cache']['folder']}"]
    lines += ["records of runs", f"  {report['records'] or 'off (HYPO_RECORD=0)'}", "environment"]
    for name, value in report["environment"].items():
        lines.append(f"  {name:<24} {'not set' if value is None else value}")
    lines += [f"warning: {problem}" for problem in report["warnings"]]
    return "\n".join([f"platform\n  {report['platform']}", *lines])
