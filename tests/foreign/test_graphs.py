"""Graphs that a foreign program captures: what they took, and whether that lived at replays."""

from __future__ import annotations

import itertools
import json
import operator
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pretended.fake_gpu_tensors import FakeTensor, Launching, Storage, events
from repository import SUPPORT

from hypocenter.cli import app
from hypocenter.cli.verbs import doctor as cli_doctor
from hypocenter.cli.verbs.doctor import DoctorRequest
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Hypothesis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.page.timeline import moments
from hypocenter.foreign.graph_hooks import GraphWatch
from hypocenter.foreign.recorder import ForeignRecorder
from hypocenter.foreign.seen_graphs import MAX_CAPTURED, Segment
from hypocenter.record import ring
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Captured, Freed, GraphReplayed, Launched
from hypocenter.record.fault_record import FaultRecord
from hypocenter.watch import foreign_runs
from hypocenter.watch.child import Ended

PROGRAM = Path(__file__).parent / "programs" / "graphs.py"
#: What torch has: memory for all tensors, and a graph's own.
PUBLIC, PRIVATE = Segment(0x1000, 0x10000, False), Segment(0x20000, 0x1000, True)


class Graph:
    """Stands for a torch.cuda.CUDAGraph."""


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[ForeignRecorder]:
    opened = ForeignRecorder(tmp_path / "runs")
    yield opened
    opened.close()


def tensor(address: int) -> FakeTensor:
    return FakeTensor(Storage(address, 256), (64,))


def capture(recorder: ForeignRecorder, graph: Graph, *tensors: FakeTensor, **told: Any) -> None:
    """Capture a launch with each two tensors that follow one another."""
    launch = Launching(recorder)
    launch.graph, launch.is_compiled = graph, bool(told)
    recorder.record_capture(graph)
    for x, out in itertools.pairwise(tensors):
        launch[(1,)](x, out, 64)
    recorder.record_captured(graph, [PUBLIC, PRIVATE], "capture.py:1")


def bundle_of(recorder: ForeignRecorder) -> Bundle:
    run = ring.read_run(recorder.folder)
    return Bundle(
        kind="suspect", fault=FaultRecord(kind="none", message=""),
        tensors=run.tensors, events=run.events, sources=run.sources,
    )  # fmt: skip


def diagnosis(recorder: ForeignRecorder) -> Diagnosis:
    return diagnose(bundle_of(recorder), without=("replay",))


def told_of(found: Diagnosis, cause: Cause) -> Hypothesis:
    [told] = [one for one in found.hypotheses if one.cause is cause]
    return told


# -- what a graph takes ---------------------------------------------------------------------------


def test_a_captured_launch_runs_at_the_replays_of_its_graph(recorder: ForeignRecorder) -> None:
    graph, x, y = Graph(), tensor(0x1000), tensor(0x2000)
    capture(recorder, graph, x, y)
    Launching(recorder)[(1,)](y, x, 64)
    case = Case(bundle_of(recorder))
    assert [(use.step, use.graph) for use in case.launches] == [(2, 0)]
    [gap] = [
        gap for gap in foreign_runs.unseen(ring.read_run(recorder.folder)) if gap.what[0] == "1"
    ]
    assert gap.what == "1 launch captured into 1 graph"
    recorder.record_replay(graph, "replay.py:7", "0x10")
    recorder.record_replay(graph, "replay.py:8", "")
    case = Case(bundle_of(recorder))
    assert [(use.step, use.graph) for use in case.launches] == [(2, 0), (1, 1)]
    first, last = events(recorder, GraphReplayed)
    assert (first.site, first.stream, last.site) == ("replay.py:7", "0x10", "replay.py:8")
    assert case.launches[-1].seq == last.seq
    assert case.launches[-1].where == "launch 1 at script.py:9, captured into graph 1"
    [captured] = events(recorder, Captured)
    [taken, plain] = events(recorder, Launched)
    assert captured.seq < taken.seq < plain.seq
    assert (taken.graph, plain.graph) == (1, 0)
    summary = foreign_runs.summary(case.bundle.events, case.bundle.sources)
    assert summary == "2 launches of 1 kernel seen, some in 1 graph"
    lines = [(moment.kind, moment.name, moment.text) for moment in moments(case)]
    assert ("graph", "graph 1", "takes a launch of kernel") in lines
    assert [line for line in lines if line[2] == "is replayed"] == 2 * [
        ("graph", "graph 1", "is replayed")
    ]
    assert lines[-1] == ("launch", "kernel", "grid 1")


def test_a_capture_that_fails_and_one_that_is_made_anew(recorder: ForeignRecorder) -> None:
    graph, x, y, z = Graph(), tensor(0x1000), tensor(0x2000), tensor(0x3000)
    launch = Launching(recorder)
    launch.graph, launch.is_compiled = graph, True
    recorder.record_capture(graph)
    launch[(1,)](x, y, 64)
    recorder.record_replay(graph, "replay.py:7", "")  # of what is no graph
    assert events(recorder, Captured) == events(recorder, GraphReplayed) == []
    told = told_of(diagnosis(recorder), Cause.CAPTURE_REFUSED)
    assert (told.verdict, told.kernel) == (Verdict.INCONCLUSIVE, "kernel")
    assert "for its launch at script.py:9, while graph 1 was captured" in told.evidence[0]
    capture(recorder, graph, y, z)
    del y
    capture(recorder, graph, x, z)
    recorder.record_replay(graph, "replay.py:9", "")
    assert [event.graph for event in events(recorder, Captured)] == [2, 3]
    found = diagnosis(recorder)
    assert found.roots == ()
    assert told_of(found, Cause.CAPTURED_POINTER).verdict is Verdict.INCONCLUSIVE


def test_of_many_captured_launches_the_first_stay(
    recorder: ForeignRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(recorder._log, "keep_event", kept.append)
    x, graph = tensor(0x1000), Graph()
    launch = Launching(recorder)
    launch.graph = graph
    recorder.record_capture(graph)
    for _ in range(MAX_CAPTURED + 5):
        launch[(1,)](x, x, 64)
    assert sum(isinstance(event, Launched) for event in kept) == MAX_CAPTURED


# -- whether its memory lives ---------------------------------------------------------------------


def test_a_replay_over_freed_memory_is_named_with_its_lines(recorder: ForeignRecorder) -> None:
    graph, x, out = Graph(), tensor(0x1000), tensor(0x2000)
    Launching(recorder)[(1,)](x, out, 64)
    capture(recorder, graph, x, out)
    recorder.record_replay(graph, "replay.py:7", "")
    assert diagnosis(recorder).roots == ()
    assert foreign_runs.stale_graphs(bundle_of(recorder).events) == []
    line = sys._getframe().f_lineno + 1
    del x
    recorder.record_replay(graph, "replay.py:8", "")
    heir = tensor(0x1000)
    Launching(recorder)[(1,)](heir, out, 64)
    [root] = diagnosis(recorder).roots
    assert (root.cause, root.kernel, root.argument) == (Cause.CAPTURED_POINTER, "kernel", "x_ptr")
    assert root.tensor == "x"
    for part in (
        "graph 1, captured at capture.py:1, was replayed at replay.py:8 over x",
        "first given to kernel at script.py:9",
        f"was freed at {__file__}:{line}",
    ):
        assert part in root.sentence
    assert root.culprit is not None
    assert root.culprit.place == f"{__file__}:{line}"
    assert root.launched_at == "script.py:9"
    assert root.proof.green.startswith("0 of the graph's replays")
    assert foreign_runs.stale_graphs(bundle_of(recorder).events) == [1]
    told = told_of(diagnosis(recorder), Cause.CAPTURED_POINTER)
    assert "its memory now belongs to heir" in told.evidence


def test_a_program_that_ends_well_over_freed_memory_is_told_so(
    recorder: ForeignRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    graph, x, out = Graph(), tensor(0x1000), tensor(0x2000)
    capture(recorder, graph, x, out)
    ended = Ended(("x",), 1, 0, None, "", started=0.0, ended=1.0, since=0.0)
    request = DoctorRequest(command=("python", "x.py"))
    seen = "1 launch of 1 kernel seen, some in 1 graph"
    for told in (
        f"hypo: nothing found; {seen}; --suspect replays them\n",
        f"hypo: nothing crashed; {seen}; graph 1 was replayed over memory that had been freed: "
        "--suspect names it\n",
    ):
        recorder.record_replay(graph, "replay.py:7", "")
        assert cli_doctor._leave(request, ended, ring.read_run(recorder.folder)) == 0
        assert capfd.readouterr().err == told
        x = tensor(0x3000)


def test_a_storage_that_lives_on_with_other_memory_counts_as_freed(
    recorder: ForeignRecorder,
) -> None:
    graph, x, out = Graph(), tensor(0x1000), tensor(0x2000)
    capture(recorder, graph, x, out)
    x.untyped_storage().address = 0x9000
    recorder.record_replay(graph, "replay.py:8", "")
    [root] = diagnosis(recorder).roots
    assert "over x (first given to kernel at script.py:9), which was resized" in root.sentence
    assert root.culprit is None
    del x
    recorder.record_replay(graph, "replay.py:9", "")
    assert len(events(recorder, Freed)) == 1


def test_memory_of_graphs_and_of_other_libraries_may_go(recorder: ForeignRecorder) -> None:
    graph, x, between, other = Graph(), tensor(0x1000), tensor(0x20000), tensor(0x50000)
    capture(recorder, graph, x, between, other, compiled=True)
    del between, other
    recorder.record_replay(graph, "replay.py:8", "")
    assert len(events(recorder, Freed)) == 2
    [captured] = events(recorder, Captured)
    assert len(captured.allocations) == 1
    assert foreign_runs.stale_graphs(bundle_of(recorder).events) == []
    case, found = Case(bundle_of(recorder)), diagnosis(recorder)
    assert found.roots == ()
    for use in case.launches:  # nor does a replay of the launch find them gone
        assert use.place is not None
        for name in case.tensors_of(use.launch).values():
            assert case.index.is_freed(name.allocation, use.place) is None
    told = told_of(found, Cause.CAPTURED_POINTER)
    assert told.verdict is Verdict.INCONCLUSIVE
    assert told.evidence == (
        "the memory of 1 captured graph lived at each of its 1 replay",
        "pointers that kernels of torch's own hold in graphs are not known",
    )
    assert told_of(found, Cause.CAPTURE_REFUSED).verdict is Verdict.REFUTED


def test_where_torch_has_no_table_nothing_is_said_of_memory(recorder: ForeignRecorder) -> None:
    graph, x, out = Graph(), tensor(0x1000), tensor(0x2000)
    recorder.record_capture(graph)
    launch = Launching(recorder)
    launch.graph = graph
    launch[(1,)](x, out, 64)
    recorder.record_captured(graph, [], "capture.py:1")
    del x
    recorder.record_replay(graph, "replay.py:8", "")
    found = diagnosis(recorder)
    assert found.roots == ()
    assert told_of(found, Cause.CAPTURED_POINTER).evidence[0] == (
        "1 graph captured, 1 replay: no memory of torch's outside the graphs' own pools is known "
        "that they point into"
    )


def test_a_log_that_begins_anew_keeps_the_graphs(tmp_path: Path) -> None:
    opened = ForeignRecorder(tmp_path / "runs", static_bytes=20_000)
    graph, x, out = Graph(), tensor(0x1000), tensor(0x2000)
    capture(opened, graph, x, out)
    folder = opened.folder
    for number in range(300):
        y = FakeTensor(Storage(0x100000 + 0x1000 * number, 256), (64,))
        Launching(opened)[(4,)](y, out, 64)
        if number == 150:
            del x
    assert opened.folder != folder
    opened.record_replay(graph, "replay.py:8", "")
    for number in range(300):
        y = FakeTensor(Storage(0x300000 + 0x1000 * number, 256), (64,))
        Launching(opened)[(4,)](y, out, 64)
    opened.record_replay(graph, "replay.py:9", "")
    [root] = diagnosis(opened).roots
    assert (root.cause, root.tensor) == (Cause.CAPTURED_POINTER, "x")
    assert "captured at capture.py:1, was replayed at replay.py:9 over x" in root.sentence
    bundle = bundle_of(opened)
    assert {source.function for source in bundle.sources} == {"kernel"}
    [taken] = [e for e in bundle.events if isinstance(e, Launched) and e.graph]
    known = {record.id for record in bundle.tensors}
    assert {one.tensor for one in taken.launch.arguments if one.tensor} <= known
    lost = 601 - len([e for e in bundle.events if isinstance(e, Launched)])
    gaps = [gap.what for gap in foreign_runs.unseen(ring.read_run(opened.folder))]
    assert f"the first {lost} of 601 launches" in gaps
    opened.close()


# -- how torch's graphs are watched ---------------------------------------------------------------


class PlainGraph:
    """torch.cuda.CUDAGraph, as far as it is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def capture_begin(self, pool: Any = None, *, capture_error_mode: str = "global") -> str:
        self.calls.append(("begin", pool, capture_error_mode))
        return "begun"

    def capture_end(self) -> str:
        self.calls.append("end")
        if "fail" in self.calls:
            raise RuntimeError("CUDA error: operation failed")
        return "ended"

    def replay(self) -> str:
        self.calls.append("replay")
        return "replayed"


@pytest.fixture
def watched() -> Any:
    """A torch of words, what it tells, and the watch over its graphs."""
    kind = type("CUDAGraph", (PlainGraph,), {})
    told: list[Any] = []
    recording = SimpleNamespace(
        record_capture=lambda graph: told.append(("begin", graph)),
        record_captured=lambda *facts: told.append(("end", *facts)),
        record_replay=lambda *facts: told.append(("replay", *facts)),
    )
    cuda = SimpleNamespace(
        CUDAGraph=kind, is_current_stream_capturing=lambda: True,
        current_device=lambda: 0,
        current_stream=lambda device: SimpleNamespace(cuda_stream=0x20),
        memory_snapshot=lambda: [
            {"address": 1, "total_size": 2, "segment_pool_id": (0, 0)},
            {"address": 3, "total_size": 4, "segment_pool_id": (0, 1)},
            {"address": 5, "total_size": 6},
        ],
    )  # fmt: skip
    watch = GraphWatch(lambda: recording, operator.call)  # type: ignore[arg-type, return-value]
    watch.watch(SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None)))
    return SimpleNamespace(kind=kind, told=told, watch=watch, cuda=cuda)


def test_who_listens_is_told_of_each_capture(watched: Any) -> None:
    heard: list[bool] = []
    watched.watch.listeners.append(heard.append)
    graph = watched.kind()
    graph.capture_begin()
    assert heard == [True]
    graph.capture_end()
    assert heard == [True, False]


def test_torchs_graphs_do_as_before_and_are_seen(watched: Any) -> None:
    graph = watched.kind()

    def into() -> Any:
        return watched.watch.captured_into

    assert into() is None
    assert graph.capture_begin((0, 1), capture_error_mode="relaxed") == "begun"
    assert into() is graph
    elsewhere: list[Any] = []
    backward = threading.Thread(target=lambda: elsewhere.append(into()))
    backward.start()
    backward.join()
    assert elsewhere == [graph]  # a backward pass launches in another thread
    watched.cuda.is_current_stream_capturing = lambda: False
    assert into() is None  # another stream
    watched.cuda.is_current_stream_capturing = lambda: True
    assert graph.capture_end() == "ended"
    assert into() is None
    line = sys._getframe().f_lineno + 1
    assert graph.replay() == "replayed"
    assert graph.calls == [("begin", (0, 1), "relaxed"), "end", "replay"]
    begun, ended, replayed = watched.told
    assert begun == ("begin", graph)
    assert ended[:2] == ("end", graph)
    assert ended[2] == [Segment(1, 2, False), Segment(3, 4, True), Segment(5, 6, False)]
    assert replayed == ("replay", graph, f"{__file__}:{line}", "0x20")


def test_an_allocator_that_is_not_torchs_has_no_table(watched: Any) -> None:
    def refuse() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support getting memory snapshots")

    watched.cuda.memory_snapshot = refuse
    graph = watched.kind()
    graph.capture_begin()
    graph.capture_end()
    assert watched.told[-1][:3] == ("end", graph, [])


def test_a_capture_that_torch_refuses_is_none(watched: Any) -> None:
    graph = watched.kind()
    graph.capture_begin()
    graph.calls.append("fail")
    with pytest.raises(RuntimeError, match="operation failed"):
        graph.capture_end()
    assert watched.told == [("begin", graph)]
    assert watched.watch.captured_into is None


# -- end to end, on a GPU that is not there -------------------------------------------------------


@pytest.mark.parametrize("case", ["freed", "healthy", "compiled"])
@pytest.mark.tier("sim", fast=lambda case: case.case == "freed")
def test_a_program_with_a_graph_is_examined_though_it_ends_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as left:
        app.main(
            [
                "doctor",
                "--suspect",
                "--json",
                "--",
                sys.executable,
                str(PROGRAM),
                case,
                str(SUPPORT),
            ]
        )
    shown = capfd.readouterr()
    assert shown.out, shown.err
    said = json.loads(shown.out)
    lines = {
        text: number
        for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
        for text in (
            "tl.load(x_ptr",
            "x = torch",
            "with torch",
            "# captured",
            "del x",
            "# the last",
        )
        if text in line
    }
    compiled = [one for one in said["hypotheses"] if one["cause"] == Cause.CAPTURE_REFUSED]
    named = f"for its launch at {PROGRAM}:{lines['# captured']}, while graph 1 was captured"
    assert [named in one["evidence"][0] for one in compiled if one["kernel"]] == (
        [True] if case == "compiled" else []
    )
    if case != "freed":
        assert said["roots"] == []
        assert left.value.code == 0
        return
    [root] = said["roots"]
    assert (left.value.code, root["cause"], root["tensor"]) == (3, Cause.CAPTURED_POINTER, "x")
    assert (root["file"], root["line"]) == (str(PROGRAM), lines["tl.load(x_ptr"])
    for words, text in (("captured at", "with torch"), ("made at", "x = torch"),
                        ("was freed at", "del x"), ("was replayed at", "# the last")):  # fmt: skip
        assert f"{words} {PROGRAM}:{lines[text]}" in root["sentence"]
    assert root["culprit"]["place"] == f"{PROGRAM}:{lines['del x']}"
