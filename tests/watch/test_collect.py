"""What a dead process left is read as it is: words of drivers, exits, kernel logs, run folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hypocenter.base import package
from hypocenter.base.cards import Card
from hypocenter.base.errors import EXIT_ERROR, EXIT_USAGE, UsageError
from hypocenter.base.refusals import WrongType
from hypocenter.doctor.report_parts import environment_rows
from hypocenter.doctor.run_environment import run_environment_of
from hypocenter.doctor.surfaced import symptom_of
from hypocenter.record import ring
from hypocenter.record.bundle import Bundle
from hypocenter.record.contents import LaunchOutcome, Snapshot
from hypocenter.record.events import (
    AnyEvent,
    ArgumentRecord,
    Called,
    Freed,
    LaunchRecord,
    PlanRecord,
    Rejected,
    SourceRecord,
    Stepped,
    TensorRecord,
    Values,
)
from hypocenter.record.fault_record import FaultRecord, MemoryKill
from hypocenter.record.gap import Gap
from hypocenter.record.ring_writer import RingWriter
from hypocenter.record.run_records import DeviceRecord, ModelRecord, ProcessRecord
from hypocenter.watch import child, collect, dead_runs, kernel_log
from hypocenter.watch.child import Deadlines, Ended, Follower, environment_for, watch
from hypocenter.watch.fault_text import fault_in, is_fault, with_kernel_log
from hypocenter.watch.memory_killer import num_memory_kills, with_memory_kill
from hypocenter.watch.redact import redact, redacted_command, redacted_text

AMD = (
    "Memory access fault by GPU node-1 (Agent handle: 0x55cd82c07cd0) on address 0x7f3a12345000. "
    "Reason: Page not present or supervisor privilege.\n"
)
STACK = (
    "Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n"
    '  File "memory.py", line 294 in _ask\n'
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    y.cpu()\n'
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call\n"
)


# -- words ----------------------------------------------------------------------------------------


def test_amds_line_gives_the_page() -> None:
    fault = fault_in("loading\n" + AMD + STACK, None, 6)
    assert (fault.kind, fault.address, fault.address_bytes) == ("crash", 0x7F3A12345000, 4096)
    assert fault.error == "Page not present or supervisor privilege."
    assert fault.stack.startswith("Fatal Python error: Aborted")
    assert "line 294 in _ask" in fault.stack
    assert (fault.signal, fault.is_asynchronous) == (6, True)
    nil = fault_in(AMD.replace("0x7f3a12345000", "(nil)"), None, 6)
    assert nil.address == 0
    read_only = AMD.replace("Page not present or supervisor privilege", "Write to a read-only page")
    assert fault_in(read_only, None, 6).access == "write"


@pytest.mark.parametrize(
    ("stderr", "kind", "call", "error", "is_asynchronous"),
    [
        (
            "hypo: sim:h200: an illegal memory access was encountered (reported at copy_out, "
            "caused by a launch before it); see `hypo doctor --last`\n",
            "error", "copy_out", "an illegal memory access was encountered", True,
        ),
        (
            "error: hip: hipErrorIllegalAddress (700): an illegal memory access was encountered "
            "(reported at launch of rope_kernel (grid=(1,1,1), block=(256,1,1)), caused by a "
            "launch before it)\n",
            "error", "launch of rope_kernel (grid=(1,1,1), block=(256,1,1))",
            "hipErrorIllegalAddress (700): an illegal memory access was encountered", True,
        ),
        (
            "hypo: cuda: cudaErrorInvalidValue (1): invalid argument (Kernel 'x' launch failed "
            "(grid=(1,1,1), block=(256,1,1)))\n",
            "error", "Kernel 'x' launch failed (grid=(1,1,1), block=(256,1,1))",
            "cudaErrorInvalidValue (1): invalid argument", False,
        ),
        (
            "Traceback (most recent call last):\n  ...\nhypocenter.errors.DeviceFault: cuda:1: "
            "invalid argument (copy_in)\n",
            "error", "copy_in", "invalid argument", False,
        ),
        (
            "hypo: sim:mi300x: the launch did not finish (reported at synchronise, caused by a "
            "launch before it)\n",
            "hang", "synchronise", "the launch did not finish", True,
        ),
        (
            TRACEBACK, "error", "", "an illegal memory access was encountered", True,
        ),
        (
            "RuntimeError: Triton Error [HIP]:  Code: 209, Messsage: no kernel image\n",
            "error", "", "Code: 209, Messsage: no kernel image", False,
        ),
        (
            "hypo: m.gguf: logits row 0: 12 of 512 values are NaN or +inf; hypo inspect ...\n",
            "nonfinite", "", "", False,
        ),
        (
            "x.cu:93: operator(): block: [0,0,0] Assertion `index < size` failed.\n",
            "error", "", "device-side assert", True,
        ),
        (
            "HW Exception by GPU node-2 (Agent handle: 0x1) reason :GPU Hang\n",
            "hang", "", "GPU Hang", True,
        ),
        (
            "hypo: rope: positions (pos) is i16, but it is read as i32\n",
            "error", "", "", False,
        ),
        ("", "error", "", "", False),
    ],
)  # fmt: skip
def test_words_of_runtimes_are_understood(
    stderr: str, kind: str, call: str, error: str, is_asynchronous: bool
) -> None:
    fault = fault_in(stderr, 3, None)
    found = (fault.kind, fault.call, fault.error, fault.is_asynchronous)
    assert found == (kind, call, error, is_asynchronous)
    assert fault.exit_code == 3
    assert fault.message


def test_the_first_fault_counts_and_not_its_echo() -> None:
    first = "hypo: cuda: misaligned address (reported at copy_out, caused by a launch before it)\n"
    echo = "hypo: cuda: launch failure (reported at free, caused by a launch before it)\n"
    assert fault_in(first + echo, 3, None).call == "copy_out"


@pytest.mark.parametrize(
    ("stderr", "exit_code", "number", "expected"),
    [
        ("hypo: nofile: there is no such file\n", 2, None, False),
        ("hypo: interrupted\n", 130, None, False),
        ("", 0, None, False),
        (AMD, 0, None, False),
        ("KeyError: 'x'\n", 1, None, False),
        (TRACEBACK, 1, None, True),
        ("anything", 3, None, True),
        ("", None, signal.SIGABRT, True),
        ("", None, signal.SIGSEGV, True),
        ("", None, signal.SIGKILL, True),
        ("", None, signal.SIGTERM, False),
        ("", None, signal.SIGINT, False),
    ],
)
def test_not_every_bad_end_is_a_fault(
    stderr: str, exit_code: int | None, number: int | None, expected: bool
) -> None:
    assert is_fault(stderr, exit_code, number) is expected


def test_a_kill_without_words_is_a_crash() -> None:
    fault = fault_in("", None, signal.SIGKILL)
    assert fault.kind == "crash"
    assert fault.message.startswith("ended by SIGKILL (from outside")


def test_a_kill_behind_the_traceback_of_a_child_tells_of_the_exception() -> None:
    """Who starts processes ends them all when one fails, and last of all itself."""
    stderr = (
        "loading\nTraceback (most recent call last):\n"
        '  File "/a/worker.py", line 12, in serve\n    run()\n'
        '  File "/a/parts.py", line 3, in run\n    raise KeyError(3)\nKeyError: 3\nkilled\n'
    )
    fault = fault_in(stderr, None, signal.SIGKILL)
    assert (fault.kind, fault.error, fault.call) == ("crash", "KeyError: 3", "run (parts.py:3)")
    assert fault.message.startswith("a process below it ended with 'KeyError: 3', and then ended")
    assert "ended from outside" not in symptom_of(fault)
    assert "ended from outside" in symptom_of(fault_in("killed\n", None, signal.SIGKILL))
    # Another signal is a fault of its own, and says what it is.
    assert fault_in(stderr, None, signal.SIGSEGV).message.startswith("ended by SIGSEGV")


def test_large_and_hostile_words_are_bounded_and_quick() -> None:
    started = time.perf_counter()
    for piece in (
        "hypo: cuda: ",
        "(",
        "Traceback (most recent call last):\n x\n",
        "CUDA error ",
        "Xid pid=",
        "a" * 50,
        "\x00",
        "Fatal\n",
    ):
        stderr = piece * (600_000 // len(piece))
        fault = fault_in(stderr, 3, None)
        assert len(fault.message) <= 2000
        assert len(fault.stack) <= 20_000
    assert time.perf_counter() - started < 10


# -- the kernel's log -----------------------------------------------------------------------------

XID = (
    "NVRM: Xid (PCI:0000:01:00): 31, pid={pid}, name=python, Ch 00000008, intr 00000000. MMU "
    "Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f3a_12345000. Fault is of type FAULT_PDE "
    "ACCESS_TYPE_VIRT_WRITE"
)
AMDGPU = [
    "amdgpu 0000:03:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:3 pasid:32770)",
    "amdgpu 0000:03:00.0: amdgpu:  for process python pid {pid} thread python pid {pid})",
    "amdgpu 0000:03:00.0: amdgpu:   in page starting at address 0x00007f3a12345000 from client 10",
    "amdgpu 0000:03:00.0: amdgpu: GCVM_L2_PROTECTION_FAULT_STATUS:0x00801031",
    "amdgpu 0000:03:00.0: amdgpu: \t RW: 0x0",
]


@pytest.mark.parametrize(("lines", "access"), [([XID], "write"), (AMDGPU, "read")])
def test_the_kernel_gives_the_address_of_this_process_alone(lines: list[str], access: str) -> None:
    fault = FaultRecord(kind="error", message="an illegal memory access was encountered")
    shown = [line.format(pid=77) for line in lines]
    found = with_kernel_log(fault, shown, 77)
    assert (found.address, found.address_bytes, found.access) == (0x7F3A12345000, 4096, access)
    assert with_kernel_log(fault, shown, 7).address is None
    assert with_kernel_log(fault, shown, None).address is None
    known = fault_in(AMD, None, 6)
    assert with_kernel_log(known, shown, 77) == known


def test_only_telling_lines_of_the_time_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [(1.0, "NVRM: old"), (90.0, "usb 1-1: new device"), (100.0, "amdgpu: page fault")]
    monkeypatch.setattr(kernel_log, "_from_device", lambda: iter(records))
    assert kernel_log.kernel_log(92.0) == (("amdgpu: page fault",), "")


def test_an_unreadable_log_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel_log, "_from_device", refused)
    monkeypatch.setattr(kernel_log, "_from_program", lambda: iter(()))
    lines, problem = kernel_log.kernel_log(0.0)
    assert lines == ()
    assert "Operation not permitted" in problem


@pytest.mark.parametrize(
    ("line", "num_kills", "found"),
    [
        ("Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB", 0, "LOGGED"),
        ("oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=4242,uid=0", None, "LOGGED"),
        ("Out of memory: Killed process 42 (python)", 0, "NOT_COUNTED"),
        ("", 1, "COUNTED"),
        ("", None, "UNKNOWN"),
    ],
)
def test_a_kill_for_lack_of_memory_is_told(line: str, num_kills: int | None, found: str) -> None:
    fault = FaultRecord(kind="crash", message="ended by SIGKILL", signal=9)
    told = with_memory_kill(fault, [line], 4242, num_kills)
    assert told.memory_kill is MemoryKill[found]


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/user/me", "user/me/memory.events"),
        ("0::/not/here", "memory.events"),
        ("3:cpu,memory:/docker/1", "memory/docker/1/memory.oom_control"),
    ],
)
def test_the_kernels_count_of_kills_is_that_of_the_own_group(
    own: str, file: str, tmp_path: Path
) -> None:
    assert num_memory_kills(tmp_path) is None
    for name, text in (("proc/self/cgroup", own), (f"sys/fs/cgroup/{file}", "oom 9\noom_kill 7")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert num_memory_kills(tmp_path) == 7


def test_kills_are_counted_from_the_start_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter((3, 5))
    monkeypatch.setattr(child, "num_memory_kills", lambda: next(counted))
    ended = watch(["true"], {}, tmp_path, lambda data: None)
    assert ended.num_memory_kills == 2


# -- what a person typed --------------------------------------------------------------------------


def values(tensor: int, *numbers: int, dtype: str = "I32") -> Values:
    code = {"I32": np.int32, "I16": np.int16}[dtype]
    return Values(tensor, dtype, (len(numbers),), np.array(numbers, code).tobytes())


def numbers(one: Values) -> list[int]:
    return [int(n) for n in np.frombuffer(one.data, one.dtype.lower().replace("i", "int"))]


def with_tokens(*token_ids: int, has_table: bool = True) -> Bundle:
    def tensor(number: int, name: str, *shape: int) -> TensorRecord:
        return TensorRecord(
            id=number, name=name, owner="step", dtype="I32", shape=shape, strides=(1,) * len(shape),
            offset=0, allocation=number, address=0, extent_bytes=64,
        )  # fmt: skip

    facts = (ArgumentRecord("token_ids", 1), ArgumentRecord("table", 3))
    launch = LaunchRecord(kernel="lookup", function="lookup", device="cpu", facts=facts)
    inputs = (values(1, *token_ids), values(2, 5, 6, 7), values(4, 1, 2))
    return Bundle(
        kind="crash", fault=FaultRecord(kind="crash", message="x"),
        command=("hypo", "run", "m.gguf", "-p", "my secret", "--prompt=secret", "-psecret"),
        tensors=(
            tensor(1, "token_ids", 8), tensor(2, "positions", 8), tensor(3, "w", 512, 64),
            tensor(4, "context_ids", 8),
        ),
        plans=(PlanRecord(id=1, name="p", device="cpu", launches=(launch,) * has_table),),
        events=(Stepped(seq=1, step=1, plan=1, inputs=inputs, requests=()),),
        snapshots=(Snapshot(1, 1, 0, inputs),), redacted=False,
    )  # fmt: skip


def test_token_ids_inside_the_vocabulary_go_and_others_stay() -> None:
    found = redact(with_tokens(3, 511, 512, -1, 70_000))
    [event] = found.events
    assert isinstance(event, Stepped)
    for inputs in (event.inputs, found.snapshots[0].values):
        assert [numbers(one) for one in inputs] == [[0, 0, 512, -1, 70_000], [5, 6, 7], [0, 0]]
    assert found.redacted
    assert "secret" not in str(found)
    unknown = redact(with_tokens(3, 512, -1, has_table=False)).snapshots[0].values[0]
    assert numbers(unknown) == [0, 0, -1]


def test_what_is_known_whole_of_launches_with_token_ids_goes() -> None:
    """Their results may be those ids again, under any name."""
    kept, gone = (
        LaunchOutcome(step=1, launch=launch, given=(values(number, 3),), gave=())
        for launch, number in ((7, 2), (8, 1))
    )
    made = msgspec.structs.replace(with_tokens(3), outcomes=(kept, gone))
    assert redact(made).outcomes == (kept,)


def test_a_prompt_is_no_part_of_a_command() -> None:
    assert redacted_command(["hypo", "run", "-p", "abc", "-n", "3"]) == (
        "hypo", "run", "-p", "<3 characters>", "-n", "3",
    )  # fmt: skip
    bench = ("python", "-P", "-m", "hypocenter", "bench", "-p", "512")
    assert redacted_command(bench) == bench
    trick = ("/usr/bin/python3", "/usr/bin/hypo", "run", "bench", "-psecret", "--stop=never")
    assert redacted_command(trick)[3:] == ("bench", "-p<6 characters>", "--stop=<5 characters>")


def test_of_a_command_that_is_not_ours_names_stay_and_values_go(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    command = (
        "python", str(script), "--token=hunter2", "--name", "Ann Lee", "-m", "pkg.mod", "1234",
        f"{script}::test_x",
    )  # fmt: skip
    assert redacted_command(command) == (
        "python", str(script), "--token=<7 characters>", "--name", "<7 characters>", "-m",
        "pkg.mod", "<4 characters>", f"{script}::test_x",
    )  # fmt: skip
    shell = redacted_command(["sh", "-c", "hypo run -p 'my password is hunter2'"])
    assert shell == ("sh", "-c", "<36 characters>")


def test_stderr_repeats_no_word_that_was_taken_out_and_no_credential() -> None:
    command = ["hypo", "run", "-p", "my password is hunter2", "--stop", "a"]
    said = "my password is hunter2 and so on\ntoken 1000000 of a vocabulary of 512\nFalse: a\n"
    assert redacted_text(said, command) == said.replace(command[3], "<22 characters>")
    for secret in ("hf_SECRETsecret", "sk-proj-1234abcd", "ghp_0123456789", "AKIAIOSFODNN7EXAMPLE"):
        assert secret not in redacted_text(f"login with {secret}.", command)
    named = 'password: hunter2, api_key="abcd1234" Authorization: Bearer eyJhb.x token=tok12345'
    assert redacted_text(named, command) == (
        'password: <7 characters>, api_key="<8 characters>" Authorization: Bearer <7 characters> '
        "token=<8 characters>"
    )


def test_a_bundle_holds_neither() -> None:
    found = redact(
        msgspec.structs.replace(
            with_tokens(3),
            command=("python", "x.py", "--key=hunter2"),
            stderr="hunter2 was wrong",
            fault=FaultRecord(kind="crash", message="hunter2 is no key"),
            environment={"TRITON_API_TOKEN": "hunter2", "TRITON_CACHE_DIR": "/x"},
        )
    )
    assert "hunter2" not in str(found)
    assert found.environment["TRITON_CACHE_DIR"] == "/x"


SECRETS = {
    "HF_TOKEN": "hf1-very-secret",
    "MY_PASSWORD": "line one\nline two",
    "DB_KEY": "hf1-very-secret-and-longer",
    "API_SECRET": "short",
    "KEY_FILE": "/dev/null",
    "PLAIN": "stays here as it is",
}


@pytest.mark.parametrize("with_prompts", [False, True])
def test_no_text_of_a_bundle_holds_a_secret_of_the_environment(with_prompts: bool) -> None:
    said = "\n".join(("it is", *SECRETS.values(), repr(SECRETS["MY_PASSWORD"])))
    kept = msgspec.structs.replace(
        with_tokens(3),
        command=("hypo", "serve", "m.gguf", "--alias", SECRETS["HF_TOKEN"]),
        stderr=said,
        fault=FaultRecord(kind="crash", message=said, stack=said),
        fault_before=FaultRecord(kind="crash", message=said),
        kernel_log=(said,),
        missing=(Gap.not_recorded("x", said),),
        environment={"HYPO_X": said},
        events=(Freed(seq=1, step=1, allocation=1, site=said),),
    )
    found = redact(kept, with_prompts=with_prompts, environ=SECRETS)
    for name in ("HF_TOKEN", "MY_PASSWORD", "DB_KEY"):
        assert SECRETS[name] not in str(found)
        assert repr(SECRETS[name])[1:-1] not in str(found)
    assert "-and-longer" not in str(found)
    assert found.redacted is not with_prompts
    for plain in ("API_SECRET", "KEY_FILE", "PLAIN"):
        assert SECRETS[plain] in found.stderr


def test_a_key_is_no_part_of_a_command() -> None:
    command = ["hypo", "serve", "m.gguf", "--api-key", "abcd", "--api-key=efghi"]
    assert redacted_command(command)[3:] == (
        "--api-key", "<4 characters>", "--api-key=<5 characters>"
    )  # fmt: skip
    assert redacted_text("abcd, efghi", command) == "<4 characters>, <5 characters>"


def test_the_users_folder_is_told_by_a_sign_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    source = SourceRecord(
        id="1", function="f", file="/home/ann/k.py", first_line=1, text="x = '/home/ann/x'\n"
    )
    kept = msgspec.structs.replace(
        with_tokens(3),
        command=("/home/ann/venv/bin/python", "-m", "hypocenter", "run", "/home/ann/m.gguf"),
        stderr='File "/home/ann/a.py", /home/anna/b.py, /srv/home/ann/c.py',
        fault=FaultRecord(kind="crash", message="/home/ann", stack="/home/ann/d.py"),
        environment={"HYPO_CACHE_DIR": "/home/ann/.cache"},
        sources=(source,),
        events=(Freed(seq=1, step=1, allocation=1, site="/home/ann/e.py:3"),),
    )
    found = redact(kept)
    assert found.command[0] == "~/venv/bin/python"
    assert found.command[-1] == "~/m.gguf"
    assert found.stderr == 'File "~/a.py", /home/anna/b.py, /srv/home/ann/c.py'
    assert (found.fault.message, found.fault.stack) == ("~", "~/d.py")
    assert found.environment == {"HYPO_CACHE_DIR": "~/.cache"}
    assert found.sources[0].file == "~/k.py"
    assert found.sources[0].text == source.text
    assert found.events[0].site == "~/e.py:3"  # type: ignore[union-attr]
    monkeypatch.setenv("HOME", "/")
    assert redact(kept).stderr == kept.stderr


# -- run folders ----------------------------------------------------------------------------------

MODEL = ModelRecord(name="m.gguf", architecture="llama", quantisation="Q8_0")
DEVICE = DeviceRecord(name="sim:h200", limits={"arch": "sm_90"})


def left_behind(folder: Path, *events: AnyEvent, state: int | None = None) -> Path:
    """A run folder as a process leaves it that dies, or ends in `state`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    writer = RingWriter(folder)
    process = ProcessRecord(
        pid=4242, command=("hypo", "run", "-p", "abc"), started="2026-01-02T03:04:05+00:00",
        environment={"TRITON_CACHE_DIR": "/x"}, packages={"numpy": "2"}, python="3.11.7",
        platform="Linux-6.8.0", driver="nvidia 550.54.15",
    )  # fmt: skip
    writer.static(process)
    writer.static(MODEL)
    writer.static(DEVICE)
    for event in events:
        writer.event(event)
    if state is None:
        writer.release()  # the lock goes, as it does when a process dies
    else:
        writer.close(state)
    return folder


def ended(exit_code: int | None = None, number: int | None = None, stderr: str = "") -> Ended:
    return Ended(
        command=("hypo", "run"), pid=4242, exit_code=exit_code, signal=number, stderr=stderr,
        started=time.time() - 1, ended=time.time(), since=time.monotonic() - 1,
    )  # fmt: skip


class Watched:
    """Stands for the GPUs of a machine, and counts how often they are let go."""

    num_closed = 0
    cards = (Card(index=0, name="Pretended", uuid="GPU-1", xids=(31,)),)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        Watched.num_closed += 1

    def end(self) -> tuple[Card, ...]:
        return self.cards


def test_a_bundle_says_which_gpus_there_were_and_what_befell_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "CardWatch", Watched)
    monkeypatch.setattr(Watched, "num_closed", 0)
    done = watch([sys.executable, "-c", ""], {**os.environ}, tmp_path, lambda data: None)
    made = collect.collect(tmp_path, done, suspect=True)
    assert made is not None
    assert made.cards == Watched.cards
    rows = dict(environment_rows(run_environment_of(made)))
    assert rows["GPU"] == "0: Pretended GPU-1 (Xid 31)"

    def fail(number: int) -> None:
        raise OSError(number)

    with pytest.raises(OSError, match=r"\d+"):
        watch(
            [sys.executable, "-c", ""],
            {**os.environ},
            tmp_path,
            lambda data: None,
            follower=Follower(fail),
        )
    assert Watched.num_closed == 2


CALLED = Called(seq=1, step=2, call="copy_out", outcome="an illegal memory access was encountered")
REJECTED = Rejected(
    seq=2, step=2, kernel="rope",
    refusal=WrongType(argument="positions", dtype="i16", read_as=("i32",)),
)  # fmt: skip


def test_a_watched_run_becomes_a_bundle(tmp_path: Path) -> None:
    left_behind(tmp_path / "1-1", CALLED, state=ring.FAILED)
    made = collect.collect(tmp_path, ended(3, stderr="hypo: something went wrong\n"))
    assert made is not None
    assert (made.kind, made.device, made.limits) == ("error", "sim:h200", {"arch": "sm_90"})
    assert (made.fault.call, made.fault.error) == (CALLED.call, CALLED.outcome)
    assert made.fault.message == "something went wrong"
    assert made.fault.is_asynchronous
    assert made.events == (CALLED,)
    assert made.stderr == "hypo: something went wrong\n"
    assert made.packages == {"hypocenter": package.version(), "numpy": "2"}
    assert made.environment == {"TRITON_CACHE_DIR": "/x"}
    assert (made.python, made.platform, made.driver, made.model) == (
        "3.11.7", "Linux-6.8.0", "nvidia 550.54.15", MODEL,
    )  # fmt: skip
    assert made.redacted


def test_a_signal_makes_a_crash_and_no_fault_makes_nothing(tmp_path: Path) -> None:
    folder = left_behind(tmp_path / "1-1")
    made = collect.collect(tmp_path, ended(number=6, stderr=AMD))
    assert made is not None
    assert (made.kind, made.fault.address) == ("crash", 0x7F3A12345000)
    shutil.rmtree(folder)
    left_behind(folder, state=ring.ENDED)
    for end in (ended(0), ended(2, stderr="hypo: no\n"), ended(number=signal.SIGTERM)):
        assert collect.collect(tmp_path, end) is None
    suspected = collect.collect(tmp_path, ended(0), suspect=True)
    assert suspected is not None
    assert (suspected.kind, suspected.fault.kind) == ("suspect", "none")


def test_a_shells_exit_code_tells_of_the_signal_below_it(tmp_path: Path) -> None:
    left_behind(tmp_path / "1-1")
    made = collect.collect(tmp_path, ended(139))
    assert made is not None
    assert (made.kind, made.fault.signal, made.fault.exit_code) == ("crash", signal.SIGSEGV, 139)
    assert made.fault.message.startswith("ended by SIGSEGV")
    for by_hand in (130, 141, 143):
        assert collect.collect(tmp_path, ended(by_hand)) is None


def test_a_process_that_died_is_a_fault_whatever_the_command_says_of_it(tmp_path: Path) -> None:
    folder = left_behind(tmp_path / "1-1")
    said = "Fatal Python error: Segmentation fault\n"
    for end in (ended(0, stderr=said), ended(2)):
        made = collect.collect(tmp_path, end)
        assert made is not None
        assert made.kind == "crash"
        assert f"process {os.getpid()} of the command died" in made.fault.message
    for end in (ended(0), ended(number=signal.SIGTERM), ended(143)):
        assert collect.collect(tmp_path, end) is None
    shutil.rmtree(folder)
    left_behind(folder, state=ring.ENDED)
    assert collect.collect(tmp_path, ended(2, stderr=said)) is None


def test_a_refusal_is_a_fault_when_the_command_failed_of_it(tmp_path: Path) -> None:
    left_behind(tmp_path / "1-1", REJECTED, state=ring.FAILED)
    made = collect.collect(tmp_path, ended(1, stderr="hypo: rope: positions is i16\n"))
    assert made is not None
    assert (made.kind, made.fault.is_asynchronous) == ("error", False)
    assert collect.collect(tmp_path, ended(0)) is None


def test_a_command_without_recorder_is_told(tmp_path: Path) -> None:
    made = collect.collect(tmp_path, ended(number=11))
    assert made is not None
    assert any("opened no recorder" in str(line) for line in made.missing)
    assert made.fault.message.startswith("ended by SIGSEGV")


def test_of_several_processes_the_one_that_failed_is_taken(tmp_path: Path) -> None:
    quiet = [Stepped(seq=n, step=n, plan=1, inputs=(), requests=()) for n in range(9)]
    left_behind(tmp_path / "1-1", CALLED)
    left_behind(tmp_path / "2-2", *quiet, state=ring.ENDED)
    left_behind(tmp_path / "3-3", *quiet[:3])
    made = collect.collect(tmp_path, ended(1, stderr="boom\n"))
    assert made is not None
    assert made.events == (CALLED,)
    (tmp_path / "1-1" / "ring").unlink()
    made = collect.collect(tmp_path, ended(number=6))
    assert made is not None
    assert len(made.events) == 3


def test_what_ended_a_statement_is_looked_for_in_the_engines_own_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Stepped(seq=1, step=1, plan=1, inputs=(), requests=())
    raised = msgspec.structs.replace(CALLED, is_statement=True)
    engine = ring.Run(folder=tmp_path / "a", pid=7, is_clean=True, model=MODEL, events=(step,))

    def chosen(*found: ring.Run) -> ring.Run | None:
        monkeypatch.setattr(collect, "runs_below", lambda runs: list(found))
        return collect.main_run(tmp_path)

    foreign = ring.Run(folder=tmp_path / "b", pid=7, events=(raised,))
    assert chosen(foreign, engine) is engine
    # That of another process has nothing to do with it; a call of the runtime is no statement.
    assert chosen(foreign, msgspec.structs.replace(engine, pid=8)) is foreign
    call = msgspec.structs.replace(foreign, events=(CALLED,))
    assert chosen(call, engine) is call


def test_a_hang_is_one_whatever_ended_it(tmp_path: Path) -> None:
    left_behind(tmp_path / "1-1")
    end = Ended(
        command=("x",), pid=1, exit_code=None, signal=6, stderr=STACK, started=0.0, ended=1.0,
        since=0.0, hung_seconds=31.0,
    )  # fmt: skip
    made = collect.collect(tmp_path, end)
    assert made is not None
    assert (made.kind, made.fault.kind) == ("hang", "hang")
    assert "31 seconds" in made.fault.message
    assert made.fault.call == "_ask (memory.py:294)"
    assert "line 294 in _ask" in made.fault.stack


@pytest.mark.parametrize("has_begun", [True, False])
def test_of_the_first_minute_is_told_where_nothing_had_begun(
    tmp_path: Path, has_begun: bool
) -> None:
    left_behind(tmp_path / "1-1")
    end = Ended(
        command=("x",), pid=1, exit_code=None, signal=6, stderr=STACK, started=0.0, ended=1.0,
        since=0.0, hung_seconds=61.0, is_idle=True, has_begun=has_begun,
    )  # fmt: skip
    made = collect.collect(tmp_path, end)
    assert made is not None
    assert "no step or launch had begun for 61 seconds" in made.fault.message
    assert ("has 60 seconds at least" in made.fault.message) != has_begun


def test_a_dead_run_is_found_once_and_named(tmp_path: Path) -> None:
    left_behind(tmp_path / "1-1", CALLED)
    left_behind(tmp_path / "2-2", state=ring.ENDED)
    [dead] = dead_runs.dead_runs(tmp_path)
    assert dead.pid == os.getpid()
    sentence = dead_runs.notice(tmp_path)
    assert sentence is not None
    assert f"pid {os.getpid()}" in sentence
    assert "hypo doctor --last" in sentence
    assert dead_runs.notice(tmp_path) is None
    made = collect.collect_dead(dead)
    assert (made.kind, made.fault.call) == ("error", "copy_out")
    assert made.command == ("hypo", "run", "-p", "<3 characters>")
    assert any("stderr and exit code" in str(line) for line in made.missing)
    with_consent = collect.collect_dead(dead, with_prompts=True)
    assert with_consent.command == ("hypo", "run", "-p", "abc")
    assert not with_consent.redacted


def test_a_running_process_is_not_dead(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "1-1")
    assert dead_runs.dead_runs(tmp_path) == []
    writer.close(ring.FAILED)
    assert len(dead_runs.dead_runs(tmp_path)) == 1


def test_what_others_may_have_put_there_is_not_looked_at(tmp_path: Path) -> None:
    base = tmp_path / "runs"
    left_behind(base / "1-1")
    assert len(dead_runs.dead_runs(base)) == 1
    (tmp_path / "link").symlink_to(base)
    assert dead_runs.dead_runs(tmp_path / "link") == []
    base.chmod(0o777)
    assert dead_runs.dead_runs(base) == []
    with pytest.raises(UsageError, match="alone, but what runs"), dead_runs.watched_runs(base):
        pass


def test_no_run_folder_no_sentence(tmp_path: Path) -> None:
    assert dead_runs.notice(tmp_path / "none") is None
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "ring").write_bytes(b"\xff" * 100)
    (tmp_path / "garbage" / "static").write_bytes(b"\xff" * 100)
    assert dead_runs.notice(tmp_path) is None


def test_folders_of_doctors_that_died_go(tmp_path: Path) -> None:
    """Whose processes have which numbers says nothing: containers share folders and not those."""
    dead = Path(tempfile.mkdtemp(prefix="doctor-", dir=tmp_path))
    (dead / "lock").touch()
    made_and_left = Path(tempfile.mkdtemp(prefix=".doctor-", dir=tmp_path))
    os.utime(made_and_left, (0, 0))
    with dead_runs.watched_runs(tmp_path) as folder:
        assert dead_runs.is_watched(folder)
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
        with dead_runs.watched_runs(tmp_path) as other:
            assert folder.is_dir(), "one doctor takes the folder of another"
            assert other != folder
        beside = (
            "import sys; from pathlib import Path; from hypocenter.watch import dead_runs\n"
            "with dead_runs.watched_runs(Path(sys.argv[1])): pass"
        )
        subprocess.run([sys.executable, "-c", beside, str(tmp_path)], check=True, timeout=60)
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


# -- children -------------------------------------------------------------------------------------


def run(program: str, runs: Path, deadlines: Deadlines | None = None) -> tuple[Ended, bytes]:
    seen = bytearray()
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    end = watch([sys.executable, "-c", program], environment, runs, seen.extend, deadlines)
    return end, bytes(seen)


def test_a_childs_words_are_passed_on_and_kept(tmp_path: Path) -> None:
    end, seen = run("import os; os.write(2, b'a\\xff\\n'); raise SystemExit(7)", tmp_path)
    assert (end.exit_code, end.signal, end.stderr, seen) == (7, None, "a\ufffd\n", b"a\xff\n")


def test_a_talkative_child_is_kept_in_part(tmp_path: Path) -> None:
    program = "import os; os.write(2, b'first'); [os.write(2, b'x' * 60000) for _ in range(60)]"
    end, seen = run(program + "; os.write(2, b'last')", tmp_path)
    assert len(seen) == 3_600_009
    assert end.stderr.startswith("first")
    assert end.stderr.endswith("last")
    assert "bytes left out" in end.stderr
    assert len(end.stderr) < 1_200_000


def test_of_a_talkative_child_whole_lines_are_kept(tmp_path: Path) -> None:
    """A secret that is cut in two would be taken out nowhere."""
    program = "import sys\nfor n in range(40000): sys.stderr.write('key-%060d\\n' % n)"
    end, seen = run(program, tmp_path)
    before, after = end.stderr.split("\n[... ")
    num_lost, after = after.split(" bytes left out ...]\n")
    assert {len(line) for line in (before + "\n" + after).splitlines() if line} == {64}
    assert int(num_lost) == len(seen) - len(before) - len(after)


def test_a_child_that_closes_stderr_is_waited_for(tmp_path: Path) -> None:
    end, _ = run("import os, time; os.close(2); time.sleep(0.5); os._exit(5)", tmp_path)
    assert end.exit_code == 5


def test_who_keeps_stderr_open_is_not_waited_for(tmp_path: Path) -> None:
    program = (
        "import subprocess; "
        "p = subprocess.Popen(['sleep', '30']); print(p.pid, file=__import__('sys').stderr)"
    )
    started = time.monotonic()
    end, _ = run(program, tmp_path)
    os.kill(int(end.stderr), signal.SIGKILL)
    assert time.monotonic() - started < 25  # what keeps it open would for 30


HANGING = """
import sys, time
from pathlib import Path
from hypocenter.record import ring
from hypocenter.record.ring_writer import RingWriter
writer = RingWriter(Path(sys.argv[1] if len(sys.argv) > 1 else {folder!r}))
writer.header[ring.CELL_STEP] = 2
writer.header[ring.CELL_STEP_STARTED] = time.monotonic_ns()
def endless():
    for _ in range(3000):
        time.sleep(0.01)
endless()
"""


def test_a_step_past_its_deadline_is_ended_with_its_stack(tmp_path: Path) -> None:
    program = HANGING.format(folder=str(tmp_path / "1-1"))
    end, _ = run(program, tmp_path, Deadlines(first_step=60.0, step=0.3))
    assert end.hung_seconds is not None
    assert 0.3 < end.hung_seconds < 25  # it would go on for 30
    assert end.signal == signal.SIGABRT
    made = collect.collect(tmp_path, end)
    assert made is not None
    assert made.kind == "hang"
    assert "in endless" in made.fault.stack


def test_one_that_was_stopped_is_told_of_at_once_and_writes_its_stack(tmp_path: Path) -> None:
    program = HANGING.format(folder=str(tmp_path / "1-1"))
    program = program.replace("def endless", "os.kill(os.getpid(), signal.SIGSTOP)\ndef endless")
    program = program.replace("import sys, time", "import os, signal, sys, time")
    late = list[tuple[float, str]]()
    state: Path | None = None

    def note_start(pid: int) -> None:
        nonlocal state
        state = Path(f"/proc/{pid}/stat")

    def note_late(seconds: float) -> None:
        assert state is not None
        late.append((seconds, state.read_text().rpartition(")")[2].split()[0]))

    end = watch(
        [sys.executable, "-c", program],
        environment_for(tmp_path),
        tmp_path,
        lambda data: None,
        Deadlines(first_step=60.0, step=0.3),
        follower=Follower(note_start, note_late),
    )
    assert late == [(end.hung_seconds, "T")], "it is told of while it stands still"
    assert end.signal == signal.SIGABRT, "not by force, at the end of its time"
    assert "Fatal Python error: Aborted" in end.stderr


DAMAGED = """
import os, sys, time
os.write(2, b"free(): invalid pointer\\n")
{then}
"""


def test_who_hangs_by_damage_of_its_own_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "DAMAGED_SECONDS", 0.5)
    monkeypatch.setattr(child, "_ABORT_SECONDS", 0.5)
    end, _ = run(DAMAGED.format(then="time.sleep(600)"), tmp_path, Deadlines())
    assert end.is_damaged
    made = collect.collect(tmp_path, end)
    assert made is not None
    assert made.kind == "crash"
    assert made.fault.message.startswith("its own memory was damaged, as it said; then it did")


def test_who_says_so_and_goes_on_to_work_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "DAMAGED_SECONDS", 0.5)
    busy = "end = time.monotonic() + 2.5\nwhile time.monotonic() < end: sum(range(100000))"
    end, _ = run(DAMAGED.format(then=busy), tmp_path, Deadlines())
    assert (end.is_damaged, end.exit_code) == (False, 0)
    quiet = "import time; time.sleep(1.5)"
    assert run(quiet, tmp_path, Deadlines())[0].exit_code == 0


def test_a_child_that_ignores_the_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hypocenter.watch import child as watching

    monkeypatch.setattr(watching, "_ABORT_SECONDS", 0.3)
    deaf = "import faulthandler, signal; faulthandler.disable()\n"
    deaf += "signal.signal(signal.SIGABRT, signal.SIG_IGN)\n"
    program = deaf + HANGING.format(folder=str(tmp_path / "1-1"))
    end, _ = run(program, tmp_path, Deadlines(first_step=60.0, step=0.3))
    assert end.signal == signal.SIGKILL
    assert end.hung_seconds is not None


def test_an_error_that_our_command_ended_with_is_examined_and_wrong_usage_is_not() -> None:
    line = "hypo: demo.gguf: llama.rope.freq_base is 0.0, but must be from 1.0 to 1e+09\n"
    assert is_fault(line, EXIT_ERROR, None)
    assert not is_fault(line, EXIT_USAGE, None)
    assert not is_fault("demo: done\n", EXIT_ERROR, None)


@pytest.mark.parametrize(
    ("call", "message"), [("", "AccessRefused: x"), ("copy_out", "copy_out: AccessRefused: x")]
)
def test_an_error_without_a_call_is_told_by_its_words_alone(call: str, message: str) -> None:
    called = Called(seq=1, step=1, call=call, outcome="AccessRefused: x")
    fault = collect._fault_of_events([called])
    assert fault is not None
    assert fault.message == message
