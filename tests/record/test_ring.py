"""The ring on its own: what was written is read, and of what is damaged only what is whole."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypocenter.record import ring
from hypocenter.record.events import (
    Allocated,
    AllocationRecord,
    AnyEvent,
    ArgumentDeclaration,
    ContractRecord,
    Copied,
    Declaration,
    Freed,
    Place,
    SourceRecord,
    Stepped,
    TensorRecord,
    Values,
)
from hypocenter.record.gap import Gap
from hypocenter.record.ring_writer import RingWriter
from hypocenter.record.run_records import ProcessRecord

SEGMENT_BYTES = 512


def _event(seq: int) -> AnyEvent:
    values = Values(1, "I32", (seq % 40,), bytes(range(seq % 40)))
    return Stepped(seq=seq, step=seq, plan=1, inputs=(values,), requests=())


DECLARATION = Declaration(
    kernel="rope", arguments=(ArgumentDeclaration(name="x", dtypes=("F32",), shape="n"),)
)
STATIC = (
    ProcessRecord(pid=1, command=("hypo", "run"), started="2026-01-01"),
    SourceRecord(id="ab", function="f", file="f.py", first_line=3, text="def f(): ..."),
    ContractRecord("rope", DECLARATION),
    TensorRecord(
        id=1, name="x", owner="decoder", dtype="F32", shape=(2, 3), strides=(3, 1), offset=0,
        allocation=7, address=4096, extent_bytes=24,
    ),
    Allocated(
        seq=1, step=0,
        allocation=AllocationRecord(
            id=7, kind="device", device="cuda", address=4096, num_bytes=24, name="x",
            owner="decoder", site="a.py:1",
        ),
    ),
    Freed(seq=2, step=0, allocation=7, site="a.py:2"),
)  # fmt: skip


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RingWriter]:
    made = RingWriter(tmp_path / "run", SEGMENT_BYTES)
    yield made
    if made._static_file >= 0:
        made.release()


def _written(writer: RingWriter, num_events: int) -> None:
    for record in STATIC:
        assert writer.static(record)
    for seq in range(3, 3 + num_events):
        assert writer.event(_event(seq))


def test_what_was_written_is_read(writer: RingWriter) -> None:
    _written(writer, 4)
    run = ring.read_run(writer.folder)
    assert run.missing == ()
    assert run.process == STATIC[0]
    assert run.sources == (STATIC[1],)
    assert run.contracts == {"rope": DECLARATION}
    assert run.tensors == (STATIC[3],)
    assert run.events == (*STATIC[4:], *map(_event, range(3, 7)))
    assert (run.pid, run.is_alive, run.is_clean) == (os.getpid(), True, False)


def test_records_of_one_launch_are_written_by_one_call_and_in_order(
    writer: RingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what is recorded fails in between: a launch is made all the same."""
    written: list[bytes] = []
    write = os.write

    def note(file: int, data: bytes) -> int:
        written.append(data)
        return write(file, data)

    monkeypatch.setattr(os, "write", note)
    with contextlib.suppress(ZeroDivisionError), writer.together():
        for record in STATIC[:-1]:
            assert writer.static(record)
        assert not written
        raise ZeroDivisionError
    assert len(written) == 1
    assert writer.static(STATIC[-1])
    assert len(written) == 2
    run = ring.read_run(writer.folder)
    assert run.missing == ()
    assert run.process == STATIC[0]
    assert run.events == STATIC[4:]


@pytest.mark.parametrize("num_events", [1, 13, 14, 15, 100, 1001])
def test_the_last_events_are_always_there(writer: RingWriter, num_events: int) -> None:
    _written(writer, num_events)
    seqs = [e.seq for e in ring.read_run(writer.folder).events if isinstance(e, Stepped)]
    assert seqs == list(range(seqs[0], 3 + num_events))
    # One segment was full, or nothing was lost at all.
    assert (
        len(seqs) == num_events or sum(len(_frame(_event(s))) for s in seqs) > SEGMENT_BYTES - 200
    )


def _frame(event: AnyEvent) -> bytes:
    return bytes(8) + msgspec.msgpack.encode(event)


def test_an_event_that_is_too_large_is_refused_and_nothing_else_is_lost(
    writer: RingWriter,
) -> None:
    _written(writer, 3)
    huge = Values(1, "U8", (2000,), bytes(2000))
    assert not writer.event(Stepped(seq=9, step=9, plan=1, inputs=(huge,), requests=()))
    assert writer.event(_event(10))
    assert [e.seq for e in ring.read_run(writer.folder).events] == [1, 2, 3, 4, 5, 10]


def test_a_full_log_says_so_and_takes_what_still_fits(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "run", SEGMENT_BYTES, static_bytes=500)
    long = SourceRecord(id="cd", function="g", file="f.py", first_line=1, text="x" * 500)
    assert [writer.static(one) for one in (STATIC[0], long, STATIC[5])] == [True, False, True]
    writer.close()
    assert ring.read_run(writer.folder).events == (STATIC[5],)


def test_only_the_user_reads_it(writer: RingWriter) -> None:
    assert stat.S_IMODE(writer.folder.stat().st_mode) == 0o700
    assert {f.name: stat.S_IMODE(f.stat().st_mode) for f in writer.folder.iterdir()} == {
        "static": 0o600,
        "ring": 0o600,
    }


def test_places_and_the_beat_of_the_heart(writer: RingWriter) -> None:
    cells = writer.header
    assert ring.read_heartbeat(writer.folder) == ring.Heartbeat(os.getpid(), False, 0, None, None)
    cells[ring.CELL_PLACE] = ring.place_word(70000, 3, 41)
    cells[ring.CELL_STEP], cells[ring.CELL_STEP_STARTED] = 70000, 123
    beat = ring.read_heartbeat(writer.folder)
    assert beat == ring.Heartbeat(os.getpid(), False, 70000, 123, Place(70000, 3, 41))
    assert ring.read_run(writer.folder).progress.submitted == Place(70000, 3, 41)
    writer.close()
    assert not ring.is_alive(writer.folder)
    beat = ring.read_heartbeat(writer.folder)
    assert beat is not None
    assert beat.is_clean
    assert ring.read_heartbeat(writer.folder.parent) is None


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_a_place_that_is_too_far_stops_at_the_limit(step: int, plan: int, launch: int) -> None:
    word = ring.place_word(step, plan, launch)
    assert 0 < word < 1 << 64
    place = Place(min(step, 2**32 - 1), min(plan, 2**16 - 1), min(launch, 2**16 - 1))
    assert ring.place_of(word) == place
    assert ring.place_of(0) is None


# -- damage --------------------------------------------------------------------------------------


def _originals(num_events: int) -> set[str]:
    return {repr(record) for record in (*STATIC, *map(_event, range(3, 3 + num_events)))}


def _records(run: ring.Run) -> set[str]:
    contracts = {repr(ContractRecord(name, text)) for name, text in run.contracts.items()}
    process = {repr(run.process)} if run.process else set()
    return process | contracts | {repr(r) for r in (*run.sources, *run.tensors, *run.events)}


@pytest.mark.parametrize("name", ["static", "ring"])
def test_a_file_cut_off_anywhere_gives_what_is_whole(writer: RingWriter, name: str) -> None:
    _written(writer, 30)
    path, known = writer.folder / name, _originals(30)
    whole, before = path.read_bytes(), -1
    # Every byte, but for the header of the ring, which is whole or is not.
    step = 1 if name == "static" else 61
    for length in [*range(0, ring.HEADER_BYTES, step), *range(ring.HEADER_BYTES, len(whole) + 1)]:
        if length > len(whole):
            break
        path.write_bytes(whole[:length])
        run = ring.read_run(writer.folder)
        found = _records(run)
        assert found <= known
        assert run.missing or length == len(whole) or name == "static"
        if name == "static":
            assert len(found) >= before
            before = len(found)
    assert len(_records(ring.read_run(writer.folder))) > 10


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_raise_and_never_invent(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder, files = _damaged(tmp_path_factory)
    for name, whole in files.items():
        broken = bytearray(whole)
        places = st.lists(
            st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 255)), max_size=6
        )
        for at, bits in data.draw(places):
            broken[at] ^= bits
        (folder / name).write_bytes(broken)
    assert _records(ring.read_run(folder)) <= _originals(30)
    ring.read_heartbeat(folder)


@settings(max_examples=100, deadline=None)
@given(static=st.binary(max_size=300), body=st.binary(max_size=5000))
def test_garbage_gives_nothing(
    tmp_path_factory: pytest.TempPathFactory, static: bytes, body: bytes
) -> None:
    folder, files = _damaged(tmp_path_factory)
    (folder / "static").write_bytes(static)
    (folder / "ring").write_bytes(files["ring"][: ring.HEADER_BYTES] + body)
    assert _records(ring.read_run(folder)) == set()
    (folder / "ring").write_bytes(body)
    assert ring.read_run(folder).missing != ()


_made: list[tuple[Path, dict[str, bytes]]] = []


def _damaged(factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A folder to break, and what stood there; one for all examples."""
    if not _made:
        writer = RingWriter(factory.mktemp("ring") / "run", SEGMENT_BYTES)
        _written(writer, 30)
        writer.release()
        files = {name: (writer.folder / name).read_bytes() for name in ("static", "ring")}
        _made.append((writer.folder, files))
    return _made[0]


def test_a_damaged_record_does_not_take_the_next_ones_with_it(writer: RingWriter) -> None:
    _written(writer, 5)
    path = writer.folder / "static"
    data = bytearray(path.read_bytes())
    data[data.index(b"def f()")] ^= 1
    path.write_bytes(data)
    run = ring.read_run(writer.folder)
    assert run.sources == ()
    assert run.tensors == (STATIC[3],)
    assert run.missing == (Gap.damage("static", "1 damaged records were passed over"),)


def test_frames_of_an_earlier_turn_are_not_read_again(writer: RingWriter) -> None:
    """Same sizes, so that an old frame stands just where a new one ends."""
    event = [Freed(seq=100 + i, step=1, allocation=1, site="") for i in range(120)]
    for one in event:
        writer.event(one)
    seqs = [e.seq for e in ring.read_run(writer.folder).events]
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == 219
    # Even without the zeros that end a segment, the turn in the checksum tells.
    whole, at = (writer.folder / "ring").read_bytes(), writer._at
    payload = msgspec.msgpack.encode(Freed(seq=999, step=1, allocation=1, site=""))
    for turn, is_read in ((writer._generation, True), (writer._generation - 2, False)):
        head = ring.FRAME_HEAD.pack(len(payload), ring.checksum(payload, turn))
        frame = head + payload
        (writer.folder / "ring").write_bytes(whole[:at] + frame + whole[at + len(frame) :])
        found = [e.seq for e in ring.read_run(writer.folder).events]
        assert found == [*seqs, 999] if is_read else found == seqs


def test_folders_are_listed_newest_first_and_links_are_not_followed(tmp_path: Path) -> None:
    for name in ("1-1", "2-2"):
        RingWriter(tmp_path / name, SEGMENT_BYTES).close()
    (tmp_path / "3-3").symlink_to(tmp_path / "1-1")
    (tmp_path / "notes").mkdir()
    assert [folder.name for folder in ring.run_folders(tmp_path)] == ["2-2", "1-1"]
    assert ring.run_folders(tmp_path / "nowhere") == []


def test_a_copy_out_is_a_copy_out(writer: RingWriter) -> None:
    event = Copied(seq=1, step=2, direction="out", tensor=3, address=1 << 60, num_bytes=8)
    writer.event(event)
    assert ring.read_run(writer.folder).events == (event,)
