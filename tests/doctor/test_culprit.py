"""Beside a good run: whether the one line that changed is blamed for what a check has proven."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import pytest
from recorded.bundles import REQUEST, Run, inputs, tensors_of_decoder

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.culprit import with_culprit
from hypocenter.doctor.diagnosis import Proof, RootCause, proven
from hypocenter.doctor.installed_text import Change, changes, texts_of
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Place, SourceRecord, Stepped
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.module_texts import ModuleText

KERNEL = '''def norm_kernel(x_ptr, out_ptr, width):
    """Of one row."""
    at = tl.arange(0, 64)
    x = tl.load(x_ptr + at, mask=at < width)
    # Nothing behind the row.
    tl.store(out_ptr + at, x, mask=at < width)
'''
CHANGED = KERNEL.replace("out_ptr + at, x, mask=at < width", "out_ptr + at, x, mask=at < width - 1")
ENDED = FaultRecord(kind="none", message="")
DIFFERS = FaultRecord(kind="differs", message="")


def run_of(kernel: str, fault: FaultRecord, asked: str = "k:1") -> Bundle:
    """One step with one launch, of whose host's text something is on record."""
    run = Run()
    tensors_of_decoder(run)
    launch = run.launch(
        "rms_norm", {"x": "x", "out": "q", "eps": 1e-5}, source=kernel,
        site="/p/hypocenter/kernels/norm.py:9",
    )  # fmt: skip
    run.run(run.plan(launch), inputs(), (msgspec.structs.replace(REQUEST, digest=asked),))
    host = "x = 1\n"
    digest = hashlib.sha256(host.encode()).hexdigest()
    return run.bundle(fault, modules=(ModuleText(file="engine/a.py", digest=digest, text=host),))


def blamed(bad: Bundle, good: Bundle, *, is_shared: bool = False) -> str:
    """The place and words of who is blamed for an output that one launch did not write."""
    root = RootCause(
        cause=Cause.OUTPUT_NOT_WRITTEN, sentence="", fix="", proof=Proof("", "", ""),
        kernel="rms_norm", argument="out", place=Place(1, 1, 0), blames=Blame.LAUNCH,
    )  # fmt: skip
    claim = proven(root, "replay", (), "")
    culprit = with_culprit(Case(bad, good), claim, is_shared=is_shared).culprit
    return f"{culprit.place} {culprit.does}" if culprit is not None else ""


LAUNCH = "/p/hypocenter/kernels/norm.py:9 launches rms_norm"


def test_the_one_changed_line_of_the_kernel_is_blamed() -> None:
    told = blamed(run_of(CHANGED, DIFFERS), run_of(KERNEL, ENDED))
    assert told == (
        "norm_kernel.py:6 `tl.store(out_ptr + at, x, mask=at < width - 1)`; in the good run "
        "`tl.store(out_ptr + at, x, mask=at < width)`"
    )


def test_two_changed_lines_are_not_told_apart() -> None:
    two = CHANGED.replace("mask=at < width)\n    #", "mask=at < width + 1)\n    #")
    assert blamed(run_of(two, DIFFERS), run_of(KERNEL, ENDED)) == LAUNCH


def _with_package(bad: Bundle, good: Bundle) -> tuple[Bundle, Bundle]:
    return msgspec.structs.replace(bad, packages={"triton": "3.9.0"}), good


def _with_command(bad: Bundle, good: Bundle) -> tuple[Bundle, Bundle]:
    return msgspec.structs.replace(bad, command=("hypo", "run", "--context", "9")), good


def _with_host(bad: Bundle, good: Bundle) -> tuple[Bundle, Bundle]:
    text = "x = 2\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    module = ModuleText(file="engine/a.py", digest=digest, text=text)
    return msgspec.structs.replace(bad, modules=(module,)), good


def _without_text_of_host(bad: Bundle, good: Bundle) -> tuple[Bundle, Bundle]:
    module = ModuleText(file="engine/a.py", digest="0", text="")
    return msgspec.structs.replace(bad, modules=(module,)), good


def _with_other_prompt(bad: Bundle, good: Bundle) -> tuple[Bundle, Bundle]:
    return run_of(CHANGED, DIFFERS, "k:2"), good


def _with_unknown_prompt(bad: Bundle, good: Bundle) -> tuple[Bundle, Bundle]:
    return run_of(CHANGED, DIFFERS, ""), run_of(KERNEL, ENDED, "")


def _with_other_input(bad: Bundle, good: Bundle) -> tuple[Bundle, Bundle]:
    events = [
        msgspec.structs.replace(
            event,
            inputs=tuple(msgspec.structs.replace(one, data=b"\1" * 12) for one in event.inputs[:1])
            + event.inputs[1:],
        )
        if isinstance(event, Stepped)
        else event
        for event in bad.events
    ]
    return msgspec.structs.replace(bad, events=tuple(events)), good


def _with_fault_in_good(bad: Bundle, good: Bundle) -> tuple[Bundle, Bundle]:
    return bad, msgspec.structs.replace(good, fault=DIFFERS)


@pytest.mark.parametrize(
    "other",
    [
        _with_package, _with_command, _with_host, _without_text_of_host, _with_other_prompt,
        _with_unknown_prompt, _with_other_input, _with_fault_in_good,
    ],
)  # fmt: skip
def test_it_is_not_blamed_where_more_than_it_may_differ(
    other: Callable[[Bundle, Bundle], tuple[Bundle, Bundle]],
) -> None:
    told = blamed(*other(run_of(CHANGED, DIFFERS), run_of(KERNEL, ENDED)))
    assert "norm_kernel.py" not in told
    assert LAUNCH.partition(" ")[0] in told or "engine/a.py" in told


def test_what_the_good_run_has_as_well_no_changed_line_has_made() -> None:
    assert blamed(run_of(CHANGED, DIFFERS), run_of(KERNEL, ENDED), is_shared=True) == LAUNCH


@pytest.mark.parametrize(
    "same",
    [
        KERNEL.replace("Nothing behind", "Never anything behind"),
        KERNEL.replace("    # Nothing behind the row.\n", ""),
        KERNEL.replace('"""Of one row."""', '"""Of a row."""'),
        KERNEL.replace("x_ptr + at, mask", "x_ptr + at,\n        mask"),
    ],
)
def test_a_comment_or_a_broken_line_is_no_change(same: str) -> None:
    assert same != KERNEL
    assert blamed(run_of(same, DIFFERS), run_of(KERNEL, ENDED)) == LAUNCH


def test_comments_beside_the_changed_line_are_not_counted() -> None:
    both = CHANGED.replace("Nothing behind", "Never anything behind").replace("Of one", "Of a")
    [line] = _changes(both)
    assert (line.line, line.was) == (6, "tl.store(out_ptr + at, x, mask=at < width)")
    gone = KERNEL.replace("    tl.store(out_ptr + at, x, mask=at < width)\n", "    return\n")
    assert [one.text for one in _changes(gone)] == ["return"]
    indented = "".join(f"    {line}\n" for line in both.splitlines())
    assert [one.line for one in _changes(indented)] == [6]


def _changes(text: str) -> list[Change]:
    def source(number: str, own: str) -> SourceRecord:
        return SourceRecord(
            id=number, function="norm_kernel", file="norm_gpu.py", first_line=1, text=own
        )

    launch = run_of(KERNEL, ENDED).plans[0].launches[0]
    launch = msgspec.structs.replace(launch, source="1")
    return changes(launch, {"1": source("1", text)}, texts_of([source("2", KERNEL)]))
