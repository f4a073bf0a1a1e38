"""The fault lab: every victim is declared, plants what it says and leaves nothing behind."""

from __future__ import annotations

import hashlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hypocenter.base.errors import UsageError
from hypocenter.base.package import recorded_kernel_module
from hypocenter.cli.verbs.lab import false_alarms, shortfalls
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Proof, RootCause
from hypocenter.doctor.run_environment import run_environment_of
from hypocenter.kernels.attention import rope_gpu
from hypocenter.lab import model, victims
from hypocenter.lab import score as scoring
from hypocenter.lab.harmless import find, harmless
from hypocenter.lab.lab import Lab
from hypocenter.lab.run import run_child
from hypocenter.lab.victim import SYMPTOMS, Victim
from hypocenter.lab.victim import victims as registered
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.tokenizer import load_tokenizer
from hypocenter.record.bundle import Bundle
from hypocenter.record.fault_record import FaultRecord

ALL = registered()
MAX_VICTIM_LINES = 75
#: Classes that no victim of the lab has, with the reason.
WITHOUT_VICTIM: dict[Cause, str] = {
    **dict.fromkeys(
        (
            Cause.TENSOR_MEMORY,
            Cause.NOT_COMPILED,
            Cause.NO_CONFIGURATION,
            Cause.DEVICE_ASSERT,
            Cause.CAPTURE_REFUSED,
        ),
        "programs of others have it; tests/doctor/test_runtime_refusals.py has their words",
    ),
    **dict.fromkeys(
        (Cause.GRID_TOO_SMALL, Cause.TUNED_IN_PLACE, Cause.LANE_RACE, Cause.UNDEFINED_LANE),
        "kernels of others have it; benchmarks/corpus/ and tests/replay/test_lanes.py have some",
    ),
    **dict.fromkeys(
        (Cause.READ_IN_FLIGHT, Cause.REUSED_IN_FLIGHT),
        "programs of others have it; tests/doctor/test_program_order.py and the corpus have some",
    ),
    **dict.fromkeys(
        (Cause.PASSED_OVER, Cause.CHANGED_LINE),
        "it is the engine's own Python; benchmarks/engine_faults/ plants some",
    ),
    Cause.CARD_HARDWARE: "nothing breaks a card; tests/doctor/test_card_hardware.py has its words",
    Cause.LOST_RANK: "a victim has one process; tests/engine/test_rank_faults.py has two",
    Cause.ACCESS_OUTSIDE: "a guard or a sanitizer sees it; tests/foreign/test_again.py has some",
    **dict.fromkeys(
        (Cause.MISCOMPILED, Cause.FAULTY_GPU),
        "programs of others are compared; tests/doctor/test_compiled_code.py has both",
    ),
    Cause.WILD_POINTER: "a simulated GPU leaves no core dump; benchmarks/gpu_programs/ has some",
}


def victim(name: str) -> Victim:
    return registered([name])[0]


def test_every_file_is_a_victim_and_there_are_enough() -> None:
    files = {path.stem for path in Path(victims.__path__[0]).glob("*.py")} - {"__init__"}
    assert {one.name for one in ALL} == files
    assert len(ALL) >= 40
    with pytest.raises(UsageError, match="no victim 'nobody'"):
        registered(["nobody"])


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_a_victim_is_short_and_declared(one: Victim) -> None:
    text = (Path(victims.__path__[0]) / f"{one.name}.py").read_text()
    assert len(text.splitlines()) <= MAX_VICTIM_LINES
    assert one.symptom in SYMPTOMS
    assert one.title
    assert one.source
    assert not one.lines or one.kernel


def test_harmless_changes_are_many_and_are_found_by_name() -> None:
    changes = harmless()
    assert len(changes) >= 20
    assert all(one.title and one.symptom == "none" for one in changes)
    names = [one.name for one in changes]
    assert not set(names) & {one.name for one in ALL}
    assert [one.name for one in find([names[0], "eps_is_one"])] == [names[0], "eps_is_one"]
    with pytest.raises(UsageError, match="no victim 'nobody'"):
        find(["nobody"])


@pytest.mark.tier("sim")
def test_a_harmless_change_raises_no_alarm_and_harm_among_such_is_found() -> None:
    chosen = [one for one in harmless() if one.name in ("norm_made_twice", "renamed_buffers")]
    for one in scoring.score_harmless(chosen):
        assert (one.observed, one.answers, one.found) == ("none", "same", ())
    [score] = scoring.score_all(registered(["eps_among_other_changes"]))
    assert (score.observed, score.class_right, score.kernel_named) == ("differs", True, True)
    assert score.argument_named


def test_an_alarm_of_a_harmless_change_is_told() -> None:
    quiet = scoring.HarmlessScore(
        name="one", observed="none", answers="same", found=(), seconds=1.0
    )
    assert false_alarms([quiet]) == []
    loud = msgspec.structs.replace(quiet, found=("wrong answer: rope.eps",), observed="differs")
    assert false_alarms([quiet, loud]) == [
        "1 of 2 harmless changes have findings", "1 of 2 harmless changes do harm",
    ]  # fmt: skip


def test_victims_cover_all_classes_symptoms_and_devices() -> None:
    assert {one.cause for one in ALL} == set(Cause) - set(WITHOUT_VICTIM)
    assert {one.symptom for one in ALL} == set(SYMPTOMS)
    assert len({one.device for one in ALL}) == 3
    assert len({one.kernel for one in ALL}) >= 9


PLANT = """
import json, linecache, sys
from hypocenter.lab.lab import Lab
from hypocenter.lab.harmless import harmless
from hypocenter.lab.victim import victims

def lines():
    # An edited module stands for the one that it is made of.
    texts = {}
    for prefix in ("hypocenter.kernels.", "hypocenter_lab."):
        for name, module in list(sys.modules.items()):
            if name.startswith(prefix) and name.endswith("_gpu") and module is not None:
                texts[name.rpartition(".")[2]] = linecache.getlines(module.__file__)
    return [line.strip() for text in texts.values() for line in text]

found = {}
for one in [*victims(), *harmless()]:
    for way in (one.twin, one.plant):
        try:
            with Lab(one.device) as lab:
                way(lab)
                planted = lines()
        except Exception as error:
            found[one.name] = repr(error)
    for line in getattr(one, "lines", ()):
        count = planted.count(line)
        if not count or (isinstance(one.line, str) and count > 1):
            found[one.name] = f"its line stands there {count} times"
from hypocenter.device import copies
from hypocenter.engine.runner import Runner
from hypocenter.kernels.attention import rope, rope_gpu
left = [
    rope_gpu.rope_kernel.fn.__module__, Runner._check.__name__, rope.CONTRACT.check.__module__,
    copies.to_device.__module__,
]
print(json.dumps([found, left]))
"""


def test_every_defect_goes_in_and_out_again() -> None:
    """In a process of its own: the texts that victims exchange are there, and restored."""
    done = subprocess.run([sys.executable, "-c", PLANT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, left = json.loads(done.stdout)
    assert found == {}
    assert left[0] == "hypocenter.kernels.attention.rope_gpu"
    assert left[1] == "_check"
    assert left[3].startswith("hypocenter.device")


def test_an_edit_that_finds_nothing_is_refused() -> None:
    before = rope_gpu.rope_kernel
    with Lab("sim:mi300x") as lab:
        with pytest.raises(UsageError, match="stands there 0 times"):
            lab.edit("rope_gpu", ("no such text", "x"))
        lab.edit("rope_gpu", ("tl.store(start + first, a,", "tl.store(start + first, b,"))
        assert rope_gpu.rope_kernel is not before
        assert "start + first, b, mask" in rope_gpu.rope_kernel.src
        # The doctor may then try the text that the project itself has.
        file = inspect.getfile(rope_gpu.rope_kernel.fn)
        assert recorded_kernel_module(file) == rope_gpu.__name__
    assert rope_gpu.rope_kernel is before


def test_the_model_is_the_same_everywhere_and_reads_text() -> None:
    assert hashlib.sha256(model.build("f32")).hexdigest()[:16] == F32_DIGEST
    with open_gguf(model.model_path("q8_0")) as file:
        tokenizer = load_tokenizer(file)
        ids = tokenizer.encode("the fault lab, é")
        assert max(ids) >= 256  # pairs are merged
        assert tokenizer.decode(ids) == "the fault lab, é"
        assert tokenizer.vocab_size == model.VOCAB_SIZE


F32_DIGEST = "527e27b57d022b82"


# -- what is scored -------------------------------------------------------------------------------

ROOT = RootCause(
    cause=Cause.DTYPE_WIDTH, sentence="", fix="", proof=Proof("red", "fact", "green"),
    kernel="rope_write", argument="positions_ptr",
)  # fmt: skip


def scored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one: scoring.Examined, *roots: RootCause
) -> scoring.Score:
    """The score of a victim whose doctor says `roots`, of its twin too."""
    bundle = Bundle(kind="crash", fault=FaultRecord(kind="crash", message=""))
    made = Diagnosis(
        kind="crash",
        fault_kind="crash",
        symptom="",
        surfaced="",
        environment=run_environment_of(bundle),
        hypotheses=(),
        roots=roots,
        seconds=2.0,
    )
    monkeypatch.setattr(scoring, "diagnose", lambda bundle, *given, **names: made)
    return scoring.score(one)


@pytest.fixture(scope="module")
def background(tmp_path_factory: pytest.TempPathFactory) -> Iterator[scoring.Examined]:
    """The case that began it all, and its twin, run once."""
    folder = tmp_path_factory.mktemp("lab")
    yield from scoring.examine([victim("positions_of_two_bytes")], folder)


@pytest.fixture(scope="module")
def solved(background: scoring.Examined) -> scoring.Score:
    return scoring.score(background)


def test_the_background_case_is_solved_from_its_bundle(
    background: scoring.Examined, solved: scoring.Score
) -> None:
    one = solved
    assert (one.observed, one.twin.observed, one.twin.found) == ("crash", "none", ())
    assert one.detected
    assert one.kernel_named
    assert one.argument_named
    assert one.line_named
    assert one.class_right
    assert one.proof
    assert shortfalls(scoring.total([one])) == []
    bundle = background.outcome.bundle
    assert bundle is not None
    assert "two_bytes" not in " ".join(bundle.command)


@pytest.mark.tier("sim")
def test_what_parts_of_attention_leave_out_is_named_and_what_they_may_is_no_finding(
    tmp_path: Path,
) -> None:
    """They write what lies within a sequence, or what is hidden, only."""
    planted = registered(["key_not_expanded", "score_not_written"])
    for one in map(scoring.score, scoring.examine(planted, tmp_path)):
        assert (one.observed, one.twin.observed, one.twin.found) == ("differs", "none", ())
        assert one.class_right
        assert (one.kernel_named, one.argument_named, one.line_named) == (True, True, True)
        assert one.proof


def test_a_wrong_answer_scores_nothing(
    background: scoring.Examined, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = scored(monkeypatch, tmp_path, background, ROOT)
    assert (right.kernel_named, right.argument_named, right.class_right) == (True, True, True)
    assert right.line_named is False
    assert right.twin.found == ("dtype width: rope_write.positions_ptr",)
    wrong = msgspec.structs.replace(
        ROOT, kernel="rope_write_and_more_kernel", argument="slots", cause=Cause.STALE_SLOT
    )
    one = scored(monkeypatch, tmp_path, background, wrong)
    assert (one.detected, one.kernel_named, one.argument_named) == (True, False, False)
    assert one.class_right is False
    # Only the first root counts: naming everything is no answer.
    assert not scored(monkeypatch, tmp_path, background, wrong, ROOT).kernel_named
    silent = scored(monkeypatch, tmp_path, background)
    assert (silent.detected, silent.proof, silent.twin.found) == (False, False, ())
    sums = scoring.total([right, one, msgspec.structs.replace(silent, observed="none")])
    assert (sums.num, sums.as_declared, sums.detected, sums.false_findings) == (3, 2, 2, 2)
    assert (sums.kernel_named, sums.argument_named, sums.class_right, sums.proof) == (1, 1, 1, 2)
    assert (sums.line_named, sums.num_with_line) == (0, 3)
    assert scoring.merit([right]) > scoring.merit([one]) > scoring.merit([silent]) == 0


def test_what_is_said_of_the_address_counts_where_a_victim_declares_it(
    background: scoring.Examined, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = scored(monkeypatch, tmp_path, background, ROOT)
    assert silent.address_explained is None
    declared = replace(background.victim, address="is the null page")
    asked = msgspec.structs.replace(background, victim=declared)
    untold = scored(monkeypatch, tmp_path, asked, ROOT)
    assert untold.address_explained is False
    told = msgspec.structs.replace(untold, address_explained=True)
    assert scoring.merit([told]) == scoring.merit([untold]) + 1


def test_what_falls_short_is_told(solved: scoring.Score) -> None:
    good = scoring.total([solved])
    for field, value, text in (
        ("detected", 0, "are detected"),
        ("as_declared", 0, "symptom that they declare"),
        ("kernel_named", 0, "kernel named"),
        ("argument_named", 0, "argument named"),
        ("class_right", 0, "class told right"),
        ("false_findings", 1, "healthy twins have findings"),
        ("median_seconds", 10.5, "median is 10.5 s"),
        ("most_seconds", 61.0, "slowest takes 61.0 s"),
    ):
        (problem,) = shortfalls(msgspec.structs.replace(good, **{field: value}))
        assert text in problem
    nearly = {"num": 20, "detected": 20, "as_declared": 20, "class_right": 19}
    nearly |= {"kernel_named": 19, "argument_named": 19}
    assert shortfalls(msgspec.structs.replace(good, **nearly)) == []


@pytest.mark.parametrize("name", ["odd_head_dim", "columns_not_written"])
@pytest.mark.tier("sim", fast=lambda case: case.name == "columns_not_written")
def test_a_victim_shows_what_it_declares(name: str, tmp_path: Path) -> None:
    one = victim(name)
    outcome = run_child(one, tmp_path / name, twin=False)
    assert outcome.symptom() == one.symptom, outcome.ended.stderr
    assert outcome.bundle is not None
