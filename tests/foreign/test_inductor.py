"""Launches of torch.compile's kernels are recorded: Inductor's own launchers, and no GPU.

The driver compiles for an H100 and launches nothing.
"""

from __future__ import annotations

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
from hypocenter.foreign.inductor import is_written_by_inductor, watch_inductor
from hypocenter.record import ring
from hypocenter.record.events import GraphReplayed, Launched

PROGRAM = """
import sys, types, json
import torch, triton, triton.language as tl
from pretended.pretend_driver import install
launched = []
install(lambda name, args: launched.append(name))
import torch._inductor.config as config
import torch._inductor.runtime.triton_helpers as helpers
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

# What needs a GPU: finding it, choosing it, and loading and launching code.
helpers.set_driver_to_gpu = lambda: None
CudaInterface.exchange_device = CudaInterface.maybe_exchange_device = staticmethod(lambda at: 0)
config.use_static_cuda_launcher = sys.argv[1] == "static"
torch._C._StaticCudaLauncher = types.SimpleNamespace(
    _load_kernel=lambda *_: (1, 1, 32, 0), _launch_kernel=lambda *_: launched.append("static")
)

@triton.jit
def triton_poi_fused_add_0(in_ptr0, in_ptr1, out_ptr0, xnumel, ONE, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + xindex, xmask) + tl.load(in_ptr1 + xindex, xmask)
    tl.store(out_ptr0 + xindex, tmp0 * ONE, xmask)

kinds = dict.fromkeys(("in_ptr0", "in_ptr1", "out_ptr0"), "*fp32") | {"xnumel": "i32"}
device = DeviceProperties(
    type="cuda", index=0, multi_processor_count=132, cc=90, major=9, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
)
tuner = CachingAutotuner(
    triton_poi_fused_add_0,
    {"signature": kinds | {"ONE": "constexpr", "XBLOCK": "constexpr"}, "device": device,
     "constants": {"ONE": 1}, "configs": [{}]},
    [triton.Config({"XBLOCK": 256}, num_warps=8, num_stages=1)],
    None, [], False, None, size_hints={"x": 1024},
    inductor_meta={"grid_type": "Grid1D", "kernel_name": "added", "autotune_cache": False},
)
x, y, out = torch.ones(1000), torch.ones(1000), torch.empty(1000)
for size in (1000, 1000, 500):
    tuner.run(x, y, out, size, 1, stream=0)  # the launch
from pretended.pretend_graphs import install_graphs
install_graphs()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    tuner.run(x, y, out, 1000, 1, stream=0)
graph.replay()
print(json.dumps([launched, type(tuner.compile_results[0]).__name__]))
"""


@pytest.mark.parametrize("way", ["static", "plain"])
@pytest.mark.tier("whole")
def test_each_launch_is_recorded_with_grid_arguments_and_configuration(
    tmp_path: Path, way: str
) -> None:
    pytest.importorskip("triton")
    program = tmp_path / "compiled.py"
    program.write_text(PROGRAM)
    environment = environment_of(tmp_path, is_own=False)
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests' / 'support'}"
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(program), way],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launched, kind = json.loads(done.stdout)
    assert len(launched) == 4
    assert kind == {"static": "StaticTritonCompileResult", "plain": "TritonCompileResult"}[way]
    [run] = map(ring.read_run, ring.run_folders(tmp_path))
    *events, captured = [event for event in run.events if isinstance(event, Launched)]
    [replay] = [event for event in run.events if isinstance(event, GraphReplayed)]
    assert (captured.graph, captured.launch.grid, replay.graph) == (1, (4, 1, 1), 1)
    assert [event.launch.grid for event in events] == [(4, 1, 1), (4, 1, 1), (2, 1, 1)]
    [line] = [at for at, text in enumerate(PROGRAM.splitlines(), 1) if "# the launch" in text]
    for event, size in zip(events, (1000, 1000, 500), strict=True):
        launch = event.launch
        assert (launch.kernel, launch.num_warps) == ("triton_poi_fused_add_0", 8)
        assert launch.constants == {"XBLOCK": 256}
        names = {tensor.id: tensor.name for tensor in run.tensors}
        given = {a.name: names.get(a.tensor or -1, a.value) for a in launch.arguments}
        assert given == {
            **{name: f"tensor of {name}" for name in ("in_ptr0", "in_ptr1", "out_ptr0")},
            "xnumel": size,
            "ONE": 1,
        }
        assert launch.site == f"{program}:{line}"
    assert {source.function for source in run.sources} == {"triton_poi_fused_add_0"}
    assert "not recorded" not in done.stderr


class Tuner:
    """A kernel of an older torch: its grid is a function that the program passes."""

    def __init__(self) -> None:
        self.fn = SimpleNamespace(arg_names=["x", "n", "B"])
        self.triton_meta = {"constants": {2: 64}}
        self.launchers: list[Any] = []

    def run(self, *args: Any, grid: Any, stream: int) -> str:
        scope: dict[str, Any] = {"runner": lambda *given: None, "grid_meta": {"B": 64}}
        text = (
            "def launcher(x, n, grid, stream):\n    a, b, c = grid(grid_meta)\n"
            "    runner(a, b, c, stream, x, n)\n"
        )
        exec(text, scope)
        scope["launcher"].config = SimpleNamespace(kwargs={"B": 64}, num_warps=2)
        self.launchers = [scope["launcher"]]
        return "ran"


def test_an_older_torch_and_one_that_is_not_known_run_as_ever() -> None:
    told: list[Any] = []
    failed: list[Exception] = []

    def attempt(do: Any, *args: Any) -> None:
        try:
            do(*args)
        except Exception as error:
            failed.append(error)

    kind = type("Older", (Tuner,), {"run": Tuner.run})
    watch_inductor(kind, lambda *facts: told.append(facts[1:]), attempt)
    grid = lambda meta: (1000 // meta["B"], 2, 1)  # noqa: E731
    assert kind().run("x", 7, grid=grid, stream=3) == "ran"
    [(given, size, _)] = told
    assert (given["x"], given["n"], given["B"], given["num_warps"]) == ("x", 7, 64, 2)
    assert size == (15, 2, 1)
    assert not failed
    other = type("Other", (), {"run": lambda self, *args: "as it is"})
    watch_inductor(other, lambda *facts: told.append(facts), attempt)
    assert other().run(1) == "as it is"
    assert len(told) == 1


def test_a_launch_that_failed_while_it_was_measured_is_noted() -> None:
    told: list[Any] = []

    class Measured(Tuner):
        def run(self, *args: Any, **options: Any) -> str:
            super().run(*args, **options)
            self.launchers *= 2
            raise RuntimeError(error)

    watch_inductor(Measured, lambda *facts: told.append(facts[1:]), lambda do, *args: do(*args))
    for error, num_told in (("CUDA error: an illegal memory access", 1), ("no such tile", 1)):
        with pytest.raises(RuntimeError, match=error):
            Measured().run("x", 7, grid=lambda meta: (3, 2, 1), stream=3)
        assert len(told) == num_told
    [(given, size, _)] = told
    assert (given["x"], given["B"], size) == ("x", 64, (3, 2, 1))


def test_lines_that_inductor_wrote_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_written_by_inductor("/tmp/torchinductor_ann/ab/cabc.py")
    assert not is_written_by_inductor("/home/ann/inductor/train.py")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/cache")
    assert is_written_by_inductor("/scratch/cache/ab/cabc.py")


def test_a_kernel_whose_function_stayed_in_inductors_own_process_is_read_again() -> None:
    told: list[Any] = []
    failed: list[Exception] = []

    def attempt(do: Any, *args: Any) -> None:
        try:
            do(*args)
        except Exception as error:
            failed.append(error)

    whole = SimpleNamespace(fn=attempt, arg_names=["x", "n", "B"])

    class Dropped(Tuner):
        num_read = 0

        def __init__(self) -> None:
            super().__init__()
            self.fn.fn = None

        def _reload_kernel(self) -> Any:
            Dropped.num_read += 1
            return SimpleNamespace(fn=whole)

    watch_inductor(Dropped, lambda *facts: told.append(facts), attempt)
    tuner = Dropped()
    for _ in range(3):
        assert tuner.run("x", 7, grid=lambda meta: (3, 2, 1), stream=3) == "ran"
    assert [jit for jit, *_ in told] == [whole] * 3
    assert (Dropped.num_read, failed) == (1, [])


def test_a_launch_of_one_of_several_configurations_is_counted_as_lost() -> None:
    lost: list[tuple[str, str]] = []

    class Undecided(Tuner):
        def run(self, *args: Any, **options: Any) -> str:
            super().run(*args, **options)
            self.launchers *= 2
            self.fn.__name__ = "triton_poi_0"
            return "ran"

    watch_inductor(
        Undecided,
        lambda *facts: None,
        lambda do, *args: do(*args),
        lambda *facts: lost.append(facts),
    )
    assert Undecided().run("x", 7, grid=lambda meta: (3, 2, 1), stream=3) == "ran"
    assert lost == [("triton_poi_0", "which of its configurations was launched is not known")]
