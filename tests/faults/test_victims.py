"""Victims: each is declared, plants what it says and leaves nothing behind; then how they score."""

from __future__ import annotations

import hashlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from faults import model, victim_case, victims
from faults.harmless import find, harmless
from faults.judge import Says
from faults.lab import Lab
from faults.report import environment_of
from faults.row import Platform, Role, Row
from faults.table import slow_runs
from faults.victim import SYMPTOMS, Victim
from faults.victim import victims as registered
from faults.victim_case import HarmlessCase, VictimCase, declared_on, other_symptom
from faults.victim_run import run_child
from hypocenter.base.errors import UsageError
from hypocenter.base.package import recorded_kernel_module
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Proof, RootCause
from hypocenter.doctor.run_environment import run_environment_of
from hypocenter.kernels.attention import rope_gpu
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
            Cause.OLD_INTERPRETER,
            Cause.DEVICE_ASSERT,
            Cause.CAPTURE_REFUSED,
        ),
        "programs of others have it; tests/doctor/test_runtime_refusals.py has their words",
    ),
    **dict.fromkeys(
        (Cause.GRID_TOO_SMALL, Cause.TUNED_IN_PLACE, Cause.LANE_RACE, Cause.UNDEFINED_LANE),
        "kernels of others have it; faults/programs/ and tests/replay/test_lanes.py have some",
    ),
    **dict.fromkeys(
        (Cause.READ_IN_FLIGHT, Cause.REUSED_IN_FLIGHT),
        "programs of others have it; test_program_order.py and faults/programs/ have some",
    ),
    **dict.fromkeys(
        (Cause.PASSED_OVER, Cause.CHANGED_LINE),
        "it is the engine's own Python; faults/patches/ plants some",
    ),
    Cause.CARD_HARDWARE: "nothing breaks a card; tests/doctor/test_card_hardware.py has its words",
    Cause.LOST_RANK: "a victim has one process; tests/engine/test_rank_faults.py has two",
    Cause.ACCESS_OUTSIDE: "a guard or a sanitizer sees it; tests/foreign/test_again.py has some",
    **dict.fromkeys(
        (Cause.MISCOMPILED, Cause.FAULTY_GPU),
        "programs of others are compared; tests/doctor/test_compiled_code.py has both",
    ),
    Cause.SHORT_OPERANDS: "only a GPU cuts them; tests/doctor/test_short_operands.py has numbers",
    Cause.WILD_POINTER: "a simulated GPU leaves no core dump; faults/programs/gpu/ has some",
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
    assert not one.truth.lines or any(one.truth.kernels)


def test_harmless_changes_are_many_and_are_found_by_name() -> None:
    changes = harmless()
    assert len(changes) >= 20
    assert all(one.title and one.symptom == "none" for one in changes)
    names = [one.name for one in changes]
    assert not set(names) & {one.name for one in ALL}
    assert [one.name for one in find([names[0], "eps_is_one"])] == [names[0], "eps_is_one"]
    with pytest.raises(UsageError, match="no victim 'nobody'"):
        find(["nobody"])


def test_another_symptom_is_wrong_but_where_a_victim_says_so_of_machine_code() -> None:
    faults, has_nan = victim("grid_over_limit"), victim("nan_weight")
    other = victim("sentinel_block")
    assert (faults.symptom, has_nan.symptom, other.symptom) == ("error", "nonfinite", "nonfinite")
    assert other_symptom(Platform.SIMULATED, "error", faults) == []
    assert other_symptom(Platform.EMULATED, "differs", faults) == ["differs instead of error"]
    assert other_symptom(Platform.SIMULATED, "differs", has_nan) != []
    assert other_symptom(Platform.EMULATED, "differs", has_nan) == ["differs instead of nonfinite"]
    assert other_symptom(Platform.SIMULATED, "nonfinite", other) == []
    assert other_symptom(Platform.EMULATED, "differs", other) == []
    assert other_symptom(Platform.EMULATED, "nonfinite", other) != []
    assert other_symptom(Platform.CARD, "differs", faults) == []


def test_a_victim_is_run_with_the_symptom_that_it_has_on_the_platform() -> None:
    loose = victim("padding_token")
    assert loose.symptom == "crash"
    assert declared_on(Platform.SIMULATED, loose) is loose
    # What ends nothing by itself is traced, and held against its twin.
    assert declared_on(Platform.EMULATED, loose).symptom == "differs"
    kept = victim("key_offset_overflow")
    assert declared_on(Platform.EMULATED, kept) is kept


def test_what_amds_gpus_do_not_mind_is_no_case_of_theirs() -> None:
    aligned = VictimCase(victim("reused_specialisation"))
    assert Platform.EMULATED not in aligned.platforms
    assert Platform.SIMULATED in aligned.platforms
    assert Platform.EMULATED in VictimCase(victim("padding_token")).platforms


def test_only_a_known_symptom_is_declared_of_machine_code() -> None:
    declared = {one.name: one.as_machine_code for one in ALL if one.as_machine_code}
    assert declared == dict.fromkeys(
        ("kernel_casts_slots", "padding_token", "sentinel_block"), "differs"
    )
    assert set(declared.values()) <= set(SYMPTOMS)


@pytest.mark.tier("sim")
def test_a_harmless_change_raises_no_alarm_and_harm_among_such_is_found(tmp_path: Path) -> None:
    chosen = [one for one in harmless() if one.name in ("norm_made_twice", "renamed_buffers")]
    for change in chosen:
        [row] = HarmlessCase(change).run(Platform.SIMULATED, tmp_path)
        assert (row.symptom, row.role, row.is_as_wanted) == ("none", Role.HEALTHY, True), row
    case = VictimCase(victim("eps_among_other_changes"))
    fault, _ = case.run(Platform.SIMULATED, tmp_path)
    assert (fault.symptom, fault.says) == ("differs", Says.RIGHT)


def test_victims_cover_all_classes_symptoms_and_devices() -> None:
    assert {cause for one in ALL for cause in one.truth.causes} == set(Cause) - set(WITHOUT_VICTIM)
    assert {one.symptom for one in ALL} == set(SYMPTOMS)
    assert len({one.device for one in ALL}) == 3
    assert len({kernel for one in ALL for kernel in one.truth.kernels}) >= 9


PLANT = """
import json, linecache, sys
from faults.lab import Lab
from faults.harmless import harmless
from faults.victim import victims

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
    guilty = one.truth.lines if hasattr(one, "truth") else ()
    for line in guilty:
        count = sum(line in text for text in planted)
        if not count or (len(guilty) == 1 and count > 1):
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
    done = subprocess.run(
        [sys.executable, "-c", PLANT], capture_output=True, text=True, env=environment_of()
    )
    assert done.returncode == 0, done.stderr
    found, left = json.loads(done.stdout)
    assert found == {}
    assert left[0] == "hypocenter.kernels.attention.rope_gpu"
    assert left[1] == "_check"
    assert left[3].startswith("hypocenter.device")


def test_a_cache_has_one_context_unless_a_victim_says_otherwise() -> None:
    lab = Lab("cuda:0")
    assert lab.engine_config().kv_tokens == lab.config["context_length"] == 64
    lab.config["kv_tokens"] = 160
    assert lab.engine_config().kv_tokens == 160


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


# -- what a report is worth -----------------------------------------------------------------------

ROOT = RootCause(
    cause=Cause.DTYPE_WIDTH, sentence="", fix="Make positions with dtype i32",
    proof=Proof("red", "fact", "green"), kernel="rope_write", argument="positions_ptr",
)  # fmt: skip


@pytest.fixture(scope="module")
def background(tmp_path_factory: pytest.TempPathFactory) -> tuple[VictimCase, list[Row], Path]:
    """The case that began it all, and its twin, run once."""
    folder, case = tmp_path_factory.mktemp("victims"), VictimCase(victim("positions_of_two_bytes"))
    return case, case.run(Platform.SIMULATED, folder), folder


def test_the_background_case_is_solved_from_its_bundle(
    background: tuple[VictimCase, list[Row], Path],
) -> None:
    case, (fault, twin), folder = background
    assert (fault.symptom, fault.says, fault.problems) == ("crash", "right", [])
    assert (twin.symptom, twin.is_alarm) == ("none", False)
    again = case.named_again(folder, ())
    assert again is not None
    assert again.is_right
    text = (folder / case.name / "victim" / "bundle" / "bundle.json").read_text()
    assert "two_bytes" not in str(json.loads(text)["command"])


def test_only_the_first_cause_counts_and_a_wrong_one_is_false(
    background: tuple[VictimCase, list[Row], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, _, folder = background
    wrong = msgspec.structs.replace(ROOT, kernel="rope_write_and_more_kernel", argument="slots")
    for roots, is_named in (((), False), ((wrong,), False), ((wrong, ROOT), False)):
        monkeypatch.setattr(victim_case, "diagnose", lambda *_, said=roots, **__: told(*said))
        again = case.named_again(folder, ())
        assert (None if again is None else again.is_right) is is_named
    # A line is at fault, and this cause names none: true, and little.
    assert case.verdict([msgspec.to_builtins(ROOT)], None).says == "vague"


def test_what_is_said_of_the_address_counts_where_a_victim_declares_it() -> None:
    assert victim_case._explains(told(), "")
    assert not victim_case._explains(told(), "is the null page")


def told(*roots: RootCause) -> Diagnosis:
    bundle = Bundle(kind="crash", fault=FaultRecord(kind="crash", message=""))
    return Diagnosis(
        kind="crash", fault_kind="crash", symptom="", surfaced="",
        environment=run_environment_of(bundle), hypotheses=(), roots=roots, seconds=2.0,
    )  # fmt: skip


def test_a_doctor_that_is_slow_is_told() -> None:
    row = Row(
        collection="victims", name="a", platform=Platform.SIMULATED, role=Role.FAULT, seconds=10.5
    )
    assert "median is 10.5 s" in slow_runs([row])[0]
    quick = msgspec.structs.replace(row, seconds=1.0)
    assert slow_runs([quick]) == []
    [problem] = slow_runs([quick, quick, msgspec.structs.replace(row, seconds=61.0)])
    assert "slowest takes 61.0 s" in problem
    # Of programs the seconds are those of the whole command.
    assert slow_runs([msgspec.structs.replace(row, collection="programs", seconds=99.0)]) == []


@pytest.mark.tier("sim")
def test_what_parts_of_attention_leave_out_is_named_and_what_they_may_is_no_finding(
    tmp_path: Path,
) -> None:
    """They write what lies within a sequence, or what is hidden, only."""
    for one in registered(["key_not_expanded", "score_not_written"]):
        fault, twin = VictimCase(one).run(Platform.SIMULATED, tmp_path)
        assert (fault.symptom, twin.symptom, twin.is_alarm) == ("differs", "none", False)
        assert fault.claims["kernel"] == fault.claims["line"] == "right"


@pytest.mark.parametrize("name", ["odd_head_dim", "columns_not_written"])
@pytest.mark.tier("sim", fast=lambda case: case.name == "columns_not_written")
def test_a_victim_shows_what_it_declares(name: str, tmp_path: Path) -> None:
    one = victim(name)
    outcome = run_child(one, tmp_path / name, twin=False)
    assert outcome.symptom() == one.symptom, outcome.ended.stderr
    assert outcome.bundle is not None
