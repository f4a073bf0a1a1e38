"""Bundles come back as they were saved, and folders from strangers do no harm."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hypocenter.base.errors import BadBundle
from hypocenter.base.tensor import DType
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle, load, save
from hypocenter.record.contents import LaunchOutcome, Snapshot
from hypocenter.record.events import (
    Allocated,
    AllocationRecord,
    ArgumentRecord,
    Called,
    Freed,
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
from hypocenter.record.gap import Gap, GapKind


def _damaged(bundle: Bundle) -> list[str]:
    return [gap.what for gap in bundle.missing if gap.kind is GapKind.DAMAGED]


FAULT = FaultRecord(kind="crash", message="ended by SIGABRT", signal=6, address=4096)

texts = st.text(max_size=12)
numbers = st.integers(0, (1 << 63) - 1)
small = st.integers(0, 1000)
scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | texts
arguments = st.builds(ArgumentRecord, name=texts, tensor=st.none() | small, value=scalars)
constants = st.dictionaries(st.text("abc_", min_size=1, max_size=4), scalars, max_size=2)
launches = st.builds(
    LaunchRecord, kernel=texts, function=texts, device=texts, grid=st.tuples(small, small),
    arguments=st.lists(arguments, max_size=2).map(tuple), constants=constants, options=constants,
)  # fmt: skip
allocations = st.builds(
    AllocationRecord, id=small, kind=texts, device=texts, address=numbers, num_bytes=numbers,
    name=texts, owner=texts, site=texts,
)  # fmt: skip


@st.composite
def values(draw: st.DrawFn) -> Values:
    dtype = draw(st.sampled_from([DType.I32, DType.I16, DType.F32, DType.U8, DType.Q8_0]))
    shape = [*draw(st.lists(st.integers(0, 3), max_size=3)), dtype.block_elements]
    num_bytes = dtype.num_bytes(math.prod(shape))
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    return Values(draw(small), dtype.name, tuple(shape), data)


@st.composite
def tensors(draw: st.DrawFn) -> TensorRecord:
    shape = tuple(draw(st.lists(small, max_size=4)))
    return TensorRecord(
        id=draw(small), name=draw(texts), owner=draw(texts), dtype="F32", shape=shape,
        strides=(1,) * len(shape), offset=draw(small), allocation=draw(small),
        address=draw(numbers), extent_bytes=draw(numbers),
    )  # fmt: skip


several_values = st.lists(values(), max_size=3).map(tuple)
requests = st.builds(
    RequestRecord, id=small, row=small, first_position=small, num_tokens=small,
    blocks=st.lists(small, max_size=3).map(tuple), digest=texts,
)  # fmt: skip
events = st.lists(
    st.builds(Allocated, seq=small, step=small, allocation=allocations)
    | st.builds(Freed, seq=small, step=small, allocation=small, site=texts)
    | st.builds(Called, seq=small, step=small, call=texts, outcome=texts)
    | st.builds(
        Stepped, seq=small, step=small, plan=small, inputs=several_values,
        requests=st.lists(requests, max_size=2).map(tuple),
    ),
    max_size=6,
)  # fmt: skip
statistics = st.builds(
    Statistics, place=st.builds(Place, small, small, small), tensor=small, digest=texts,
    low=st.floats(), high=st.floats(), mean=st.floats(), rms=st.floats(), num_nan=small,
    num_inf=small,
)  # fmt: skip
whole_bundles = st.builds(
    Bundle,
    version=st.just(bundles.VERSION),
    kind=st.sampled_from(bundles.KINDS),
    command=st.lists(texts, max_size=3).map(tuple),
    environment=st.dictionaries(texts, texts, max_size=2),
    limits=st.none() | st.just({"arch": "gfx942", "max_grid_dims": (1, 2, 3), "wavefront": 64}),
    fault=st.just(FAULT),
    progress=st.just(Reached(Place(3, 1, 7), None)),
    tensors=st.lists(tensors(), max_size=3).map(tuple),
    plans=st.lists(
        st.builds(
            PlanRecord, id=small, name=texts, device=texts,
            launches=st.lists(launches, max_size=3).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    sources=st.lists(
        st.builds(SourceRecord, id=texts, function=texts, file=texts, first_line=small, text=texts),
        max_size=4,
    ).map(tuple),
    events=events.map(tuple),
    statistics=st.lists(statistics, max_size=2).map(tuple),
    snapshots=st.lists(st.builds(Snapshot, small, small, small, several_values), max_size=3).map(
        tuple
    ),
    stderr=texts,
    kernel_log=st.lists(texts, max_size=2).map(tuple),
    missing=st.lists(st.builds(Gap, st.sampled_from(GapKind), texts, texts), max_size=2).map(tuple),
    redacted=st.booleans(),
)  # fmt: skip


def plain(value: Any) -> Any:
    """With NaN as a word, so that equal bundles compare equal."""
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def same(left: Bundle, right: Bundle) -> bool:
    return bool(plain(msgspec.to_builtins(left)) == plain(msgspec.to_builtins(right)))


def stepped(step: int, num_tokens: int = 4) -> Stepped:
    data = np.full(num_tokens, step, np.int32).tobytes()
    inputs = (Values(1, "I32", (num_tokens,), data),)
    return Stepped(seq=10 + step, step=step, plan=1, inputs=inputs, requests=())


def allocated(number: int) -> Allocated:
    record = AllocationRecord(
        id=number, kind="device", device="sim:mi300x", address=4096 * number, num_bytes=512,
        name="positions", owner="step", site="decoder.py:12",
    )  # fmt: skip
    return Allocated(seq=number, step=0, allocation=record)


@pytest.fixture
def example() -> Bundle:
    source = SourceRecord(
        id="ab" * 32, function="rope_kernel", file="rope.py", first_line=3, text="def rope(): ...\n"
    )
    return Bundle(
        kind="crash", fault=FAULT, events=(allocated(1), stepped(1), stepped(2)),
        sources=(source,), stderr="Memory access fault\n",
    )  # fmt: skip


@pytest.fixture
def folder(example: Bundle, tmp_path: Path) -> Path:
    save(example, tmp_path / "b")
    return tmp_path / "b"


# -- round trip -----------------------------------------------------------------------------------


@given(made=whole_bundles)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_bundle_comes_back_as_it_was(made: Bundle, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("bundles") / "b"
    assert same(save(made, path), made)
    assert same(load(path), made)


def test_equal_numbers_keep_their_own_arrays(tmp_path: Path) -> None:
    one = stepped(1)
    other = msgspec.structs.replace(one, inputs=(Values(1, "I32", (1,), b"abcd"),))
    snapshots = (Snapshot(1, 1, 1, one.inputs), Snapshot(1, 1, 1, other.inputs))
    made = Bundle(kind="crash", fault=FAULT, events=(one, other), snapshots=snapshots)
    save(made, tmp_path / "b")
    assert load(tmp_path / "b") == made


def test_an_outcome_comes_back_with_all_that_it_held(tmp_path: Path) -> None:
    held = tuple(
        Values(number, name, (2,), bytes(2 * width))
        for number, (name, width) in enumerate((("F64", 8), ("BOOL", 1), ("U64", 8), ("BF16", 2)))
    )
    outcome = LaunchOutcome(step=3, launch=9, given=held, gave=held[:1], num_again=3)
    made = Bundle(kind="suspect", fault=FAULT, outcomes=(outcome,))
    save(made, tmp_path / "b")
    assert load(tmp_path / "b") == made


def test_outcomes_that_no_run_left_or_that_have_no_room_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = (Values(1, "U8", (100,), bytes(100)),)
    whole = [LaunchOutcome(step=1, launch=n, given=held, gave=()) for n in range(3)]
    odd = msgspec.structs.replace(whole[0], num_again=-5)
    save(Bundle(kind="suspect", fault=FAULT, outcomes=(odd, whole[1])), tmp_path / "a")
    found = load(tmp_path / "a")
    assert found.outcomes == (whole[1],)
    assert "outcomes[0]" in str(found.missing[0])
    monkeypatch.setattr(bundles, "MAX_OUTCOME_BYTES", 250)
    kept = save(Bundle(kind="suspect", fault=FAULT, outcomes=tuple(whole)), tmp_path / "b")
    assert kept.outcomes == tuple(whole[:2])
    assert "the last 1 of 3 outcomes" in str(kept.missing[0])


def test_only_the_owner_reads_it_and_people_can(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    text = (folder / "bundle.json").read_text()
    assert json.loads(text)["fault"]["signal"] == 6
    assert sum('"Stepped"' in line for line in text.splitlines()) == 2
    assert (folder / "stderr.txt").read_text() == "Memory access fault\n"
    [source] = (folder / "sources").iterdir()
    assert source.name == "rope_kernel_abababababababab.py"
    arrays = safetensors.numpy.load_file(folder / "arrays.safetensors")
    assert [array.view(np.int32).tolist() for array in arrays.values()] == [[1] * 4, [2] * 4]


def test_nothing_is_overwritten_and_no_half_folder_stays(
    example: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadBundle, match="is there already"):
        save(example, folder)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        save(example, folder.with_name("c"))
    assert [path.name for path in folder.parent.iterdir()] == ["b"]


def test_the_file_that_there_is_no_room_for_is_named(
    example: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(inside: int, path: str, flags: int) -> int:
        if path.endswith("arrays.safetensors"):
            raise OSError(28, "No space left on device")
        return os.open(path, flags, 0o600, dir_fd=inside)

    monkeypatch.setattr(bundles, "_private", full)
    with pytest.raises(OSError, match="No space") as told:
        save(example, tmp_path / "c")
    assert told.value.filename == str(tmp_path / "c" / "arrays.safetensors")
    assert list(tmp_path.iterdir()) == []


# -- limits ---------------------------------------------------------------------------------------


def test_the_oldest_steps_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAX_ARRAYS_BYTES", 2 * 5 * 16)
    made = Bundle(
        kind="crash", fault=FAULT, events=(allocated(1), *(stepped(n) for n in range(1, 9)))
    )
    kept = save(made, tmp_path / "b")
    assert [event.step for event in kept.events] == [0, 4, 5, 6, 7, 8]
    assert kept.missing == (
        Gap(GapKind.LEFT_OUT, "events of steps 0 to 3", "there was no room for them"),
    )
    assert load(tmp_path / "b") == kept


@pytest.mark.parametrize(("limit", "value"), [("MAX_ARRAYS", 12), ("MAX_RECORDS", 6)])
def test_arrays_and_events_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """Of each array and event all readers make an object, however few bytes it has."""
    monkeypatch.setattr(bundles, limit, value)
    made = Bundle(
        kind="crash", fault=FAULT, events=(allocated(1), *(stepped(n) for n in range(1, 9)))
    )
    kept = save(made, tmp_path / "b")
    assert 0 < len(kept.events) <= value
    assert kept.events[-1].step == 8
    assert load(tmp_path / "b") == kept


def test_launches_of_all_steps_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan and a step are a line each, and one times the other is what readers walk through."""
    launch = LaunchRecord(kernel="k", function="k", device="d")
    plan = PlanRecord(id=1, name="p", device="d", launches=(launch,) * 10)
    made = Bundle(
        kind="crash", fault=FAULT, plans=(plan,),
        events=(allocated(1), *(stepped(n) for n in range(1, 9))),
    )  # fmt: skip
    save(made, tmp_path / "whole")
    monkeypatch.setattr(bundles, "MAX_LAUNCHES", 35)
    for kept in (save(made, tmp_path / "short"), load(tmp_path / "whole")):
        assert [event.step for event in kept.events] == [0, 6, 7, 8]
        [gap] = kept.missing
        assert (gap.kind, gap.what) == (GapKind.LEFT_OUT, "events of steps up to 5")
        assert "30 launches" in gap.reason


def test_json_has_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Bundle(kind="crash", fault=FAULT, events=tuple(stepped(n) for n in range(200)))
    monkeypatch.setattr(bundles, "MAX_JSON_BYTES", 8000)
    kept = save(made, tmp_path / "b")
    assert 5 < len(kept.events) < 40
    assert kept.events[-1].step == 199
    assert (tmp_path / "b" / "bundle.json").stat().st_size <= 8000
    tensors = tuple(
        TensorRecord(
            id=n, name="x", owner="y", dtype="F32", shape=(), strides=(), offset=0, allocation=1,
            address=0, extent_bytes=4,
        )
        for n in range(100)
    )  # fmt: skip
    with pytest.raises(BadBundle, match="above 8000"):
        save(msgspec.structs.replace(made, tensors=tensors), tmp_path / "c")


def test_long_texts_keep_their_ends(
    example: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "MAX_STDERR_BYTES", 1600)
    monkeypatch.setattr(bundles, "MAX_SOURCE_BYTES", 10)
    made = msgspec.structs.replace(example, stderr="first" + "x" * 9000 + "last")
    save(made, tmp_path / "b")
    back = load(tmp_path / "b")
    assert back.stderr.startswith("first")
    assert back.stderr.endswith("last")
    assert "[... 7409 bytes left out ...]" in back.stderr
    assert len(back.stderr) < 1700
    assert back.sources[0].text == ""
    assert back.missing == (
        Gap.left_out("7409 bytes out of the middle of stderr"),
        Gap.left_out("the source of rope_kernel", "it has 16 bytes"),
    )


def test_snapshots_and_statistics_have_limits(
    example: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = tuple(Snapshot(1, 1, n, (Values(1, "U8", (100,), bytes(100)),)) for n in range(9))
    place = Place(1, 1, 1)
    figures = tuple(
        Statistics(
            place=place, tensor=n, digest="", low=0, high=0, mean=0, rms=0, num_nan=0, num_inf=0
        )
        for n in range(100)
    )
    monkeypatch.setattr(bundles, "MAX_ARRAYS_BYTES", 1000)
    monkeypatch.setattr(bundles, "MAX_JSON_BYTES", 20_000)
    made = msgspec.structs.replace(example, snapshots=snapshots, statistics=figures)
    kept = save(made, tmp_path / "b")
    assert [one.launch for one in kept.snapshots] == [0, 1, 2, 3, 4]
    assert kept.statistics[-1].tensor == 99
    assert len(kept.statistics) < 60
    assert [gap.what.split(" ")[1] for gap in kept.missing] == ["oldest", "last"]


# -- folders from strangers -----------------------------------------------------------------------


def rewritten(folder: Path, **fields: Any) -> None:
    """Put other values into bundle.json; None takes a field out."""
    content = json.loads((folder / "bundle.json").read_text()) | fields
    content = {name: value for name, value in content.items() if value is not None}
    (folder / "bundle.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 2}, "has version 2, but this hypocenter reads version 3"),
        ({"version": None}, "says no version"),
        ({"version": "one"}, "is damaged"),
        ({"kind": "party"}, "is of kind 'party'"),
        ({"kind": None}, "lacks what every bundle has"),
        ({"fault": {"kind": 3}}, "lacks what every bundle has"),
    ],
)
def test_what_makes_no_sense_is_refused(folder: Path, fields: dict[str, Any], words: str) -> None:
    rewritten(folder, **fields)
    with pytest.raises(BadBundle, match=words):
        load(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 200_000,
        '{"version":' * 100_000,
        "\x00\xff",
        '{"version": 1e99}',
    ],
    ids=range(8),
)
def test_json_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "bundle.json").write_text(text, "latin-1")
    with pytest.raises(BadBundle, match=r"bundle\.json"):
        load(folder)


def test_nesting_inside_a_field_costs_that_field(folder: Path) -> None:
    text = (folder / "bundle.json").read_text()
    deep = '"limits": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (folder / "bundle.json").write_text(text.replace('"limits": null', deep))
    try:
        back = load(folder)
    except BadBundle:
        return
    assert back.limits is None
    assert "limits" in _damaged(back)


def test_a_damaged_record_costs_only_itself(folder: Path, example: Bundle) -> None:
    content = json.loads((folder / "bundle.json").read_text())
    content["events"][1]["inputs"] = 5
    content["events"].append({"type": "Surprise", "seq": 3, "step": 3})
    content["environment"] = ["no", "table"]
    content["from_the_future"] = {"x": 1}
    (folder / "bundle.json").write_text(json.dumps(content))
    back = load(folder)
    assert back.events == (example.events[0], example.events[2])
    assert back.sources == example.sources
    assert len(back.missing) == 2
    assert _damaged(back) == ["environment", "events[1]"]
    assert "and 1 more of events" in back.missing[1].reason


@pytest.mark.parametrize(
    "fields",
    [
        {"address": -1},
        {"num_bytes": 1 << 70},
        {"id": "one"},
    ],
)
def test_impossible_allocations_are_left_out(folder: Path, fields: dict[str, Any]) -> None:
    content = json.loads((folder / "bundle.json").read_text())
    content["events"][0]["allocation"] |= fields
    (folder / "bundle.json").write_text(json.dumps(content))
    back = load(folder)
    assert not any(isinstance(event, Allocated) for event in back.events)
    assert "events[0]" in _damaged(back)


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [2] * 40, "strides": [1] * 40},
        {"shape": [2, 2]},
        {"shape": [-1], "strides": [1]},
        {"shape": [1 << 60], "strides": [1]},
        {"strides": [1 << 60]},
        {"offset": -(1 << 60)},
        {"extent_bytes": -4},
    ],
)
def test_impossible_tensors_are_left_out(tmp_path: Path, fields: dict[str, Any]) -> None:
    tensor = TensorRecord(
        id=1, name="x", owner="y", dtype="F32", shape=(3,), strides=(1,), offset=0, allocation=1,
        address=0, extent_bytes=12,
    )  # fmt: skip
    save(Bundle(kind="crash", fault=FAULT, tensors=(tensor,)), tmp_path / "b")
    assert load(tmp_path / "b").tensors == (tensor,)
    rewritten(tmp_path / "b", tensors=[{**msgspec.to_builtins(tensor), **fields}])
    back = load(tmp_path / "b")
    assert back.tensors == ()
    assert _damaged(back)[0] == "tensors[0]"


def test_arrays_must_be_as_long_as_they_say(folder: Path) -> None:
    arrays = safetensors.numpy.load_file(folder / "arrays.safetensors")
    first = next(iter(arrays))
    safetensors.numpy.save_file({first: arrays[first][:7]}, folder / "arrays.safetensors")
    back = load(folder)
    assert [event.inputs for event in back.events if isinstance(event, Stepped)] == [(), ()]
    assert _damaged(back) == ["2 arrays"]
    (folder / "arrays.safetensors").write_bytes(b"\x08" + bytes(7) + b"\xff" * 64)
    assert "damaged (" in str(load(folder).missing[-2])
    (folder / "arrays.safetensors").unlink()
    assert Gap.damage("arrays.safetensors", "it is not there") in load(folder).missing


def test_a_file_of_a_million_arrays_is_not_parsed(folder: Path) -> None:
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"step{number}.0.0": empty for number in range(300_000)}).encode()
    (folder / "arrays.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    [gap] = [gap for gap in load(folder).missing if gap.what == "arrays.safetensors"]
    assert "its header has" in gap.reason


def test_a_lost_event_does_not_shift_the_arrays(folder: Path) -> None:
    content = json.loads((folder / "bundle.json").read_text())
    del content["events"][1]
    (folder / "bundle.json").write_text(json.dumps(content))
    [step] = [event for event in load(folder).events if isinstance(event, Stepped)]
    assert np.frombuffer(step.inputs[0].data, np.int32).tolist() == [2] * 4


def test_links_and_pipes_are_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    for name in ("stderr.txt", "sources/rope_kernel_abababababababab.py"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
    back = load(folder)
    assert "password" not in str(back)
    assert len(back.missing) == 2
    (folder / "sources" / "rope_kernel_abababababababab.py").unlink()
    (folder / "sources").rmdir()
    (folder / "sources").symlink_to(tmp_path)
    assert any("was not followed" in gap.reason for gap in load(folder).missing)
    (folder / "stderr.txt").unlink()
    os.mkfifo(folder / "stderr.txt")
    assert Gap.damage("stderr.txt", "it is no regular file") in load(folder).missing
    (folder / "bundle.json").unlink()
    (folder / "bundle.json").symlink_to(secret)
    with pytest.raises(BadBundle, match="cannot be read"):
        load(folder)


def test_names_of_functions_choose_no_path(tmp_path: Path) -> None:
    source = SourceRecord(
        id="../../../tmp/x", function="../../evil", file="/etc/passwd", first_line=1, text="x = 1"
    )
    save(Bundle(kind="crash", fault=FAULT, sources=(source, source)), tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "b" / "sources").iterdir())
    assert names == ["______evil__________tmp_x.py", "______evil__________tmp_x_2.py"]
    assert load(tmp_path / "b").sources == (source, source)


def test_large_files_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAX_STDERR_BYTES", 0)
    with open(folder / "stderr.txt", "wb") as file:
        file.truncate(1 << 40)
    assert any("it has 1099511627776 bytes" in gap.reason for gap in load(folder).missing)
    with open(folder / "bundle.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadBundle, match="above"):
        load(folder)


def test_what_is_no_bundle_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(BadBundle, match="is not there, so this is no bundle"):
        load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadBundle, match="is no folder"):
        load(tmp_path / "file")


@given(data=st.data())
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_anywhere_never_raises_anything_else(
    data: st.DataObject, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("hostile") / "b"
    save(Bundle(kind="crash", fault=FAULT, events=(allocated(1), stepped(1))), folder)
    path = folder / data.draw(st.sampled_from(["bundle.json", "arrays.safetensors"]))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content)))
    length = data.draw(st.integers(0, 20))
    content[at : at + length] = data.draw(st.binary(max_size=20))
    path.write_bytes(content)
    with contextlib.suppress(BadBundle):
        assert isinstance(load(folder), Bundle)


def test_it_opens_without_gpu_torch_and_triton() -> None:
    program = (
        "import sys; import hypocenter.record.bundle; "
        "print([n for n in ('torch', 'triton', 'numba') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n"
