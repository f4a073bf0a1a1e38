"""Broken and hostile GGUF files: each is refused in one line that names field, value and limit."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.gguf_exercise import TRIED, refusal
from models.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U8,
    U32,
    U64,
    FileTensor,
    GGUFWriter,
    Item,
    array_of,
    every_tensor,
    every_value,
    write,
)

from hypocenter.base.errors import BadModelFile, UsageError
from hypocenter.model.gguf import parse
from hypocenter.model.gguf.file import open_gguf

Fields = list[tuple[str | bytes, Item]]


@pytest.fixture(scope="module", autouse=True)
def number_of_inputs(record_testsuite_property: Callable[[str, object], None]) -> Iterator[None]:
    """Writes how many files were tried into the test report (`--junit-xml`)."""
    before = len(TRIED)
    yield
    record_testsuite_property("hostile_gguf_inputs", len(TRIED) - before)


many = settings(
    max_examples=200,  # scripts/test-fuzz tries thousands
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def file_bytes(fields: Fields | None = None, *tensors: FileTensor, **options: Any) -> bytes:
    return GGUFWriter(**options).build(fields or [], tensors)


def one(item: Item) -> bytes:
    return file_bytes([("key", item)])


def raw_value(value_type: int, payload: bytes) -> bytes:
    """A file whose only value is a type number and loose bytes."""
    data = one(Item(U8, 0))
    return data[:-5] + struct.pack("<I", value_type) + payload


def nested(depth: int) -> bytes:
    """One array, `depth` deep; the innermost is an empty array of u8."""
    levels = struct.pack("<IQ", ARRAY, 1) * (depth - 1) + struct.pack("<IQ", U8, 0)
    return raw_value(ARRAY, levels)


def tensor(*dims: int, **options: Any) -> FileTensor:
    return FileTensor("w", dims, **{"data": b"\0" * 64, **options})


ALIGNMENT = "general.alignment"

#: name: (file, then what the message must hold: field, value, limit)
CASES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "html upper": (b"<HTML><BODY>Sign in", ("the file is an HTML page", "download")),
    "torch": (b"PK\x03\x04....", ("the file is a zip archive", "PyTorch")),
    "noise": (b"\x00\x01\x02\x03", ("magic", r"b'\x00\x01\x02\x03'", "b'GGUF'")),
    "empty": (b"", ("file size in bytes is 0", "empty")),
    "three bytes": (b"GGU", ("magic", "b'GGU'")),
    "magic only": (b"GGUF", ("version", "at least 4 bytes are missing", "cut off")),
    "version 0": (file_bytes(version=0), ("version is 0", "2 and 3")),
    "version 1": (file_bytes(version=1), ("version is 1", "2 and 3")),
    "version 4": (file_bytes(version=4), ("version is 4", "2 and 3")),
    "big-endian": (file_bytes(big_endian=True), ("version is 3", "big-endian", "little-endian")),
    "tensors 2^16+1": (
        file_bytes(num_tensors=2**16 + 1),
        ("number of tensors is 65537", "at most 65536"),
    ),
    "tensors 2^63": (file_bytes(num_tensors=2**63), ("number of tensors is 9223372036854775808",)),
    "tensors absent": (
        file_bytes(num_tensors=2),
        ("number of tensors is 2", "at least 58 bytes are missing"),
    ),
    "keys 2^60": (file_bytes(num_fields=2**60), ("number of metadata keys", "at most 65536")),
    "keys absent": (
        file_bytes(num_fields=60000),
        ("number of metadata keys is 60000", "840000 bytes are missing"),
    ),
    "key twice": (
        file_bytes([("a", Item(U8, 1)), ("a", Item(U8, 2))]),
        ("metadata key 1 is 'a'", "before"),
    ),
    "key empty": (file_bytes([("", Item(U32, 1))]), ("metadata key 0", "not be empty")),
    "key not UTF-8": (file_bytes([(b"\xff\xfe", Item(U8, 1))]), ("metadata key 0", "UTF-8")),
    "key long": (
        file_bytes([("k" * 65536, Item(U8, 1))]),
        ("length of metadata key 0 is 65536", "at most 65535"),
    ),
    "value type 13": (raw_value(13, b"\0" * 8), ("type of 'key' is 13", "0 to 12")),
    "value type 2^32-1": (raw_value(2**32 - 1, b""), ("type of 'key' is 4294967295", "0 to 12")),
    "flag 2": (one(Item(BOOL, 2)), ("'key' is 2", "0 or 1")),
    "flags 255": (one(array_of(BOOL, [0, 1, 255])), ("'key' is 255", "0 or 1")),
    "string 2^64-1": (
        raw_value(STRING, b"\xff" * 8),
        ("length of 'key' is 18446744073709551615", "at most 16777216"),
    ),
    "string cut": (
        raw_value(STRING, struct.pack("<Q", 100) + b"abc"),
        ("'key', size in bytes, is 100", "at least 97 bytes are missing"),
    ),
    "array 10^6 in 46 bytes": (
        raw_value(ARRAY, struct.pack("<IQ", U8, 10**6)),
        ("length of array 'key' is 1000000", "1000000 bytes are missing"),
    ),
    "array 2^64-1": (
        raw_value(ARRAY, struct.pack("<IQ", F32, 2**64 - 1)),
        ("length of array 'key' is 18446744073709551615", "at most 67108864"),
    ),
    "array times width": (
        raw_value(ARRAY, struct.pack("<IQ", U64, 2**26) + b"\0" * 64),
        ("length of array 'key' is 67108864", "bytes are missing"),
    ),
    "strings 2^62": (
        raw_value(ARRAY, struct.pack("<IQ", STRING, 2**62)),
        ("length of array 'key'", "at most 4194304"),
    ),
    "strings absent": (
        raw_value(ARRAY, struct.pack("<IQ", STRING, 4_000_000)),
        ("length of array 'key' is 4000000", "32000000 bytes are missing"),
    ),
    "string 1 too long": (
        raw_value(ARRAY, struct.pack("<IQQ", STRING, 2, 0) + struct.pack("<Q", 2**63)),
        ("length of string 1 of 'key' is 9223372036854775808", "at most 16777216"),
    ),
    "string 1 cut": (
        raw_value(ARRAY, struct.pack("<IQQ", STRING, 2, 1) + b"a" + struct.pack("<Q", 9) + b"b"),
        ("string 1 of 'key', size in bytes, is 9", "8 bytes are missing"),
    ),
    "string 2 without length": (
        raw_value(ARRAY, struct.pack("<IQ", STRING, 3) + struct.pack("<Q4s", 4, b"abcd") * 2),
        ("length of string 2 of 'key', size in bytes, is 8", "8 bytes are missing"),
    ),
    "nested 5 deep": (nested(5), ("array 'key'", "5 arrays deep", "limit is 4")),
    "nested 100000 deep": (nested(100_000), ("array 'key'", "5 arrays deep", "limit is 4")),
    "nested 2^60 wide": (
        raw_value(ARRAY, struct.pack("<IQ", ARRAY, 2**60)),
        ("length of array 'key'", "at most 65536"),
    ),
    "item type 99": (
        raw_value(ARRAY, struct.pack("<IQ", 99, 0)),
        ("type of items of 'key' is 99",),
    ),
    "alignment 0": (file_bytes([(ALIGNMENT, Item(U32, 0))]), (f"{ALIGNMENT} is 0", "power of two")),
    "alignment 48": (file_bytes([(ALIGNMENT, Item(U32, 48))]), (f"{ALIGNMENT} is 48", "power of")),
    "alignment 4": (file_bytes([(ALIGNMENT, Item(U32, 4))]), (f"{ALIGNMENT} is 4", "at least 8")),
    "alignment of u64": (
        file_bytes([(ALIGNMENT, Item(U64, 32))]),
        (f"type of {ALIGNMENT} is 'U64'", "one U32"),
    ),
    "alignment an array": (
        file_bytes([(ALIGNMENT, array_of(U32, [32]))]),
        (f"type of {ALIGNMENT}", "one U32"),
    ),
    "alignment 2^31": (
        file_bytes([(ALIGNMENT, Item(U32, 2**31))], tensor(16)),
        ("end of tensor 'w', in bytes, is 2147483712", "bytes are missing"),
    ),
    "tensor name empty": (
        file_bytes([], FileTensor("", (16,))),
        ("name of tensor 0", "not be empty"),
    ),
    "tensor name long": (
        file_bytes([], FileTensor("w" * 128, (16,))),
        ("length of name of tensor 0 is 128", "at most 127"),
    ),
    "tensor twice": (
        file_bytes([], tensor(16), tensor(16)),
        ("tensor name is 'w'", "before"),
    ),
    "no dimensions": (file_bytes([], tensor()), ("dimensions of tensor 'w' is 0", "1 to 4")),
    "5 dimensions": (
        file_bytes([], tensor(1, 1, 1, 1, 1)),
        ("dimensions of tensor 'w' is 5", "1 to 4"),
    ),
    "dimension 0": (file_bytes([], tensor(4, 0)), ("dimension 1 of tensor 'w' is 0", "at least 1")),
    "dimension 2^63": (
        file_bytes([], tensor(2**63)),
        ("dimension 0 of tensor 'w' is 9223372036854775808", "2^63 - 1"),
    ),
    "product wraps to 0": (
        file_bytes([], tensor(2**32, 2**32)),
        ("dimension 1 of tensor 'w' is 4294967296", "2^63 - 1"),
    ),
    "product wraps to 16": (
        file_bytes([], tensor(16, 2**62 + 1)),
        ("dimension 1 of tensor 'w' is 4611686018427387905", "2^63 - 1"),
    ),
    "row not whole blocks": (
        file_bytes([], tensor(48, 2, type=8)),
        ("row length of tensor 'w' is 48", "multiple of 32", "Q8_0"),
    ),
    "row not whole super-blocks": (
        file_bytes([], tensor(128, 2, type=12)),
        ("row length of tensor 'w' is 128", "multiple of 256", "Q4_K"),
    ),
    "tensor type 43": (
        file_bytes([], tensor(16, type=43)),
        ("type of tensor 'w' is 43", "no type"),
    ),
    "tensor type 2^32-1": (
        file_bytes([], tensor(16, type=2**32 - 1)),
        ("type of tensor 'w' is 4294967295", "no type"),
    ),
    "offset not aligned": (
        file_bytes([], tensor(16, offset=8)),
        ("offset of tensor 'w' is 8", "multiple of general.alignment = 32"),
    ),
    "offset 2^64-32": (
        file_bytes([], tensor(16, offset=2**64 - 32)),
        ("end of tensor 'w', in bytes, is 18446744073709551712", "bytes are missing"),
    ),
    "tensor beyond the end": (
        file_bytes([], tensor(1 << 20)),
        ("end of tensor 'w', in bytes, is 4194368", "4194240 bytes are missing"),
    ),
    "tensors overlap": (
        file_bytes([], tensor(16), FileTensor("v", (16,), offset=32)),
        ("offset of tensor 'v' is 32", "tensor 'w' ends at 64: they overlap"),
    ),
    "tensors at one place": (
        file_bytes([], tensor(16), FileTensor("v", (8,), offset=0)),
        ("offset of tensor 'v' is 0", "overlap"),
    ),
    "newline in a name": (
        file_bytes([], FileTensor("w\nERROR", (16,), offset=8)),
        (r"offset of tensor 'w\nERROR' is 8",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_case(tmp_path: Path, name: str) -> None:
    data, parts = CASES[name]
    error = refusal(tmp_path / "a.gguf", data)
    assert error is not None, "it was read"
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize("depth", [1, 4])
def test_arrays_may_nest_a_little(tmp_path: Path, depth: int) -> None:
    assert refusal(tmp_path / "a.gguf", nested(depth)) is None


def test_limits_hold_over_all_arrays_of_a_file(tmp_path: Path) -> None:
    """Strings and nested arrays are counted together, not array by array."""
    half = struct.pack("<IQ", STRING, 1 << 21) + bytes(8 << 21)
    payload = struct.pack("<IQ", ARRAY, 3) + half * 3
    error = refusal(tmp_path / "a.gguf", raw_value(ARRAY, payload))
    assert error is not None
    assert "length of array 'key' is 2097152, but it must be at most 0" in str(error)

    inner = struct.pack("<IQ", ARRAY, 40_000) + struct.pack("<IQ", U8, 0) * 40_000
    payload = struct.pack("<IQ", ARRAY, 2) + inner * 2
    error = refusal(tmp_path / "a.gguf", raw_value(ARRAY, payload))
    assert error is not None
    assert "length of array 'key' is 40000, but it must be at most 25534" in str(error)


class TestPaths:
    def test_absent(self, tmp_path: Path) -> None:
        write(tmp_path / "model.gguf", file_bytes())
        with pytest.raises(UsageError, match=r"no such file; did you mean 'model\.gguf'"):
            open_gguf(tmp_path / "modle.gguf")
        with pytest.raises(UsageError, match="no such file, nor a folder"):
            open_gguf(tmp_path / "no" / "model.gguf")

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is a directory, but a model must be a GGUF file"):
            open_gguf(tmp_path)

    def test_named_pipe_does_not_wait(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UsageError, match="is no regular file"):
            open_gguf(tmp_path / "pipe")

    def test_no_permission(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.gguf", file_bytes())
        path.chmod(0)
        is_root = os.geteuid() == 0
        if is_root:  # root may read everything, so be nobody for a moment
            os.seteuid(65534)
        try:
            with pytest.raises(BadModelFile, match=r"Permission denied.*give read permission"):
                open_gguf(path)
        finally:
            if is_root:
                os.seteuid(0)

    def test_null_character(self) -> None:
        with pytest.raises(BadModelFile, match="null"):
            open_gguf("a\0b")


def valid_file() -> bytes:
    return file_bytes(every_value(), *every_tensor())


def test_the_valid_file_is_valid(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.gguf", valid_file()) is None


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    data = valid_file()
    for size in range(len(data)):
        error = refusal(tmp_path / "a.gguf", data[:size])
        assert error is not None, f"read with {size} of {len(data)} bytes"
        if size >= 4:
            assert "bytes are missing" in str(error)
        if size >= len(data) - 32:
            assert f"{len(data) - size} bytes are missing" in str(error)


def test_every_byte_changed(tmp_path: Path) -> None:
    writer = GGUFWriter()
    data = writer.build(every_value(), every_tensor())
    num_inputs = num_refused = 0
    for place in range(writer.header_bytes):
        for byte in {0, 1, 0x7F, 0x80, 0xFF, data[place] ^ 1, data[place] ^ 0x80} - {data[place]}:
            changed = data[:place] + bytes([byte]) + data[place + 1 :]
            num_refused += refusal(tmp_path / "a.gguf", changed) is not None
            num_inputs += 1
    assert num_refused > num_inputs / 3


def blown_up(width: int) -> Iterator[int]:
    top = 1 << (8 * width)
    for bits in (0, 1, 2, 4, 5, 7, 8, 15, 16, 24, 31, 32, 33, 47, 61, 62, 63, 64):
        for value in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1):
            if value < top:
                yield value


def test_every_count_blown_up(tmp_path: Path) -> None:
    """Every count, length, type and offset of the header, one at a time, takes 50 values."""
    writer = GGUFWriter()
    data = writer.build(every_value(), every_tensor())
    for mark in writer.marks:
        for value in blown_up(mark.width):
            number = value.to_bytes(mark.width, "little")
            changed = data[: mark.offset] + number + data[mark.offset + mark.width :]
            error = refusal(tmp_path / "a.gguf", changed)
            # Some values and types may change and leave a good file; no count beyond it may.
            if value > len(data) and mark.what.startswith(("number", "length", "dimension")):
                assert error is not None, (mark, value)


@many
@given(st.binary(max_size=400))
def test_arbitrary_bytes(tmp_path: Path, data: bytes) -> None:
    assert refusal(tmp_path / "a.gguf", data) is not None
    refusal(tmp_path / "a.gguf", b"GGUF" + data)


@many
@given(
    st.sampled_from([2, 3]),
    st.integers(0, 6),
    st.integers(0, 6),
    st.lists(
        st.one_of(
            st.binary(max_size=12),
            st.integers(0, 40).map(lambda n: struct.pack("<I", n)),
            st.integers(0, 40).map(lambda n: struct.pack("<Q", n)),
            st.integers(0, 2**64 - 1).map(lambda n: struct.pack("<Q", n)),
            st.binary(min_size=1, max_size=8).map(lambda raw: struct.pack("<Q", len(raw)) + raw),
        ),
        max_size=40,
    ),
)
def test_plausible_pieces(
    tmp_path: Path, version: int, num_tensors: int, num_fields: int, pieces: list[bytes]
) -> None:
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)
    refusal(tmp_path / "a.gguf", head + b"".join(pieces) + bytes(256))


VALID = valid_file()


@many
@given(
    st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 8), st.binary(max_size=8)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, len(VALID)),
)
def test_mutated_file(tmp_path: Path, edits: list[tuple[int, int, bytes]], cut: int) -> None:
    """Bytes replaced, deleted and inserted at several places, and the end cut off."""
    data = VALID
    for place, num_gone, new in edits:
        data = data[:place] + new + data[place + num_gone :]
    refusal(tmp_path / "a.gguf", data)
    refusal(tmp_path / "a.gguf", data[: len(data) - cut])


numbers = st.one_of(st.integers(0, 70), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**63]))


@many
@given(
    st.lists(
        st.tuples(
            st.lists(numbers, max_size=5),
            st.one_of(st.sampled_from([0, 1, 2, 8, 12, 30]), st.integers(0, 50)),
            st.one_of(st.sampled_from([0, 32, 64, 96]), numbers),
        ),
        max_size=6,
    ),
    st.sampled_from([1, 8, 16, 32, 64, 2**20]),
)
def test_any_tensor_table(
    tmp_path: Path, rows: list[tuple[list[int], int, int]], alignment: int
) -> None:
    """Whatever the table says, what is handed out lies inside the file and never overlaps."""
    tensors = [
        FileTensor(f"t{index}", tuple(dims), kind, bytes(64), offset)
        for index, (dims, kind, offset) in enumerate(rows)
    ]
    refusal(tmp_path / "a.gguf", file_bytes([(ALIGNMENT, Item(U32, alignment))], *tensors))


GREEDY = """
import sys, time, tracemalloc
from pathlib import Path
from hypocenter.base.errors import BadModelFile
from hypocenter.model.gguf import parse
from hypocenter.model.gguf.file import open_gguf
for path in map(Path, sys.argv[1:]):
    size = path.stat().st_size
    tracemalloc.start()
    start = time.process_time()
    outcome = "read"
    try:
        with open_gguf(path) as file:
            for key in list(file.metadata):
                file.metadata[key]
    except BadModelFile:
        outcome = "refused"
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(path.name, outcome, size, peak, seconds)
"""


def greedy_files() -> Iterator[tuple[str, bytes]]:
    """Files that make a naive reader allocate much more than they weigh."""
    num = 1 << 16
    keys = b"".join(struct.pack("<Q5sIB", 5, b"%05x" % index, U8, 0) for index in range(num))
    yield "keys", b"GGUF" + struct.pack("<IQQ", 3, 0, num) + keys
    tensors = b"".join(
        struct.pack("<Q5sIQQQQIQ", 5, b"%05x" % index, 4, 1, 1, 1, 1, 0, index * 32)
        for index in range(num)
    )
    yield "tensors", b"GGUF" + struct.pack("<IQQ", 3, num, 0) + tensors + bytes(num * 32 + 32)
    yield "strings", raw_value(ARRAY, struct.pack("<IQ", STRING, 1 << 18) + bytes(8 << 18))
    inner = struct.pack("<IQ", U8, 0)
    yield "nested", raw_value(ARRAY, struct.pack("<IQ", ARRAY, num // 2) + inner * (num // 2))
    wide = b"a" * ((1 << 24) - 4) + "\N{GRINNING FACE}".encode()
    yield "text", raw_value(STRING, struct.pack("<Q", len(wide)) + wide)
    yield "numbers", raw_value(ARRAY, struct.pack("<IQ", U8, 1 << 24) + bytes(1 << 24))
    for kind in (U8, U64, STRING, ARRAY):
        for count in (10**6, 2**22, 2**40, 2**64 - 1):
            yield f"claims-{kind}-{count}", raw_value(ARRAY, struct.pack("<IQ", kind, count))
    yield "claims-tensor", file_bytes([], tensor(2**60))


@pytest.mark.tier("fuzz")
def test_memory_and_time_are_bounded(tmp_path: Path) -> None:
    """At most 4 times the file and 64 MB, in a process of its own; each in seconds of CPU time."""
    paths = [write(tmp_path / name, data) for name, data in greedy_files()]
    done = subprocess.run(
        [sys.executable, "-c", GREEDY, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths)
    for line in lines:
        name, outcome, size, peak, seconds = line.split()
        assert outcome == ("refused" if name.startswith("claims") else "read"), line
        assert int(peak) <= 4 * int(size) + 64_000_000, line
        assert float(seconds) < 10, line
        if outcome == "refused":
            assert int(peak) < 1_000_000, line


def test_a_sparse_terabyte_is_refused_unread(tmp_path: Path) -> None:
    """It takes no room on the disk, and each of its flags would be looked at."""
    data = bytearray(one(array_of(BOOL, [1])))
    data[-9:-1] = (1 << 40).to_bytes(8, "little")
    path = write(tmp_path / "sparse.gguf", bytes(data))
    os.truncate(path, (1 << 40) + len(data))
    with pytest.raises(BadModelFile, match="length of array 'key' is 1099511627776, but it must"):
        open_gguf(path)


def test_numbers_of_all_arrays_count_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parse, "MAX_NUMBERS", 5)
    path = tmp_path / "a.gguf"
    fields: Fields = [("one", array_of(U8, [1, 2, 3])), ("two", array_of(BOOL, [1, 0]))]
    assert refusal(path, file_bytes(fields)) is None
    refused = refusal(path, file_bytes([*fields, ("three", array_of(U32, [1]))]))
    assert refused is not None
    assert "at most 0" in str(refused)
