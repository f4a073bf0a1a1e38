"""The gate of a death: what is wrong on purpose is told, and no process of it is left behind."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from repository import DEMO

from hypocenter import LLM, EngineConfig
from hypocenter.audit import deaths, life
from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.equivalence import AuditSizes, OwnGates
from hypocenter.audit.executed import CannotRun, OwnRecord
from hypocenter.audit.life import LifeOrder
from hypocenter.audit.ways import Ways
from hypocenter.base.errors import HypoError
from hypocenter.record import recorder
from hypocenter.verify.outcome import Stage, StageVerdict

SIZES = AuditSizes(read=24, asked=20, answered=3, chunks=(7,), batches=(2,))
ORDER = LifeOrder("model", EngineConfig(device="cpu"), SIZES, "", "", "", False, os.getpid())
ANSWERS = "import sys; sys.stdin.readline(); print('{}', flush=True); "


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnGates]:
    patched = pytest.MonkeyPatch()
    patched.setenv("HYPO_RUN_DIR", str(tmp_path_factory.mktemp("runs")))
    patched.delenv("HYPO_RECORD", raising=False)
    recorder.close_recorder()
    fields: dict[str, Any] = {"context_length": 64, "kv_tokens": 256, "max_batch_requests": 2}
    with LLM(DEMO, device="cpu", prefix_cache=False, **fields) as llm:
        yield OwnGates(Ways(llm, OwnRecord(), "cpu"), SIZES, 0.0)
    recorder.close_recorder()
    patched.undo()


def gate(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch, change: Any = None, **executed: Any
) -> Stage:
    """The gate with a second process that answers what `change` makes of the first one's answer,
    and is recorded with these fields."""
    answer = own.answer("before")

    def answering(order: LifeOrder, out: Path, *, goes_on: bool) -> None:
        ran = answer
        if not goes_on:
            # It reads a block of 16 tokens that the first one has left.
            fields = {"processes": (1,), "chunks": (4, 1, 1), **executed}
            ran = replace(ran, executed=msgspec.structs.replace(ran.executed, **fields))
            ran = change(ran) if change is not None else ran
        life.write_answer(out, ran)

    monkeypatch.setattr(deaths, "live", answering)
    return deaths.death(str(DEMO), own.ways.runner.config, own, keeps_blocks=True)


def one_unit_off(ran: AuditedRun) -> AuditedRun:
    rows = ran.rows.copy()
    rows[1, 3] = np.nextafter(rows[1, 3], np.float32(np.inf))
    return replace(ran, rows=rows)


def test_an_answer_that_differs_after_the_death_is_told(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gate(own, monkeypatch)
    assert right.verdict is StageVerdict.RIGHT, right.findings
    assert not right.uncovered
    wrong = gate(own, monkeypatch, one_unit_off)
    assert wrong.verdict is StageVerdict.WRONG
    assert "has other bits" in wrong.findings[0].what


def test_a_process_that_did_not_die_and_blocks_that_are_not_found_are_told(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = gate(own, monkeypatch, processes=(os.getpid(),))
    assert same.verdict is StageVerdict.WRONG
    assert same.findings[0].details == {"axis": "processes"}
    lost = gate(own, monkeypatch, chunks=(20, 1, 1))
    assert lost.verdict is StageVerdict.WRONG
    assert lost.findings[0].details == {"field": "chunks"}


def test_without_a_prefix_cache_no_block_is_asked_for(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[LifeOrder] = []

    def refused(order: LifeOrder, out: Path, *, goes_on: bool) -> None:
        orders.append(order)
        raise CannotRun("seen")

    monkeypatch.setattr(deaths, "live", refused)
    found = deaths.death(str(DEMO), own.ways.runner.config, own, keeps_blocks=False)
    assert found.verdict is StageVerdict.NOT_RUN
    assert not orders[0].config.prefix_cache
    assert not orders[0].block_memory


@pytest.mark.parametrize(
    ("program", "goes_on", "error", "why"),
    [
        ("import time; time.sleep(60)", True, CannotRun, "took more than 1 s"),
        (ANSWERS + "import time; time.sleep(60)", False, CannotRun, "took more than 1 s"),
        ("raise SystemExit('no room')", True, CannotRun, "ended with 1: no room"),
        ("raise SystemExit('no room')", False, HypoError, "ended with 1: no room"),
        (ANSWERS.replace("{}", '{"cannot": "no room"}'), False, CannotRun, "^no room"),
    ],
)
def test_a_process_that_does_not_do_its_part(
    program: str,
    goes_on: bool,
    error: type[HypoError],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_slow = "sleep" in program
    monkeypatch.setattr(deaths, "MAX_SECONDS", 1.0 if is_slow else 60.0)
    monkeypatch.setattr(deaths, "module_command", lambda module: [sys.executable, "-c", program])
    with pytest.raises(HypoError, match=why) as raised:
        deaths.live(ORDER, tmp_path / "before", goes_on=goes_on)
    assert type(raised.value) is error


def test_a_process_that_is_killed_leaves_its_record_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPO_RUN_DIR", "/of/the/user")
    told = f"import os; open({str(tmp_path / 'told')!r}, 'w').write(os.environ['HYPO_RUN_DIR']); "
    program = told + ANSWERS + "import time; time.sleep(60)"
    monkeypatch.setattr(deaths, "module_command", lambda module: [sys.executable, "-c", program])
    deaths.live(ORDER, tmp_path / "before", goes_on=True)
    assert (tmp_path / "told").read_text() == str(tmp_path / "runs")


def test_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "module_command", lambda module: [str(tmp_path / "nothing")])
    with pytest.raises(CannotRun, match="no process can be started"):
        deaths.live(ORDER, tmp_path / "before", goes_on=True)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_life_ends_with_its_parent_and_has_an_end(
    is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def end(code: int) -> None:
        ended.set()

    def living(order: LifeOrder) -> None:
        assert ended.wait(20)

    if is_old:
        monkeypatch.setattr(life, "_MAX_SECONDS", 0.0)
    monkeypatch.setattr(life.os, "_exit", end)  # type: ignore[attr-defined]
    monkeypatch.setattr(life, "_live", living)
    parent = os.getppid() if is_old else 0
    order = msgspec.json.encode(msgspec.structs.replace(ORDER, parent=parent)).decode()
    monkeypatch.setattr(sys, "stdin", io.StringIO(order + "\n"))
    life.main()
