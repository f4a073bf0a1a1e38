"""What stops the machine is what docs/amd.md names: no instruction more, and none less."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache

import pytest
from machine.amd_objects import TARGETS
from machine.amd_wave import num_lanes_of
from repository import ROOT

from hypocenter.device.amd.decode import FAMILIES, Instruction, NotModelled, _formats
from hypocenter.device.amd.lower import Lowering

#: Fields that hold vector registers, of which number 0 is written 256.
_REGISTERS = re.compile(r"v(dst|data|addr|src\d?)|data\d?|addr|src\d")
_SCALAR_DESTS = ("V_READLANE_B32", "V_READFIRSTLANE_B32")


def _named() -> list[str]:
    """The patterns in the table of docs/amd.md."""
    text = (ROOT / "docs" / "amd.md").read_text()
    table = text.split("| stops the machine |")[1].split("\n\n")[0]
    return re.findall(r"`([A-Z0-9_*\[\]]+)`", table)


def _plain_instructions(arch: str) -> Iterator[Instruction]:
    """Each opcode in each of its encodings, without modifiers; pairs (VOPD) by their first half."""
    for encoding in _formats(FAMILIES[arch]):
        if encoding.__name__.endswith(("DPP8", "DPP16", "_SDWA", "_LIT")):
            continue
        fields = dict(encoding._fields)
        op = fields.get("op")
        if op is None:
            continue
        names = [name for name in fields if name not in ("encoding", "op", "seg")]
        values = {name: 256 if _REGISTERS.fullmatch(name) else 0 for name in names}
        for each in op.allowed or op._enum:
            name = each.name.removesuffix("_E32").removesuffix("_E64")
            own = values | {"vdst": 0} if name in _SCALAR_DESTS else values
            yield Instruction(0, name, encoding.__name__, own, 8, bytes(8))


@cache
def _stopping(arch: str) -> tuple[set[str], set[str]]:
    """The names of a target that stop the machine in every encoding, and all its names."""
    lowered: defaultdict[str, list[bool]] = defaultdict(list)
    for each in _plain_instructions(arch):
        try:
            Lowering(arch, num_lanes_of(arch))._rows(each)
        except NotModelled:
            lowered[each.name].append(False)
        else:
            lowered[each.name].append(True)
    return {name for name, found in lowered.items() if not any(found)}, set(lowered)


@pytest.mark.parametrize("arch", TARGETS)
def test_each_instruction_that_is_not_modelled_is_named(arch: str) -> None:
    stopping, every = _stopping(arch)
    assert len(every) > 700
    patterns = _named()
    unnamed = {n for n in stopping if not any(fnmatchcase(n, each) for each in patterns)}
    assert unnamed == set()


def test_each_name_of_the_table_stops_the_machine_somewhere() -> None:
    stopping = {name for arch in TARGETS for name in _stopping(arch)[0]}
    every = {name for arch in TARGETS for name in _stopping(arch)[1]}
    for pattern in _named():
        matched = {name for name in every if fnmatchcase(name, pattern)}
        assert matched, pattern
        assert matched <= stopping, (pattern, matched - stopping)
