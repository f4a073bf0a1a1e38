"""The house keeps its rooms, fences and doors; and the check of that sees what it should see."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from layering import ENGINE, FENCES, INSTRUMENT, MAY_IMPORT, ROOMS, findings
from repository import PACKAGE_DIR

SKELETON = {
    "__init__.py": "from .base.errors import HypoError\ndef later():\n    from .engine import x",
    "base/errors.py": "class HypoError(Exception): ...\n",
    "settings/config.py": "from hypocenter.base.errors import HypoError\n",
    "record/recorder.py": "from hypocenter.base.errors import HypoError\n",
    "coredump/elf.py": "from hypocenter.record.recorder import x\n",
    "watch/child.py": "from hypocenter.coredump.elf import x\n",
    "device/__init__.py": "",
    "device/cpu/lang.py": "import numba, llvmlite\n",
    "device/triton_lang.py": "import triton\n",
    "device/gpu/torch_gpu.py": "import torch\n",
    "device/launch.py": "def launch(kernel, *a):\n    kernel.serial(*a)\n    kernel[1](*a)",
    "device/memory.py": "def to_host(x):\n    return x.cpu()\n",
    "foreign/hooks.py": "from hypocenter.device import limits\n",
    "kernels/__init__.py": "",
    "kernels/rowwise/norm.py": "from ...device.launch import launch\n"
    "from .norm_cpu import norm_cpu\nREADERS = {1: int}\nREADERS[1](2)\n",
    "kernels/rowwise/norm_cpu.py": "from hypocenter.device.cpu.lang import cpu_kernel\n"
    "@cpu_kernel\ndef norm_cpu(x): ...\n",
    "model/__init__.py": "",
    "model/gguf/file.py": "import numpy\nnames = numpy.zeros(3).tolist()\n",
    "model/layers/decoder.py": "from hypocenter.kernels.rowwise import norm\n",
    "engine/__init__.py": "",
    "engine/runner.py": "from hypocenter.model.layers.decoder import Decoder\n",
    "replay/memory.py": "import torch\nfrom hypocenter.device import memory\n",
    "check/check.py": "from hypocenter.replay import replay\n",
    "doctor/rungs/limits.py": "from hypocenter.device import limits\n",
    "cli/app.py": "import cyclopts\ndef run():\n    from hypocenter.engine.runner import Runner\n",
    "cli/verbs/run.py": "from hypocenter.cli.output import say\n",
    "cli/verbs/bench.py": "from hypocenter import LLM\n",
    "cli/output.py": "",
    "__main__.py": "from .cli.app import main\n",
}

PLANTED = [
    (
        "base/errors.py",
        "from hypocenter.settings.config import x",
        "(base)",
    ),
    (
        "settings/config.py",
        "from ..model.gguf import file",
        "(settings) may not import hypocenter.model.gguf",
    ),
    ("record/ring.py", "from hypocenter.device import launch", "(record) may not import"),
    ("coredump/elf.py", "from hypocenter.watch import child", "(coredump) may not import"),
    ("watch/child.py", "from hypocenter.device import launch", "(watch) may not import"),
    ("watch/child.py", "def f():\n    import hypocenter.engine.llm", "(watch) may not import"),
    ("device/memory.py", "from ..kernels.rowwise.norm import norm", "(device) may not import"),
    ("device/copies.py", "from hypocenter import LLM", "may not import hypocenter (package)"),
    ("foreign/hooks.py", "from hypocenter.kernels import contract", "(foreign) may not import"),
    ("kernels/rowwise/norm.py", "def f():\n    import hypocenter.engine.runner", "(kernels) may"),
    ("model/gguf/file.py", "from hypocenter.cli import app", "hypocenter.cli.app (cli)"),
    ("model/layers/decoder.py", "import numpy as np", "may not import numpy"),
    (
        "model/layers/decoder.py",
        "from ... import engine",
        "may not import hypocenter.engine (engine)",
    ),
    (
        "engine/runner.py",
        "from hypocenter.cli.verbs.bench import x",
        "hypocenter.cli.verbs.bench (cli)",
    ),
    ("engine/runner.py", "from hypocenter.doctor import doctor", "hypocenter.doctor (doctor)"),
    ("engine/runner.py", "from numba import njit", "may not import numba"),
    ("server/app.py", "from hypocenter.engine.llm import LLM", "(server) may not import"),
    ("kernels/rowwise/norm_cpu.py", "import llvmlite.ir", "may not import llvmlite.ir"),
    ("kernels/rowwise/norm.py", "import triton.language as tl", "may not import triton.language"),
    ("device/memory.py", "import torch", "may not import torch"),
    ("doctor/case.py", "import torch", "may not import torch"),
    (
        "model/tensors/weights.py",
        "import importlib\nimportlib.import_module('torch')",
        "import torch",
    ),
    ("engine/llm.py", "from starlette.routing import Route", "may not import starlette.routing"),
    ("model/text/chat.py", "import rich.table", "may not import rich.table"),
    ("kernels/rowwise/norm.py", "kernel[(4,)](x, y)", "launches kernel[4,]"),
    ("kernels/rowwise/norm.py", "norm_cpu(x)", "calls kernel norm_cpu"),
    ("kernels/rowwise/norm.py", "norm_cpu.shared(x)", "calls kernel norm_cpu.shared"),
    ("kernels/rowwise/norm_cpu.py", "def f(x):\n    norm_cpu(x)", "calls kernel norm_cpu"),
    (
        "engine/runner.py",
        "def f(x):\n    return x.data.item()",
        "copies to the host by x.data.item",
    ),
    ("kernels/rowwise/norm.py", "y = x.to('cpu')", "copies to the host by x.to"),
    ("kernels/rowwise/norm.py", "y = x.to(device='cpu')", "copies to the host by x.to"),
    ("model/layers/decoder.py", "y = x.tolist()", "copies to the host by x.tolist"),
    ("__init__.py", "from hypocenter.engine import x", "may not import hypocenter.engine"),
    ("doctor/doctor.py", "from hypocenter.engine import runner", "(doctor) may not"),
    ("replay/replay.py", "from hypocenter.doctor import case", "(replay) may not"),
    ("check/check.py", "from hypocenter.doctor import report", "(check) may not"),
    (
        "cli/verbs/bench.py",
        "from hypocenter.cli.verbs.run import x",
        "is a verb and may not import",
    ),
    ("wing/room.py", "x = 1", "lies in no room"),
]


def _build(root: Path) -> Path:
    for name, text in SKELETON.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_house_keeps_its_rules() -> None:
    assert findings(PACKAGE_DIR) == []


def test_a_house_in_order_has_no_findings(tmp_path: Path) -> None:
    assert findings(_build(tmp_path)) == []


@pytest.mark.parametrize(("name", "planted", "expected"), PLANTED)
def test_a_planted_violation_is_found(
    tmp_path: Path, name: str, planted: str, expected: str
) -> None:
    path = _build(tmp_path) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + f"\n{planted}\n")
    found = findings(tmp_path)
    assert len(found) == 1, found
    assert found[0].startswith(f"{name}:"), found
    assert expected in found[0], found


def test_rooms_stand_on_those_above_them_in_the_table_and_each_fence_is_known() -> None:
    for room, below in MAY_IMPORT.items():
        if room != "cli":
            assert all(ROOMS.index(lower) < ROOMS.index(room) for lower in below), room
    assert {"numba", "torch", "triton", "starlette"} <= FENCES.keys()


def test_the_instrument_and_the_engine_know_nothing_of_each_other() -> None:
    for half, other in ((INSTRUMENT, ENGINE), (ENGINE, INSTRUMENT)):
        assert {room: MAY_IMPORT[room] & other for room in half} == dict.fromkeys(half, frozenset())


def test_the_instrument_loads_without_what_only_the_engine_needs() -> None:
    blocked = ("numba", "llvmlite", "tokenizers", "jinja2", "llguidance")
    rooms = ("doctor", "check", "foreign", "replay")
    modules = sorted(
        ".".join(("hypocenter", *path.relative_to(PACKAGE_DIR).with_suffix("").parts))
        for room in rooms
        for path in (PACKAGE_DIR / room).rglob("*.py")
        # What executes machine code is compiled by numba, and loaded where that is asked for.
        if path.name != "__init__.py" and path.parent.name not in ("startup", "machine")
    )
    lines = (
        "import importlib, sys",
        f"sys.modules |= dict.fromkeys({blocked})",
        f"for name in {modules}: importlib.import_module(name)",
        f"engine = {[['hypocenter', room] for room in sorted(ENGINE)]}",
        "assert not [name for name in sys.modules if name.split('.')[:2] in engine]",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_each_room_says_what_it_is() -> None:
    """In its `__init__.py`: what it holds, its door and what it never does, in ten lines."""
    for folder in sorted({path.parent for path in PACKAGE_DIR.rglob("*.py")} - {PACKAGE_DIR}):
        text = (folder / "__init__.py").read_text()
        told = ast.get_docstring(ast.parse(text))
        assert told is not None, folder
        assert len(ast.parse(text).body) == 1, f"{folder} has code in its __init__.py"
        assert len(text.splitlines()) <= 10, folder
        if "victims" not in folder.parts and folder.name != "startup":
            assert "Never" in told or "never" in told, folder
            assert "Door" in told, folder
