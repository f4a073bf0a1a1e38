"""The engine's own Python beside that of a good run: what changed, and when that is the cause."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from recorded.bundles import REQUEST, Run, inputs, tensors_of_decoder

from hypocenter.base import package
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.engine_events import Answered, TextAsked
from hypocenter.record.events import ArgumentDeclaration, Declaration, Place, Statistics
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.module_texts import (
    ModuleDigests,
    ModuleText,
    digests_of_modules,
    read_texts,
)

NO_REPLAY = ("replay", "hang")
DIFFERS = FaultRecord(kind="differs", message="")
ENDED = FaultRecord(kind="none", message="")
BATCH = '''"""Lays out a batch."""


def positions(start: int, stop: int) -> list[int]:
    """Those of a chunk."""
    return list(range(start, stop))


def rows(number: int) -> list[int]:
    return [number]
'''
WRONG = BATCH.replace("range(start, stop)", "range(start + 1, stop + 1)")


def module(text: str, file: str = "engine/batch.py") -> ModuleText:
    return ModuleText(file=file, digest=hashlib.sha256(text.encode()).hexdigest(), text=text)


def with_modules(bundle: Bundle, *texts: str) -> Bundle:
    files = ("engine/batch.py", "engine/other.py")
    modules = tuple(module(text, file) for text, file in zip(texts, files, strict=False))
    return msgspec.structs.replace(bundle, modules=modules)


def told(good: str, bad: str) -> list[tuple[int, str, str, str]]:
    empty = Run().bundle(ENDED)
    case = Case(with_modules(empty, bad), with_modules(empty, good))
    return [
        (line.line, line.function, line.text, line.was)
        for change in case.host.changes
        for line in change.lines
    ]


def test_the_changed_line_of_a_function_is_told_with_both_texts() -> None:
    assert told(BATCH, WRONG) == [
        (
            6,
            "positions",
            "return list(range(start + 1, stop + 1))",
            "return list(range(start, stop))",
        )
    ]
    assert told(BATCH, BATCH) == []


@pytest.mark.parametrize(
    "other",
    [
        BATCH.replace("Those of a chunk.", "The positions of one chunk."),
        BATCH.replace("    return [number]", "    # One for each.\n    return [number]"),
        BATCH.replace("list(range(start, stop))", "list(\n        range(start, stop)\n    )"),
    ],
)
def test_comments_docstrings_and_the_way_lines_are_broken_are_no_change(other: str) -> None:
    assert other != BATCH
    assert told(BATCH, other) == []


def step_of_norms(*, fact: float, digest: str, positions: list[int], asked: str = "k:asked") -> Run:
    """A step of two requests' worth of inputs, and one launch whose result was seen."""
    run = Run()
    tensors_of_decoder(run)
    launch = run.launch(
        "rms_norm", {"x": "x", "out": "q", "eps": fact}, site="/p/hypocenter/kernels/norm.py:9",
        caller="/p/hypocenter/model/decoder.py:70",
    )  # fmt: skip
    plan = run.plan(launch)
    request = msgspec.structs.replace(REQUEST, digest=asked)
    run.run(plan, inputs(positions=positions), (request,))
    written = ArgumentDeclaration(name="out", dtypes=("F32",), shape="num_rows", access="write")
    run.contracts["rms_norm"] = Declaration(kernel="rms_norm", arguments=(written,))
    run.seen = (  # type: ignore[attr-defined]
        Statistics(
            place=Place(1, plan, 0), tensor=run.tensors["q"].id, digest=f"k:{digest}", low=0.0,
            high=1.0, mean=0.5, rms=0.5, num_nan=0, num_inf=0,
        ),
    )  # fmt: skip
    return run


def pair(bad: str, *more: str, fact: float = 1e-5, good: str = BATCH) -> tuple[Bundle, Bundle]:
    """A run with other positions and another result, and the good one; `more` are other modules."""
    one = step_of_norms(fact=fact, digest="b", positions=[1, 2, 3])
    other = step_of_norms(fact=1e-5, digest="a", positions=[0, 1, 2])
    wrong = one.bundle(DIFFERS, statistics=one.seen)  # type: ignore[attr-defined]
    right = other.bundle(ENDED, statistics=other.seen)  # type: ignore[attr-defined]
    return with_modules(wrong, bad, *more), with_modules(right, good, *[BATCH for _ in more])


def found(bad: Bundle, good: Bundle) -> Diagnosis:
    result = diagnose(bad, good, without=NO_REPLAY)
    assert all(not rung.left_out or rung.name in NO_REPLAY for rung in result.rungs), result.rungs
    return result


def test_the_line_of_the_host_is_the_culprit_where_it_alone_changed() -> None:
    root = found(*pair(WRONG)).roots[0]
    assert root.culprit is not None
    assert root.culprit.place == "hypocenter/engine/batch.py:6"
    assert "range(start + 1, stop + 1)" in root.culprit.does
    assert "in the good run `return list(range(start, stop))`" in root.culprit.does


def test_a_wrong_result_with_equal_facts_is_blamed_on_the_line_that_changed() -> None:
    bad, good = pair(WRONG)
    bad = msgspec.structs.replace(bad, events=good.events)
    root = found(bad, good).roots[0]
    assert (root.cause, root.file, root.line) == (
        Cause.WRONG_ANSWER, "hypocenter/engine/batch.py", 6,
    )  # fmt: skip
    assert root.fix == "Put the line back: return list(range(start, stop))"
    unchanged = msgspec.structs.replace(bad, modules=good.modules)
    assert not found(unchanged, good).roots


def test_of_two_changes_none_is_proven_to_be_the_one() -> None:
    bad, good = pair(WRONG, WRONG)
    result = found(msgspec.structs.replace(bad, events=good.events), good)
    assert not result.roots
    [row] = [row for row in result.hypotheses if row.cause is Cause.WRONG_ANSWER]
    assert row.verdict is Verdict.INCONCLUSIVE
    assert sum("changed since the good run" in text for text in row.evidence) == 2


def test_a_line_is_not_blamed_where_more_than_it_differs() -> None:
    bad, good = pair(WRONG)
    bad = msgspec.structs.replace(bad, events=good.events, packages={"numpy": "1"})
    assert not found(bad, good).roots


def test_a_harmless_change_is_no_finding() -> None:
    _, good = pair(BATCH)
    changed = msgspec.structs.replace(
        good, modules=(module(WRONG),), events=(*good.events, answered("t", "s"))
    )
    good = msgspec.structs.replace(good, events=(*good.events, answered("t", "s")))
    result = found(changed, good)
    assert not result.roots
    assert result.is_clean


def answered(tokens: str, said: str, failed: str = "") -> Answered:
    digests = {"digest": f"k:{tokens}", "said": f"k:{said}"}
    return Answered(seq=99, step=1, request=7, num_tokens=4, failed=failed, **digests)


def test_another_text_of_equal_tokens_is_a_wrong_answer() -> None:
    _, good = pair(BATCH)
    bad = msgspec.structs.replace(
        good, modules=(module(WRONG),), events=(*good.events, answered("t", "other"))
    )
    good = msgspec.structs.replace(good, events=(*good.events, answered("t", "s")))
    [root] = found(bad, good).roots
    assert (root.cause, root.file, root.line) == (
        Cause.WRONG_ANSWER, "hypocenter/engine/batch.py", 6,
    )  # fmt: skip
    assert "another text, or other calls" in root.sentence
    unchanged = msgspec.structs.replace(bad, modules=good.modules)
    result = found(unchanged, good)
    assert not result.roots
    assert [row.verdict for row in result.hypotheses if row.cause is Cause.WRONG_ANSWER] == [
        Verdict.INCONCLUSIVE
    ]


def test_a_request_that_failed_behind_equal_steps_is_a_wrong_answer() -> None:
    _, good = pair(BATCH)
    failed = answered("t", "s", "GrammarError")
    bad = msgspec.structs.replace(good, modules=(module(WRONG),), events=(*good.events, failed))
    both = msgspec.structs.replace(good, events=(*good.events, failed))
    good = msgspec.structs.replace(good, events=(*good.events, answered("t", "s")))
    [root] = found(bad, good).roots
    assert (root.cause, root.file, root.line) == (
        Cause.WRONG_ANSWER, "hypocenter/engine/batch.py", 6,
    )  # fmt: skip
    assert "ended with an error, and not in the good run" in root.sentence
    assert not found(bad, both).roots  # it fails there, too


@pytest.mark.parametrize(("asked", "is_found"), [("k:1", True), ("k:2", False), ("j:1", False)])
def test_other_tokens_of_the_same_question_are_the_hosts_doing(asked: str, is_found: bool) -> None:
    def of(text: str, digest: str, question: str) -> Bundle:
        run = step_of_norms(fact=1e-5, digest="a", positions=[0, 1, 2])
        request = msgspec.structs.replace(REQUEST, digest=f"k:{digest}")
        events = [
            msgspec.structs.replace(e, requests=(request,)) if hasattr(e, "requests") else e
            for e in run.events
        ]
        events.append(TextAsked(seq=0, step=0, digest=question))
        bundle = run.bundle(DIFFERS if digest != "a" else ENDED)
        return with_modules(msgspec.structs.replace(bundle, events=tuple(events)), text)

    result = found(of(WRONG, "b", asked), of(BATCH, "a", "k:1"))
    assert bool(result.roots) == is_found
    assert (result.not_compared == "") == is_found


def test_the_line_beyond_the_launcher_is_the_culprit_of_an_argument_it_was_given() -> None:
    bad, good = pair(BATCH, fact=2.0)
    bad = msgspec.structs.replace(bad, events=good.events)
    root = found(bad, good).roots[0]
    assert root.argument == "eps"
    assert root.culprit is not None
    assert root.culprit.place == "/p/hypocenter/model/decoder.py:70"
    assert root.culprit.does == "passes eps to rms_norm"


def test_digests_are_of_the_package_and_texts_only_of_what_has_not_changed(tmp_path: Path) -> None:
    own = digests_of_modules()
    expected = {"engine/scheduler.py", "conversation/tools.py", "settings/config.py"}
    assert expected <= own.digests.keys()
    texts, gaps = read_texts(own)
    assert not gaps
    one = next(text for text in texts if text.file == "engine/scheduler.py")
    assert one.text == (package.FOLDER / "engine/scheduler.py").read_text("utf-8")
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    digest = hashlib.sha256(b"x = 1\n").hexdigest()
    recorded = ModuleDigests(folder=str(tmp_path), digests={"a.py": digest, "b.py": digest})
    (tmp_path / "b.py").write_text("x = 2\n")
    texts, gaps = read_texts(recorded)
    assert [text.text for text in texts] == ["x = 1\n", ""]
    assert "the texts of 1 of the engine's modules" in str(gaps[0])


def test_a_bundle_keeps_the_texts_of_modules(tmp_path: Path) -> None:
    bundle = with_modules(Run().bundle(ENDED), BATCH, WRONG)
    bundles.save(bundle, tmp_path / "b")
    assert bundles.load(tmp_path / "b").modules == bundle.modules
    (tmp_path / "b" / "modules.json").write_text("{")
    damaged = bundles.load(tmp_path / "b")
    assert [one.text for one in damaged.modules] == ["", ""]
    assert any(gap.what == "modules.json" for gap in damaged.missing)
