"""Guarded launches of foreign kernels as a GPU would get them: compiled here, for no GPU is needed.

What a launch gets is seen at a driver that makes none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import ROOT

from hypocenter.cli.child_run import environment_of
from hypocenter.device.guard.guard import guard
from hypocenter.device.offline.compile import compile_specimen
from hypocenter.device.offline.specimen import Specimen
from hypocenter.foreign import hooks
from hypocenter.record import ring
from hypocenter.record.events import MaskedOff, RanUnguarded

PROGRAMS = Path(__file__).parent / "guarded"

#: Program and kernel: Triton's types of the run-time parameters, and the constants.
KERNELS: dict[tuple[str, str], tuple[dict[str, str], dict[str, Any]]] = {
    ("silent_store", "fill_rows"): ({"out_ptr": "*fp32", "width": "i32"}, {"BLOCK": 64}),
    ("indexed", "embed"): (
        {"ids_ptr": "*i64", "table_ptr": "*fp16", "out_ptr": "*fp16", "width": "i32",
         "scale": "fp32"},
        {"BLOCK": 64, "EVEN": True},
    ),
    ("overflow", "sum_rows"): (
        {"x_ptr": "*i8", "out_ptr": "*i32", "stride": "i32"}, {"WIDE": False, "BLOCK": 16},
    ),
    ("tail", "scale"): (
        {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}, {"LAST": True, "BLOCK": 1024},
    ),
    ("listed_pointers", "count_up"): ({"out_ptr": "*fp32", "n": "i32"}, {"BLOCK": 32}),
}  # fmt: skip


def kernel_of(program: str, name: str) -> Any:
    """The @triton.jit function, without what tunes it."""
    spec = importlib.util.spec_from_file_location(f"of_{program}", PROGRAMS / f"{program}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name)
    while hasattr(found.fn, "fn"):
        found = found.fn
    return found


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize(("program", "name"), KERNELS)
@pytest.mark.tier("targets", fast=lambda case: case.name in ("embed", "scale"))
def test_guarded_variants_of_foreign_kernels_compile(program: str, name: str, arch: str) -> None:
    types, constants = KERNELS[program, name]
    made = guard(kernel_of(program, name), [n for n, kind in types.items() if kind[0] == "*"])
    divisible = tuple(n for n, kind in types.items() if kind != "fp32")
    built = compile_specimen(
        Specimen(made.fn, {**types, **made.extra_types}, constants, divisible), arch
    )
    assert built.ok, built.problems
    assert built.spills == 0


LAUNCHES = """
import json, sys
import torch, triton, triton.language as tl
from pretended.pretend_driver import install
launched, compiled = [], []

def on_launch(name, args):
    extents = [a for a in args if isinstance(a, int) and a > 64]
    launched.append([name, extents])
    slots = args[-1]
    if name == "double":
        return  # not guarded
    assert slots.dtype is torch.int64, args
    if len(launched) in (4, 5):  # as if program 1 had stored at byte 512
        slots[1] = (1 << 36 | 512) - (1 << 63)

install(on_launch)

def note(**facts):
    compiled.append(facts["fn"].name)

triton.knobs.runtime.jit_post_compile_hook = note

@triton.jit
def inner(ptr, at, inside):
    return tl.load(ptr + at, mask=inside, other=0.0)

@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, inner(x_ptr, at, at < n) * 2, mask=at < n)

tuned = triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2)], key=["n"])(double)
y = torch.zeros(128)
for x in (torch.ones(128), torch.ones(101), torch.ones(128)[1:]):
    double[(2,)](x, y, 100, BLOCK=64)          # the third is not aligned: compiled anew
double[(2,)](torch.ones(128), y, 100, BLOCK=64)
double[(2,)](torch.ones(128), y, 1 << 40, BLOCK=64)
double[(2,)](torch.ones(128, dtype=torch.float16), y, 100, BLOCK=64, num_warps=8)
tuned[(2,)](torch.ones(128), y, 100)
warm = double.warmup(torch.ones(128), y, 100, BLOCK=64, grid=(1,))
warm[(2, 1, 1)](torch.ones(128), y, 100)
warm[(2, 1, 1)](torch.ones(128), y, 100)
print(json.dumps([launched, compiled]))
"""


def _launches(folder: Path, *, is_guarded: bool) -> Any:
    """What LAUNCHES launched, and what was compiled for it."""
    folder.mkdir(exist_ok=True)
    (folder / "launches.py").write_text(LAUNCHES)
    environment = environment_of(folder, is_own=False, is_guarded=is_guarded)
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests' / 'support'}"
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(folder / "launches.py")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_compiled_launch_gets_extents_and_slots_and_compiles_once_a_specialisation(
    tmp_path: Path,
) -> None:
    pytest.importorskip("triton")
    launched, compiled = _launches(tmp_path, is_guarded=True)
    _, of_plain = _launches(tmp_path / "plain", is_guarded=False)
    assert [name for name, _ in launched] == ["double__guarded"] * 7 + ["double"] * 2
    # n, and then the extents of x and y in bytes
    assert [extents for _, extents in launched[:3]] == [
        [100, 512, 512], [100, 404, 512], [100, 508, 512],
    ]  # fmt: skip
    # Aligned and not, a wide n, another type and number of warps, the tuned one; and the warm-up.
    assert of_plain == ["double"] * 5
    assert compiled == ["double__guarded"] * 5 + ["double"]
    [run] = map(ring.read_run, ring.run_folders(tmp_path))
    [event] = [event for event in run.events if isinstance(event, MaskedOff)]
    assert event.fault.site.operation == "store"
    assert (event.fault.parameter, event.fault.byte_offset) == ("y_ptr", 512)
    assert event.fault.program == (1, 0, 0)
    assert event.launch.kernel == "double"
    assert event.step == 4
    [past] = [event for event in run.events if isinstance(event, RanUnguarded)]
    assert (past.kernel, past.reason) == (
        "double", "it is launched as a compiled kernel, past triton.jit",
    )  # fmt: skip


def test_kernels_of_torch_compile_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(hooks, "_is_guarded_run", lambda: True)
    monkeypatch.setattr(hooks, "_tell_unguarded", lambda *facts: told.append(facts))
    ran = []

    class CachingAutotuner:
        def __init__(self, name: str) -> None:
            self.fn = SimpleNamespace(__name__=name)

        def run(self, *args: int, stream: int) -> int:
            ran.append((args, stream))
            return 7

    name = "torch._inductor.runtime.triton_heuristics"
    assert name in hypocenter_waiting_modules()
    hooks.module_loaded(SimpleNamespace(__name__=name, CachingAutotuner=CachingAutotuner))
    first, second = CachingAutotuner("triton_poi_0"), CachingAutotuner("triton_red_1")
    assert [first.run(1, stream=2), first.run(1, stream=3), second.run(4, stream=5)] == [7] * 3
    assert ran == [((1,), 2), ((1,), 3), ((4,), 5)]
    assert [kernel for kernel, _ in told] == ["triton_poi_0", "triton_red_1"]
    assert "torch.compile" in told[0][1]


def hypocenter_waiting_modules() -> tuple[str, ...]:
    path = Path(hooks.__file__).parent / "startup" / "hypocenter_waiting.py"
    spec = importlib.util.spec_from_file_location("waiting_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    modules: tuple[str, ...] = module.MODULES
    return modules
