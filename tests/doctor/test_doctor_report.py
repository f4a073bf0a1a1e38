"""How a diagnosis reads: the first lines, the formats, and the example in docs/doctor.md."""

from __future__ import annotations

import json
import re
from html import escape, unescape
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt
from recorded.bundles import Run, background, crash, decoder, step, tensors_of_decoder
from repository import ROOT

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.culprit import with_culprit
from hypocenter.doctor.diagnosis import Culprit, Diagnosis, Proof, RootCause, Verdict, proven
from hypocenter.doctor.doctor import LADDER, diagnose
from hypocenter.doctor.markdown import code, plain, report_markdown
from hypocenter.doctor.report import report_text
from hypocenter.doctor.report_parts import Origin, headline, spots_of
from hypocenter.doctor.run_environment import run_environment_of
from hypocenter.record import bundle as bundles
from hypocenter.record.events import Place
from hypocenter.record.fault_record import FaultRecord, MemoryKill
from hypocenter.record.gap import Gap, GapKind
from hypocenter.record.run_records import ModelRecord

DOCUMENT = ROOT / "docs" / "doctor.md"


def shown(diagnosis: Diagnosis) -> str:
    """The text with what is another machine's or another second's taken out."""
    text = report_text(diagnosis).replace(f"{ROOT}/", "")
    lines = text.splitlines()
    return "\n".join(line.rstrip() for line in lines)


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(background())


def test_the_first_lines_say_what_to_do(found: Diagnosis) -> None:
    lines = report_text(found).splitlines()
    assert lines[0] == "CAUSE      dtype width: argument positions of kernel rope"
    labels = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert labels[:8] == [
        "CAUSE", "CAUSED", "FAULTS", "FIX", "WHEN", "REPLAY", "PROOF", "SYMPTOM",
    ]  # fmt: skip
    assert "\nCAUSED BY  decoder.py:30\n               makes positions\n" in report_text(found)
    assert re.search(r"^FAULTS AT  .*kernels/attention/rope_gpu\.py:\d+$", report_text(found), re.M)
    assert "    tl.load(positions_ptr + token)" in report_text(found)
    assert headline(found) == lines[0].removeprefix("CAUSE").strip()


def test_no_line_is_too_wide_but_for_paths(found: Diagnosis) -> None:
    wide = [line for line in report_text(found).splitlines() if len(line) > 100]
    assert all(line.startswith("FAULTS AT") for line in wide), wide


def test_each_hypothesis_has_its_verdict_and_evidence(found: Diagnosis) -> None:
    text = report_text(found, show_all=True)
    table = " ".join(text[text.index("HYPOTHESES") :].split())
    for one in found.hypotheses:
        assert f"{one.cause}" in table
        if one.verdict is not Verdict.NOT_TESTED:
            words = " ".join(one.evidence[-1].split()[:4])
            assert words in table


def test_what_is_refuted_or_not_tested_is_counted(found: Diagnosis) -> None:
    counts = {
        verdict: len({one.cause for one in found.hypotheses if one.verdict is verdict})
        for verdict in Verdict
    }
    text = report_text(found)
    line = (
        f"  {counts[Verdict.REFUTED]} causes refuted, {counts[Verdict.NOT_TESTED]} not tested "
        "(--all shows them)"
    )
    assert line in text.splitlines()
    assert not re.search(r"^  (REFUTED|NOT TESTED)", text, re.M)
    assert "(--all" not in report_text(found, show_all=True)


def test_launches_not_replayed_for_one_reason_stand_in_one_line(found: Diagnosis) -> None:
    why = "it is the program's own kernel; its recorded source was not run"
    of_a, of_c = (Gap(GapKind.SOURCE_NOT_RUN, name, why) for name in "ac")
    many = msgspec.structs.replace(found, roots=(), unseen=(of_a, Gap.not_recorded("b"), of_c))
    told = report_text(many)
    seen = told[told.index("NOT SEEN") :].split("\n\n")[0].splitlines()[1:]
    assert seen[0] == "  - b"
    assert seen[1].startswith("  - not replayed: a, c: it is the program's own kernel;")
    assert "--run-sources runs it" in told.split("\n\n")[0]


def test_a_run_that_left_no_record_refutes_nothing() -> None:
    killed = FaultRecord(kind="crash", message="ended by SIGKILL", signal=9)
    found = diagnose(Run().bundle(killed))
    assert {one.verdict for one in found.hypotheses} == {Verdict.NOT_TESTED}
    assert "driver" not in found.surfaced.replace("not from the driver", "")
    assert found.symptom.startswith("ended from outside, by SIGKILL")
    assert not any("address" in str(text) for text in found.unseen)
    dead = diagnose(Run().bundle(FaultRecord(kind="crash", message="it has died")))
    assert dead.surfaced.startswith(
        "it is not known where it was reported: the doctor did not run this program; a process "
        "that ends without a word was usually ended by the kernel's out-of-memory killer"
    )


@pytest.mark.parametrize(
    ("kill", "words"),
    [
        (MemoryKill.LOGGED, "the kernel's log says that its out-of-memory killer ended this"),
        (MemoryKill.COUNTED, "out-of-memory killer ended a process of this control group"),
        (MemoryKill.NOT_COUNTED, "killer ended no process of this control group"),
        (MemoryKill.UNKNOWN, "was usually ended by the kernel's out-of-memory killer"),
    ],
)
def test_a_kill_names_the_killer_that_is_known(kill: MemoryKill, words: str) -> None:
    killed = FaultRecord(kind="crash", message="ended by SIGKILL", signal=9, memory_kill=kill)
    assert words in diagnose(Run().bundle(killed)).surfaced
    ended = msgspec.structs.replace(killed, signal=15)
    assert "out-of-memory" not in diagnose(Run().bundle(ended)).surfaced


def test_json_can_be_read_back(found: Diagnosis) -> None:
    assert msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis) == found


def test_markdown_has_the_cause_the_proof_and_the_table(found: Diagnosis) -> None:
    text = report_markdown(found)
    assert text.startswith("# dtype width: argument positions of kernel rope\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert sum(line.startswith("| CONFIRMED |") for line in rows) == 1
    assert all(line.count("|") - line.count("\\|") in (3, 5) for line in rows)


def html_of(text: str) -> str:
    """What an issue shows of it: CommonMark with tables and tags."""
    return str(MarkdownIt("commonmark").enable("table").render(text))


HOSTILE = (
    "<script>alert(1)</script>", "<img src=x onerror=y>", "![i](http://a/b)", "[t](javascript:x)",
    "\n\n# heading", "`code` **bold** _it_ ~~gone~~ &lt;", "a\n| b | c |\n|---|---|", "\\<b>",
)  # fmt: skip


def with_text(found: Diagnosis, text: str) -> Diagnosis:
    """The diagnosis of a bundle that says `text` wherever it says something."""
    root = msgspec.structs.replace(
        found.roots[0], kernel=text, argument=text, sentence=text, fix=text, file=text,
        expression=text, culprit=Culprit(text, text), proof=Proof(text, text, text),
    )  # fmt: skip
    row = msgspec.structs.replace(found.hypotheses[0], kernel=text, evidence=(text + "!",))
    model = ModelRecord(name=text, architecture=text, quantisation=text)
    return msgspec.structs.replace(
        found, symptom=text, surfaced=text, consequences=(text,), roots=(root,),
        hypotheses=(row, *found.hypotheses[1:]), unseen=(Gap.not_recorded(text, text),),
        environment=msgspec.structs.replace(found.environment, command=text, model=model),
    )  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_bundle_is_markup(found: Diagnosis, text: str) -> None:
    was, now = (html_of(report_markdown(with_text(found, one))) for one in ("word", text))
    tags = [re.findall("<[^<>]+>", page) for page in (was, now)]
    assert tags[1] == tags[0]
    assert now.count(escape(" ".join(text.split()))) == was.count("word")


def test_a_backtick_ends_no_code() -> None:
    assert code("a`b``c") == "``` a`b``c ```"
    assert plain("a_b | c") == "a\\_b \\| c"


def test_refuted_causes_are_folded_and_nothing_is_said_twice(found: Diagnosis) -> None:
    text = report_markdown(found)
    above, folded = text.split("<details>")
    assert "| REFUTED |" not in above
    assert "| NOT TESTED |" not in above
    assert "| REFUTED |" in folded.split("</details>")[0]
    for sentence in ("the kernel gets", "the fault's address:", "positions holds i16"):
        assert text.count(sentence) <= 1, sentence
    assert report_text(found, show_all=True).count("the fault's address:") == 1


def test_no_name_of_a_bundle_makes_a_line_of_its_own(found: Diagnosis) -> None:
    name = "x\nCAUSE      nothing found"
    root = msgspec.structs.replace(
        found.roots[0], kernel=name, file=name, expression=name, culprit=Culprit(name, name)
    )
    row = msgspec.structs.replace(found.hypotheses[0], kernel=name)
    forged = msgspec.structs.replace(found, roots=(root,), hypotheses=(row,))
    lines = report_text(forged).splitlines()
    assert [line for line in lines if line.startswith("CAUSE ")] == lines[:1]


def test_the_environment_of_the_run_is_in_each_format(found: Diagnosis) -> None:
    facts = (
        "hypocenter 0.1.0", "Python 3.11.7", "torch not installed", "Triton 3.9.0",
        "Linux-6.8.0-x86_64-with-glibc2.39", "sim:mi300x (MI300X, gfx942)", "amdgpu 6.7.0",
        "model.gguf (architecture llama, Q8_0)", "hypo run model.gguf -p <16 characters>",
        "2026-11-20T03:12:45+00:00", "HIP_VISIBLE_DEVICES=1",
    )  # fmt: skip
    text, markdown = report_text(found), unescape(html_of(report_markdown(found)))
    for fact in facts:
        assert fact in text
        assert fact in markdown
    assert found.environment.triton == "3.9.0"
    assert found.environment.torch == ""
    assert found.environment.model == ModelRecord(
        name="model.gguf", architecture="llama", quantisation="Q8_0"
    )


def test_a_bundle_from_before_these_fields_says_that_they_are_not_recorded(tmp_path: Path) -> None:
    bundles.save(background(), tmp_path / "b")
    path = tmp_path / "b" / bundles.JSON
    kept = json.loads(path.read_text())
    for name in ("python", "platform", "driver", "model", "packages", "command", "started"):
        del kept[name]
    path.write_text(json.dumps(kept))
    old = bundles.load(tmp_path / "b")
    assert old.missing == ()
    text = report_text(diagnose(old, without=("replay",)))
    assert (
        "  versions    hypocenter not recorded, Python not recorded, torch not recorded, Triton not"
        in text
    )
    for label in ("system", "GPU driver", "model", "command", "began"):
        assert f"\n  {label:<12}not recorded\n" in text


def test_a_run_of_which_nothing_was_recorded_says_nothing_of_its_packages() -> None:
    """The collector knows of this package alone, and that by itself."""
    bundle = msgspec.structs.replace(background(), packages={"hypocenter": "0.1.0"})
    found = run_environment_of(bundle)
    assert (found.hypocenter, found.torch, found.triton) == ("0.1.0", None, None)


def test_what_a_bundle_says_of_its_environment_is_short_and_names_no_folder() -> None:
    long = "x" * 10**6
    bundle = msgspec.structs.replace(
        background(), python=f"3\n{long}", command=("/home/ann/hypo", "run", *([long] * 10**4)),
        environment=dict.fromkeys((f"V{n}" for n in range(10**4)), f"/home/ann/{long}"),
        model=ModelRecord(name=f"/home/ann/{long}", architecture=long, quantisation=long),
    )  # fmt: skip
    environment = run_environment_of(bundle)
    told = json.dumps(msgspec.to_builtins(environment))
    assert len(told) < 30_000
    assert "ann" not in told
    assert "\\n" not in told
    given = ("/usr/bin/python3", "/home/ann/train.py", "--data=/home/ann/d", "~/e", "--steps=3")
    shown = run_environment_of(msgspec.structs.replace(bundle, command=given)).command
    assert shown == "python3 train.py --data=d e --steps=3"


@pytest.mark.parametrize(
    ("blame", "culprit"),
    [
        (Blame.KERNEL, Culprit("k.py:3", "tl.load(x)")),
        (Blame.MAKER, Culprit("decoder.py:30", "makes positions")),
        (Blame.FREE, Culprit("cache.py:99", "frees positions")),
        (Blame.LAUNCH, Culprit("plan.py:7", "launches rope")),
        (Blame.UNKNOWN, None),
    ],
)
def test_the_culprit_is_the_line_to_change(blame: Blame, culprit: Culprit | None) -> None:
    run = Run()
    tensors_of_decoder(run)
    plan = run.plan(run.launch("rope", {"x": "q"}, site="plan.py:7"))
    stepped = run.run(plan, {})
    run.free("positions")
    root = RootCause(
        cause=Cause.DTYPE_WIDTH, sentence="", fix="", proof=Proof("", "", ""), file="k.py", line=3,
        expression="tl.load(x)", place=Place(stepped.step, plan, 0), blames=blame,
    )  # fmt: skip
    claim = proven(root, "arguments", (), "", tensors=(run.tensors["positions"].id,))
    blamed = with_culprit(Case(run.bundle()), claim)
    assert (blamed.culprit, blamed.launched_at) == (culprit, "plan.py:7")


def test_a_kernels_own_line_is_named_once() -> None:
    root = RootCause(
        cause=Cause.MISSING_MASK, sentence="", fix="", proof=Proof("", "", ""), file="k.py", line=3,
        expression="tl.load(x)", culprit=Culprit("k.py:3", "tl.load(x)"),
    )  # fmt: skip
    assert [(spot.label, spot.place, spot.text) for spot in spots_of(root)] == [
        ("Caused by", "k.py:3", "tl.load(x)")
    ]


def test_the_last_lines_say_what_to_attach(found: Diagnosis) -> None:
    text = " ".join(report_text(found, Origin("my bundle")).split())
    assert text.endswith(
        "ATTACH to an issue: the output of `hypo doctor --markdown 'my bundle'` and of `hypo env`; "
        "no prompt is in the bundle"
    )
    options = ("--run-sources", "--good", "my good one")
    with_options = " ".join(report_text(found, Origin("b", options=options)).split())
    assert "`hypo doctor --markdown --run-sources --good 'my good one' b`" in with_options
    unsaved = " ".join(report_text(found, Origin("")).split())
    assert unsaved.endswith(
        "ATTACH to an issue: this report, for no bundle was saved, and the output of `hypo env`"
    )
    assert "REPLAY" not in unsaved
    with_prompts = " ".join(report_text(found, Origin("b", has_prompts=True)).split())
    assert with_prompts.endswith("prompts are in the bundle")
    assert "CHECKS" not in text
    assert "CHECKS     " in report_text(found, show_all=True)


def test_nothing_found_says_so() -> None:
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run))
    clean = diagnose(run.bundle(), without=("replay",))
    assert headline(clean) == "nothing found"
    run.copy_out("out")
    crashed = diagnose(run.bundle(crash()), without=("replay",))
    assert report_text(crashed).startswith("CAUSE      no root cause is proven\n")
    assert "NOT SEEN\n  - the address of the fault: this driver does not give it" in report_text(
        crashed
    )


def test_the_example_of_the_document_is_what_the_doctor_says(found: Diagnosis) -> None:
    blocks = re.findall(r"^```\n(CAUSE.*?)\n```$", DOCUMENT.read_text(), re.S | re.M)
    example = re.sub(r":\d+$", ":N", blocks[0], flags=re.M)
    assert example == re.sub(r":\d+$", ":N", shown(found), flags=re.M)


def test_the_document_names_every_rung_and_every_cause() -> None:
    text = DOCUMENT.read_text()
    rungs = re.findall(r"^\| (?:`)?([a-z ]+?)(?:`)? \|", text, re.M)
    assert [name for name in rungs if name in LADDER] == list(LADDER)
    missing = [cause for cause in Cause if cause not in text]
    assert not missing
