"""Matrix instructions beside products of whole matrices, of numbers whose sums are all exact.

Where a number lies is AMD's: the tables of the chapters on matrix instructions in the manuals of
CDNA3, RDNA3 and RDNA4.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from machine.amd_wave import Wave

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r

_A, _B, _C, _D = 0, 40, 80, 140
_MFMA = [
    "f32_32x32x1_2b_f32",
    "f32_16x16x1_4b_f32",
    "f32_4x4x1_16b_f32",
    "f32_32x32x2_f32",
    "f32_16x16x4_f32",
    "f32_32x32x4_2b_f16",
    "f32_16x16x4_4b_f16",
    "f32_4x4x4_16b_f16",
    "f32_32x32x8_f16",
    "f32_16x16x16_f16",
    "f32_32x32x4_2b_bf16",
    "f32_16x16x4_4b_bf16",
    "f32_4x4x4_16b_bf16",
    "f32_32x32x8_bf16",
    "f32_16x16x16_bf16",
    "i32_32x32x4_2b_i8",
    "i32_16x16x4_4b_i8",
    "i32_4x4x4_16b_i8",
    "i32_32x32x16_i8",
    "i32_16x16x32_i8",
    "f64_16x16x4_f64",
    "f64_4x4x4_4b_f64",
    "f32_16x16x32_bf8_fp8",
    "f32_16x16x32_fp8_bf8",
    "f32_16x16x32_fp8_fp8",
    "f32_16x16x32_bf8_bf8",
    "f32_32x32x16_bf8_fp8",
    "f32_32x32x16_fp8_fp8",
]
_GFX950 = [
    "f32_16x16x32_f16",
    "f32_32x32x16_f16",
    "f32_16x16x32_bf16",
    "f32_32x32x16_bf16",
    "i32_16x16x64_i8",
    "i32_32x32x32_i8",
]
_WMMA = ["f32_16x16x16_f16", "f32_16x16x16_bf16", "i32_16x16x16_iu8"]
_GFX1201 = [
    "f16_16x16x16_f16",
    "bf16_16x16x16_bf16",
    "f32_16x16x16_fp8_fp8",
    "f32_16x16x16_bf8_fp8",
]
CASES = [
    *(("gfx942", f"v_mfma_{name}") for name in _MFMA),
    *(("gfx950", f"v_mfma_{name}") for name in [*_MFMA, *_GFX950]),
    *(("gfx1100", f"v_wmma_{name}") for name in _WMMA),
    *(("gfx1201", f"v_wmma_{name}") for name in [*_WMMA, *_GFX1201]),
]
_FLOATS = {"f16": "f2", "f32": "f4", "f64": "f8", "i8": "i1", "iu8": "i1", "i32": "i4"}
Places = tuple[Array, Array]


def _encoded(values: Array, kind: str, arch: str) -> Array:
    """Bytes of numbers of a type."""
    if kind in _FLOATS:
        return values.astype(_FLOATS[kind])
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    num_fraction = 3 if kind == "fp8" else 2
    bias = (7 if kind == "fp8" else 15) + (arch == "gfx942")
    size = np.abs(values)
    exponent = np.floor(np.log2(np.where(size > 0, size, 1)))
    fraction = (size / 2**exponent - 1) * 2**num_fraction
    bits = np.where(size > 0, (exponent + bias) * 2**num_fraction + fraction, 0)
    return (bits + np.where(values < 0, 128, 0)).astype(np.uint8)


def _decoded(wave: Wave, kind: str, num_words: int) -> Array:
    if kind == "bf16":
        halves = wave.get(_D, "u2", num_words).astype(np.uint32) << 16
        return halves.view(np.float32).astype(np.float64)
    return wave.get(_D, _FLOATS[kind], num_words).astype(np.float64)


def _grid(num_lanes: int, per_lane: int) -> Places:
    lane, place = np.mgrid[:num_lanes, :per_lane]
    return lane, place


def _mfma_places(size: int, depth: int, blocks: int, is_f64: bool) -> tuple[Array, Array]:
    """[lanes, n, 3] each: block, row (or column) and k of A and B, block, row and column of D."""
    lane, place = _grid(64, size * depth * blocks // 64)
    group = lane // size
    k = place + (size * depth * blocks // 64) * (group // blocks)
    given = np.stack([group % blocks, lane % size, k], -1)
    lane, place = _grid(64, size * size * blocks // 64)
    if size == 32:
        rest = place % 16
        row, block = rest // 4 * 8 + lane // 32 * 4 + rest % 4, place // 16
    elif size == 16:
        row, block = lane // 16 * 4 + place % 4, place // 4
        if is_f64:
            row, block = place * 4 + lane // 16, 0 * place
    else:
        row, block = place, lane // 4
        if is_f64:
            row, block = lane // 16, lane // 4 % 4
    return given, np.stack([block, row, lane % size], -1)


def _wmma_places(arch: str) -> tuple[Array, Array]:
    is_old = arch == "gfx1100"
    lane, place = _grid(32, 16 if is_old else 8)
    given = np.stack([0 * lane, lane % 16, place + (0 if is_old else lane // 16 * 8)], -1)
    lane, place = _grid(32, 8)
    row = 2 * place + lane // 16 if is_old else place + lane // 16 * 8
    return given, np.stack([0 * lane, row, lane % 16], -1)


def _wholes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Small whole numbers: each product and each sum of them is exact in every format."""
    return rng.integers(-6, 7, shape).astype(np.float64)


@pytest.mark.parametrize("first", [30, 32, 34])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_all_of_c_is_read_before_any_of_d_is_written(arch: str, first: int) -> None:
    wave, rng = Wave(arch), np.random.default_rng(3)
    a, b, c = (_wholes(rng, (16, 16)) for _ in range(3))
    lane, k = np.arange(64), 4 * (np.arange(64) // 16)[:, None] + np.arange(4)
    wave.put(38, a[lane[:, None] % 16, k].astype(np.float16))
    wave.put(40, b[k, lane[:, None] % 16].astype(np.float16))
    wave.put(first, c[k, lane[:, None] % 16].astype(np.float32))
    line = f"v_mfma_f32_16x16x16_f16 v[32:35], v[38:39], v[40:41], v[{first}:{first + 3}]"
    assert wave.run(line) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.get(32, "f4", 4), (a @ b + c)[k, lane[:, None] % 16])


def _differing(arch: str, name: str, line: Callable[[str], str] = str) -> int:
    """How many numbers of D are not those of the product; `line` may change the instruction."""
    found = re.fullmatch(r"v_(mfma|wmma)_(\w+?)_(\d+)x\d+x(\d+)_(?:(\d+)b_)?(\w+)", name)
    assert found is not None
    result, size, depth, blocks = found[2], int(found[3]), int(found[4]), int(found[5] or 1)
    first, _, second = found[6].partition("_")
    is_mfma = found[1] == "mfma"
    given, made = (
        _mfma_places(size, depth, blocks, result == "f64") if is_mfma else _wmma_places(arch)
    )
    rng, wave = np.random.default_rng(5), Wave(arch)
    a, b = (_wholes(rng, (blocks, size, depth)) for _ in range(2))
    c = _wholes(rng, (blocks, size, size))
    words = []
    for register, values, kind, at in (
        (_A, a, first, given), (_B, b, second or first, given), (_C, c, result, made),
    ):  # fmt: skip
        raw = _encoded(values[at[..., 0], at[..., 1], at[..., 2]], kind, arch)
        wave.put(register, raw)
        words.append(raw[0].nbytes // 4)
    places = [
        f"v[{register}:{register + num - 1}]" if num > 1 else f"v{register}"
        for register, num in zip((_D, _A, _B, _C), (words[2], *words), strict=True)
    ]
    more = " neg_lo:[1,1,0]" if "iu8" in name else ""
    assert wave.run(line(f"{name} {', '.join(places)}{more}")) == r.ALL_ENDED
    wanted = np.einsum("bik,bjk->bij", a, b) + c
    at = made
    have = _decoded(wave, result, words[2])
    return int((have != wanted[at[..., 0], at[..., 1], at[..., 2]]).sum())


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_a_product_is_that_of_whole_matrices(arch: str, name: str) -> None:
    assert _differing(arch, name) == 0


def _exchanged(line: str) -> str:
    name, *places = re.split(r",? (?=v)", line)
    return f"{name} {', '.join([places[0], places[2], places[1], *places[3:]])}"


def _without_c(line: str) -> str:
    return re.sub(r", v\S*( neg_lo:\S+)?$", r", 0\1", line)


@pytest.mark.parametrize("change", [_exchanged, _without_c])
@pytest.mark.parametrize(("arch", "name"), CASES)
def test_a_changed_product_is_told(arch: str, name: str, change: Callable[[str], str]) -> None:
    if change is _exchanged and re.search("bf8_fp8|fp8_bf8", name):
        name = re.sub("bf8_fp8|fp8_bf8", "fp8_fp8", name)  # it would be of other types, too
    assert _differing(arch, name, change) > 0


_SPARSE = {
    "gfx942": ["f32_16x16x32_f16", "f32_32x32x16_f16", "f32_16x16x32_bf16", "f32_32x32x16_bf16",
               "i32_16x16x64_i8", "i32_32x32x32_i8", "f32_16x16x64_fp8_bf8",
               "f32_32x32x32_bf8_fp8", "f32_16x16x64_fp8_fp8"],
    "gfx950": ["f32_16x16x64_f16", "f32_32x32x32_f16", "f32_16x16x64_bf16", "f32_32x32x32_bf16",
               "i32_16x16x128_i8", "i32_32x32x64_i8", "f32_16x16x128_fp8_bf8",
               "f32_32x32x64_fp8_fp8", "f32_16x16x32_f16"],
}  # fmt: skip
SPARSE = [(arch, f"v_smfmac_{name}") for arch, names in _SPARSE.items() for name in names]


def _sparse_differing(arch: str, name: str, which: int, *, shift: int = 0) -> int:
    """How many numbers of D are not those of the product; `which` part of the indices is meant.

    `shift` moves each number of A to another one of its four columns than the index says.
    """
    found = re.fullmatch(r"v_smfmac_(\w+?)_(\d+)x\d+x(\d+)_(\w+)", name)
    assert found is not None
    result, size, depth = found[1], int(found[2]), int(found[3])
    first, _, second = found[4].partition("_")
    rng, wave = np.random.default_rng(7), Wave(arch)
    held = size * depth // 128
    kept = _wholes(rng, (64, held))
    pairs = rng.permuted(np.tile(np.arange(4), (64, held // 2, 1)), axis=2)[..., :2]
    inner = np.sort(pairs, axis=2).reshape(64, held)
    lane, place = _grid(64, held)
    a = np.zeros((size, depth))
    column = lane // size * 2 * held + place // 2 * 4 + (inner + shift) % 4
    a[lane % size, column] = kept
    b, c = _wholes(rng, (size, depth)), _wholes(rng, (size, size))
    lane, place = _grid(64, 2 * held)
    given = b[lane % size, lane // size * 2 * held + place]
    made = _mfma_places(size, depth, 1, is_f64=False)[1]
    index = (inner.astype(np.uint64) << (2 * np.arange(held, dtype=np.uint64))).sum(1)
    wave.put(_A, _encoded(kept, first, arch))
    wave.put(_B, _encoded(given, second or first, arch))
    wave.put(_D, _encoded(c[made[..., 1], made[..., 2]], result, arch))
    wave.put(_C, (index << np.uint64(2 * held * which)).astype(np.uint32)[:, None])
    sizes = [_encoded(kept, first, arch)[0].nbytes // 4]
    sizes.append(_encoded(given, second or first, arch)[0].nbytes // 4)
    num = size * size // 64
    line = (
        f"{name} v[{_D}:{_D + num - 1}], v[{_A}:{_A + sizes[0] - 1}], v[{_B}:{_B + sizes[1] - 1}], "
        f"v{_C} abid:{which}"
    )
    assert wave.run(line) == r.ALL_ENDED
    have = _decoded(wave, result, num)
    return int((have != (a @ b.T + c)[made[..., 1], made[..., 2]]).sum())


@pytest.mark.parametrize(("arch", "name"), SPARSE)
def test_a_sparse_product_is_that_of_the_whole_matrix(arch: str, name: str) -> None:
    for which in range(2 if "i8" not in name and "fp8" not in name else 1):
        assert _sparse_differing(arch, name, which) == 0
    assert _sparse_differing(arch, name, 0, shift=1) > 0


def test_each_part_of_a_register_of_indices_is_reached() -> None:
    name = "v_smfmac_f32_16x16x32_f16"
    assert [_sparse_differing("gfx942", name, which) for which in range(4)] == [0] * 4
    assert _sparse_differing("gfx942", "v_smfmac_i32_16x16x64_i8", 1) == 0


#: Sizes of numbers, by their code without a sign: the format's number for F8F6F4, and its bits.
#: Source: OCP's Microscaling Formats, "FP6" and "FP4".
_EIGHTH, _QUARTER = np.arange(8) / 8, np.arange(4) / 4
_SMALL = {
    2: (6, np.concatenate([_EIGHTH, 1 + _EIGHTH, 2 * (1 + _EIGHTH), 4 * (1 + _EIGHTH)])),
    3: (6, np.concatenate([_QUARTER / 4, *((1 + _QUARTER) * 2.0**e for e in range(-2, 5))])),
    4: (4, np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])),
}


def _small_codes(
    rng: np.random.Generator, form: int, shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Numbers of a format, and the bits of each lane's as words of 32 bits."""
    if form < 2:
        values = _wholes(rng, shape)
        return values, _encoded(values, ("fp8", "bf8")[form], "gfx950").view(np.uint32)
    num_bits, sizes = _SMALL[form]
    codes = rng.integers(0, 2**num_bits, shape)
    half = 2 ** (num_bits - 1)
    values = np.where(codes < half, sizes[codes % half], -sizes[codes % half])
    bits = (codes[..., None] >> np.arange(num_bits) & 1).reshape(shape[0], -1)
    return values, np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def _small_differing(size: int, forms: tuple[int, int], which: int, scaled_by: str) -> int:
    """Of a product of small formats on gfx950: how many numbers of D differ."""
    rng, wave, depth = np.random.default_rng(9), Wave("gfx950"), 2048 // size
    matrices, widths = [], []
    for register, form in zip((_A, _B), forms, strict=True):
        values, words = _small_codes(rng, form, (64, 32))
        wave.put(register, words)
        widths.append(words.shape[1])
        matrices.append(values)
    scales = rng.integers(122, 133, (2, 64))
    for register, exponents in zip((70, 71), scales, strict=True):
        wave.put(register, (exponents.astype(np.uint32) << np.uint32(8 * which))[:, None])
    lane, place = _grid(64, 32)
    whole = np.zeros((2, size, depth))
    for at, (values, form) in enumerate(zip(matrices, forms, strict=True)):
        column = lane // size * 32 + place
        if form < 2:
            column = lane // size * 16 + place % 16 + place // 16 * (depth // 2)
        whole[at, lane % size, column] = values
        if scaled_by:  # of row i and 32 columns from 32 n on: lane i + size * n
            of_blocks = 2.0 ** (scales[at].reshape(-1, size).T - 127.0)
            whole[at] *= np.repeat(of_blocks, 32, axis=1)
    c = _wholes(rng, (size, size))
    made = _mfma_places(size, depth, 1, is_f64=False)[1]
    wave.put(_C, c[made[..., 1], made[..., 2]].astype(np.float32))
    num = size * size // 64
    a, b = (f"v[{at}:{at + n - 1}]" for at, n in zip((_A, _B), widths, strict=True))
    line = f"f32_{size}x{size}x{depth}_f8f6f4 v[{_D}:{_D + num - 1}], {a}, {b}"
    line += f", v[{_C}:{_C + num - 1}]{scaled_by} cbsz:{forms[0]} blgp:{forms[1]}"
    assert wave.run(f"v_mfma_{'scale_' if scaled_by else ''}{line}") == r.ALL_ENDED
    wanted = (whole[0] @ whole[1].T + c).astype(np.float32)
    return int((wave.get(_D, "f4", num) != wanted[made[..., 1], made[..., 2]]).sum())


@pytest.mark.parametrize("forms", [(0, 0), (1, 0), (0, 4), (4, 1), (4, 4)])
@pytest.mark.parametrize("size", [16, 32])
def test_a_product_of_small_formats_is_that_of_whole_matrices(
    size: int, forms: tuple[int, int]
) -> None:
    assert _small_differing(size, forms, 0, "") == 0
    for which in range(4):
        low, high = which & 1, which >> 1
        bytes_of = f" op_sel:[{low},{low},0] op_sel_hi:[{high},{high},0]"
        assert _small_differing(size, forms, which, f", v70, v71{bytes_of}") == 0
    assert _small_differing(size, forms, 0, ", v71, v70 op_sel_hi:[0,0,0]") > 0


@pytest.mark.parametrize("forms", [(2, 2), (3, 3), (2, 3)])
def test_a_product_of_six_bits_is_that_of_whole_matrices(forms: tuple[int, int]) -> None:
    assert _small_differing(16, forms, 0, "") == 0
    assert _small_differing(32, forms, 0, "") == 0


@pytest.mark.parametrize(("forms", "scaled_by"), [((2, 0), ""), ((3, 3), ", v70, v71")])
def test_where_columns_of_six_bits_lie_beside_others_is_not_modelled(
    forms: tuple[int, int], scaled_by: str
) -> None:
    with pytest.raises(AssertionError, match=r"F8F6F4, .*with operands of formats"):
        _small_differing(16, forms, 0, scaled_by)
