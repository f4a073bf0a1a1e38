"""Programs that know nothing of hypocenter: what is recorded of them, and what the doctor says."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended.fake_gpu_tensors import JIT, FakeTensor, Launching, Storage, events, kernel
from repository import ROOT, SUPPORT

from hypocenter.cli import app
from hypocenter.cli.child_run import environment_of
from hypocenter.cli.verbs import doctor as cli_doctor
from hypocenter.doctor.case import Case
from hypocenter.doctor.rungs.order.streams import order
from hypocenter.foreign import hooks
from hypocenter.foreign import recorder as foreign
from hypocenter.foreign.argument_facts import INTERPRETER, undefined_in
from hypocenter.foreign.last_exception import refusal_of
from hypocenter.foreign.lost_launches import LostLaunches
from hypocenter.foreign.recorder import ForeignRecorder, LaunchPlace
from hypocenter.foreign.seen_memory import storages_are_kept
from hypocenter.record import bundle as bundles
from hypocenter.record import ring
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import (
    Allocated,
    Called,
    Freed,
    Launched,
    LostLaunch,
    StreamEvent,
)
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.gap import GapKind
from hypocenter.watch import foreign_runs

SCRIPTS = Path(__file__).parent / "programs"
STARTUP = Path(foreign.__file__).parent / "startup" / "hypocenter_waiting.py"


def doctor(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, *args: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `hypo doctor`, run in `folder` with Triton's interpreter."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        app.main(["doctor", *args])
    code = left.value.code
    return code if isinstance(code, int) else 0, *capfd.readouterr()


def line_of(script: str, text: str) -> int:
    lines = (SCRIPTS / script).read_text().splitlines()
    [number] = [at for at, line in enumerate(lines, 1) if text in line]
    return number


# -- end to end -----------------------------------------------------------------------------------


def test_a_healthy_script_ends_as_ever(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own sitecustomize')\n")
    monkeypatch.setenv("PYTHONPATH", str(own))
    monkeypatch.setattr("hypocenter.cli.verbs.doctor.diagnose", None)  # there is nothing to examine
    code, out, err = doctor(
        capfd, monkeypatch, tmp_path, "--", sys.executable, str(SCRIPTS / "add.py")
    )
    assert (code, out) == (0, "own sitecustomize\nsum 2000.0\n")
    assert err == "hypo: nothing found; 2 launches of 1 kernel seen; --suspect replays them\n"
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.tier("whole")
def test_what_the_interpreter_cannot_do_is_told_at_the_line_of_the_kernel(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ROOT / "faults" / "programs" / "unlike_shapes.py"
    code, out, _ = doctor(
        capfd, monkeypatch, tmp_path, "--json", "--", sys.executable, str(program)
    )
    [root] = json.loads(out)["roots"]
    assert (code, root["cause"], root["kernel"]) == (3, "kernel does not compile", "add_blocks")
    line = next(
        at for at, text in enumerate(program.read_text().splitlines(), 1) if "x + y" in text
    )
    assert (root["file"], root["line"]) == (str(program), line)
    assert "incompatible dimensions at index 0: 64 and 32" in root["sentence"]


def test_what_python_cannot_do_in_a_kernel_is_no_compile_error() -> None:
    """A kernel's own line may divide by zero in the interpreter, which no compiler refuses."""

    class InterpreterError(Exception):
        """Named as Triton's."""

    def divide(x: int) -> int:
        return x // 0

    error = InterpreterError()
    try:
        divide(1)
    except ZeroDivisionError as cause:
        error.__cause__ = cause
    assert refusal_of(error, SimpleNamespace(fn=divide), {}, lambda: None) is None


def test_a_missing_tail_mask_is_found_though_nothing_may_have_crashed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = doctor(
        capfd, monkeypatch, tmp_path, "--suspect", "--json", "--",
        sys.executable, str(SCRIPTS / "add.py"), "tail",
    )  # fmt: skip
    [root] = json.loads(out)["roots"]
    assert (code, root["cause"], root["kernel"]) == (3, "missing tail mask", "add_kernel")
    assert (root["argument"], root["tensor"]) == ("out_ptr", "out")
    line = line_of("add.py", "tl.store(out_ptr + offsets, x + y)")
    assert (root["file"], root["line"]) == (str(SCRIPTS / "add.py"), line)
    assert root["proof"]["green"]
    unseen = " ".join(str(gap) for gap in json.loads(out)["unseen"])
    for part in ("Triton's interpreter", "what tensors held", "not launched through triton.jit"):
        assert part in unseen


SUMS = ("--suspect", "--json", "--", sys.executable, str(SCRIPTS / "sums.py"))


def test_what_was_never_written_is_found_where_it_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = doctor(capfd, monkeypatch, tmp_path, *SUMS)
    [root] = json.loads(out)["roots"]
    assert (code, root["cause"], root["tensor"]) == (3, "uninitialised read", "out")
    assert root["line"] == line_of("sums.py", "tl.load(out_ptr + row)")
    assert "out cleared before" in root["proof"]["corrected"]
    made = bundles.load(tmp_path / "hypo-bundle")
    kept = [v for snapshot in made.snapshots for v in snapshot.values if v.dtype == "F32"]
    assert kept
    assert all(set(values.data) <= {0, 0xFF} for values in kept), "floats are nobody's business"


@pytest.mark.tier("sim")  # that a twin is left alone `test_unwritten.py` sees, too
def test_what_was_cleared_before_it_is_read_is_no_finding(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = doctor(capfd, monkeypatch, tmp_path, *SUMS, "cleared")
    assert json.loads(out)["roots"] == []


@pytest.mark.tier("whole")
def test_an_offset_beyond_32_bits_crashes_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = doctor(
        capfd, monkeypatch, tmp_path, "--json", "--", sys.executable, str(SCRIPTS / "rows.py")
    )
    found = json.loads(out)
    assert (code, found["kind"]) == (3, "crash")
    [root] = found["roots"]
    assert (root["cause"], root["kernel"]) == ("offset overflow", "first_of_row")
    assert root["line"] == line_of("rows.py", "row * row_stride")
    assert "`row.to(tl.int64) * row_stride`" in root["proof"]["corrected"]
    assert "launch 1 (first_of_row at" in found["surfaced"]


@pytest.mark.tier("whole")
def test_a_wrong_index_in_a_tuned_kernel_is_named_with_its_entry(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = doctor(
        capfd, monkeypatch, tmp_path, "--", sys.executable, str(SCRIPTS / "gather.py")
    )
    assert code == 3
    assert out.startswith(
        "CAUSE      index out of range: argument ids_ptr (tensor ids) of kernel gather\n"
    )
    assert f"gather.py:{line_of('gather.py', 'return tl.load')}" in out
    assert "change  ids_ptr[70] = 99\n" in out
    assert "AssertionError: wrong result" in " ".join(out.split())
    [words] = re.findall(
        r"^REPLAY +hypo (replay hypo-bundle --launch (\d+) --run-sources)$", out, re.M
    )
    assert re.search(rf"^WHEN       launch {words[1]}, launched at .*gather\.py:\d+$", out, re.M)
    command = words[0].split()
    for given, code, parts in (
        (command, 4, [f"  launch {words[1]}: gather (", ", 1 finding in 1 launch"]),
        (command[:-1], 1, ["--run-sources", "0 findings in 0 of 1 launch replayed"]),
    ):
        with pytest.raises(SystemExit) as left:
            app.main(given)
        shown = capfd.readouterr().out
        assert left.value.code == code, shown
        for part in parts:
            assert part.removeprefix(", ") in shown


REFUSED: list[tuple[str, str, str, str]] = [
    ("resources", "shared memory over the limit", "tile_product", "has 232448"),
    ("threads", "threads over the limit", "tile_product", "has 256 threads"),
    ("compile", "kernel does not compile", "halves", "must be a power of 2"),
    ("capture", "call not allowed during capture", "tile_product", "is being captured"),
]


@pytest.mark.parametrize(("case", "cause", "kernel", "words"), REFUSED)
@pytest.mark.tier("whole")
def test_what_triton_refuses_is_named_with_kernel_and_line(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    cause: str,
    kernel: str,
    words: str,
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    shutil.copy(Path(SUPPORT) / "no_gpu_driver.py", installed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, str(SCRIPTS / "refused.py"), case, str(installed)]
    with pytest.raises(SystemExit) as left:
        app.main(["doctor", "--json", "--", *command])
    [root] = json.loads(capfd.readouterr().out)["roots"]
    assert (left.value.code, root["cause"], root["kernel"]) == (3, cause, kernel)
    assert words in root["sentence"]
    launch = (
        "halves[(1,)]" if case == "compile" else "B=128" if case == "resources" else "B=16, num"
    )
    assert root["launched_at"] == f"{SCRIPTS / 'refused.py'}:{line_of('refused.py', launch)}"
    if case == "compile":
        line = line_of("refused.py", "tl.zeros((3,)")
        assert (root["file"], root["line"]) == (str(SCRIPTS / "refused.py"), line)


ENDLESS = """
import torch, triton, triton.language as tl
@triton.jit
def spin(x_ptr, n):
    while tl.program_id(0) < n:
        tl.store(x_ptr, n)
spin[(1,)](torch.zeros(4, dtype=torch.int32), 4)
"""


@pytest.mark.tier("whole")
def test_an_endless_launch_is_past_its_deadline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypocenter.cli.verbs.doctor.diagnose", lambda *_, **__: sys.exit(99))
    (tmp_path / "endless.py").write_text(ENDLESS)
    code, _, err = doctor(
        capfd, monkeypatch, tmp_path, "--deadline", "0.5", "--", sys.executable, "endless.py"
    )
    assert code == 99
    assert "a step or launch ran for" in err
    made = bundles.load(tmp_path / "hypo-bundle")
    assert (made.kind, made.fault.kind) == ("hang", "hang")
    assert "in spin" in made.fault.stack
    assert [event.launch.kernel for event in made.events if isinstance(event, Launched)] == ["spin"]


def test_without_a_deadline_a_foreign_launch_may_take_any_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    own = cli_doctor.DoctorRequest(command=("run", "-p", "x"), verbs=frozenset(app.own_verbs()))
    foreign_one = cli_doctor.DoctorRequest(command=("python", "x.py"), verbs=own.verbs)
    assert cli_doctor.deadlines_of(own).step == 120
    assert cli_doctor.deadlines_of(foreign_one).step == math.inf
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreted = cli_doctor.deadlines_of(foreign_one)
    assert (interpreted.step, interpreted.idle) == (cli_doctor.INTERPRETED_SECONDS, math.inf)


def test_a_program_without_torch_pays_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; print([n for n in sys.modules if n.startswith(('hypocenter.', 'msgspec'))], "
        f"{str(STARTUP.parent)!r} in sys.path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment_of(tmp_path, is_own=False),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[] False\n"
    assert list(tmp_path.iterdir()) == []


def test_hypo_record_0_leaves_the_program_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.delenv("HYPO_RECORD", raising=False)
    path = environment_of(tmp_path, is_own=False)["PYTHONPATH"]
    assert path == f"{STARTUP.parent}{os.pathsep}mine"
    assert environment_of(tmp_path)["PYTHONPATH"] == "mine"
    monkeypatch.setenv("HYPO_RECORD", "0")
    environment = environment_of(tmp_path, is_own=False)
    assert (environment["PYTHONPATH"], environment["HYPO_RECORD"]) == ("mine", "0")
    monkeypatch.setattr(hooks, "_State", type("_State", (hooks._State,), {}))
    monkeypatch.setattr(hooks._State, "lost", LostLaunches(lambda: hooks._State.recorder))
    assert hooks.recorder() is None


# -- the first thing that runs --------------------------------------------------------------------


@pytest.fixture
def startup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The start-up file as a module of another name, waiting for `awaited`, which can be loaded."""
    spec = importlib.util.spec_from_file_location("startup_under_test", STARTUP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "awaited.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "awaited", raising=False)
    monkeypatch.setattr(module, "MODULES", ("awaited",))
    monkeypatch.setattr(sys, "meta_path", [module.Waiting(), *sys.meta_path])
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path))
    return module


#: Pythons that a command may run in, as far as this machine has them.
PYTHONS = ("2.7", "3.6", "3.7", "3.8", "3.9", "3.10", "3.12", "3.13", "3.14")


def _python(version: str) -> str:
    """The interpreter of that version; skips where there is none that runs."""
    found = shutil.which(f"python{version}")
    versions = [found] if found else []
    versions += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in reversed(versions):
        done = subprocess.run([path, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:
            return path
    pytest.skip(f"there is no Python {version}")


@pytest.mark.parametrize("own", [True, False], ids=["own", "none"])
@pytest.mark.parametrize("version", [*PYTHONS, "this"])
def test_any_python_starts_in_silence_and_runs_its_own_file(
    tmp_path: Path, version: str, own: bool
) -> None:
    python = sys.executable if version == "this" else _python(version)
    folders = [str(STARTUP.parent)]
    if own:
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.stdout.write('own ')\n")
        folders.append(str(tmp_path))
    program = (
        "import sys; assert not [p for p in sys.path if 'startup' in p]; "
        "sys.stdout.write('end ' + str('sitecustomize' in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "HYPO_RECORD": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # Python 2 writes its own beside the source
    done = subprocess.run(
        [python, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("own end True" if own else "end True", "")
    assert done.returncode == 0


def test_the_first_file_has_no_syntax_that_a_python_lacks() -> None:
    """Where no old Python is at hand: only names, calls and statements that all of them have."""
    text = STARTUP.with_name("sitecustomize.py").read_text(encoding="ascii")
    newer = (ast.AnnAssign, ast.JoinedStr, ast.NamedExpr, ast.Nonlocal, ast.FunctionDef,
             ast.AsyncFunctionDef, ast.ClassDef, ast.Starred, ast.Match, ast.Await)  # fmt: skip
    nodes = list(ast.walk(ast.parse(text)))
    assert not [node for node in nodes if isinstance(node, newer)]
    assert not [node for node in nodes if isinstance(node, ast.Raise) and node.cause]


def test_what_an_own_file_raises_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import no_such_module\n")
    path = os.pathsep.join([str(STARTUP.parent), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", "print('end')"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "No module named 'no_such_module'" in done.stderr


def test_a_module_is_told_of_once_it_is_loaded(
    startup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(startup, "_hooks", lambda: SimpleNamespace(module_loaded=told.append))
    awaited = importlib.import_module("awaited")
    assert told == [awaited]
    assert awaited.x == 1
    assert "exec_module" not in vars(awaited.__loader__)


def test_a_python_that_cannot_record_leaves_word(
    startup: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'msgspec'")

    monkeypatch.setattr(startup, "_hooks", missing)
    assert importlib.import_module("awaited").x == 1
    note = str(*foreign_runs.notes(tmp_path))
    assert f"process {os.getpid()}: ModuleNotFoundError: No module named 'msgspec'" in note
    assert "install hypocenter there" in note


def test_another_environment_is_lent_this_package(
    startup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `import hypocenter` fails it is found beside the start-up file, for that once."""
    given = []
    real = importlib.import_module

    def find(name: str) -> Any:
        given.append(str(STARTUP.parents[3]) in sys.path[-1:])
        if len(given) == 1:
            raise ModuleNotFoundError(name)
        return real("hypocenter.foreign.hooks")

    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(STARTUP.parents[3])])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(importlib, "import_module", find)
    assert startup._hooks().module_loaded
    assert given == [False, True]
    assert str(STARTUP.parents[3]) not in sys.path


# -- bookkeeping, with a GPU that is made of words ------------------------------------------------


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[ForeignRecorder]:
    opened = ForeignRecorder(tmp_path / "runs")
    yield opened
    opened.close()


def test_a_launch_is_written_with_its_tensors(recorder: ForeignRecorder) -> None:
    memory = Storage(0x7000, 4096)
    x, view = FakeTensor(memory, (8, 64)), FakeTensor(memory, (16,), torch.float16, 64)
    Launching(recorder)[(4,)](x, view, n=1000, num_warps=8, num_stages=3)
    Launching(recorder)[(4,)](x, FakeTensor(memory, (8, 64)), 5)
    [first, second] = [event.launch for event in events(recorder, Launched)]
    assert (first.kernel, first.device, first.grid) == ("kernel", "cuda:0", (4,))
    assert (first.num_warps, first.constants) == (8, {"BLOCK": 64})
    assert (first.options, first.site) == ({"num_stages": 3}, "script.py:9")
    run = ring.read_run(recorder.folder)
    assert [event.step for event in events(recorder, Launched)] == [1, 2]
    tensors = {tensor.id: tensor for tensor in run.tensors}
    named = {one.name: one for one in first.arguments}
    assert named["n"].value == 1000
    found = tensors[named["x_ptr"].tensor]
    assert (found.name, found.dtype, found.shape) == ("x", "F32", (8, 64))
    assert (found.address, found.extent_bytes, found.strides) == (0x7000, 2048, (64, 1))
    found = tensors[named["out_ptr"].tensor]
    assert (found.name, found.dtype, found.offset) == ("view", "F16", 64)
    assert (found.address, found.extent_bytes) == (0x7080, 32)
    [allocation] = [event.allocation for event in events(recorder, Allocated)]
    assert (allocation.address, allocation.num_bytes, allocation.kind) == (0x7000, 4096, "device")
    assert {tensor.allocation for tensor in run.tensors} == {allocation.id}
    assert len(run.tensors) == 2  # another object for what is known
    assert second.arguments[0] == first.arguments[0]
    assert [source.function for source in run.sources] == ["kernel"]


def test_memory_that_goes_away_is_freed_before_the_next_launch(recorder: ForeignRecorder) -> None:
    out = FakeTensor(Storage(0x9000, 256), (64,))
    x = FakeTensor(Storage(0x7000, 256), (64,))
    Launching(recorder)[(4,)](x, out, 64)
    del x
    assert events(recorder, Freed) == []  # told from no finaliser
    again = FakeTensor(Storage(0x7000, 256), (64,))
    Launching(recorder)[(4,)](again, out, 64)
    [first, second] = events(recorder, Launched)
    [freed] = events(recorder, Freed)
    made = {event.allocation.name: event for event in events(recorder, Allocated)}
    assert first.seq < freed.seq < made["again"].seq < second.seq
    assert freed.allocation == made["x"].allocation.id
    assert first.launch.arguments[0].tensor != second.launch.arguments[0].tensor
    assert first.launch.arguments[1] == second.launch.arguments[1]


def test_where_storages_cannot_be_watched_nothing_counts_as_freed(tmp_path: Path) -> None:
    opened = ForeignRecorder(tmp_path / "runs", sees_frees=False)
    out = FakeTensor(Storage(0x9000, 256), (64,))
    for num_bytes in (256, 256, 512):
        Launching(opened)[(4,)](FakeTensor(Storage(0x7000, num_bytes), (64,)), out, 64)
    assert events(opened, Freed) == []
    assert len(events(opened, Allocated)) == 3
    opened.close()


def test_the_host_is_told_from_the_gpu_and_one_gpu_from_another(recorder: ForeignRecorder) -> None:
    host = FakeTensor(Storage(0x1000, 256), (64,), device="cpu")
    other = FakeTensor(Storage(0x1000, 256), (64,), device="cuda:1")
    Launching(recorder)[(4,)](host, other, 64)
    found = {e.allocation.name: e.allocation for e in events(recorder, Allocated)}
    assert (found["host"].kind, found["host"].device) == ("host", "cpu")
    assert (found["other"].kind, found["other"].device) == ("device", "cuda:1")


def test_torch_keeps_one_object_for_a_storage_as_the_recorder_needs() -> None:
    assert storages_are_kept()
    tensor = torch.empty(4)
    died: list[int] = []
    reference = weakref.ref(tensor.untyped_storage(), lambda _: died.append(1))
    view = tensor[2:]
    del tensor
    assert reference() is view.untyped_storage()
    del view
    assert died == [1]


def test_small_integers_of_the_host_are_kept_with_their_launch(recorder: ForeignRecorder) -> None:
    ids, many = torch.arange(3, dtype=torch.int32), torch.arange(5000)
    recorder.record_launch(JIT, (ids, many, 3), {"BLOCK": 1}, (1,), LaunchPlace(INTERPRETER))
    from hypocenter.record.trace_log import read_trace

    [snapshot] = read_trace(recorder.folder).snapshots
    [event] = events(recorder, Launched)
    assert (snapshot.step, snapshot.plan, snapshot.launch) == (1, -1, event.seq)
    [values] = snapshot.values
    assert (values.dtype, values.data) == ("I32", bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]))


def test_of_floats_only_what_nobody_wrote_is_kept() -> None:
    tensor = torch.tensor([1.5, 0.0, -2.0, 3.0])
    assert undefined_in(tensor, 7, "F32") == []
    tensor.view(torch.uint8)[4:8] = 0xFF
    [values] = undefined_in(tensor, 7, "F32")
    assert (values.tensor, values.dtype, values.shape) == (7, "F32", (4,))
    assert values.data == bytes(4) + b"\xff" * 4 + bytes(8)


def test_a_full_log_begins_anew_and_keeps_the_last_launches(tmp_path: Path) -> None:
    opened = ForeignRecorder(tmp_path / "runs", static_bytes=20_000)
    for number in range(300):
        x = FakeTensor(Storage(0x1000 * (number + 1), 256), (64,))
        Launching(opened)[(4,)](x, x, 64)
    run = ring.read_run(opened.folder)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [opened.folder.name]
    made = [event for event in run.events if isinstance(event, Launched)]
    assert made[-1].step == 300
    assert made[0].step > 200
    known = {tensor.id for tensor in run.tensors}
    assert {one.tensor for one in made[-2].launch.arguments if one.tensor} <= known
    first = f"the first {made[0].step - 1} of 300 launches"
    assert first in [gap.what for gap in foreign_runs.unseen(run)]
    assert foreign_runs.summary(run.events, run.sources) == "300 launches of 1 kernel seen"
    opened.close()


def test_streams_that_nobody_saw_wait_are_no_disorder(recorder: ForeignRecorder) -> None:
    x = FakeTensor(Storage(0x7000, 256), (64,))
    for stream in ("0x10", "0x20"):
        place = LaunchPlace("cuda:0", stream)
        recorder.record_launch(JIT, (x, x, 64), {"BLOCK": 64}, (1,), place)
    run = ring.read_run(recorder.folder)
    bundle = Bundle(
        kind="crash", fault=FaultRecord(kind="crash", message="an illegal memory access"),
        tensors=run.tensors, events=run.events, sources=run.sources,
    )  # fmt: skip
    case = Case(bundle)
    assert {use.launch.stream for use in case.launches} == {"0x10", "0x20"}
    assert order(case) == []
    assert any("the order of streams" in str(text) for text in case.unseen)


# -- hooks ----------------------------------------------------------------------------------------


class FakeJit:
    """Stands for triton.runtime.jit.JITFunction."""

    def __init__(self, function: Any = kernel) -> None:
        self.fn = function
        self.ran: list[Any] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> str:
        size = grid({"BLOCK": 64, **options}) if callable(grid) else grid
        self.ran.append((args, size, warmup))
        return "a compiled kernel"


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeJit]:
    """A Jit of its own class, watched, on a torch with one fake GPU."""
    compared = {"equal": torch.equal, "allclose": torch.allclose}
    fake = SimpleNamespace(
        version=SimpleNamespace(hip=None), empty=torch.empty,
        **compared, Tensor=SimpleNamespace(**compared),
        cuda=SimpleNamespace(
            current_device=lambda: 0, is_initialized=lambda: True,
            current_stream=lambda number: SimpleNamespace(cuda_stream=0),
            synchronize=lambda: "done",
            memory_snapshot=lambda: [{
                "address": 0x7000, "device": 0, "blocks": [
                    {"size": 512, "state": "active_allocated"}, {"size": 1024, "state": "inactive"},
                ],
            }],
        ),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(hooks, "_limits", lambda: None)
    monkeypatch.setattr(hooks, "_State", type("_State", (hooks._State,), {}))
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.delenv("HYPO_RECORD", raising=False)
    monkeypatch.setattr(sys, "excepthook", lambda *args: None)
    kind = type("Jit", (FakeJit,), {"run": FakeJit.run})
    hooks._watch_launches(kind, is_interpreted=False)
    return kind


def opened_recorder() -> ForeignRecorder:
    found = hooks._State.recorder
    assert found is not None
    return found


def test_a_launch_runs_as_before_and_is_seen(hooked: type[FakeJit]) -> None:
    jit, x = hooked(), FakeTensor(Storage(0x7000, 256), (64,))
    assert jit.run(x, x, 64, grid=lambda meta: (meta["BLOCK"] // 16, 2), warmup=False, BLOCK=64)
    assert jit.run(x, x, 64, grid=(7,), warmup=False, BLOCK=64) == "a compiled kernel"
    jit.run(x, x, 64, grid=(9,), warmup=True, BLOCK=64)
    assert jit.ran == [((x, x, 64), (4, 2), False), ((x, x, 64), (7,), False),
                       ((x, x, 64), (9,), True)]  # fmt: skip
    made = [event.launch for event in events(opened_recorder(), Launched)]
    assert [one.grid for one in made] == [(4, 2), (7,)]  # a warm-up launches nothing
    assert made[0].site.startswith(f"{__file__}:")


def test_what_goes_wrong_in_the_recorder_never_reaches_the_program(
    hooked: type[FakeJit], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def broken(*args: Any, **options: Any) -> None:
        tried.append(1)
        raise ValueError("an odd tensor")

    monkeypatch.setattr(ForeignRecorder, "record_launch", broken)
    jit = hooked()
    for _ in range(20):
        assert jit.run(1, 2, 3, grid=(1,), warmup=False) == "a compiled kernel"
    assert len(caplog.records) == 1
    assert "a launch was not recorded: ValueError: an odd tensor" in caplog.text
    assert len(tried) == hooks.MAX_FAILURES
    name = hooks._name_of(jit)
    gaps = foreign_runs.lost_launches(events(opened_recorder(), LostLaunch))
    assert [(gap.kind, gap.what) for gap in gaps] == [
        (GapKind.LOST_LAUNCH, f"8 launches of {name}"),
        (GapKind.LOST_LAUNCH, f"8 launches of {name}"),
    ]
    hooks._State.lost.tell()
    assert [
        str(gap) for gap in foreign_runs.lost_launches(events(opened_recorder(), LostLaunch))
    ] == [
        f"10 launches of {name}: not recorded: ValueError: an odd tensor",
        f"10 launches of {name}: not recorded: recording was given up after 10 failures",
    ]


def test_this_packages_own_kernels_are_left_to_its_own_recorder(hooked: type[FakeJit]) -> None:
    def own() -> None:
        """As a kernel of ours."""

    own.__module__ = "hypocenter.kernels.attention.rope_gpu"
    hooked(own).run(grid=(1,), warmup=False)
    assert hooks._State.recorder is None


def test_waits_and_the_last_exception_are_noted(hooked: type[FakeJit]) -> None:
    fake: Any = sys.modules["torch"]
    ended: list[Any] = []
    sys.excepthook = lambda *args: ended.append(args)
    fake.__name__ = "torch"
    hooks.module_loaded(fake)
    x = FakeTensor(Storage(0x7000, 256), (64,))
    hooked().run(x, x, 64, grid=(1,), warmup=False)
    assert fake.cuda.synchronize() == "done"
    try:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    except RuntimeError as error:
        sys.excepthook(RuntimeError, error, error.__traceback__)
    assert len(ended) == 1  # what would have been done was done
    opened = opened_recorder()
    [called] = events(opened, Called)
    assert called.outcome.startswith("RuntimeError: CUDA error: an illegal memory access")
    assert called.call.startswith("`raise RuntimeError(")
    assert called.site.startswith(f"{__file__}:")
    [wait] = events(opened, StreamEvent)
    assert wait.action == "synchronise"
    # The allocator's own table: the block of x is known, the free one behind it is not.
    [other] = [e.allocation for e in events(opened, Allocated) if e.allocation.address != 0x7000]
    assert (other.address, other.num_bytes) == (0x7200, 1024)
    assert "held free" in other.name
    opened.close()
    assert not ring.read_run(opened.folder).is_clean


# -- on a real GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here; scripts/gpu runs this")
@pytest.mark.parametrize(
    ("script", "args", "cause", "kernel", "argument", "text"),
    [
        ("rows.py", ["gpu"], "offset overflow", "first_of_row", "x_ptr", "row * row_stride"),
        ("add.py", ["gpu", "tail"], "missing tail mask", "add_kernel", "out_ptr",
         "tl.store(out_ptr + offsets, x + y)"),
    ],
)  # fmt: skip
def test_on_a_gpu_a_faulty_kernel_of_anyones_is_named(
    tmp_path: Path, script: str, args: list[str], cause: str, kernel: str, argument: str, text: str
) -> None:
    """The first one faults; the second hits memory that torch's allocator rounds up to."""
    done = subprocess.run(
        [sys.executable, "-m", "hypocenter", "doctor", "--suspect", "--json", "--",
         sys.executable, str(SCRIPTS / script), *args],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    [root] = json.loads(done.stdout)["roots"]
    assert (root["cause"], root["kernel"], root["argument"]) == (cause, kernel, argument)
    assert root["line"] == line_of(script, text)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here; scripts/gpu runs this")
def test_on_a_gpu_a_healthy_script_is_left_in_peace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hypocenter", "doctor", "--",
         sys.executable, str(SCRIPTS / "add.py"), "gpu"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "sum 2000.0\n")
    assert "nothing found; 2 launches of 1 kernel seen" in done.stderr


WAITING_HOST = """
import torch, triton, triton.language as tl
@triton.jit
def fill(x_ptr):
    tl.store(x_ptr, 1.0)
done = torch.zeros(1)
fill[(1,)](torch.zeros(4))
while done.item() == 0:
    pass
"""


def test_a_host_that_waits_for_a_value_is_ended_and_no_launch_is_blamed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waiting.py").write_text(WAITING_HOST)
    code, out, err = doctor(
        capfd, monkeypatch, tmp_path, "--deadline", "1", "--json", "--", sys.executable,
        "waiting.py",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 3
    assert "no step or launch was begun for" in err
    assert found["roots"] == []
    assert "between steps and launches" in found["surfaced"]
    assert "waiting.py" in bundles.load(tmp_path / "hypo-bundle").fault.stack
