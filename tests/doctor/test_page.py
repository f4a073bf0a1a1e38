"""The page of a report: what it shows, that it is whole, and that nothing of a bundle is markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter

import msgspec
import pytest
from outside.hostile_pages import ATTRIBUTES, ELEMENTS, HOSTILE, PageReader, hostile_bundle, page_of
from recorded.bundles import Run, background, crash, decoder, inputs, step, tensors_of_decoder
from recorded.foreign_launch import TAKE, launch_of

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Proof, RootCause
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.page import trace_events
from hypocenter.doctor.page.address_life import lives
from hypocenter.doctor.page.address_picture import address_picture, where_text
from hypocenter.doctor.page.address_space import AddressSpace, BlockState, address_space
from hypocenter.doctor.page.example_access import ExampleAccess, example_of
from hypocenter.doctor.page.markup import Html, bytes_text, prose, tag
from hypocenter.doctor.page.page import report_html
from hypocenter.doctor.page.source_view import SourceMark, source_html, source_views
from hypocenter.doctor.page.style import STYLE
from hypocenter.doctor.page.timeline import Kind, moments
from hypocenter.doctor.report_parts import Origin, count_of_others
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Captured, Place, Values
from hypocenter.record.fault_record import FaultRecord


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return background()


@pytest.fixture(scope="module")
def found(bundle: Bundle) -> Diagnosis:
    return diagnose(bundle)


@pytest.fixture(scope="module")
def page(bundle: Bundle, found: Diagnosis) -> str:
    return report_html(bundle, found, Origin("hypo-bundle"))


def test_the_page_says_what_the_report_says(page: str, found: Diagnosis) -> None:
    text, [root] = PageReader(page).text, found.roots
    assert text.startswith("dtype width: argument positions of kernel rope")
    for part in (
        root.sentence, root.fix, root.proof.red, root.proof.corrected, root.proof.green,
        "hypo replay hypo-bundle --step 1 --launch 1", "hypo replay hypo-bundle --step 1 --launch 1"
        " --export repro.py", count_of_others(found), "the kernel reads int32: [65536]",
        "held [0, 1, 2]", "Attach to an issue: the output of hypo doctor --markdown hypo-bundle",
    ):  # fmt: skip
        assert " ".join(part.split()) in text, part
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        "Where it shows", "The proof", "The memory around it", "What rope was given",
        "The end of the run", "How it showed", "What else was looked at",
    ]  # fmt: skip


def test_of_a_programs_floats_the_page_says_what_nobody_had_written() -> None:
    bundle = launch_of(TAKE, [0] * 99 + [10**6])
    [taken] = bundle.snapshots
    x = next(tensor.id for tensor in bundle.tensors if tensor.name == "x")
    data = bytes(4 * 97) + b"\xff" * 12
    values = (*taken.values, Values(x, "F32", (100,), data))
    held = msgspec.structs.replace(taken, values=values)
    bundle = msgspec.structs.replace(bundle, snapshots=(held,))
    found = diagnose(bundle, allow_source=True)
    assert found.roots
    text = PageReader(report_html(bundle, found, Origin("hypo-bundle"))).text
    assert "held 3 of 100 elements that nobody had written" in text


def test_a_page_runs_nothing_and_loads_nothing(page: str) -> None:
    read = PageReader(page)
    assert set(read.elements) <= ELEMENTS
    assert {name for name, _ in read.attributes} <= ATTRIBUTES
    policy = next(value for name, value in read.attributes if "default-src" in value)
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    assert policy.split("; ")[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert f"<style>{STYLE}</style>" in page
    assert not re.search(r"url\(|@import|https?:|<script|\bon\w+=", page.replace("url(#hatch)", ""))


@pytest.fixture(scope="module")
def harmless() -> PageReader:
    return PageReader(page_of(hostile_bundle("word")))


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_bundle_is_markup(text: str, harmless: PageReader) -> None:
    page = page_of(hostile_bundle(text))
    read = PageReader(page)
    assert set(read.elements) <= ELEMENTS
    assert {name for name, _ in read.attributes} <= ATTRIBUTES
    # Words of code have elements of their own, and what was between backticks is code.
    plain = {"span", "code"}
    assert {k: n for k, n in read.elements.items() if k not in plain} == {
        k: n for k, n in harmless.elements.items() if k not in plain
    }
    assert (
        len(read.attributes) - sum(name == "class" for name, _ in read.attributes)
        >= len(harmless.attributes) - sum(name == "class" for name, _ in harmless.attributes) - 8
    )
    assert all(character.isprintable() or character == "\n" for character in page)


def test_what_stands_in_a_source_is_text(bundle: Bundle) -> None:
    text = "@triton.jit\ndef k(x_ptr):\n    y = '</code><script>' # \u202e <b>\n    z = 1\n"
    run = Run()
    run.source(text)
    case = Case(run.bundle())
    [view] = source_views(case, None, [SourceMark("k.py", 3, "'</code><script>'")])
    html = source_html(view)
    assert "<script" not in html
    assert "<mark>" in html
    assert "\\u202e" in html
    assert PageReader(html).text.startswith("k.py:3 in k")


def test_a_long_function_is_shown_around_its_line() -> None:
    body = "".join(f"    a{n} = {n}\n" for n in range(100))
    run = Run()
    run.source(f"@triton.jit\ndef long(x_ptr):\n{body}")
    [view] = source_views(Case(run.bundle()), None, [SourceMark("long.py", 50, "a47 = 47")])
    assert (view.first_line, view.num_above) == (36, 35)
    assert view.lines[50 - view.first_line] == "    a47 = 47"
    assert view.num_above + len(view.lines) + view.num_below == 102


# -- memory ---------------------------------------------------------------------------------------


def freed_then_used() -> Bundle:
    """A graph over q, which is freed and whose place is given to another before its replay."""
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    run.run(plan, inputs())
    memory = run.tensors["q"].allocation
    run.emit(Captured, graph=1, plan=plan, allocations=(memory,))
    run.free("q")
    run.tensor("scratch", "F32", 4, 64, address=run.tensors["q"].address)
    run.run(plan, inputs(), graph=1)
    return run.bundle(crash(run.tensors["q"].address))


def space_of(bundle: Bundle) -> tuple[Case, Diagnosis, AddressSpace]:
    found = diagnose(bundle, without=("replay",))
    case = Case(bundle)
    space = address_space(case, found.roots[0], example_of(case, found.roots[0]))
    assert space is not None
    return case, found, space


def test_a_freed_block_and_its_heir_lie_at_the_wrong_address() -> None:
    _, _, space = space_of(freed_then_used())
    states = {block.name: block.state for block in space.blocks}
    assert (states["q"], states["scratch"]) == (BlockState.FREED, BlockState.LIVE)
    assert space.wrong is not None
    assert where_text(space.wrong, space.blocks) == "byte 0 of q, freed"
    assert [block.start for block in space.blocks] == sorted(b.start for b in space.blocks)
    assert address_picture(space).count("<title>") == len(space.blocks) + 1


def test_the_life_of_memory_is_told_in_order() -> None:
    case, found, space = space_of(freed_then_used())
    [life, *_] = lives(case, found.roots[0], space)
    assert life.name == "q"
    assert [event.verb for event in life.changes] == [
        "made", "first given to", "captured", "freed", "reused", "goes wrong in", "last given to",
    ]  # fmt: skip
    assert [event.verb for event in life.changes if event.is_wrong] == ["freed", "goes wrong in"]
    by_verb = {event.verb: event for event in life.changes}
    assert by_verb["freed"].site == "cache.py:99"
    assert by_verb["made"].site.startswith("decoder.py:")
    assert by_verb["reused"].text == "scratch lies there now"


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (-64, "64 bytes before cos"), (0, "byte 0 of cos"), (4095, "byte 4095 of cos"),
        (4096, "right behind the end of cos"), (5000, "904 bytes past the end of cos"),
    ],
)  # fmt: skip
def test_an_address_is_told_by_the_tensor_that_is_blamed(at: int, text: str) -> None:
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run))
    root = RootCause(
        cause=Cause.DTYPE_WIDTH, sentence="", fix="", proof=Proof("", "", ""),
        argument="cos", place=Place(1, 1, 1),
    )  # fmt: skip
    fault = msgspec.structs.replace(
        crash(), address=run.tensors["cos"].address + at, address_bytes=1
    )
    space = address_space(Case(run.bundle(fault)), root, ExampleAccess())
    assert space is not None
    assert space.wrong is not None
    assert where_text(space.wrong, space.blocks) == text


def test_without_an_address_there_is_no_picture() -> None:
    run = Run()
    tensors_of_decoder(run)
    assert address_space(Case(run.bundle()), None, ExampleAccess()) is None
    empty = Run().bundle(FaultRecord(kind="crash", message="it died"))
    text = PageReader(page_of(empty)).text
    assert "No root cause is proven" in text
    assert "The memory around it" not in text


# -- the timeline ---------------------------------------------------------------------------------


def test_the_timeline_has_everything_in_its_order(bundle: Bundle) -> None:
    told = list(moments(Case(bundle)))
    assert [moment.seq for moment in told] == sorted(moment.seq for moment in told)
    assert told[-1].kind is Kind.FAULT
    kinds = Counter(moment.kind for moment in told)
    assert kinds[Kind.ALLOCATION] == len(Case(bundle).allocations)
    assert kinds[Kind.LAUNCH] == len(Case(bundle).launches)
    assert any(moment.is_under_way for moment in told if moment.kind is Kind.LAUNCH)
    assert not any(moment.is_under_way for moment in told if moment.kind is not Kind.LAUNCH)


def test_a_trace_has_each_launch_and_marks_the_fault_and_the_cause(
    bundle: Bundle, found: Diagnosis
) -> None:
    trace = json.loads(trace_events.trace_json(bundle, found))
    events = trace["traceEvents"]
    told = list(moments(Case(bundle)))
    assert [e["ts"] for e in events if e["ph"] in "Xi" and e["cat"] != "cause"] == list(
        range(len(told))
    )
    launches = [e for e in events if e.get("cat") == "launch" and e["ph"] == "X"]
    assert [e["name"] for e in launches] == [u.launch.kernel for u in Case(bundle).launches]
    [step] = [e for e in events if e.get("cat") == "step"]
    assert step["ts"] < launches[0]["ts"] < step["ts"] + step["dur"] == launches[-1]["ts"] + 1
    [mark] = [e for e in events if e.get("cat") == "cause"]
    assert (mark["name"], mark["ph"]) == ("proven: dtype width", "i")
    assert events[-1]["cat"] == "fault"
    assert events[-1]["s"] == "g"
    live = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert live[-1] == sum(m.num_bytes for m in Case(bundle).allocations.values())
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["tid"] for e in events if e["ph"] in "Xi"} <= set(tracks)
    assert "launches, stream default" in tracks.values()


def test_a_trace_keeps_the_newest(
    bundle: Bundle, found: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_events, "MAX_MOMENTS", 3)
    trace = json.loads(trace_events.trace_json(bundle, found))
    kept = [e for e in trace["traceEvents"] if e["ph"] in "Xi" and e["cat"] != "cause"]
    assert len(kept) == 3
    assert kept[-1]["cat"] == "fault"
    num = len(list(moments(Case(bundle))))
    assert trace["otherData"]["left_out"] == f"{num - 3} older events"


# -- words ----------------------------------------------------------------------------------------


def test_only_what_tag_makes_is_markup() -> None:
    assert tag("p", "<b>", tag("b", "x"), title='"') == '<p title="&quot;">&lt;b&gt;<b>x</b></p>'
    assert tag("rect", x=1) == '<rect x="1"/>'
    assert prose("run `a<b` or `") == "run `a&lt;b` or `"
    assert prose("run `a<b`") == "run <code>a&lt;b</code>"
    assert isinstance(tag("p"), Html)
    with pytest.raises(ValueError, match="no name"):
        tag("p onload=x")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (1023, "1023 bytes"), (1024, "1 KiB"), (1 << 31, "2 GiB"),
     (3 << 19, "1.5 MiB"), (1 << 63, "8 EiB")],
)  # fmt: skip
def test_sizes_are_short(number: int, text: str) -> None:
    assert bytes_text(number) == text
