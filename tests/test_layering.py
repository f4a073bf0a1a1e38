"""The house keeps its floors, fences and doors; and the check of that sees what it should see."""

from __future__ import annotations

from pathlib import Path

import pytest
from layering import FENCES, FLOORS, MAY_IMPORT, findings

PACKAGE_DIR = Path(__file__).parent.parent / "src" / "hypocenter"

SKELETON = {
    "__init__.py": "from .errors import HypoError\ndef later():\n    from .engine import x",
    "errors.py": "class HypoError(Exception): ...\n",
    "config.py": "from hypocenter.errors import HypoError\n",
    "device/__init__.py": "",
    "device/lang.py": "import numba, llvmlite\n",
    "device/gpu_lang.py": "import triton\n",
    "device/launch.py": "def launch(kernel, *a):\n    kernel.serial(*a)\n    kernel[1](*a)",
    "device/memory.py": "def to_host(x):\n    return x.cpu()\n",
    "kernels/__init__.py": "",
    "kernels/norm.py": "from ..device.launch import launch\nfrom .norm_cpu import norm_cpu\n"
    "READERS = {1: int}\nREADERS[1](2)\n",
    "kernels/norm_cpu.py": "from hypocenter.device.lang import cpu_kernel\n"
    "@cpu_kernel\ndef norm_cpu(x): ...\n",
    "model/__init__.py": "",
    "model/gguf.py": "import numpy\nnames = numpy.zeros(3).tolist()\n",
    "model/decoder.py": "from hypocenter.kernels import norm\n",
    "engine/__init__.py": "",
    "engine/runner.py": "from hypocenter.model.decoder import Decoder\n",
    "forensics/replay_memory.py": "from hypocenter.device import memory\n",
    "cli.py": "import cyclopts\ndef run():\n    from hypocenter.engine.runner import Runner\n",
    "cli_bench.py": "from hypocenter import LLM\n",
    "__main__.py": "from .cli import main\n",
}

PLANTED = [
    ("errors.py", "from hypocenter.config import x\nfrom hypocenter.device import lang", "(words)"),
    ("config.py", "from .model import gguf", "(words) may not import hypocenter.model.gguf"),
    ("device/memory.py", "from ..kernels.norm import norm", "(device) may not import"),
    ("device/cpu.py", "from hypocenter import LLM", "may not import hypocenter (package)"),
    ("kernels/norm.py", "def f():\n    import hypocenter.engine.runner", "(kernels) may not"),
    ("model/gguf.py", "from hypocenter import cli", "may not import hypocenter.cli (cli)"),
    ("model/decoder.py", "import numpy as np", "may not import numpy"),
    ("model/decoder.py", "from .. import engine", "may not import hypocenter.engine (engine)"),
    ("engine/runner.py", "from hypocenter.cli_bench import x", "hypocenter.cli_bench (cli)"),
    ("engine/runner.py", "from numba import njit", "may not import numba"),
    ("kernels/norm_cpu.py", "import llvmlite.ir", "may not import llvmlite.ir"),
    ("kernels/norm.py", "import triton.language as tl", "may not import triton.language"),
    ("model/weights.py", "import torch", "may not import torch"),
    ("model/weights.py", "import importlib\nimportlib.import_module('torch')", "import torch"),
    ("engine/llm.py", "from starlette.routing import Route", "may not import starlette.routing"),
    ("model/chat.py", "import rich.table", "may not import rich.table"),
    ("kernels/norm.py", "kernel[(4,)](x, y)", "launches kernel[4,]"),
    ("kernels/norm.py", "norm_cpu(x)", "calls kernel norm_cpu"),
    ("kernels/norm.py", "norm_cpu.shared(x)", "calls kernel norm_cpu.shared"),
    ("kernels/norm_cpu.py", "def f(x):\n    norm_cpu(x)", "calls kernel norm_cpu"),
    (
        "engine/runner.py",
        "def f(x):\n    return x.data.item()",
        "copies to the host by x.data.item",
    ),
    ("kernels/norm.py", "y = x.to('cpu')", "copies to the host by x.to"),
    ("kernels/norm.py", "y = x.to(device='cpu')", "copies to the host by x.to"),
    ("model/decoder.py", "y = x.tolist()", "copies to the host by x.tolist"),
    ("__init__.py", "from hypocenter.engine import x", "may not import hypocenter.engine"),
    ("forensics/doctor.py", "from hypocenter.device import launch", "(forensics) may not"),
    ("forensics/replay.py", "from hypocenter.engine import runner", "(forensics) may not"),
    ("wing/room.py", "x = 1", "lies on no floor"),
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
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + f"\n{planted}\n")
    found = findings(tmp_path)
    assert len(found) == 1, found
    assert found[0].startswith(f"{name}:"), found
    assert expected in found[0], found


def test_floors_form_an_order_and_each_fence_is_known() -> None:
    for floor in FLOORS:
        for lower in MAY_IMPORT[floor]:
            if lower != "package":
                assert FLOORS.index(lower) <= FLOORS.index(floor), (floor, lower)
    assert {"numba", "torch", "triton", "starlette"} <= FENCES.keys()
