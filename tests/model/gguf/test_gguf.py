"""What the GGUF reader reads: every value and tensor type, splits, speed, agreement with `gguf`."""

from __future__ import annotations

import gc
import hashlib
import math
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.gguf_files import (
    ARRAY,
    F32,
    F64,
    I32,
    STRING,
    U32,
    FileTensor,
    GGUFWriter,
    Item,
    array_of,
    every_tensor,
    every_value,
    write,
    write_split,
)
from repository import DEMO

from hypocenter.base.errors import BadModelFile, UnsupportedModel, UsageError
from hypocenter.base.tensor import WEIGHT_TYPES, DType
from hypocenter.kernels.weights.block_types import RESERVED
from hypocenter.model.gguf import inspection
from hypocenter.model.gguf.file import GGUFFile, StringArray, open_gguf
from hypocenter.model.gguf.file_types import FILE_TYPES
from hypocenter.model.gguf.parse import UNSUPPORTED_TYPES


def plain(value: object) -> object:
    """A metadata value as lists and scalars, so that == works."""
    if isinstance(value, StringArray):
        return [text.encode("utf-8", "surrogateescape") for text in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(tmp_path: Path, version: int) -> None:
    path = write(tmp_path / "a.gguf", GGUFWriter(version=version).build(every_value()))
    with open_gguf(path) as file:
        assert file.version == version
        assert {key: plain(value) for key, value in file.metadata.items()} == {
            "general.architecture": "llama",
            "u8": 255,
            "i8": -128,
            "u16": 65535,
            "i16": -32768,
            "u32": 2**32 - 1,
            "i32": -(2**31),
            "f32": 0.5,
            "yes": True,
            "no": False,
            "u64": 2**64 - 1,
            "i64": -(2**63),
            "f64": 0.1,
            "text": "Grüße",
            "tokens": [b"a", b"", "Ġb".encode(), b"\xff\xfe", b"d" * 40],
            "scores": [0.0, -1.5, 3.0],
            "ids": [1, -2, 3],
            "flags": [True, False, True],
            "bytes": list(range(9)),
            "nothing": [],
            "nested": [[1, 2], [b"x", b"yz"]],
        }
        assert isinstance(file.metadata["yes"], bool)
        assert isinstance(file.metadata["f32"], float)


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_tensors_are_views_of_their_bytes(tmp_path: Path, alignment: int) -> None:
    tensors = every_tensor()
    fields: list[tuple[str | bytes, Item]] = [("general.alignment", Item(U32, alignment))]
    data = GGUFWriter(alignment=alignment).build(fields, tensors)
    with open_gguf(write(tmp_path / "a.gguf", data)) as file:
        assert list(file.tensors) == [tensor.name for tensor in tensors]
        for tensor in tensors:
            info = file.tensors[tensor.name]
            raw = file.raw(tensor.name)
            assert info.in_axes(len(tensor.dims)) == tensor.dims[::-1]
            assert len(info.shape) == 1 or info.shape[0] > 1
            assert info.dtype.ggml_id == tensor.type
            assert raw.tobytes() == tensor.payload()
            assert data[info.offset : info.offset + info.num_bytes] == tensor.payload()
            assert raw.dtype == np.uint8
            assert raw.base is not None
            assert not raw.flags.owndata
            assert not raw.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                raw[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                raw.flags.writeable = True
        first = file.raw("half").__array_interface__["data"][0]
        assert first == file.raw("half").__array_interface__["data"][0], "two copies, not views"


def test_views_and_strings_outlive_close(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path / "a.gguf", GGUFWriter().build(every_value(), every_tensor())))
    raw, tokens = file.raw("half"), file.strings("tokens")
    file.close()
    file.close()
    gc.collect()
    assert raw.tobytes() == bytes(range(100, 110))
    assert tokens[2] == "Ġb"
    for use in (lambda: file.raw("half"), lambda: file.metadata, lambda: file.text("text")):
        with pytest.raises(UsageError, match="is closed"):
            use()
    assert "half" in file.tensors


def test_close_unmaps_when_nothing_views(tmp_path: Path) -> None:
    path = write(tmp_path / "unmapped.gguf", GGUFWriter().build(every_value(), every_tensor()))
    file = open_gguf(path)
    assert path.name in Path("/proc/self/maps").read_text()
    file.close()
    assert path.name not in Path("/proc/self/maps").read_text()


class TestTypedAccess:
    @pytest.fixture
    def file(self, tmp_path: Path) -> GGUFFile:
        extra: list[tuple[str | bytes, Item]] = [
            ("nan", Item(F32, math.nan)),
            ("infinite", Item(F64, math.inf)),
            ("latin", Item(STRING, b"Gr\xfc\xdfe")),
        ]
        return open_gguf(write(tmp_path / "a.gguf", GGUFWriter().build(every_value() + extra)))

    def test_right(self, file: GGUFFile) -> None:
        assert file.integer("u8") == 255
        assert file.integer("i16", low=-(1 << 20)) == -32768
        assert file.integer("u64", high=2**64) == 2**64 - 1
        assert file.number("f64") == 0.1
        assert file.number("u16") == 65535.0
        assert file.flag("yes") is True
        assert file.flag("no") is False
        assert file.text("text") == "Grüße"
        assert file.strings("tokens").raw(-2) == b"\xff\xfe"
        assert file.strings("tokens")[3].encode("utf-8", "surrogateescape") == b"\xff\xfe"
        assert file.strings("tokens")[1:3] == ["", "Ġb"]
        assert list(file.strings("tokens")) == [file.strings("tokens")[i] for i in range(5)]
        assert file.numbers("ids").tolist() == [1, -2, 3]
        assert not file.numbers("ids").flags.writeable
        assert file.numbers("scores").flags.aligned
        with pytest.raises(IndexError):
            file.strings("tokens")[5]

    def test_defaults(self, file: GGUFFile) -> None:
        assert file.integer("absent", 7) == 7
        assert file.integer("absent", None) is None
        assert file.number("absent", 0.5) == 0.5
        assert file.flag("absent", False) is False
        assert file.text("absent", None) is None

    @pytest.mark.parametrize(
        ("method", "key", "options", "parts"),
        [
            ("integer", "absent", {}, ("absent", "missing")),
            ("integer", "scores", {}, ("type of scores", "array of 3 f32", "one integer")),
            ("integer", "f32", {}, ("type of f32", "'f32'", "one integer")),
            ("integer", "yes", {}, ("type of yes", "bool")),
            ("integer", "text", {"default": 3}, ("type of text", "string", "one integer")),
            ("integer", "i8", {}, ("i8", "-128", "from 0 to 2147483647")),
            ("integer", "u8", {"high": 254}, ("u8", "255", "to 254")),
            ("number", "text", {}, ("type of text", "one number")),
            ("number", "yes", {}, ("bool", "one number")),
            ("number", "nan", {}, ("nan", "finite")),
            ("number", "infinite", {}, ("inf", "finite")),
            ("flag", "u8", {}, ("u8", "one flag")),
            ("text", "u8", {}, ("type of u8", "one string")),
            ("text", "tokens", {}, ("array of 5 string", "one string")),
            ("text", "text", {"max_bytes": 6}, ("length of text", "7", "6 bytes")),
            ("text", "latin", {}, ("latin", "UTF-8", "byte 2")),
            ("strings", "scores", {}, ("scores", "array of strings")),
            ("strings", "text", {}, ("text", "array of strings")),
            ("strings", "tokenz", {}, ("tokenz", "missing", "did you mean 'tokens'")),
            ("numbers", "flags", {}, ("flags", "array of 3 bool", "array of numbers")),
            ("numbers", "u8", {}, ("u8", "array of numbers")),
            ("numbers", "absent", {}, ("absent", "missing")),
            ("raw", "tok", {}, ("tensor", "tok", "0 tensors")),
        ],
    )
    def test_wrong(
        self, file: GGUFFile, method: str, key: str, options: dict[str, Any], parts: tuple[str, ...]
    ) -> None:
        with pytest.raises(BadModelFile) as caught:
            getattr(file, method)(key, **options)
        for part in parts:
            assert part in str(caught.value)


class TestSplit:
    def test_reads_all_shards(self, tmp_path: Path) -> None:
        tensors = every_tensor()
        paths = write_split(tmp_path, "model", tensors, 3)
        with open_gguf(paths[0]) as file:
            assert file.shard_paths == tuple(paths)
            assert file.text("general.architecture") == "llama"
            assert sorted(file.tensors) == sorted(tensor.name for tensor in tensors)
            for index, tensor in enumerate(tensors):
                assert file.raw(tensor.name).tobytes() == tensor.payload()
                assert file.tensors[tensor.name].shard == index % 3

    def test_a_single_shard_may_have_any_name(self, tmp_path: Path) -> None:
        (path,) = write_split(tmp_path, "model", every_tensor(), 1)
        with open_gguf(path.rename(tmp_path / "other.gguf")) as file:
            assert len(file.tensors) == 5

    def test_another_shard_names_the_first(self, tmp_path: Path) -> None:
        paths = write_split(tmp_path, "model", every_tensor(), 3)
        with pytest.raises(BadModelFile, match=r"open 'model-00001-of-00003\.gguf'"):
            open_gguf(paths[1])

    def test_missing_shard_is_named(self, tmp_path: Path) -> None:
        paths = write_split(tmp_path, "model", every_tensor(), 3)
        paths[2].unlink()
        with pytest.raises(BadModelFile, match=r"'model-00003-of-00003\.gguf', but 1 of 3 shards"):
            open_gguf(paths[0])

    def test_renamed_first_shard(self, tmp_path: Path) -> None:
        paths = write_split(tmp_path, "model", every_tensor(), 2)
        with pytest.raises(BadModelFile, match=r"must be named 'NAME-00001-of-00002\.gguf'"):
            open_gguf(paths[0].rename(tmp_path / "model.gguf"))

    @pytest.mark.parametrize(
        ("false_values", "field", "value"),
        [
            ({"number": [0, 2, 1]}, "split.no", 2),
            ({"total": 6}, "split.tensors.count", 6),
            ({"total": -1}, "split.tensors.count", -1),
            ({"count": 4}, "file name", "model-00001-of-00003.gguf"),
            ({"count": 513}, "split.count", 513),
        ],
    )
    def test_contradictions(
        self, tmp_path: Path, false_values: dict[str, Any], field: str, value: object
    ) -> None:
        paths = write_split(tmp_path, "model", every_tensor(), 3, **false_values)
        with pytest.raises(BadModelFile) as caught:
            open_gguf(paths[0])
        assert (caught.value.field, caught.value.value) == (field, value)

    def test_shard_of_another_model(self, tmp_path: Path) -> None:
        paths = write_split(tmp_path, "model", every_tensor(), 2)
        paths[1].write_bytes(GGUFWriter().build(every_value()))
        with pytest.raises(BadModelFile) as caught:
            open_gguf(paths[0])
        assert (caught.value.path, caught.value.field) == (paths[1], "split.no")

    def test_tensor_twice(self, tmp_path: Path) -> None:
        tensors = [FileTensor("twin", (4,)), FileTensor("twin", (4,))]
        paths = write_split(tmp_path, "model", tensors, 2)
        with pytest.raises(BadModelFile, match=r"00002-of-00002\.gguf: tensor name is 'twin'"):
            open_gguf(paths[0])


def test_names_and_numbers_of_types_are_those_of_ggml() -> None:
    known = {dtype.ggml_id: dtype.name for dtype in WEIGHT_TYPES} | UNSUPPORTED_TYPES
    for kind in gguf.GGMLQuantizationType:
        assert known[int(kind)] == kind.name
        if kind.name not in UNSUPPORTED_TYPES.values():
            sizes = gguf.GGML_QUANT_SIZES[kind]
            assert (DType[kind.name].block_elements, DType[kind.name].block_bytes) == sizes


@pytest.mark.parametrize("number", sorted(UNSUPPORTED_TYPES))
def test_unsupported_tensor_type_by_name(tmp_path: Path, number: int) -> None:
    data = GGUFWriter().build([], [FileTensor("w", (256,), number, bytes(2048))])
    with pytest.raises(UnsupportedModel, match=f"tensor 'w' is '{UNSUPPORTED_TYPES[number]}'"):
        open_gguf(write(tmp_path / "a.gguf", data))


def oracle_file(path: Path) -> None:
    """A file that the `gguf` package writes: all value types, arrays, and every tensor type."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63 + 1)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.25)
    writer.add_float64("f64", 1 / 3)
    writer.add_bool("bool", True)
    writer.add_string("text", "Ünïcode \N{GRINNING FACE}\nline")
    writer.add_array("strings", ["a", "b\0c", "Ġ"])
    writer.add_array("bytes_strings", [b"\xff", b"ok"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [1.5, -2.5])
    writer.add_array("bools", [True, False])
    writer.add_array("blob", b"\x00\x01\xff")
    writer.add_array("nested", [[1, 2], [3]])
    random = np.random.default_rng(1)
    for dtype in WEIGHT_TYPES:
        if dtype in (DType.F32, DType.F16):
            kind = np.float32 if dtype is DType.F32 else np.float16
            writer.add_tensor(dtype.name, random.standard_normal((3, 256)).astype(kind))
        else:
            if dtype is DType.Q2_0:  # which the package does not know
                continue
            rows = random.integers(0, 256, (3, 2, dtype.num_bytes(512)), dtype=np.uint8)
            raw_dtype = gguf.GGMLQuantizationType(dtype.ggml_id)
            writer.add_tensor(dtype.name, rows, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same_as_oracle(path: Path) -> int:
    """Compare every key and tensor with `gguf.GGUFReader`; returns how many were compared."""
    reader = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        keys = [key for key in reader.fields if not key.startswith("GGUF.")]
        assert list(file.metadata) == keys
        for key in keys:
            entry = reader.fields[key]
            if entry.types[0] == gguf.GGUFValueType.ARRAY and ARRAY in entry.types[1:]:
                # GGUFReader flattens nested arrays; their values must come in the same order.
                flat = [int(entry.parts[index][0]) for index in entry.data]
                assert [item for inner in plain(file.metadata[key]) for item in inner] == flat  # type: ignore[attr-defined]
            elif entry.types[-1] == gguf.GGUFValueType.STRING:
                raw = [bytes(entry.parts[index]) for index in entry.data]
                ours = file.metadata[key]
                if isinstance(ours, str):
                    assert [ours.encode()] == raw
                else:
                    assert plain(ours) == raw
            else:
                theirs = entry.contents()
                assert plain(file.metadata[key]) == (
                    list(theirs) if isinstance(theirs, list) else theirs
                )
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(int(dim) for dim in reversed(tensor.shape.tolist()))
            assert info.dtype.name == tensor.tensor_type.name
            assert info.num_bytes == tensor.n_bytes
            assert info.offset == tensor.data_offset
            assert file.raw(tensor.name).tobytes() == tensor.data.tobytes()
        return len(keys) + len(reader.tensors)


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    oracle_file(tmp_path / "oracle.gguf")
    assert same_as_oracle(tmp_path / "oracle.gguf") == 19 + len(WEIGHT_TYPES)


def test_split_by_the_gguf_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama", split_max_tensors=2)
    arrays = {f"t{i}": np.full((4, 8), i, np.float32) for i in range(5)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "part-00001-of-00003.gguf") as file:
        for name, array in arrays.items():
            assert file.raw(name).tobytes() == array.tobytes()


def test_demo_model() -> None:
    if not DEMO.exists():
        pytest.skip("the bundled model is not in this checkout")
    assert same_as_oracle(DEMO) > 50


def test_opens_a_large_vocabulary_fast(tmp_path: Path) -> None:
    """150,000 tokens and 150,000 merges in 0.3 s; the best of five, since the machine is shared."""
    tokens = [f"Ġtoken{index}" for index in range(150_000)]
    merges = [f"Ġtoken {index}" for index in range(150_000)]
    fields: list[tuple[str | bytes, Item]] = [
        ("tokenizer.ggml.tokens", array_of(STRING, tokens)),
        ("tokenizer.ggml.merges", array_of(STRING, merges)),
        ("tokenizer.ggml.scores", array_of(F32, [0.0] * 150_000)),
        ("tokenizer.ggml.token_type", array_of(I32, [1] * 150_000)),
    ]
    path = write(tmp_path / "vocabulary.gguf", GGUFWriter().build(fields))
    seconds = []
    for _ in range(5):
        start = time.process_time()
        with open_gguf(path) as file:
            seconds.append(time.process_time() - start)
            assert file.strings("tokenizer.ggml.tokens")[149_999] == "Ġtoken149999"
            assert file.strings("tokenizer.ggml.merges")[-1] == "Ġtoken 149999"
            assert len(file.numbers("tokenizer.ggml.scores")) == 150_000
    assert min(seconds) < 0.3, seconds


def test_opening_decodes_no_string(tmp_path: Path) -> None:
    """So opening takes less processor time than decoding does, on a fast machine or a slow one."""
    fields: list[tuple[str | bytes, Item]] = [
        ("tokens", array_of(STRING, [f"Ġtoken{index}" for index in range(150_000)]))
    ]
    path = write(tmp_path / "vocabulary.gguf", GGUFWriter().build(fields))
    opening, decoding = [], []
    for _ in range(5):
        start = time.process_time()
        with open_gguf(path) as file:
            opened = time.process_time()
            list(file.strings("tokens"))
            decoding.append(time.process_time() - opened)
        opening.append(opened - start)
    assert min(opening) < min(decoding), (opening, decoding)


def plant(blocks: np.ndarray, dtype: DType, offset: int, data: bytes) -> None:
    """Write a float of some blocks; that of IQ1_M lies in the highest four bits of four words."""
    if dtype is DType.IQ1_M:
        number = int.from_bytes(data, "little")
        for i in range(4):
            place = blocks[..., 49 + 2 * i]
            blocks[..., 49 + 2 * i] = (place & 15) | (((number >> 4 * i) & 15) << 4)
        return
    blocks[..., offset : offset + len(data)] = np.frombuffer(data, np.uint8)


class TestInspection:
    def test_metadata_lines(self, tmp_path: Path) -> None:
        fields = [
            *every_value(),
            ("long", Item(STRING, "x" * 5000)),
            ("many", array_of(U32, range(99))),
        ]
        file = open_gguf(write(tmp_path / "a.gguf", GGUFWriter().build(fields)))
        lines = {line.key: line for line in inspection.metadata_lines(file)}
        assert list(lines) == [key for key, _ in fields]
        assert lines["many"].length == 99
        assert lines["many"].kind == "array of 99 u32"
        assert lines["many"].shown == "[0, 1, 2, 3, 4, 5 ...]"
        assert lines["tokens"].shown.startswith("['a', '', 'Ġb', '\ufffd\ufffd', 'dddd")
        assert lines["nested"].shown == "[array of 2 u16, array of 2 string]"
        assert lines["yes"].shown == "True"
        assert lines["long"].length is None
        assert all(len(line.shown) < 250 for line in lines.values())

    def test_type_counts(self, tmp_path: Path) -> None:
        tensors = [*every_tensor(), FileTensor("more", (64, 2), 8)]
        file = open_gguf(write(tmp_path / "a.gguf", GGUFWriter().build([], tensors)))
        counts = {count.dtype: count for count in inspection.type_counts(file)}
        assert counts[DType.Q8_0] == inspection.TypeCount(DType.Q8_0, 2, 256, 272)
        assert counts[DType.Q4_K] == inspection.TypeCount(DType.Q4_K, 1, 256, 144)
        assert inspection.type_counts(file)[0].dtype is DType.Q8_0

    def test_check_finds_reserved_exponents(self, tmp_path: Path) -> None:
        """The `gguf` package takes them for numbers, the format for none."""
        blocks = np.random.default_rng(2).integers(0, 255, (700, 17), dtype=np.uint8)
        assert self.report(tmp_path, DType.MXFP4, blocks).findings == ()
        blocks[613, 0] = 255
        (found,) = self.report(tmp_path, DType.MXFP4, blocks).findings
        assert str(found) == "w (MXFP4): e of block 613 is nan"
        blocks = np.random.default_rng(2).integers(0, 127, (700, 36), dtype=np.uint8)
        assert self.report(tmp_path, DType.NVFP4, blocks).findings == ()
        blocks[613, 2] = 127
        (found,) = self.report(tmp_path, DType.NVFP4, blocks).findings
        assert str(found) == "w (NVFP4): d[2] of block 613 is nan"

    @pytest.mark.parametrize(
        "dtype",
        [dtype for dtype in WEIGHT_TYPES if dtype not in RESERVED],
        ids=lambda dtype: dtype.name,
    )
    @pytest.mark.parametrize("planted", ["nan", "inf", "-inf"])
    def test_check_finds_what_dequantises_to_a_bad_number(
        self, tmp_path: Path, dtype: DType, planted: str
    ) -> None:
        """Each float field of each type, planted alone, in turn; `gguf` says what it decodes to."""
        num_blocks, place = 700, 613
        random = np.random.default_rng(2)
        blocks = random.integers(0, 256, (num_blocks, dtype.block_bytes), dtype=np.uint8)
        fields = inspection.FLOAT_FIELDS[dtype]
        for _, offset, kind in fields:
            # Finite ones only, among them the largest, the smallest and a negative zero.
            finite = [1.0, -0.0, 2.0**-24 if kind is DType.F16 else 2.0**-126, -LARGEST[kind]]
            for place_of, value in enumerate([*finite, LARGEST[kind]]):
                plant(blocks[place_of::5], dtype, offset, float_bytes(value, kind))
        assert self.report(tmp_path, dtype, blocks).findings == ()
        for name, offset, kind in fields:
            broken = blocks.copy()
            plant(broken[place], dtype, offset, float_bytes(float(planted), kind))
            report = self.report(tmp_path, dtype, broken)
            assert report.num_bad_floats == 1
            assert report.num_floats == num_blocks * len(fields)
            (found,) = report.findings
            assert (found.tensor, found.block, found.field) == ("w", place, name)
            assert str(found.value) == planted
            assert f"{place} is {planted}" in str(found)
            self.same_blocks_are_bad(dtype, broken, place)

    def same_blocks_are_bad(self, dtype: DType, blocks: np.ndarray, place: int) -> None:
        if dtype in (DType.Q1_0, DType.Q2_0):  # which the package cannot read
            return
        kind = gguf.GGMLQuantizationType(dtype.ggml_id)
        flat = blocks.reshape(1, -1)
        if dtype in (DType.F32, DType.F16):
            flat = flat.view(np.float32 if dtype is DType.F32 else np.float16)
        with np.errstate(all="ignore"):
            values = gguf.dequantize(flat, kind).reshape(len(blocks), -1)
        assert np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist() == [place]

    def report(self, folder: Path, dtype: DType, blocks: np.ndarray) -> inspection.TensorsReport:
        assert dtype.ggml_id is not None
        dims = (dtype.block_elements * len(blocks),)
        tensor = FileTensor("w", dims, dtype.ggml_id, blocks.tobytes())
        with open_gguf(write(folder / "a.gguf", GGUFWriter().build([], [tensor]))) as file:
            return inspection.check(file)

    def test_every_field_of_every_type_is_looked_at(self) -> None:
        assert set(inspection.FLOAT_FIELDS) == set(WEIGHT_TYPES)

    def test_check_is_bounded_and_crosses_slabs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(inspection, "SLAB_BYTES", 1000)
        values = np.zeros(5000, "<f4")
        values[[0, 249, 250, 4999]] = np.nan
        values[1000:1100] = np.inf
        tensors = [FileTensor("w", (5000,), 0, values.tobytes())]
        file = open_gguf(write(tmp_path / "a.gguf", GGUFWriter().build([], tensors)))
        shares: list[float] = []
        report = inspection.check(file, lambda _, share: shares.append(share))
        assert report.num_bad_floats == 104
        blocks = [found.block for found in report.findings]
        assert blocks == [0, 249, 250, 1000, 1001, 1002, 1003, 1004]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0

    def test_hash_of_each_shard(self, tmp_path: Path) -> None:
        paths = write_split(tmp_path, "model", every_tensor(), 2)
        with open_gguf(paths[0]) as file:
            shards = inspection.check(file).shards
        assert [(shard.path, shard.sha256) for shard in shards] == [
            (path, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths
        ]


LARGEST = {
    DType.F32: float(np.finfo(np.float32).max),
    DType.F16: 65504.0,
    DType.BF16: (2 - 2.0**-7) * 2.0**127,
}


def float_bytes(value: float, kind: DType) -> bytes:
    single = struct.pack("<f", value)
    if kind is DType.BF16:
        return single[2:]
    return single if kind is DType.F32 else struct.pack("<e", value)


def test_a_file_type_is_shown_by_name() -> None:
    with open_gguf(DEMO) as file:
        shown = {line.key: line.shown for line in inspection.metadata_lines(file)}
    assert shown["general.file_type"] == "7 (MOSTLY_Q8_0)"


def test_loaded_bytes_count_the_packed_form() -> None:
    """Q8_0 keeps its size up to the padding of rows, of which the demo has none."""
    with open_gguf(DEMO) as file:
        stored = sum(info.num_bytes for info in file.tensors.values())
        assert inspection.loaded_bytes(file) == stored


def test_names_of_file_types_are_those_of_the_formats_own_package() -> None:
    """Of version 0.19; that of the format's code is newer by a type."""
    of_package = {kind.value: kind.name for kind in gguf.LlamaFileType}
    assert of_package | {41: "MOSTLY_Q2_0"} == FILE_TYPES
