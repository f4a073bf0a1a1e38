"""Of which parameters an address is made, by machine code that nvcc 13.0 made for three GPUs.

`tests/fixtures/coredump/kernels.json` holds the source and the code, `kernels.cubin.xz` the whole
image for sm_90.
"""

from __future__ import annotations

import functools
import json
import lzma
import os
from pathlib import Path

import pytest
from recorded.core_dumps import FIXTURES, fixture

from hypocenter.coredump.elf import Elf
from hypocenter.coredump.nvidia import read_core_dump
from hypocenter.coredump.parameters import parameters_of
from hypocenter.coredump.sass import INSTRUCTION_BYTES, memory_instruction
from hypocenter.coredump.sources import MAX_CODE_BYTES, Sources, parameter_sources

ARCHITECTURES = (80, 90, 100)


@functools.cache
def code_of(kernel: str, architecture: int) -> bytes:
    held = json.loads((FIXTURES / "kernels.json").read_text())
    return bytes.fromhex(held["code"][str(architecture)][kernel])


def accesses(kernel: str, architecture: int) -> list[Sources]:
    """Of each access to global memory of a kernel, in order, what its address is made of."""
    code = code_of(kernel, architecture)
    return [
        parameter_sources(code, at, access, architecture)
        for at in range(0, len(code), INSTRUCTION_BYTES)
        if (access := memory_instruction(code[at:])) is not None
    ]


def pointers(kernel: str, architecture: int, among: set[int]) -> list[set[int]]:
    """The same, of the parameters that are pointers in the source."""
    return [
        {at // 8 * 8 for at in sources.parameters} & among
        for sources in accesses(kernel, architecture)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("kernel", "among", "right"),
    [
        # ids, and then out, whose index was loaded.
        ("scatter", {0, 8}, [{0}, {8}]),
        ("scale", {0}, [{0}, {0}]),
        ("vec", {0, 8}, [{0}, {8}]),
        # Two pointers in one structure, the second 16 bytes behind the first.
        ("instruct", {0, 16}, [{0}, {16}]),
    ],
)
def test_an_address_is_made_of_the_pointer_in_the_source(
    kernel: str, among: set[int], right: list[set[int]], architecture: int
) -> None:
    assert pointers(kernel, architecture, among) == right


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_atomic_in_a_loop_is_through_its_own_pointer_alone(architecture: int) -> None:
    assert pointers("hist", architecture, {0, 8})[-1] == {8}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_of_two_pointers_that_may_be_taken_both_are_told(architecture: int) -> None:
    """The kernel takes one or the other, by a number: the code alone does not tell which."""
    assert pointers("pick", architecture, {0, 8, 16}) == [{0, 8}, {16}]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pointer_that_was_loaded_is_of_no_parameter(architecture: int) -> None:
    first, second = accesses("viaptr", architecture)
    assert (first.parameters, first.is_loaded) == ((0,), False)
    # The number of the element, and nothing of the table of pointers.
    assert (second.parameters, second.is_loaded) == ((8,), True)


def test_what_is_not_known_gives_nothing() -> None:
    code = code_of("scale", 90)
    at = next(at for at in range(0, len(code), 16) if memory_instruction(code[at:]))
    access = memory_instruction(code[at:])
    assert access is not None
    assert parameter_sources(code, at, access, 60) == Sources()
    assert parameter_sources(code, len(code), access, 90) == Sources()
    assert parameter_sources(bytes(MAX_CODE_BYTES + 16), 0, access, 90) == Sources()


def test_a_dump_of_a_gpu_says_it_of_its_access(tmp_path: Path) -> None:
    """Triton's code: the rows of a table by an index that was loaded; an address that was."""
    found = {}
    for name in ("gather", "pointers"):
        (tmp_path / name).write_bytes(fixture(name))
        warp = read_core_dump(tmp_path / name).faulting
        assert warp is not None
        assert warp.access is not None
        found[name] = warp.access.parameters
    assert found == {"gather": (8,), "pointers": ()}


def test_the_code_says_how_its_parameters_lie(tmp_path: Path) -> None:
    path = tmp_path / "kernels.cubin"
    path.write_bytes(lzma.decompress((FIXTURES / "kernels.cubin.xz").read_bytes()))
    file = os.open(path, os.O_RDONLY)
    try:
        image = Elf(file, 0, path.stat().st_size, "kernels")
        assert parameters_of(image, "scatter") == ((0, 8), (8, 8), (16, 4))
        assert parameters_of(image, "instruct") == ((0, 24), (24, 4))
        assert parameters_of(image, "hist") == ((0, 8), (8, 8), (16, 4), (24, 8))
        assert parameters_of(image, "another") == ()
    finally:
        os.close(file)
    (tmp_path / "gather").write_bytes(fixture("gather"))
    [grid] = read_core_dump(tmp_path / "gather").grids
    assert grid.layout == ((0, 8), (8, 8), (16, 8), (24, 8), (32, 8))
