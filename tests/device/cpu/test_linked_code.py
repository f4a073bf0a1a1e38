"""Code that one process linked runs in the next without numba, or numba is asked again."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import binding
from repository import PACKAGE_DIR

from hypocenter.device.cpu import kept_files, linked_code, slots
from hypocenter.device.cpu.kernel_forms import KernelForm, kernel_at_hand, named_kernel
from hypocenter.device.cpu.lang import allocating_kernel, kinds_of, prange
from hypocenter.device.cpu.native import BoundLaunch
from hypocenter.device.cpu.object_code import Unlinkable, link
from hypocenter.device.cpu.vector import get, put
from hypocenter.engine.llm import LLM
from hypocenter.settings.config import EngineConfig

pytestmark = pytest.mark.skipif(not linked_code.can_load(), reason="only x86-64 code is linked")

PROGRAM = """
import hashlib, sys
import numpy as np
from hypocenter.device.cpu.kernel_forms import named_kernel
from hypocenter.device.cpu.native import BoundLaunch

x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
counts = np.array([4, 0], np.int32)
scale = named_kernel("kernels.rowwise.activation_cpu.scale")
for is_shared in (False, True):
    BoundLaunch(scale.form(is_shared=is_shared), (x, counts, 0, np.float32(0.3)))()
print(hashlib.sha256(x).hexdigest(), "numba" in sys.modules, scale.parameters)
"""


def _start(folder: Path, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(PACKAGE_DIR.parent),
            "HYPO_CACHE_DIR": str(folder),
            **environ,
        },
        stdout=subprocess.PIPE,
        text=True,
    )


def _run(folder: Path, **environ: str) -> list[str]:
    out, _ = _start(folder, **environ).communicate(timeout=100)
    return out.split(maxsplit=2)


@pytest.mark.tier("whole")
def test_a_second_process_gives_the_same_bits_without_numba(tmp_path: Path) -> None:
    first, second = _run(tmp_path), _run(tmp_path)
    assert (first[1], second[1]) == ("True", "False")
    assert (first[0], first[2]) == (second[0], second[2])


@pytest.mark.tier("whole")
@pytest.mark.parametrize("change", ["cut", "one bit", "empty", "gone", "another's"])
def test_what_is_damaged_is_made_anew(tmp_path: Path, change: str) -> None:
    first = _run(tmp_path)
    for file in (tmp_path / "linked").glob("code-*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= change == "one bit"
        file.write_bytes(data[: {"cut": len(data) - 1, "empty": 0}.get(change, len(data))])
        if change == "another's":
            file.write_bytes((tmp_path / "linked").glob("target-*").__next__().read_bytes())
        if change == "gone":
            file.unlink()
    second, third = _run(tmp_path), _run(tmp_path)
    assert (second[1], third[1]) == ("True", "False")
    assert first[0] == second[0] == third[0]


@pytest.mark.tier("whole")
@pytest.mark.parametrize(
    "environ", [{"NUMBA_OPT": "2"}, {"HYPO_INSTRUCTIONS": "plain"}, {"NUMBA_CPU_NAME": "generic"}]
)
def test_what_was_compiled_for_otherwise_is_not_taken(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    _run(tmp_path)
    assert _run(tmp_path, **environ)[1] == "True"
    assert _run(tmp_path)[1] == "False"


@pytest.mark.tier("whole")
def test_two_processes_may_be_the_first(tmp_path: Path) -> None:
    both = [_start(tmp_path) for _ in range(2)]
    digests = {one.communicate(timeout=100)[0].split()[0] for one in both}
    third = _run(tmp_path)
    assert digests == {third[0]}
    assert third[1] == "False"


def test_a_file_that_was_not_written_by_us_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_files, "_folder", lambda: tmp_path)
    assert kept_files.read("x") is None
    kept_files.write("x", b"code")
    assert kept_files.read("x") == b"code"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    written = (tmp_path / "x").read_bytes()
    for other in (b"", written[:-1], written[:-1] + b"f", b"code", written + b"\0"):
        (tmp_path / "x").write_bytes(other)
        assert kept_files.read("x") is None, other
    (tmp_path / "y").write_bytes(written)
    assert kept_files.read("y") is None


def test_a_folder_that_takes_nothing_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_files, "_folder", lambda: tmp_path / "is not there")
    kept_files.write("x", b"code")
    assert kept_files.read("x") is None


# -- linking ---------------------------------------------------------------------------------------

TEXT = """
target triple = "{triple}"
@table = private constant [4 x i64] [i64 3, i64 5, i64 7, i64 11]
@place = private constant i64* getelementptr ([4 x i64], [4 x i64]* @table, i64 0, i64 2)
declare i64 @nobody(i64)
declare i8* @memset(i8*, i32, i64)
define i64 @look(i64 %at) noinline {{
  %p = getelementptr [4 x i64], [4 x i64]* @table, i64 0, i64 %at
  %v = load i64, i64* %p
  ret i64 %v
}}
define i64 @far(i64 %at) {{
  %p = load i64*, i64** @place
  %v = load i64, i64* %p
  %w = call i64 @look(i64 %at)
  %room = alloca i64
  store i64 -1, i64* %room
  %bytes = bitcast i64* %room to i8*
  call i8* @memset(i8* %bytes, i32 0, i64 %at)
  %left = load volatile i64, i64* %room
  %s = add i64 %v, %w
  %t = add i64 %s, %left
  ret i64 %t
}}
define i64 @asks(i64 %x) noinline {{
  %v = call i64 @nobody(i64 %x)
  ret i64 %v
}}
define i64 @asks_by_another(i64 %x) {{
  %v = call i64 @asks(i64 %x)
  ret i64 %v
}}
{more}
"""


def _object(more: str = "") -> bytes:
    """As numba's: code that may lie anywhere."""
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(jit=True, codemodel="large", opt=0)
    text = TEXT.format(triple=binding.get_default_triple(), more=more)
    return bytes(machine.emit_object(binding.parse_assembly(text)))


def test_linked_code_finds_its_constants_its_functions_and_those_of_libc() -> None:
    # The second lies behind the first, at another address.
    linked = link([_object(), _object()], {"far"}, ())
    addresses = linked_code.load(linked)
    assert addresses is not None
    far = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(addresses["far"])
    assert far(3) == 7 + 11 + (-1 << 24)


@pytest.mark.parametrize("entry", ["asks", "asks_by_another", "is not there"])
def test_what_asks_for_what_nobody_has_is_not_linked(entry: str) -> None:
    with pytest.raises(Unlinkable):
        link([_object()], {entry}, ())


def test_data_that_change_are_not_linked() -> None:
    with pytest.raises(Unlinkable, match="data that change"):
        link([_object("@count = global i64 5")], {"far"}, ())


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02\x01" + bytes(58), bytes(64)])
def test_what_is_no_object_file_is_not_linked(data: bytes) -> None:
    with pytest.raises(Unlinkable):
        link([data], (), ())


# -- forms -----------------------------------------------------------------------------------------


@allocating_kernel
def _sum_of_squares(x: Any, out: Any) -> None:
    for item in prange(x.shape[0]):
        room = np.empty(x.shape[1], np.float64)
        for column in range(x.shape[1]):
            room[column] = get(x, item * x.shape[1] + column)
        put(out, item, (room * room).sum())


@pytest.mark.parametrize("is_shared", [False, True])
def test_numba_runs_what_cannot_be_linked_and_the_bits_are_those_of_linked_code(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).standard_normal((7, 33)).astype(np.float32)
    found = []
    for can_load in (True, False):
        monkeypatch.setattr(linked_code, "can_load", lambda can_load=can_load: can_load)
        out = np.zeros(7)
        kernel_at_hand.cache_clear()
        form = kernel_at_hand(_sum_of_squares).form(is_shared=is_shared)
        BoundLaunch(form, (x, out))()
        found.append(out)
        assert _is_linked(form, (x, out)) == can_load
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0], (x.astype(np.float64) ** 2).sum(1), rtol=1e-12)


@pytest.mark.tier("whole")
def test_a_model_gives_the_same_bits_by_linked_code_and_by_numba(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, found = [(7 * n) % 900 + 5 for n in range(40)], []
    for can_load in (True, False):
        monkeypatch.setattr(linked_code, "can_load", lambda can_load=can_load: can_load)
        named_kernel.cache_clear()
        with LLM(config=EngineConfig(context_length=128)) as llm:
            found.append((llm.logits(ids).tobytes(), llm.generate("import os").token_ids))
    named_kernel.cache_clear()
    assert found[0] == found[1]


def _is_linked(form: KernelForm, args: tuple[Any, ...]) -> bool:
    """Whether its code lies in memory that linked code was put into."""
    address = form.entry(args).kernel
    kept = (np.frombuffer(memory, np.uint8) for memory in linked_code._kept)
    return any(held.ctypes.data <= address < held.ctypes.data + held.size for held in kept)


def test_arguments_of_one_key_are_of_one_type() -> None:
    """And those of numba's types that differ have keys that differ."""
    table = np.zeros((4, 6), np.float32)
    fixed = table.copy()
    fixed.flags.writeable = False
    record = np.dtype([("a", np.int32), ("b", np.float32, (2,))])
    values: list[Any] = [
        table, table[:2], table[:, ::2], table.T, table[0], fixed, table.astype(np.float64),
        np.zeros((2, 3), record), np.zeros((2, 3), np.dtype([("b", np.int32), ("a", "<f4", 2)])),
        np.zeros((2, 3), np.int32), np.zeros((2, 3), np.uint32), np.zeros(0, np.float32),
        1, -5, 1 << 40, 1 << 63, True, 0.5, np.float32(1), np.float64(1), np.int32(1), np.uint8(1),
        np.bool_(1), np.int64(3),
    ]  # fmt: skip
    types: dict[str, set[Any]] = {}
    for value in values:
        types.setdefault(slots.key_of((value,))[0], set()).add(kinds_of((value,))[0])
    assert all(len(kinds) == 1 for kinds in types.values()), types
    assert len({numba.typeof(value) for value in values}) <= len(types)
