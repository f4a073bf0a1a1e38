"""An exported launch: a file that breaks as the launch did, and out of which no text breaks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from costs import processor_seconds
from outside.forked import run_forked
from recorded.bundles import Run
from recorded.foreign_launch import TAKE, launch_of

from hypocenter.base.errors import NotReplayed, UsageError
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import (
    FOREIGN,
    OUTSIDE_PLANS,
    Launched,
    Place,
    SourceRecord,
)
from hypocenter.replay.export import expected_lines, repro_text
from hypocenter.replay.findings import Finding
from hypocenter.replay.recorded import replay_place
from hypocenter.replay.reproduction import BROKEN
from hypocenter.replay.terms import KernelText

HALF = """@triton.jit
def half_written_kernel(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n), mask=i < n // 2)
"""


def place_of(bundle: Bundle) -> Place:
    return Place(1, OUTSIDE_PLANS, max(event.seq for event in bundle.events))


def finding_of(bundle: Bundle) -> Finding:
    return replay_place(bundle, place_of(bundle), text=KernelText(may_run=True)).findings[0]


def exported(bundle: Bundle, finding: Finding | None = None, *expected: str) -> str:
    told = expected_lines(finding) if finding is not None else list(expected)
    return repro_text(BundleIndex(bundle), place_of(bundle), told, finding)


def run_alone(
    text: str, folder: Path, *, is_forked: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run it where hypocenter cannot be imported; in a process of its own or a fork."""
    file = folder / "repro.py"
    file.write_text(text)
    (folder / "hypocenter.py").write_text("raise ImportError('it needs hypocenter')\n")
    if is_forked:
        return run_forked(file, folder)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, str(file)], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip


def test_what_a_fork_takes_is_counted(tmp_path: Path) -> None:
    run_alone("", tmp_path)
    before = processor_seconds()
    run_alone("import time\nwhile time.process_time() < 0.3: pass\n", tmp_path)
    assert processor_seconds() - before > 0.25


def right(count: int = 100) -> list[int]:
    return list(range(count))


def wrong(at: int, value: int) -> list[int]:
    return [value if n == at else n for n in range(100)]


@pytest.mark.tier("sim", fast=lambda case: case.entry == 100)
@pytest.mark.parametrize("entry", [100, 1 << 30, -1])
def test_an_index_out_of_range_breaks_at_its_line(entry: int, tmp_path: Path) -> None:
    bundle = launch_of(TAKE, wrong(70, entry))
    finding = finding_of(bundle)
    text = exported(bundle, finding)
    done = run_alone(text, tmp_path, is_forked=False)  # once as people do
    assert done.returncode == BROKEN, done.stderr
    assert done.stdout.startswith("reproduced: SIGSEGV")
    number = 1 + text.splitlines().index(TAKE.splitlines()[4])
    assert f"line {number} in take_entry_kernel" in done.stderr
    head = text[: text.index('"""')]
    assert "# EXPECTED in the launch of take_entry:" in head
    assert f"take_entry_kernel.py:5: {finding.kind}: load of x in take_entry_kernel" in head
    assert finding.detail in head


def test_a_right_launch_does_not_break(tmp_path: Path) -> None:
    done = run_alone(exported(launch_of(TAKE, right())), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("not reproduced")


@pytest.mark.tier("sim")
def test_freed_memory_cannot_be_touched(tmp_path: Path) -> None:
    bundle = launch_of(TAKE, right(), freed="x")
    text = exported(bundle, finding_of(bundle))
    assert "'gone': 'freed memory'" in text
    assert run_alone(text, tmp_path).returncode == BROKEN


def test_what_is_never_written_is_counted(tmp_path: Path) -> None:
    bundle = launch_of(HALF, name="half_written")
    finding = msgspec.convert(
        {"kind": "never written", "kernel": "half_written", "operation": "launch",
         "detail": "half of it", "argument": "o"},
        Finding,
    )  # fmt: skip
    done = run_alone(exported(bundle, finding), tmp_path)
    assert done.returncode == BROKEN
    assert done.stdout.startswith("o: 50 elements were not written")


def test_tensors_that_overlap_lie_in_one_memory() -> None:
    run = Run()
    run.tensor("x", "F32", 100, owner=FOREIGN)
    run.tensor("o", "F32", 90, owner=FOREIGN, of="x", offset=10)
    run.step += 1
    launch = run.launch("half_written", {}, {"x": "x", "o": "o", "n": 9}, source=HALF, grid=(1,),
                        constants={"B": 64})  # fmt: skip
    run.emit(Launched, launch=launch)
    text = exported(run.bundle())
    assert "'x': {'memory': 1, 'start': 0," in text
    assert "'o': {'memory': 1, 'start': 40," in text
    assert "2: {'num_bytes'" not in text


# -- what comes from a bundle ---------------------------------------------------------------------

BREAKING = (
    "'''\"\"\"\nimport os\nos.abort()\n", "x\nraise SystemExit(7)", "x\rraise SystemExit(7)",
    "\x0craise SystemExit(7)", "\u2028raise SystemExit(7)", "\\", "'); raise SystemExit(7) #",
    "# -*- coding: utf-7 -*-",
)  # fmt: skip


def structure(text: str) -> list[str]:
    """What statements a file has."""
    return [ast.unparse(node)[:20] for node in ast.parse(text).body[1:]]


@pytest.mark.parametrize("name", BREAKING)
def test_no_name_of_a_bundle_breaks_out_of_the_file(name: str, tmp_path: Path) -> None:
    bundle = launch_of(TAKE, right(), options={"num_stages": name, name: name})
    [launched] = [event for event in bundle.events if isinstance(event, Launched)]
    launch = msgspec.structs.replace(
        launched.launch, kernel=name, site=name, function=name, stream=name,
        constants={"B": 64, name: name},
    )  # fmt: skip
    event = msgspec.structs.replace(launched, launch=launch)
    tensors = tuple(msgspec.structs.replace(t, name=name, owner=name) for t in bundle.tensors)
    forged = msgspec.structs.replace(bundle, events=(*bundle.events[:-1], event), tensors=tensors)
    text = exported(forged, None, name, name)
    assert structure(text) == structure(exported(launch_of(TAKE, right()), None, "a", "b"))
    assert text.splitlines()[0].startswith("# A recorded launch, written by hypocenter")
    if name == BREAKING[0]:
        assert run_alone(text, tmp_path).returncode == 0


def forged_source(text: str, **fields: Any) -> Bundle:
    bundle = launch_of(TAKE, right())
    [source] = bundle.sources
    return msgspec.structs.replace(
        bundle, sources=(msgspec.structs.replace(source, text=text, **fields),)
    )


def test_of_a_source_the_function_alone_is_written_and_nothing_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w')\n@open({str(mark)!r}, 'w')\n{TAKE}\nopen({str(mark)!r}, 'w')"
    written = exported(forged_source(text))
    assert not mark.exists()
    assert str(mark) not in written
    assert run_alone(written, tmp_path).returncode == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("not python at all", {}, "has a source that is not Python"),
        ("x = 1\n", {}, "is not defined by its source"),
        ("", {}, "has no source in the bundle"),
        (TAKE, {"constants": {"a = 1; b": 2}}, "names a constant"),
        (TAKE, {"constants": {"reproduce": 2}}, "has a name that the exported file needs"),
    ],
)
def test_a_source_that_does_not_do_is_refused(
    text: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotReplayed, match=message):
        exported(forged_source(text, **fields))


def test_a_kernel_of_the_cpu_is_refused() -> None:
    bundle = launch_of(TAKE, right())
    [launched] = [event for event in bundle.events if isinstance(event, Launched)]
    launch = msgspec.structs.replace(launched.launch, device="cpu")
    event = msgspec.structs.replace(launched, launch=launch)
    with pytest.raises(UsageError, match="runs on the CPU"):
        exported(msgspec.structs.replace(bundle, events=(*bundle.events[:-1], event)))


def test_constants_and_callees_come_along(tmp_path: Path) -> None:
    text = TAKE.replace("tl.load(x + at, mask=i < n)", "pick(x, at * ONE, i < n)").replace(
        "tl.arange", "language.arange"
    )
    pick = "@triton.jit\ndef pick(p, at, mask):\n    return tl.load(p + at, mask=mask)\n"
    bundle = forged_source(text, callees=("p",), constants={"ONE": 1})
    callee = SourceRecord(id="p", function="pick", file="p.py", first_line=1, text=pick)
    whole = msgspec.structs.replace(bundle, sources=(*bundle.sources, callee))
    written = exported(whole)
    assert "ONE = tl.constexpr(1)" in written
    assert "language = tl" in written
    assert written.index("def pick(") < written.index("def take_entry_kernel(")
    assert run_alone(written, tmp_path).returncode == 0
