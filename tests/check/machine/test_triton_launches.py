"""Triton launches as AMD's machine code: joined with the replay, and a compiler that is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from machine.amd_planted import instructions_of, without
from machine.scaling_kernels import copy_listed, scale, scale_broken, turn

from hypocenter.check.machine import triton_launches
from hypocenter.check.machine.results import first_difference
from hypocenter.check.machine.triton_launches import MachineLaunches
from hypocenter.check.report import CheckedLaunch
from hypocenter.replay.findings import Finding, FindingKind


def _launched(jit: Any, n: int, arch: str) -> tuple[list[Finding], CheckedLaunch, torch.Tensor]:
    records: list[Any] = []
    launches = MachineLaunches(60.0, records.append, arch)
    x, out = torch.arange(1.0, 501.0), torch.zeros(500)
    launches.launch(jit, (x, out, n), (2,), {"BLOCK": 256})
    (launched,) = (record for record in records if isinstance(record, CheckedLaunch))
    return [record for record in records if isinstance(record, Finding)], launched, out


def test_a_healthy_launch_has_no_finding_and_was_executed() -> None:
    found, launched, out = _launched(scale, 500, "gfx942")
    assert found == []
    assert launched.unexecuted == ""
    assert out[499] == 1000.0


def test_a_compiler_that_makes_something_else_is_told_with_the_program_that_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hypocenter.device.offline.compile import compile_source

    def broken(source: Any, limits: Any, options: Any) -> Any:
        return compile_source(
            triton.compiler.ASTSource(
                scale_broken, source.signature, source.constants, source.attrs
            ),
            limits, options,
        )  # fmt: skip

    monkeypatch.setattr(triton_launches, "compile_source", broken)
    (found,), _, out = _launched(scale, 500, "gfx942")
    assert found.kind is FindingKind.OTHER_RESULT
    assert (found.argument, found.number, found.program) == ("out_ptr", 300, (1, 0, 0))
    assert "is 903 as" in found.detail
    assert "602 in the interpreter" in found.detail
    assert "1 of 500 elements differ" in found.detail
    assert out[300] == 602.0


def test_a_finding_of_the_replay_gets_lane_register_and_pc_of_the_machine_code() -> None:
    found, _, _ = _launched(scale, 512, "gfx942")
    load, store = found
    assert (load.kind, load.argument, load.number) == (FindingKind.OUT_OF_BOUNDS, "x_ptr", 500)
    assert "in the machine code block (1, 0, 0): " in load.detail
    assert "; wave 3 lane 52: v" in load.detail
    assert "buffer_load_dword at pc +0x" in load.detail
    assert store.argument == "out_ptr"


def test_shared_memory_that_nobody_wrote_is_told_where_it_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row is stored, which only the first of four stores into shared memory has numbers of."""
    from hypocenter.device.offline.compile import compile_source

    def without_store(number: int | None) -> list[Finding]:
        def compiled(source: Any, limits: Any, options: Any) -> Any:
            made = compile_source(source, limits, options)
            data = made.asm["hsaco"]
            stores = [one for one in instructions_of(data) if one.name.startswith("DS_WRITE")]
            assert len(stores) == 4
            data = data if number is None else without(data, stores[number])
            return SimpleNamespace(asm={"hsaco": data}, metadata=made.metadata)

        monkeypatch.setattr(triton_launches, "compile_source", compiled)
        records: list[Any] = []
        launches = MachineLaunches(60.0, records.append, "gfx942")
        launches.launch(turn, (torch.ones(1024), torch.zeros(1024), 1), (1,), {"SIZE": 32})
        (launched,) = (record for record in records if isinstance(record, CheckedLaunch))
        assert launched.unexecuted == ""
        return [record for record in records if isinstance(record, Finding)]

    (found,) = without_store(0)
    assert (found.kind, found.kernel) == (FindingKind.UNINITIALISED_READ, "turn")
    assert found.detail.startswith("byte 0 of shared memory was written by nobody; wave 0 lane 0: ")
    assert "ds_read_b32 at pc +0x" in found.detail
    assert found.sites[0].expression.startswith("tl.store(out_ptr")
    assert [without_store(number) for number in (None, 1, 2, 3)] == [[]] * 4


def test_memory_whose_address_stands_in_a_tensor_is_there_and_no_other() -> None:
    records: list[Any] = []
    launches = MachineLaunches(60.0, records.append, "gfx942")
    with launches.watch:
        parts = [torch.full((64,), float(number)) for number in (3, 5)]
        table, out = torch.tensor([part.data_ptr() for part in parts]), torch.zeros(128)
    launches.launch(copy_listed, (table, out), (2,), {"BLOCK": 64})
    assert [record for record in records if isinstance(record, Finding)] == []
    (launched,) = (record for record in records if isinstance(record, CheckedLaunch))
    assert launched.unexecuted == ""
    assert out.tolist() == [3.0] * 64 + [5.0] * 64
    table[1] += 1 << 40
    launches.launch(copy_listed, (table, out), (2,), {"BLOCK": 64})
    kinds = {record.kind for record in records if isinstance(record, Finding)}
    assert kinds == {FindingKind.WILD_POINTER}


def test_what_cannot_be_compiled_is_told_and_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(triton_launches, "compile_source", refuse)
    found, launched, _ = _launched(scale, 500, "gfx942")
    assert found == []
    assert launched.unexecuted == "RuntimeError: PassManager::run failed"


@pytest.mark.parametrize(("dtype", "by", "differs"), [
    (torch.float32, 2.0**-10, False), (torch.float32, 2.0**-7, True),
    (torch.bfloat16, 2.0**-6, False), (torch.bfloat16, 2.0**-2, True),
    (torch.float32, float("nan"), True), (torch.int32, 1, True),
])  # fmt: skip
def test_rounding_is_no_difference_and_more_is(
    dtype: torch.dtype, by: float, differs: bool
) -> None:
    mine = torch.ones(8, dtype=dtype)
    other = mine.clone()
    other[5] += by
    raw = other.view(torch.uint8).numpy().copy()
    found = first_difference({"out": mine}, {"out": raw})
    assert (found is not None) == differs
    assert found is None or found.number == 5


def test_whole_numbers_beside_floats_are_not_judged() -> None:
    codes, scales = torch.tensor([1, 2]), torch.ones(2)
    machine = {
        "codes": np.array([1, 3]).view(np.uint8),
        "scales": np.ones(2, np.float32).view(np.uint8),
    }
    assert first_difference({"codes": codes, "scales": scales}, machine) is None
