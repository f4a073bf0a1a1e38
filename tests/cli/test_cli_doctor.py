"""`hypo doctor` as a person meets it, with children that fault, die, hang, talk or do nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
from outside.terminal import (
    AS_A_PERSON,
    HYPO,
    TIMEOUT_SECONDS,
    hypo,
    hypo_in_process,
    lines_without_progress,
    on_terminal,
)
from recorded.bundles import background
from repository import DEMO

from faults import __main__ as faults
from faults.model import model_path
from hypocenter.base.errors import ErrorKind, UsageError
from hypocenter.cli import app
from hypocenter.cli.child_run import environment_of
from hypocenter.cli.output import printable
from hypocenter.cli.tool_options import DoctorOptions
from hypocenter.cli.verbs import doctor as cli_doctor
from hypocenter.cli.verbs.doctor import DoctorRequest, command_of, split_words
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.nonfinite import NonFiniteReached, NumberEnd, NumberRead, NumbersWatched
from hypocenter.watch import dead_runs
from hypocenter.watch.child import START_SECONDS, Deadlines, Ended

#: A process that records, and then does what `{end}` says.
RECORDED = """
import os, sys, time
from hypocenter.settings.environment import Environment
from hypocenter.record import recorder, ring
from hypocenter.record.events import Stepped
opened = recorder.open_recorder()
opened.header[ring.CELL_STEP] = 2
opened._event(Stepped(**opened._now(), plan=0))
{end}
"""
AMD_LINE = (
    "Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f3a12345000. Reason: "
    "Page not present or supervisor privilege."
)
FAULTS = f"os.write(2, b'{AMD_LINE}\\n'); os.abort()"
HANGS = """
opened.header[ring.CELL_STEP_STARTED] = time.monotonic_ns()
def endless():
    for _ in range(3000):
        time.sleep(0.01)
endless()
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Doctor = Callable[..., Done]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def doctor(capfd: pytest.CaptureFixture[str]) -> Doctor:
    """`hypo doctor` in this process, which has loaded what it needs once."""

    def run(*args: str) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            app.main(["doctor", *args])
        code = left.value.code
        return Done(code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


def child(end: str) -> list[str]:
    return [sys.executable, "-c", RECORDED.format(end=end)]


def a_bundle(name: str, kind: str = "none", message: str = "") -> Bundle:
    fault = FaultRecord(kind=kind, message=message)
    bundle_kind = {"none": "suspect", "crash": "crash"}[kind]
    return bundles.save(Bundle(kind=bundle_kind, fault=fault), name)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ([], ["give a BUNDLE, or --last, or a command behind --", "none was given"]),
        (["--"], ["no command stands behind --"]),
        (["a", "b"], ["'b' is one word too many"]),
        (["a", "--", "run"], ["more than one was given"]),
        (["--last", "a"], ["more than one was given"]),
        (["--suspect", "a"], ["--suspect is for a command"]),
        (["--deadline", "3", "a"], ["--deadline is for a command"]),
        (["--deadline", "0", "--", "true"], ["--deadline is 0.0, but must be above 0"]),
        (["--out", "here", "a"], ["--out is for a new bundle"]),
        (["--json", "--markdown", "a"], ["both --json and --markdown"]),
        (["nowhere"], ["nowhere: no such folder", "hypo doctor -- ..."]),
        (["--good", "nowhere", "--", "true"], ["nowhere: no such folder"]),
        (["--last"], ["no run that died is to be found"]),
        (["--", "no-such-command"], ["no-such-command: No such file", "nothing was run"]),
        (["--", "/"], ["Permission denied", "nothing was run"]),
        (["--", "doctor", "--last"], ["is not run by a doctor"]),
        (["run", "-p", "a b"], ["put the command behind --: hypo doctor -- run -p 'a b'"]),
        (["--out", "b", "--suspect", "sh", "x"], ["hypo doctor --out b --suspect -- sh x"]),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    args: list[str], parts: list[str], doctor: Doctor
) -> None:
    done = doctor(*args)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    for part in parts:
        assert part in line


def test_nothing_runs_when_the_folder_is_taken(tmp_path: Path, doctor: Doctor) -> None:
    (tmp_path / "taken").mkdir()
    done = doctor("--out", "taken", "--", "touch", "ran")
    assert done.returncode == 2
    assert "taken is there already" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_is_no_bundle_is_an_error(tmp_path: Path, doctor: Doctor) -> None:
    done = doctor(str(tmp_path))
    assert done.returncode == 2
    assert "bundle.json is not there, so this is no bundle" in done.stderr
    (tmp_path / "bundle.json").write_text("{")
    done = doctor(str(tmp_path))
    assert done.returncode == 1
    assert "bundle.json" in done.stderr


def test_options_behind_the_dashes_are_the_commands() -> None:
    assert split_words(["--", "run", "--json", "-p", "x"]) == (None, ("run", "--json", "-p", "x"))
    assert split_words(["--", "--", "x"]) == (None, ("--", "x"))
    assert split_words(["b"]) == ("b", ())
    begun = [sys.executable, "-P", "-m", "hypocenter"]
    assert command_of(_asked("run", "m.gguf")) == [*begun, "run", "m.gguf"]
    assert command_of(_asked("./run", "x")) == ["./run", "x"]
    assert command_of(_asked("--help")) == ["--help"]


def _asked(*command: str) -> DoctorRequest:
    return DoctorRequest(command=command, verbs=frozenset(app.own_verbs()))


def test_the_child_records_whatever_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPO_RECORD", "0")
    environment = environment_of(tmp_path, suspect=True)
    assert "HYPO_RECORD" not in environment
    assert environment["HYPO_TRACE"] == "1"
    assert environment["HYPO_RUN_DIR"] == str(tmp_path)
    assert "HYPO_TRACE" not in environment_of(tmp_path)


def test_one_way_must_be_asked_for() -> None:
    with pytest.raises(UsageError, match="more than one"):
        DoctorRequest(folder="a", options=DoctorOptions(last=True))


# -- a bundle -------------------------------------------------------------------------------------


def test_a_bundle_is_examined_in_three_formats(doctor: Doctor) -> None:
    a_bundle("good")
    a_bundle("bad", "crash", "Memory access fault")
    text = doctor("bad")
    assert text.returncode == 3
    assert "CAUSE" in text.stdout
    assert "Memory access fault" in text.stdout
    assert lines_without_progress(text.stderr) == []
    shown = doctor("bad", "--json")
    assert (shown.returncode, json.loads(shown.stdout)["kind"]) == (3, "crash")
    assert doctor("bad", "--markdown", "--good", "good").stdout.startswith("# ")
    healthy = doctor("good")
    assert (healthy.returncode, lines_without_progress(healthy.stderr)) == (0, [])


def test_a_damaged_bundle_is_called_one_before_anything_else(
    tmp_path: Path, doctor: Doctor
) -> None:
    a_bundle("b", "crash", "Memory access fault")
    (tmp_path / "b" / bundles.ARRAYS).write_bytes(b"\xff" * 9)
    (tmp_path / "b" / bundles.STDERR).unlink()
    done = doctor("b")
    assert done.stderr.startswith("hypo: b is damaged, so what follows may lack what matters: ")
    assert "1 more under NOT SEEN" in done.stderr


def test_a_good_run_that_may_be_none_is_told(doctor: Doctor) -> None:
    bundles.save(background(), "bad")
    a_bundle("crashed", "crash")
    elsewhere = msgspec.structs.replace(
        background(), kind="suspect", fault=FaultRecord(kind="none", message=""), device="cpu"
    )
    bundles.save(elsewhere, "elsewhere")
    good = msgspec.structs.replace(elsewhere, device=background().device)
    bundles.save(good, "good")
    for dtype in ("F16", "F32"):
        weight = msgspec.structs.replace(good.tensors[0], id=99, owner="model", dtype=dtype)
        bundles.save(msgspec.structs.replace(good, tensors=(*good.tensors, weight)), dtype)
    assert "it had other weights" in doctor("F32", "--good", "F16").stderr
    said = doctor("bad", "--good", "crashed").stderr
    assert "--good crashed may be no run to compare with: it is of a run that ended in a" in said
    assert "it recorded nothing" in said
    assert (
        "it ran on cpu, and the other on sim:mi300x" in doctor("bad", "--good", "elsewhere").stderr
    )
    assert "compare with" not in doctor("bad", "--good", "good").stderr


WITHOUT = """
import sys
for name in ("torch", "triton"):
    sys.modules[name] = None
from hypocenter.cli import app
app.main(["doctor", "b"])
"""


def test_the_background_case_is_solved_without_gpu_torch_and_triton() -> None:
    bundles.save(background(), "b")
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    first = done.stdout.split("HYPOTHESES")[0]
    assert "dtype width: argument positions of kernel rope" in first
    assert "tl.load(positions_ptr + token)" in first


def test_a_terminal_is_not_told_what_to_do_by_a_bundle(doctor: Doctor) -> None:
    a_bundle("bad", "crash", "\x1b]0;evil\x07\x1b[2Jtext\r")
    done = doctor("bad")
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert "\\x1b[2Jtext" in done.stdout
    assert printable("a\nb\x9bc\u202e") == "a\nb\\x9bc\\u202e"


# -- a command ------------------------------------------------------------------------------------


def test_a_faulting_command_is_bundled_and_examined(tmp_path: Path, doctor: Doctor) -> None:
    done = doctor("--", *child("print('half an answer', flush=True)\n" + FAULTS))
    assert done.returncode == 3
    assert done.stdout.startswith("half an answer\n")
    assert "CAUSE" in done.stdout
    assert AMD_LINE in done.stderr
    assert "ended by SIGABRT; the bundle is in hypo-bundle" in done.stderr
    made = bundles.load(tmp_path / "hypo-bundle")
    assert (made.kind, made.fault.address, made.fault.signal) == ("crash", 0x7F3A12345000, 6)
    assert AMD_LINE in made.stderr
    assert made.packages["numpy"]
    assert "HYPO_RUN_DIR" not in made.environment
    assert list(Path(os.environ["HYPO_RUN_DIR"]).iterdir()) == []
    again = doctor("hypo-bundle")
    assert again.returncode == 3
    assert "0x7f3a12345000" in again.stdout


def test_json_alone_is_on_stdout_and_bundles_do_not_collide(tmp_path: Path, doctor: Doctor) -> None:
    a_bundle("hypo-bundle")
    done = doctor("--json", "--", *child("print('answer', flush=True)\n" + FAULTS))
    assert json.loads(done.stdout)["kind"] == "crash"
    assert "answer" in done.stderr
    assert "the bundle is in hypo-bundle-2" in done.stderr
    assert bundles.load(tmp_path / "hypo-bundle-2").kind == "crash"


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("pass", 0, "ended without a fault"),
        ("sys.exit(7)", 7, "exit code 7, which is no fault to examine"),
        ("os.kill(os.getpid(), 15)", 143, "ended by SIGTERM, which is no fault"),
    ],
)
def test_without_a_fault_the_exit_code_is_the_commands(
    tmp_path: Path, end: str, code: int, words: str, doctor: Doctor
) -> None:
    done = doctor("--", *child(end))
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert not (tmp_path / "hypo-bundle").exists()


def test_a_crash_below_a_shell_script_is_bundled(tmp_path: Path, doctor: Doctor) -> None:
    (tmp_path / "crash.py").write_text(RECORDED.format(end="os.kill(os.getpid(), 11)"))
    script = f"{sys.executable} crash.py; exit $?"
    done = doctor("--", "sh", "-c", script)
    assert done.returncode == 3
    assert "exit code 139: SIGSEGV ended what it ran; the bundle is in hypo-bundle" in done.stderr
    assert bundles.load(tmp_path / "hypo-bundle").packages["numpy"]  # of the process that died


#: Loads a model whose file loses its end as soon as it is mapped.
SHRINKS = """
import os, sys
from hypocenter.__main__ import main
from hypocenter.model.gguf import file
opened = file._open_shard
def opened_and_shrunk(path, shard):
    found = opened(path, shard)
    os.truncate(path, 65536)
    return found
file._open_shard = opened_and_shrunk
sys.argv = ["hypo", "run", sys.argv[1], "-p", "x", "-n", "1"]
main()
"""


def test_a_model_that_becomes_shorter_is_named_with_both_sizes(
    tmp_path: Path, doctor: Doctor
) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(DEMO, model)
    done = doctor("--", sys.executable, "-c", SHRINKS, str(model))
    assert done.returncode == 3
    found = bundles.load(tmp_path / "hypo-bundle").fault
    assert found.signal == signal.SIGBUS
    assert found.message == (
        f"ended by SIGBUS: model.gguf became shorter while it was open, from "
        f"{DEMO.stat().st_size:,} to 65,536 bytes; get the file again, and move a new one to its "
        "place"
    )
    assert "model.gguf became shorter while it was open" in done.stdout


def test_another_file_in_the_place_of_a_model_is_not_blamed(tmp_path: Path, doctor: Doctor) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(9))
    (tmp_path / "new").write_bytes(bytes(1))
    end = "os.replace('new', 'model.gguf'); os.kill(os.getpid(), 7)"
    assert doctor("--", *child(end), "model.gguf").returncode == 3
    assert bundles.load(tmp_path / "hypo-bundle").fault.message == (
        "ended by SIGBUS (a mapped file became shorter or could not be read, or memory is broken)"
    )


def test_env_with_a_program_is_the_systems() -> None:
    assert command_of(_asked("env", "--json"))[1:] == ["-P", "-m", "hypocenter", "env", "--json"]
    for command in (["env", "TRITON_INTERPRET=1", "python", "x.py"], ["env", "-i", "true"]):
        assert command_of(_asked(*command)) == command
        assert not _asked(*command).is_own


def test_a_verb_with_wrong_usage_is_no_fault(doctor: Doctor) -> None:
    done = doctor("--", "run", "no-such-model.gguf", "-p", "x")
    assert done.returncode == 2
    assert "no such file" in done.stderr


@pytest.mark.tier("sim")  # compiles what a traced run takes
def test_nan_in_a_gate_is_of_the_weight_that_it_and_up_are(doctor: Doctor) -> None:
    """The kernel's own names for what it makes are the contract's for what it reads."""
    model = model_path("q8_0", nan_in="blk.1.ffn_gate.weight")
    told = ("--device", "cpu", "--launch-mode", "traced", "-p", "x", "-n", "1")
    done = doctor("--", "run", str(model), *told)
    assert (
        "non-finite value: argument weight (tensor blk.1.ffn_gate.weight + blk.1.ffn_up.weight) of "
        "kernel linear_gate_codes"
    ) in " ".join(done.stdout.split())


def test_the_bundle_of_a_victim_lies_one_folder_down(
    tmp_path: Path, doctor: Doctor, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its end is that of the victim, and what is told of it is the fault, not a list of modules."""
    status = faults.main(["run", "positions_of_two_bytes", "--out", "b1"])
    assert status == 128 + signal.SIGABRT
    assert "crash; Memory access fault by GPU" in capfd.readouterr().err
    done = doctor("b1")
    assert done.returncode == 3
    assert "argument positions of kernel rope_write" in done.stdout


def test_a_bundle_that_cannot_be_saved_costs_neither_report_nor_recording(
    tmp_path: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(made: Bundle, folder: Path) -> Bundle:
        raise OSError(28, "No space left on device", f"{folder}/arrays.safetensors")

    with monkeypatch.context() as patched:
        patched.setattr(bundles, "save", full)
        done = doctor("--out", "b", "--", *child(FAULTS))
    assert done.returncode == 3
    assert done.stdout.startswith("CAUSE")
    assert "it is examined all the same" in done.stderr
    [said] = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    assert said.startswith("hypo: b/arrays.safetensors: No space left on device: the bundle was ")
    [kept] = Path(os.environ["HYPO_RUN_DIR"]).iterdir()
    assert f"what was recorded is kept in {kept}, and `hypo doctor --last --out FOLDER`" in said
    last = doctor("--last", "--out", "b")
    assert last.returncode == 3
    assert bundles.load(tmp_path / "b").packages["numpy"]


def test_a_command_that_never_ran_is_no_good_result(tmp_path: Path, doctor: Doctor) -> None:
    """A wrong option ended it before anything was recorded: 0 would have been a false green."""
    a_bundle("good")
    never = ("run", "-p", "x", "-n", "1", "--kv-dtype", "f64")
    done = doctor("--suspect", "--good", "good", "--out", "bad", "--", *never)
    assert done.returncode == 2
    assert "exit code 2 and recorded no step and no launch, so nothing was examined" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "bad").exists()
    silent = doctor("--suspect", "--", sys.executable, "-c", "pass")
    assert silent.returncode == 1
    assert "so nothing was examined" in silent.stderr


def endless(*given: object, **more: object) -> None:
    time.sleep(200)


def test_a_bundle_that_takes_too_long_to_load_is_refused_in_one_line(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_bundle("b", "crash", "broke")
    monkeypatch.setattr(bundles, "load", endless)
    done = doctor("--examine-for", "0.5", "b")
    assert done.returncode == 2
    assert "b: the bundle was not ready within 0.5 seconds; --examine-for SECONDS" in done.stderr


def test_a_report_and_files_that_take_too_long_cost_nothing_of_what_is_known(
    tmp_path: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_bundle("b", "crash", "broke")
    for name in ("report_text", "report_html", "trace_json"):
        monkeypatch.setattr(cli_doctor, name, endless)
    files = ("--html", "page.html", "--perfetto", "times.json")
    done = doctor("--examine-for", "0.5", *files, "b")
    assert done.returncode == 3
    assert done.stdout == "CAUSE      no root cause is proven\n"
    for what in ("the rest of the report", "the page", "the timeline"):
        assert f"{what} was not ready within 0.5 seconds" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"b"}


ANOMALY = "RuntimeError: Function 'ExpBackward0' returned nan values in its 0th output."


@pytest.mark.parametrize(
    ("error", "again", "kept"),
    [
        (ANOMALY, "error", "the second run"),
        (ANOMALY, "none", "the first run"),
        ("RuntimeError: the loss is nan", "", "the first run"),
    ],
    ids=["anomaly", "only once", "by itself"],
)
def test_where_anomaly_mode_ended_a_command_it_is_run_once_more_with_nan(
    error: str, again: str, kept: str, tmp_path: Path, doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fault = FaultRecord(kind="error", message="the first run", error=error, exit_code=1)
    first = Bundle(kind="crash", fault=fault)
    second = Bundle(kind="crash", fault=FaultRecord(kind=again, message="the second run"))
    was_looking = []

    def run(request: DoctorRequest, runs: Path) -> tuple[Ended, Bundle]:
        was_looking.append(request.options.nan)
        code = 0 if len(was_looking) > 1 and again == "none" else 1
        ended = Ended(("python", "x.py"), 1, code, None, "", 0.0, 1.0, 0.0)
        return ended, second if len(was_looking) > 1 else first

    monkeypatch.setattr(cli_doctor, "_run_command", run)
    done = doctor("--", "python", "x.py")
    assert done.returncode == 3
    assert was_looking == [False, True][: 1 + bool(again)]
    assert ("torch's anomaly mode; it is run once more with --nan" in done.stderr) == bool(again)
    assert ("with exit code 0 this time" in done.stderr) == (again == "none")
    assert bundles.load(tmp_path / "hypo-bundle").fault.message == kept


NAN_ENDED = FaultRecord(
    kind="error", message="", error="AssertionError: NaN in it", exit_code=1,
    error_kind=ErrorKind.NOT_A_NUMBER,
)  # fmt: skip
REACHED = NonFiniteReached(seq=2, step=1, of=1, how=NumberEnd.READ, value=math.nan)
READ = NumberRead(seq=1, step=1, site="x.py:3")


@pytest.mark.parametrize(
    ("options", "first", "is_proven", "seen", "is_kept"),
    [
        (("--suspect",), NAN_ENDED, False, (), True),
        (("--suspect",), READ, False, (REACHED,), True),
        (("--suspect",), READ, False, (), False),  # what it read is of no use
        (("--suspect",), READ, True, (), None),
        (("--suspect",), None, False, (), None),
        ((), NAN_ENDED, False, (), None),
    ],
    ids=["ended", "read", "only once", "said why", "no NaN", "not closely"],
)
def test_nan_that_came_out_of_a_run_that_is_looked_at_closely_is_followed(
    options: tuple[str, ...], first: FaultRecord | NumberRead | None, is_proven: bool,
    seen: tuple[NonFiniteReached, ...], is_kept: bool | None, tmp_path: Path, doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fault = first if isinstance(first, FaultRecord) else FaultRecord(kind="none", message="")
    watched = NumbersWatched(seq=9, step=1, num_operations=1)
    read = (first,) if isinstance(first, NumberRead) else ()
    bundles_made = [
        Bundle(kind="suspect", fault=fault, events=(*read, watched), driver="1"),
        Bundle(kind="suspect", fault=fault, events=(*seen, watched), driver="2"),
    ]
    looked = []

    def run(request: DoctorRequest, runs: Path) -> tuple[Ended, Bundle]:
        looked.append((request.options.nan, request.options.suspect))
        ended = Ended(("python", "x.py"), 1, fault.exit_code or 0, None, "", 0.0, 1.0, 0.0)
        return ended, bundles_made[len(looked) - 1]

    def examined(made: Bundle, seconds: float) -> SimpleNamespace:
        return SimpleNamespace(diagnosis=SimpleNamespace(is_proven=is_proven))

    monkeypatch.setattr(cli_doctor, "_run_command", run)
    monkeypatch.setattr(cli_doctor, "examine", examined)
    done = doctor(*options, "--", "python", "x.py")
    assert looked == [(False, bool(options)), (True, False)][: 1 if is_kept is None else 2]
    assert ("it is run once more with --nan" in done.stderr) == (is_kept is not None)
    assert bundles.load(tmp_path / "hypo-bundle").driver == ("2" if is_kept else "1")


@pytest.mark.tier("sim")
def test_anomaly_mode_of_torch_is_followed_to_its_operation(tmp_path: Path, doctor: Doctor) -> None:
    (tmp_path / "x.py").write_text(
        "import torch\n"
        "with torch.autograd.set_detect_anomaly(True):\n"
        "    x = torch.zeros(2, requires_grad=True)\n"
        "    y = (x * 0).sqrt() * 0\n"
        "    y.sum().backward()\n"
    )
    done = doctor("--json", "--", sys.executable, "x.py")
    assert done.returncode == 3
    [root] = json.loads(done.stdout)["roots"]
    assert root["cause"] == "non-finite value"
    assert root["culprit"]["place"].endswith("x.py:4")


def test_a_suspect_that_failed_by_itself_keeps_its_exit_code(doctor: Doctor) -> None:
    done = doctor("--suspect", "--", *child("os._exit(7)"))
    assert done.returncode == 7
    assert "with exit code 7" in done.stdout


def test_exit_code_3_of_another_program_is_no_fault_of_a_gpu(doctor: Doctor) -> None:
    done = doctor("--", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert "exit code 3, which is no fault" in done.stderr


def test_a_suspect_is_examined_though_it_ends_well(tmp_path: Path, doctor: Doctor) -> None:
    a_bundle("good")
    done = doctor("--suspect", "--good", "good", "--out", "deep/er", "--", *child("pass"))
    assert done.returncode == 2
    assert "the runs cannot be compared: neither run recorded a step" in done.stdout
    assert "the bundle is in deep/er" in done.stderr
    made = bundles.load(tmp_path / "deep" / "er")
    assert (made.kind, made.fault.kind) == ("suspect", "none")
    assert made.environment["HYPO_TRACE"] == "1"


def test_a_command_that_opens_no_recorder_is_examined_as_far_as_it_goes(
    tmp_path: Path, doctor: Doctor
) -> None:
    done = doctor("--", "sh", "-c", "kill -SEGV $$")
    assert done.returncode == 3
    made = bundles.load(tmp_path / "hypo-bundle")
    assert made.fault.signal == signal.SIGSEGV
    assert any("opened no recorder" in str(line) for line in made.missing)


DEADLOCK = """
import pathlib, sys, threading
a, b, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
def take(first, second, mark):
    with first:
        both.wait()
        pathlib.Path(mark).touch()
        with second:
            pass
other = threading.Thread(target=take, args=(a, b, "stuck-1"))
other.start()
take(b, a, "stuck-2")
"""


def test_the_help_of_deadline_has_the_seconds_that_count() -> None:
    text = " ".join(re.sub(r"[│|]", " ", hypo_in_process("doctor", "--help").stdout).split())
    own = DoctorRequest(command=("run", "-p", "x"), verbs=frozenset(app.own_verbs()))
    plain, asked = cli_doctor.deadlines_of(own), Deadlines(5, 5, start=START_SECONDS, idle=5)
    options = replace(own.options, deadline=5.0)
    assert cli_doctor.deadlines_of(replace(own, options=options)) == asked
    assert START_SECONDS == 60
    assert (
        "Until the first of these begins the command has "
        f"{asked.start:.0f} seconds at least. [default: of a step {plain.step:.0f}, and "
        f"{plain.first_step:.0f} for the first, which compiles; of other programs none, "
        f"but {cli_doctor.INTERPRETED_SECONDS:.0f} for a launch in Triton's interpreter]"
    ) in text
    foreign = cli_doctor.deadlines_of(replace(own, command=("python", "x.py")))
    assert (foreign.step, foreign.first_step) == (math.inf, math.inf)


def test_threads_that_wait_for_each_other_are_ended_with_their_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadlock.py").write_text(DEADLOCK)
    monkeypatch.chdir(tmp_path)
    clock, marks = time.monotonic, [tmp_path / "stuck-1", tmp_path / "stuck-2"]
    #: A minute goes by as soon as both wait, however long the machine took to get there.
    later = lambda: clock() + (60.0 if all(mark.exists() for mark in marks) else 0.0)  # noqa: E731
    monkeypatch.setattr(time, "monotonic", later)
    line = f"{sys.executable} deadlock.py; true"  # who waits need not be what was started
    with pytest.raises(SystemExit) as ended:
        app.main(["doctor", "--deadline", "0.5", "--", "sh", "-c", line])
    assert ended.value.code == 3
    made = bundles.load(tmp_path / "hypo-bundle")
    assert (made.kind, made.fault.kind) == ("hang", "hang")
    assert re.search("no step or launch had begun for 6. seconds", made.fault.message)
    assert "until its first one a command has 60 seconds at least" in made.fault.message
    assert made.fault.stack.count("in take") == 2
    assert made.fault.waiting == ("take (deadlock.py:8)",)


SLOW_TO_END = """
import pathlib, signal, time
def end(number, frame):
    time.sleep(1)
    print("written at last", file=__import__("sys").stderr, flush=True)
signal.signal(signal.SIGABRT, end)
pathlib.Path("ready").touch()
time.sleep(60)
"""


def test_what_a_shell_started_has_time_to_write_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The shell itself ends at once."""
    (tmp_path / "slow.py").write_text(SLOW_TO_END)
    monkeypatch.chdir(tmp_path)
    clock, mark = time.monotonic, tmp_path / "ready"
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (60.0 if mark.exists() else 0.0))
    with pytest.raises(SystemExit):
        app.main(["doctor", "--deadline", "1", "--", "sh", "-c", f"{sys.executable} slow.py; true"])
    assert "written at last" in capfd.readouterr().err


def test_a_command_that_begins_steps_is_not_idle(doctor: Doctor) -> None:
    steps = "for n in range(3, 14):\n    opened.header[ring.CELL_STEP] = n\n    time.sleep(0.2)\n"
    assert doctor("--deadline", "1.5", "--", *child(steps)).returncode == 0


def test_stdin_reaches_the_command() -> None:
    done = hypo("doctor", "--", "cat", stdin="through\n")
    assert (done.returncode, done.stdout) == (0, "through\n")


def test_a_hang_is_ended_and_its_stack_kept(tmp_path: Path, doctor: Doctor) -> None:
    started = time.monotonic()
    done = doctor("--deadline", "0.5", "--", *child(HANGS))
    assert time.monotonic() - started < 60
    assert done.returncode == 3
    assert "so the command was ended; the bundle is in hypo-bundle" in done.stderr
    made = bundles.load(tmp_path / "hypo-bundle")
    assert (made.kind, made.fault.kind) == ("hang", "hang")
    assert "in endless" in made.fault.stack


# -- Ctrl-C and other ends ------------------------------------------------------------------------

TALKS = "print('ready', file=sys.stderr, flush=True)\n"


def test_ctrl_c_goes_to_the_command() -> None:
    waits = f"try:\n    {TALKS}    while True: time.sleep(0.05)\n"
    waits += "except KeyboardInterrupt:\n    sys.exit(130)"
    process = subprocess.Popen(
        [*AS_A_PERSON, "doctor", "--", *child(waits)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert "exit code 130, which is no fault" in rest


def test_three_times_ctrl_c_end_a_deaf_command(tmp_path: Path) -> None:
    deaf = "import signal\nsignal.signal(2, lambda n, f: print('no', file=sys.stderr, flush=True))"
    process = subprocess.Popen(
        [*AS_A_PERSON, "doctor", "--", *child(f"{deaf}\n{TALKS}while True: time.sleep(0.1)")],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "no\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 128 + signal.SIGKILL
    assert not (tmp_path / "hypo-bundle").exists()


def test_the_command_does_not_outlive_the_doctor(doctor: Doctor) -> None:
    waits = "print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [*HYPO, "doctor", "--", *child(waits)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    pid = int(process.stderr.readline())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 143
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        raise AssertionError("the child lives on")
    assert list(Path(os.environ["HYPO_RUN_DIR"]).iterdir()) == []


def test_a_command_can_ask_on_a_terminal() -> None:
    asks = "print('got ' + input('name? '))"
    with on_terminal(["doctor", "--", *child(asks)]) as terminal:
        terminal.wait_for("name? ")
        terminal.type("Ada\n")
        terminal.wait_for("got Ada")
        assert terminal.wait() == 0


# -- a run that died with nobody watching ---------------------------------------------------------


def test_the_next_command_tells_of_a_death_once_and_last_examines_it(
    tmp_path: Path, doctor: Doctor
) -> None:
    died = subprocess.run(child("os.kill(os.getpid(), 9)"), capture_output=True)
    assert died.returncode == -9
    for words in (["env", "--help"], ["--version"]):
        assert hypo_in_process(*words).stderr == ""
    first, second = (hypo_in_process("inspect", "nowhere.gguf") for _ in range(2))
    assert "died; see `hypo doctor --last`" in first.stderr
    assert len(first.stderr.splitlines()) == 2
    assert "died" not in second.stderr
    done = doctor("--last")
    assert done.returncode == 3
    assert "its bundle is now in hypo-bundle" in done.stderr
    assert "nobody saw how" in done.stdout
    again = doctor("--last", "--json")
    assert json.loads(again.stdout)["kind"] == "crash"
    assert f"its bundle is {tmp_path / 'hypo-bundle'}" in again.stderr
    assert not (tmp_path / "hypo-bundle-2").exists()
    assert doctor("--last", "--out", "mine").returncode == 3
    assert (tmp_path / "mine" / "bundle.json").is_file()


@pytest.mark.parametrize(
    ("end", "code", "has_died"),
    [
        ("os.kill(os.getpid(), 15)", -15, False),
        ("os.kill(os.getpid(), 1)", -1, False),
        ("os.kill(os.getpid(), 11)", -11, True),
        ("import signal; signal.signal(15, lambda n, f: os._exit(7)); os.kill(os.getpid(), 15)", 7,
         True),
        ("os.fork() or os.kill(os.getpid(), 15)\nos.wait(); os.kill(os.getpid(), 9)", -9, True),
    ],
    ids=["SIGTERM", "SIGHUP", "SIGSEGV", "a handler of its own", "a child was ended"],
)  # fmt: skip
def test_a_run_that_somebody_ended_did_not_die(
    end: str, code: int, has_died: bool, doctor: Doctor
) -> None:
    def hang_up_ends() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup

    done = subprocess.run(child(end), capture_output=True, preexec_fn=hang_up_ends)
    assert done.returncode == code
    [folder] = Path(os.environ["HYPO_RUN_DIR"]).iterdir()
    assert bool(dead_runs.dead_runs(folder.parent)) == has_died
    assert doctor("--last").returncode == (3 if has_died else 2)


FAULTING_RUN = """
from hypocenter.cli import app
from hypocenter.cli.verbs import run
from hypocenter.base.errors import DeviceFault
from hypocenter.record import recorder
def fault(*args, **keywords):
    error = DeviceFault("cuda", "copy_out", "an illegal memory access was encountered",
                        is_asynchronous=True)
    recorder.open_recorder().record_failure(error)
    raise error
run.run = fault
app.main(["run", "-p", "x"])
"""


def test_a_fault_inside_hypo_run_names_the_way_and_is_found(tmp_path: Path, doctor: Doctor) -> None:
    died = subprocess.run([sys.executable, "-c", FAULTING_RUN], capture_output=True, text=True)
    assert died.returncode == 3
    assert died.stderr.rstrip().endswith("; see `hypo doctor --last`")
    assert "died" not in hypo_in_process("inspect").stderr  # it has been told
    done = doctor("--last")
    assert done.returncode == 3
    assert "an illegal memory access" in done.stdout
    watched = doctor("--out", "b", "--", sys.executable, "-c", FAULTING_RUN)
    assert watched.returncode == 3
    assert "doctor --last" not in watched.stderr
    made = bundles.load(tmp_path / "b")
    assert (made.kind, made.fault.call) == ("error", "copy_out")


def test_prompts_stay_out_without_consent(tmp_path: Path, doctor: Doctor) -> None:
    secret = "def a_secret_name("
    assert doctor("--suspect", "--", "run", "-p", secret, "-n", "1").returncode == 0
    made = bundles.load(tmp_path / "hypo-bundle")
    assert made.redacted
    assert made.plans
    assert made.snapshots
    assert "a_secret_name" not in (tmp_path / "hypo-bundle" / "bundle.json").read_text()
    holders = {tensor.id for tensor in made.tensors if tensor.name == "token_ids"}
    inputs = [one for event in made.events for one in getattr(event, "inputs", ())]
    inputs += [one for snapshot in made.snapshots for one in snapshot.values]
    ids = [one.data for one in inputs if one.tensor in holders]
    assert ids
    assert not any(map(any, ids))


def test_a_program_whose_tuner_finds_no_gpu_is_told_of_the_check(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "0 active drivers ([]). There should only be one."  # triton/runtime/driver.py
    for said, is_hinted in ((text, True), ("2 active drivers", False)):
        with pytest.raises(SystemExit) as left:
            app.main(["doctor", "--", sys.executable, "-c", f"raise RuntimeError({said!r})"])
        assert left.value.code == 1
        err = capfd.readouterr().err
        assert ("`hypo check FILE` runs the launches" in err) is is_hinted
