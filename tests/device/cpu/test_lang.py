"""Compiled kernels on disk: found again, never stale, private, and done without when need be."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from repository import PACKAGE_DIR

from hypocenter.base import package
from hypocenter.device.cpu import code_cache, lang, threads
from hypocenter.device.cpu.lang import CpuKernel
from hypocenter.kernels.weights.cpu_layout import RECORDS, layout_of

PROGRAM = """
import sys
import numpy as np
from hypocenter.device import copies, launch, memory
from hypocenter.device.cpu import target
from hypocenter.device.cpu.kept_files import cache_problem
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.rowwise import activation
from hypocenter.base.tensor import DType

gate, up = (memory.allocate(n, "test", DType.F32, (1, 64)) for n in ("gate", "up"))
counts = memory.allocate("counts", "test", DType.I32, (2,))
for tensor, values in ((gate, np.ones((1, 64), np.float32)), (up, np.ones((1, 64), np.float32)),
                       (counts, np.array([1, 0], np.int32))):
    copies.to_device(tensor, values)
plan = PlanBuilder(1)
activation.gate(plan, gate, up, "silu", counts)
(prepared,) = plan.launches
launch.run(plan.launches)
is_late = "numba" not in sys.modules
hits = is_late or sum(prepared.function.dispatcher.stats.cache_hits.values())
print(float(copies.to_host(gate)[0, 0]), int(hits), target.instruction_set(), cache_problem())
"""


def _run(package_parent: Path, cache: Path, **environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(package_parent),
            "HYPO_CACHE_DIR": str(cache),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout.split(maxsplit=3)


def test_a_second_process_finds_the_kernel(tmp_path: Path) -> None:
    first = _run(PACKAGE_DIR.parent, tmp_path)
    second = _run(PACKAGE_DIR.parent, tmp_path)
    assert (first[1], second[1]) == ("0", "1")
    assert first[0] == second[0]
    for folder in (tmp_path / "kernels", *(tmp_path / "kernels").iterdir()):
        assert folder.stat().st_mode & 0o777 == 0o700


TWO_PROCESSES = """
import sys, time
from pathlib import Path
import numba
from numba.core.caching import IndexDataCacheFile
from hypocenter.device.cpu import code_cache
import twice as module

role, folder = sys.argv[1], Path(sys.argv[2])
save_index, save_overload = IndexDataCacheFile._save_index, code_cache._KernelCache.save_overload

def until(name, seconds):
    end = time.monotonic() + seconds
    while not (folder / name).exists() and time.monotonic() < end:
        time.sleep(0.01)

def in_the_middle(self, overloads):
    (folder / "saving").touch()
    until("saved", 1.5)
    save_index(self, overloads)

def meanwhile(self, signature, compiled):
    until("saving", 60)
    save_overload(self, signature, compiled)
    (folder / "saved").touch()

if role == "first":
    IndexDataCacheFile._save_index = in_the_middle
if role == "second":
    code_cache._KernelCache.save_overload = meanwhile
twice = numba.njit(module.twice)
code_cache.keep(twice, module.twice, "plain")
print(*map(twice, {"first": [3], "second": [0.5], "third": [3, 0.5]}[role]))
print(sum(twice.stats.cache_hits.values()))
"""


@pytest.mark.tier("whole")
def test_two_processes_that_save_at_once_lose_and_mistake_nothing(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text("def twice(x):\n    return x + x\n")
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{PACKAGE_DIR.parent}{os.pathsep}{tmp_path}",
        "HYPO_CACHE_DIR": str(tmp_path / "cache"),
    }

    def start(role: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TWO_PROCESSES, role, str(tmp_path)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    both = start("first"), start("second")
    assert [one.communicate(timeout=100)[0] for one in both] == ["6\n0\n", "1.0\n0\n"]
    assert start("third").communicate(timeout=100)[0] == "6 1.0\n2\n"


def test_code_for_one_path_of_instructions_is_not_found_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the processor has the same features on both."""

    def kernel() -> None: ...

    variants: list[str] = []
    monkeypatch.setattr(code_cache, "keep", lambda _, __, variant: variants.append(variant))
    for path in ("avx512-bf16", "avx512-vnni"):
        monkeypatch.setattr(lang, "instruction_set", lambda path=path: path)
        lang._compile_on_demand(kernel, "shared")
    assert len(set(variants)) == 2


def test_an_edited_callee_in_another_file_is_noticed_and_no_other_edit(tmp_path: Path) -> None:
    """numba alone would run the old sigmoid: it looks at the file of the outer function only."""
    copy = tmp_path / "src"
    shutil.copytree(
        PACKAGE_DIR, copy / "hypocenter", ignore=shutil.ignore_patterns("assets", "*.pyc")
    )
    before = _run(copy, tmp_path / "cache")
    for name in ("record/recorder.py", "base/errors.py", "kernels/rowwise/norm_cpu.py"):
        with (copy / "hypocenter" / name).open("a") as file:
            file.write("# An edit that no kernel of this plan can see.\n")
    assert _run(copy, tmp_path / "cache")[:2] == [before[0], "1"]
    path = copy / "hypocenter" / "device" / "cpu" / "vector.py"
    text = path.read_text()
    formula = "return div(splat(_ONE), add(splat(_ONE), exp(sub(splat(_ZERO), x))))"
    assert formula in text
    path.write_text(text.replace(formula, "return add(splat(_ONE), x)"))
    after = _run(copy, tmp_path / "cache")
    assert float(before[0]) < 1
    assert after[:2] == ["2.0", "0"]


def test_no_two_functions_of_kernels_go_by_one_name() -> None:
    """numba names machine code by module, name and a number that begins anew in each process.

    Of two functions of one name that were compiled in different processes the numbers may be equal;
    when both come out of the cache, calls of one then reach the other.
    """
    names = Counter(
        (function.py_func.__module__, function.py_func.__qualname__)
        for function in _compiled_functions()
    )
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []


def _compiled_functions() -> list[Any]:
    """Every function of the package that numba compiles, both forms of kernels among them."""
    for path in package.module_files("kernels"):
        if path.stem.endswith("_cpu"):
            importlib.import_module(package.module_name(path))
    gc.unfreeze()  # what was there before the first test is looked at too
    seen = gc.get_objects()
    both = [(one.serial, one.shared) for one in seen if type(one) is CpuKernel]
    kind = type(both[0][0])
    ours = [one for one in seen if type(one) is kind] + [shared for _, shared in both]
    unique = {id(one): one for one in ours if one.py_func.__module__.startswith("hypocenter.")}
    return list(unique.values())


FULL_DISK = """
import errno
from numba.core import caching

def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device", "x")

caching.IndexDataCacheFile._open_for_write = full
"""


def test_a_full_disk_costs_one_warning_and_no_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK + PROGRAM],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(PACKAGE_DIR.parent),
            "HYPO_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert float(done.stdout.split()[0]) > 0
    (warning,) = done.stderr.splitlines()
    assert warning.startswith(
        f"compiled kernels cannot be kept in {tmp_path / 'kernels'}: No space"
    )


def test_a_folder_that_others_may_write_to_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir(mode=0o777)
    (tmp_path / "kernels").chmod(0o777)
    _run(PACKAGE_DIR.parent, tmp_path)
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700


def test_without_a_folder_kernels_still_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = _run(PACKAGE_DIR.parent, tmp_path / "file")
    assert float(result[0]) < 1
    assert "Not a directory" in result[3]


def test_a_thread_may_ask_for_another_number_of_threads_each_time() -> None:
    """There are never more than the pool has."""
    most = threads.max_num_threads()
    before = threads.num_threads()
    try:
        for wanted in (1, most, 1, most + 7, 1, most):
            threads.set_num_threads(wanted)
            assert threads.num_threads() == min(wanted, most)
    finally:
        threads.set_num_threads(before)


@pytest.mark.tier("whole")
def test_a_plain_machine_gives_the_same_numbers(tmp_path: Path) -> None:
    """No vector extension at all: slower, rounded twice where others round once, never wrong."""
    plain = _run(PACKAGE_DIR.parent, tmp_path, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    native = _run(PACKAGE_DIR.parent, tmp_path)
    assert plain[2] == "plain"
    assert abs(float(plain[0]) - float(native[0])) < 1e-6
    assert native[1] == "0", "machine code of another machine was taken"


def test_machine_code_of_each_record_layout_has_a_name_of_its_own_in_every_process() -> None:
    """numba's own name for a record type is a number that another process gives to another type."""
    names: dict[Any, set[Any]] = {}
    for layout in (layout_of(dtype, columns) for dtype in RECORDS for columns in (256, 32)):
        record = numba.typeof(np.zeros((1, 1), layout.record)).dtype
        names.setdefault(record.mangling_args, set()).add(layout.record)
    assert all(len(layouts) == 1 for layouts in names.values())
    code = (
        "import numba, numpy as np\n"
        "from hypocenter.kernels.weights.cpu_layout import RECORDS, layout_of\n"
        "from hypocenter.device.cpu import lang\n"
        "for layout in [layout_of(d, n) for d in reversed(RECORDS) for n in (32, 256)]:\n"
        "    print(numba.typeof(np.zeros((1, 1), layout.record)).dtype.mangling_args)\n"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(other.stdout.splitlines()) == {str(name) for name in names}
