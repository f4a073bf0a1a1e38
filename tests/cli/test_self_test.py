"""`hypo doctor --self-test`: the planted fault is proven, and what could not be seen is said."""

from __future__ import annotations

import importlib.util
import json

import msgspec
import pytest
from outside.terminal import hypo, hypo_in_process

from hypocenter.base.errors import EXIT_GATE
from hypocenter.cli import app
from hypocenter.cli.verbs import self_test
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Proof, RootCause

pytest.importorskip("torch")
pytest.importorskip("triton")


def test_the_planted_fault_is_proven_and_each_source_is_told() -> None:
    done = hypo("doctor", "--self-test", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["is_proven"]
    assert "take_rows" in told["found"]
    works = {source["name"]: source["works"] for source in told["sources"]}
    assert works["launches"]
    assert works["fault"]
    assert works["replay on the CPU"]
    assert all(source["detail"] for source in told["sources"])


def test_a_machine_that_shows_nothing_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_test, "_PROGRAM", "hypocenter.cli.verbs")  # does nothing at all
    with pytest.raises(SystemExit) as left:
        app.main(["doctor", "--self-test"])
    assert left.value.code == EXIT_GATE
    out = capsys.readouterr().out
    assert "NOT PROVEN" in out
    assert "launches              -      none was recorded" in out


def test_only_the_planted_fault_counts_as_proven() -> None:
    planted = RootCause(
        cause=Cause.INDEX_RANGE,
        sentence="",
        fix="",
        proof=Proof("", "", ""),
        kernel="take_rows",
        argument="ids_ptr",
        expression="tl.load(table_ptr + index * WIDTH + column)",
    )
    assert self_test._is_planted(planted)
    for name, other in (
        ("kernel", "gather"),
        ("argument", "table_ptr"),
        ("expression", "tl.load(ids_ptr + row)"),
    ):
        assert not self_test._is_planted(msgspec.structs.replace(planted, **{name: other}))


def test_nothing_else_is_asked_for_beside_it() -> None:
    for words in (["--", "true"], ["bundle"], ["--suspect"], ["--last"]):
        done = hypo_in_process("doctor", "--self-test", *words)
        assert done.returncode == 2, words
        assert "give it alone" in done.stderr


def test_without_triton_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as left:
        app.main(["doctor", "--self-test"])
    assert left.value.code == 2
    assert "needs torch, which is not installed" in capsys.readouterr().err
