"""Kernels are compiled ahead by processes, into a cache that may be damaged or not writable.

Triton compiles for an H200 here; a stand-in takes the place of its driver, which launches nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from outside.forked import run_forked
from repository import SUPPORT

pytest.importorskip("triton")
pytest.importorskip("torch")

#: What takes two seconds to import, and knows no cache and no launch.
LOADED = (
    "hypocenter.device.gpu.torch_gpu",
    "hypocenter.kernels.sampling.sampling_gpu",
    "hypocenter.kernels.sampling.sampling_plan",
)
CHILD = """
import logging, os, sys
sys.path.insert(0, os.environ["SUPPORT"])
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
from no_gpu_driver import Driver
import triton
triton.runtime.driver.set_active(Driver(1024, None))
from pretended.fake_torch import FakeTorch
from hypocenter.base.tensor import DType
from hypocenter.device import devices, memory
from hypocenter.device.gpu import ahead
from hypocenter.device.gpu.torch_gpu import TorchGpu
from hypocenter.device.limits import named_gpu
from hypocenter.kernels.sampling.sampling_plan import every_launch

gpu = TorchGpu("cuda", FakeTorch(), 0, named_gpu("sm_90"), environ={})
devices.use_backend(gpu)
ids = memory.allocate("ids", "test", DType.I32, (4,), device="cuda")
quick = ("greedy_blocks", "greedy_rows", "sample_peaks")
launches = [one for one in every_launch("cuda", 4096, 4, ids) if one.kernel in quick]
def here(*args, **keywords):
    print("compiled here")
    return make(*args, **keywords)
make, triton.compiler.ASTSource.make_ir = triton.compiler.ASTSource.make_ir, here
if os.environ.get("OVER"):
    print("whole", gpu.compile(launches, None, lambda: True), gpu.num_compiled)
    sys.exit()
if os.environ.get("INDEX"):
    print("loaded", gpu.load_forms(os.environ["INDEX"]))
    asked = []
    hook = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda **given: asked.append(given["key"])
    gpu.compile(launches)
    triton.knobs.runtime.jit_cache_hook = hook
    print("looked for", len(asked))
gpu.compile(launches)
print("ready", gpu.num_compiled)
before = gpu.num_compiled
for one in launches:
    one.jit.run(*one.args, warmup=True, **one.options)
print("after", gpu.num_compiled - before)
"""


def run(cache: Path, **environ: str) -> str:
    """What a process says that has its kernels ready, with Triton's cache in `cache`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "child.py"
        file.write_text(CHILD)
        environ = {"SUPPORT": str(SUPPORT), "TRITON_CACHE_DIR": str(cache), **environ}
        done = run_forked(
            file, Path(folder), 300, environ=environ, loads=LOADED, is_interpreted=False
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache that a first process has left, and what that one said."""
    cache = tmp_path_factory.mktemp("triton")
    return cache, run(cache)


def test_helpers_compile_and_nothing_is_compiled_afterwards(filled: tuple[Path, str]) -> None:
    said = filled[1]
    assert "3 forms compiled in" in said
    assert "compiled here" not in said
    assert "ready 3\nafter 0\n" in said


def test_the_next_process_reads_from_disk(filled: tuple[Path, str]) -> None:
    assert run(filled[0]) == "ready 3\nafter 0\n"


def test_what_is_not_compiled_when_the_time_is_over_is_left(
    filled: tuple[Path, str], tmp_path: Path
) -> None:
    assert run(tmp_path, OVER="1") == "whole False 0\n"
    assert not list(tmp_path.glob("*/*.cubin"))
    assert run(filled[0], OVER="1") == "whole True 3\n"


def test_the_next_process_loads_by_the_index_what_it_will_need(filled: tuple[Path, str]) -> None:
    """Before it knows its launches; then nothing is left to be looked for."""
    cache = filled[0]
    assert run(cache, INDEX="a").startswith("loaded 0\nlooked for 3\n")
    assert run(cache, INDEX="a") == "loaded 3\nlooked for 0\nready 3\nafter 0\n"
    assert run(cache, INDEX="b").startswith("loaded 0\n")
    index = cache / "forms-a.json"
    index.write_text(index.read_text().replace("hypocenter.kernels", "hypocenter.nowhere", 1))
    assert run(cache, INDEX="a").startswith("loaded 2\nlooked for 1\n")
    assert run(cache, INDEX="a").startswith("loaded 3\nlooked for 0\n"), "it is mended"
    index.write_text("[{")
    assert run(cache, INDEX="a").startswith("loaded 0\nlooked for 3\n")


@pytest.mark.tier("sim")
def test_a_damaged_file_is_told_and_compiled_anew(filled: tuple[Path, str]) -> None:
    cache = filled[0]
    file = next(cache.glob("*/sample_peaks_kernel.json"))
    file.write_text("{")
    said = run(cache)
    (warning,) = (line for line in said.splitlines() if line.startswith("WARNING"))
    assert warning.startswith("WARNING sample_peaks in Triton's cache is damaged: ")
    assert "compiled here\n" in said
    assert "ready 3\nafter 0\n" in said
    assert run(cache) == "ready 3\nafter 0\n"


@pytest.mark.tier("sim")
def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = run(tmp_path / "file" / "cache")
    (warning,) = (line for line in said.splitlines() if line.startswith("WARNING"))
    assert warning.startswith("WARNING kernels are compiled at each start: ")
    assert warning.endswith("; set HYPO_CACHE_DIR")
    assert "ready 3\nafter 0\n" in said


@pytest.mark.tier("sim")
def test_our_cache_folder_holds_them_where_one_is_named(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": "", "HYPO_CACHE_DIR": str(tmp_path / "ours")}
    assert "ready 3" in run(tmp_path, **environ)
    assert list((tmp_path / "ours" / "triton").glob("*/greedy_rows_kernel.cubin"))
