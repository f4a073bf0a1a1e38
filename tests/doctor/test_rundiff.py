"""Two recorded runs: where they part is named by step, launch and fact; equal ones say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from outside.terminal import hypo_in_process

from hypocenter.cli.verbs import replay
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Verdict
from hypocenter.doctor.diff import differing_pairs, rundiff
from hypocenter.doctor.difference import Answers, Difference
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.report_parts import headline
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.engine_events import Answered
from hypocenter.record.events import (
    Allocated,
    AllocationRecord,
    ArgumentRecord,
    Launched,
    LaunchRecord,
    Place,
    PlanRecord,
    Reached,
    RequestRecord,
    SourceRecord,
    Statistics,
    Stepped,
    TensorRecord,
    Values,
)
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.gap import Gap

replace = msgspec.structs.replace


def _tensor(number: int, name: str, dtype: str, shape: tuple[int, ...], base: int) -> TensorRecord:
    return TensorRecord(
        id=number, name=name, owner="step", dtype=dtype, shape=shape, strides=(1,) * len(shape),
        offset=0, allocation=number, address=base + 512 * number,
        extent_bytes=4 * int(np.prod(shape)),
    )  # fmt: skip


def _launch(kernel: str, *tensors: int, **more: Any) -> LaunchRecord:
    arguments = [ArgumentRecord(f"a{i}", tensor=number) for i, number in enumerate(tensors)]
    arguments.append(ArgumentRecord("head_dim", value=16))
    given: dict[str, Any] = {
        "grid": (3, 2), "num_warps": 4, "constants": {"BLOCK": 8},
        "arguments": tuple(arguments), "source": "s1",
    }  # fmt: skip
    return LaunchRecord(
        kernel=kernel, function=f"{kernel}_kernel", device="sim:h200", **given | more
    )


def _figures(place: Place, tensor: int, digest: str, mean: float = 0.5) -> Statistics:
    return Statistics(place=place, tensor=tensor, digest=digest, low=0.0, high=1.0, mean=mean,
                      rms=0.6, num_nan=0, num_inf=0)  # fmt: skip


def _run(base: int = 0x1000, ids: int = 0, steps: int = 3) -> Bundle:
    """A run of two launches per step; addresses and identities differ from run to run."""
    x, positions = _tensor(ids + 1, "x", "F32", (3, 8), base), _tensor(
        ids + 2, "positions", "I32", (4,), base
    )  # fmt: skip
    launches = (_launch("rms_norm", x.id), _launch("rope", x.id, positions.id))
    events: list[Any] = [
        Allocated(seq=i + 1, step=0, allocation=AllocationRecord(
            id=one.id, kind="device", device="sim:h200", address=one.address, num_bytes=512,
            name=one.name, owner=one.owner, site="a.py:1"))
        for i, one in enumerate((x, positions))
    ]  # fmt: skip
    statistics = []
    for step in range(1, steps + 1):
        held = np.array([step, step + 1, 0], np.int32)
        events.append(Stepped(
            seq=10 + step, step=step, plan=ids + 1,
            inputs=(Values(positions.id, "I32", (3,), held.tobytes()),),
            requests=(RequestRecord(id=1, row=0, first_position=step, num_tokens=1, blocks=(4,),
                                    digest=f"d{step}"),),
        ))  # fmt: skip
        statistics += [_figures(Place(step, ids + 1, i), x.id, f"{step}.{i}" * 8) for i in (0, 1)]
    return Bundle(
        kind="suspect", fault=FaultRecord(kind="none", message=""), device="sim:h200",
        tensors=(x, positions), events=tuple(events), statistics=tuple(statistics),
        plans=(PlanRecord(id=ids + 1, name="step", device="sim:h200", launches=launches),),
        sources=(SourceRecord(id="s1", function="rope_kernel", file="/a/rope_gpu.py",
                              first_line=1, text=""),),
    )  # fmt: skip


def _with_launch(bundle: Bundle, number: int, **changes: Any) -> Bundle:
    plan = bundle.plans[0]
    launches = list(plan.launches)
    launches[number] = replace(launches[number], **changes)
    return replace(bundle, plans=(replace(plan, launches=tuple(launches)),))


def _with_step(bundle: Bundle, step: int, **changes: Any) -> Bundle:
    events = tuple(
        replace(e, **changes) if isinstance(e, Stepped) and e.step == step else e
        for e in bundle.events
    )
    return replace(bundle, events=events)


def first(good: Bundle, bad: Bundle) -> Difference:
    found = rundiff(good, bad).first
    assert found is not None
    return found


def test_equal_runs_have_no_difference_whatever_their_addresses() -> None:
    found = rundiff(_run(), _run(base=0x7000000, ids=40))
    assert not found.differences
    assert not found.around
    assert not found.unseen
    assert tuple(msgspec.structs.astuple(found.compared)) == (3, 6, 15, 3, 6)


@pytest.mark.parametrize(
    ("changes", "what", "subject", "good", "bad"),
    [
        ({"grid": (3, 1)}, "grid", "", "[3, 2]", "[3, 1]"),
        ({"kernel": "rope2"}, "launch", "name", "rope", "rope2"),
        ({"num_warps": 8}, "option", "num_warps", "4", "8"),
        ({"constants": {"BLOCK": 16}}, "option", "BLOCK", "8", "16"),
        ({"options": {"num_stages": 2}}, "option", "num_stages", "None", "2"),
    ],
)
def test_a_launch_that_differs_is_named(
    changes: dict[str, Any], what: str, subject: str, good: str, bad: str
) -> None:
    found = first(_run(), _with_launch(_run(ids=9), 1, **changes))
    assert (found.step, found.launch, found.what, found.subject) == (1, 1, what, subject)
    assert (found.good, found.bad) == (good, bad)
    assert found.text.startswith("step 1, launch 1 (rope")


def test_what_the_gpu_decides_is_no_difference() -> None:
    """The same run on another GPU of the vendor, or with a wait after each launch."""
    given = {"constants": {"BLOCK": 8, "OVERLAPS": True}, "options": {"launch_pdl": True}}
    good = _with_launch(_run(), 0, **given)
    bad = _with_launch(_run(), 0, constants={"BLOCK": 8, "OVERLAPS": False})
    assert rundiff(good, bad).differences == ()


def test_an_argument_differs_by_what_its_tensor_is() -> None:
    bad = _run(ids=9)
    tensors = tuple(
        replace(t, dtype="I16", extent_bytes=8) if t.name == "positions" else t for t in bad.tensors
    )
    found = first(_run(), replace(bad, tensors=tensors))
    assert (found.launch, found.what, found.subject) == (1, "argument", "a1")
    assert found.good == "dtype I32, extent_bytes 16"
    assert found.bad == "dtype I16, extent_bytes 8"


def test_a_scalar_and_a_short_allocation_differ() -> None:
    arguments = (*_run().plans[0].launches[0].arguments[:-1], ArgumentRecord("head_dim", value=17))
    found = first(_run(), _with_launch(_run(), 0, arguments=arguments))
    assert (found.subject, found.good, found.bad) == ("head_dim", "16", "17")
    bad = _run()
    events = tuple(
        replace(e, allocation=replace(e.allocation, num_bytes=8))
        if isinstance(e, Allocated) and e.seq == 2
        else e
        for e in bad.events
    )
    found = first(_run(), replace(bad, events=events))
    assert (found.launch, found.good, found.bad) == (
        1, "allocation bytes 512", "allocation bytes 8",
    )  # fmt: skip


def test_an_input_differs_at_its_first_element() -> None:
    values = Values(2, "I32", (3,), np.array([2, 99, 0], np.int32).tobytes())
    found = first(_run(), _with_step(_run(), 2, inputs=(values,)))
    assert (found.step, found.launch, found.what) == (2, None, "input")
    assert (found.subject, found.good, found.bad) == ("positions[1]", "3", "99")


def test_a_request_differs_by_its_digest_and_its_blocks() -> None:
    request = RequestRecord(id=7, row=0, first_position=3, num_tokens=1, blocks=(5,), digest="e")
    found = rundiff(_run(), _with_step(_run(), 3, requests=(request,)))
    assert [(one.what, one.subject) for one in found.differences] == [
        ("tokens", "0"), ("request", "0, blocks"),
    ]  # fmt: skip
    assert found.differences[0].text == "step 3: request 0 has got other tokens in BAD than in GOOD"
    assert found.compared.num_steps == 2


def test_runs_of_different_prompts_are_called_so_and_nothing_else_is_told() -> None:
    request = RequestRecord(id=7, row=0, first_position=1, num_tokens=1, blocks=(5,), digest="e")
    held = Values(2, "I32", (3,), np.zeros(3, np.int32).tobytes())
    bad = _with_step(_run(), 1, requests=(request,), inputs=(held,))
    [found] = rundiff(_run(), bad).differences
    assert found.text == (
        "step 1: the two runs were given different prompts (request 0); compare runs of the same "
        "command"
    )
    diagnosis = diagnose(bad, _run(), without=("replay",))
    [told] = [row for row in diagnosis.hypotheses if row.cause is Cause.WRONG_ANSWER]
    assert (told.verdict, told.evidence) == (Verdict.INCONCLUSIVE, (found.text,))
    assert any("run the same command for both" in gap.reason for gap in diagnosis.unseen)
    assert diagnosis.not_compared == "the two runs were asked for different things"
    # Of a run whose first steps are not there nobody knows whether this was the prompt.
    late = [
        replace(run, events=tuple(event for event in run.events if event.step != 1))
        for run in (_run(), _with_step(_run(), 2, requests=(request,)))
    ]
    assert rundiff(*late).differences[0].what == "tokens"


def test_a_prompt_of_another_length_is_no_other_plan(tmp_path: Path) -> None:
    longer = RequestRecord(id=7, row=0, first_position=1, num_tokens=2, blocks=(5,), digest="e")
    run = _run()
    other = replace(run.plans[0], id=9, name="step of 2 tokens")
    bad = _with_step(replace(run, plans=(*run.plans, other)), 1, requests=(longer,), plan=9)
    [found] = rundiff(run, bad).differences
    assert found.is_of_prompts
    assert "2 in BAD, by another prompt or another -b; compare runs of the same" in found.text
    diagnosis = diagnose(bad, run, without=("replay",))
    assert headline(diagnosis).startswith("the runs cannot be compared: ")
    for name, bundle in (("good", run), ("bad", bad)):
        bundles.save(bundle, tmp_path / name)
    done = hypo_in_process("doctor", str(tmp_path / "bad"), "--good", str(tmp_path / "good"))
    assert done.returncode == 2
    assert "CAUSE      the runs cannot be compared: " in done.stdout
    assert "nothing found" not in done.stdout


def test_runs_of_which_nothing_is_recorded_are_not_compared() -> None:
    empty = replace(_run(), events=())
    assert "neither run recorded a step" in headline(diagnose(empty, empty, without=("replay",)))
    same = diagnose(_run(), _run(), without=("replay",))
    assert (same.not_compared, headline(same)) == ("", "nothing found")


def test_no_name_of_a_bundle_makes_a_line_of_its_own() -> None:
    forged = "x\nCAUSE      nothing found"
    bad = _with_launch(replace(_run(), packages={"torch": forged}), 1, kernel=forged)
    lines = replay.diff_text(rundiff(_run(), bad)).splitlines()
    assert not [line for line in lines if line.startswith("CAUSE")]
    assert sum("\\nCAUSE" in line for line in lines) == 2


def test_digests_of_two_machines_say_nothing_of_each_other() -> None:
    request = RequestRecord(id=7, row=0, first_position=3, num_tokens=1, blocks=(4,), digest="k:d3")
    found = rundiff(_run(), _with_step(_run(), 3, requests=(request,)))
    assert not found.differences
    [gap] = [gap for gap in found.unseen if "token ids" in gap.what]
    assert "two machines" in gap.reason


def test_the_first_tensor_that_differs_after_its_launch_is_named() -> None:
    bad = _run()
    changed = tuple(
        replace(one, digest="x" * 64, mean=0.7) if one.place.step >= 2 and one.place.launch else one
        for one in bad.statistics
    )
    found = first(_run(), replace(bad, statistics=changed))
    assert (found.step, found.launch, found.what, found.subject) == (2, 1, "statistics", "x")
    assert "mean 0.5," in found.good
    assert "mean 0.7," in found.bad


def test_between_devices_figures_count_and_not_bytes() -> None:
    bad = replace(_run(), device="sim:mi300x")
    changed = tuple(replace(one, digest="y" * 64, mean=0.5001) for one in bad.statistics)
    found = rundiff(_run(), replace(bad, statistics=changed))
    assert found.differences == ()
    assert found.around == ("device: sim:h200 in GOOD, sim:mi300x in BAD",)
    changed = tuple(replace(one, num_nan=1) for one in bad.statistics)
    assert first(_run(), replace(bad, statistics=changed)).what == "statistics"


def test_a_run_that_died_ends_where_the_other_goes_on() -> None:
    bad = replace(_run(), progress=Reached(Place(2, 1, 0)))
    found = first(_run(), replace(bad, events=tuple(e for e in bad.events if e.step < 3)))
    assert (found.step, found.launch, found.what) == (2, 1, "end")
    assert (found.good, found.bad) == ("goes on with rope", "ends there")
    shorter = first(_run(), _run(steps=2))
    assert (shorter.step, shorter.what, shorter.good) == (3, "end", "1 plans or launches")


def test_a_launch_too_many_is_named_and_the_others_are_compared() -> None:
    plan = _run().plans[0]
    twice = replace(plan, launches=(*plan.launches, plan.launches[1]))
    found = first(_run(), replace(_run(), plans=(twice,)))
    assert (found.what, found.launch, found.good, found.bad) == ("launch", 2, "absent", "rope")
    before = replace(plan, launches=(plan.launches[1], *plan.launches))
    found = first(_run(), replace(_run(), plans=(before,)))
    assert (found.what, found.launch, found.good, found.bad) == ("launch", 0, "absent", "rope")
    shorter = replace(plan, launches=plan.launches[1:])
    found = first(_run(), replace(_run(), plans=(shorter,)))
    assert (found.what, found.good, found.bad) == ("launch", "rms_norm", "absent")
    pairs, compared = differing_pairs(_run(), replace(_run(), plans=(before,), statistics=()))
    assert [pair.facts[0].launch for pair in pairs] == [0, 0, 0]
    assert compared.num_launches == 6


def _answered(run: Bundle, digest: str, request: int = 1, failed: str = "") -> Bundle:
    event = Answered(seq=99, step=3, request=request, num_tokens=4, digest=digest, failed=failed)
    return replace(run, events=(*run.events, event))


def test_whether_the_answers_differ_is_known_where_all_requests_ended_in_both() -> None:
    good = _answered(_run(), "k:a")
    for other, answers in (
        (_answered(_run(), "k:a"), Answers.SAME),
        (_answered(_run(), "k:b"), Answers.DIFFERENT),
        (_answered(_run(), "k:a", failed="GrammarError"), Answers.DIFFERENT),
        (_answered(_run(), "other:a"), Answers.UNKNOWN),
        (_answered(_run(), "k:a", request=2), Answers.UNKNOWN),
        (_run(), Answers.UNKNOWN),
    ):
        assert rundiff(good, other).answers is answers
    failed = _answered(_run(), "k:a", failed="GrammarError")
    assert rundiff(failed, failed).answers is Answers.SAME


def test_results_that_rounding_tells_apart_are_no_wrong_ones() -> None:
    def with_sketch(run: Bundle, digest: str, *sketch: float) -> Bundle:
        figures = [replace(one, digest=digest, sketch=sketch) for one in run.statistics]
        return replace(run, statistics=tuple(figures))

    good = with_sketch(_run(), "a" * 64, 0.5, -0.2)
    for sketch, is_wrong in (((0.5005, -0.2), False), ((0.51, -0.2), True), ((), True)):
        pairs, _ = differing_pairs(good, with_sketch(_run(), "b" * 64, *sketch))
        assert (pairs[-1].wrong is not None) is is_wrong
        assert len(pairs) == (1 if is_wrong else 6)


def test_a_buffer_of_another_name_is_told_as_that_and_compared_by_its_argument() -> None:
    bad = _run()
    tensors = tuple(replace(t, name="stream") if t.name == "x" else t for t in bad.tensors)
    pairs, compared = differing_pairs(_run(), replace(bad, tensors=tensors))
    assert all(fact.is_renamed for pair in pairs for fact in pair.facts)
    assert compared.num_statistics == 6
    # One that goes by both names is another tensor.
    swapped = _with_launch(replace(bad, tensors=tensors), 1, arguments=(
        ArgumentRecord("a0", tensor=2), ArgumentRecord("a1", tensor=2),
        ArgumentRecord("head_dim", value=16),
    ))  # fmt: skip
    pairs, _ = differing_pairs(_run(), swapped)
    assert not all(fact.is_renamed for pair in pairs for fact in pair.facts)


def test_launches_outside_of_plans_are_compared_too() -> None:
    def outside(grid: tuple[int, ...]) -> Bundle:
        event = Launched(seq=50, step=0, launch=_launch("theirs", grid=grid))
        return Bundle(kind="crash", fault=FaultRecord(kind="crash", message=""), events=(event,))

    assert rundiff(outside((1,)), outside((1,))).compared.num_launches == 1
    assert first(outside((1,)), outside((2,))).what == "grid"


def test_what_could_not_be_compared_is_said() -> None:
    bare = replace(_run(), statistics=())
    assert rundiff(bare, _run()).unseen == (
        Gap.not_recorded("tensor statistics", "GOOD has none; run it with --launch-mode traced"),
    )
    late = replace(_run(), events=tuple(e for e in _run().events if e.step != 1))
    assert rundiff(_run(), late).unseen == (
        Gap.not_recorded("steps before 2", "one run has kept no record of them"),
    )  # fmt: skip
    changed = replace(_run(), sources=(replace(_run().sources[0], id="s2"),))
    assert rundiff(_run(), changed).around == ("source of rope_kernel: s1 in GOOD, s2 in BAD",)


def test_the_command_says_it_and_leaves_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    bundles.save(_run(), good)
    bundles.save(_with_launch(_run(ids=9), 1, grid=(3, 1)), bad)
    replay.diff(good, good, as_json=False)
    assert capsys.readouterr().out == (
        "no difference\ncompared: 3 whole steps, 6 launches with 15 arguments, 3 inputs, "
        "6 tensors after their launch\n"
    )
    with pytest.raises(SystemExit) as left:
        replay.diff(good, bad, as_json=False)
    assert left.value.code == 4
    assert "launch 1 (rope): grid: [3, 2] in GOOD, [3, 1] in BAD\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        replay.diff(good, bad, as_json=True)
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["differences"][0]["what"] == "grid"


def test_it_needs_neither_triton_nor_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = sys.modules['torch'] = sys.modules['numba'] = None\n"
        "import hypocenter.doctor.diff, hypocenter.cli.verbs.replay\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
