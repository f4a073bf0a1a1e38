"""Packed weights on disk: found again, made anew when anything is wrong, never too many."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny_gguf import write_tiny
from outside.terminal import TIMEOUT_SECONDS
from repository import DEMO

from hypocenter.device.cpu.sources import import_closure
from hypocenter.kernels.weights import cpu_layout, packing
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors import packed_weights
from hypocenter.model.tensors.table import Weights
from hypocenter.model.tensors.weights import load_weights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    monkeypatch.setattr(packed_weights, "private_folder", lambda _: (folder, ""))
    monkeypatch.setattr(packed_weights, "_WORTH_BYTES", 0)
    return folder


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the rows of each matrix that is packed and not found."""
    rows: list[int] = []
    for name in ("_fill", "in_groups"):
        function = getattr(cpu_layout, name)

        def counted(*args: Any, _function: Callable[..., Any] = function) -> Any:
            rows.append(len(args[0]))
            return _function(*args)

        monkeypatch.setattr(cpu_layout, name, counted)
    return rows


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model that nobody has written to for a while."""
    return _settled(Path(shutil.copy(DEMO, tmp_path / "model.gguf")))


def _settled(path: Path) -> Path:
    time.sleep(0.01)
    os.utime(path, (1, 1))
    return path


def _load(path: Path) -> Weights:
    with open_gguf(path) as file:
        arch = read_architecture(file)
        return load_weights(file, arch, arch.context_length)


def _bytes(weights: Weights) -> list[bytes]:
    """Of every matrix."""
    tensors = [weights.token_table, weights.output]
    for layer in weights.layers:
        tensors += layer.matrices
    return [tensor.data.parts[0].tobytes() for tensor in tensors]


def _files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.packed"))


def _age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of files stand where they count as settled."""
    monkeypatch.setattr(packed_weights, "_SETTLED_NS", -(1 << 60))


@pytest.mark.parametrize("name", ["demo", "llama", "phi3"])
def test_what_is_found_is_what_was_packed(
    name: str, tmp_path: Path, cache: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = DEMO if name == "demo" else write_tiny(tmp_path / "tiny.gguf", name)
    made = _load(path)
    assert packed
    (file,) = _files(cache)
    assert file.stat().st_mode & 0o077 == 0
    packed.clear()
    found = _load(path)
    assert packed == []
    assert _bytes(found) == _bytes(made)
    matrix = found.layers[0].down.data.parts[0]
    assert not matrix.flags.owndata
    assert matrix.flags.writeable, "kernels for arrays that cannot be written to are others"
    # Without anything on disk it is the same again.
    monkeypatch.setattr(packed_weights, "_WORTH_BYTES", 1 << 60)
    assert _bytes(_load(path)) == _bytes(made)
    assert packed


def test_the_model_is_read_whole_only_once(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[int] = []
    digest = packed_weights._digest

    def counted(raw: Any) -> bytes:
        digested.append(len(raw))
        return digest(raw)

    _age(monkeypatch)
    monkeypatch.setattr(packed_weights, "_digest", counted)
    _load(model)
    assert model.stat().st_size in digested
    digested.clear()
    _load(model)
    assert digested == []


def test_a_file_just_written_is_read_again(model: Path, cache: Path) -> None:
    """It could change once more within the same tick of the clock."""
    _load(model)
    assert json.loads((cache / "remembered.json").read_text())["digests"] == {}


def test_a_copy_of_the_model_finds_the_same(
    model: Path, cache: Path, packed: list[int], tmp_path: Path
) -> None:
    _load(model)
    packed.clear()
    _load(Path(shutil.copy(model, tmp_path / "copy.gguf")))
    assert packed == []
    assert len(_files(cache)) == 1


def test_a_model_that_changed_in_place_is_packed_anew(
    model: Path, cache: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its size and the time of its last change are what they were."""
    _age(monkeypatch)
    before = _bytes(_load(model))
    status = model.stat()
    time.sleep(0.01)
    with model.open("r+b") as file, open_gguf(model) as gguf:
        info = gguf.tensors["token_embd.weight"]
        file.seek(info.offset)
        file.write(bytes(byte ^ 1 for byte in gguf.raw(info.name)[:64].tobytes()))
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    packed.clear()
    assert _bytes(_load(model)) != before
    assert packed
    assert len(_files(cache)) == 2


def test_another_layout_is_another_file(
    model: Path, cache: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _load(model)
    packed.clear()
    monkeypatch.setattr(packed_weights, "_layout", lambda **_: "newer")
    _load(model)
    assert packed
    assert len(_files(cache)) == 2
    assert Path(cpu_layout.__file__) in import_closure(Path(packing.__file__))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _tail(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-16, os.SEEK_END)
        file.write(b"\xff" * 8)


def _index(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"num_bytes":', b'"num_bytes":9'))


@pytest.mark.parametrize("damage", [_cut, _emptied, _tail, _index])
def test_a_damaged_file_is_told_of_and_made_anew(
    damage: Callable[[Path], None],
    model: Path,
    cache: Path,
    packed: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = _bytes(_load(model))
    damage(_files(cache)[0])
    packed.clear()
    assert _bytes(_load(model)) == before
    assert packed
    (record,) = caplog.records
    assert "is damaged" in record.message
    packed.clear()
    assert _bytes(_load(model)) == before
    assert packed == []


def test_bytes_that_a_crash_lost_are_noticed_after_the_next_start_of_the_machine(
    model: Path,
    cache: Path,
    packed: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = _bytes(_load(model))
    with _files(cache)[0].open("r+b") as file:
        file.seek(4096 + 5)
        file.write(b"\0\1\2\3")
    monkeypatch.setattr(packed_weights, "_run_of_machine", lambda: "the next")
    packed.clear()
    assert _bytes(_load(model)) == before
    assert packed
    assert "other bytes than were written" in caplog.text
    packed.clear()
    assert _bytes(_load(model)) == before
    assert packed == []


def test_no_more_is_kept_than_is_allowed(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [write_tiny(tmp_path / f"{n}.gguf", metadata={"number": n}) for n in range(4)]
    _load(others[0])
    size = _files(cache)[0].stat().st_size
    monkeypatch.setenv("HYPO_PACKED_GIB", f"{3.5 * size / 2**30:.9f}"[:8])
    kept = [*_files(cache)]
    for path in others[1:3]:
        _load(path)
        kept.append(next(file for file in _files(cache) if file not in kept))
        time.sleep(0.01)
    time.sleep(0.01)
    _load(others[0])  # used last, though made first
    _load(others[3])
    assert len(_files(cache)) == 3
    assert kept[0] in _files(cache)
    assert kept[1] not in _files(cache)


@pytest.mark.parametrize("setting", ["0", "0.000001"])
def test_a_model_that_may_not_be_kept_loads(
    setting: str, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPO_PACKED_GIB", setting)
    _load(model)
    assert _files(cache) == []


def test_a_full_disk_costs_one_warning(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_left = [3]
    add = packed_weights._NewFile.add

    def full(new: Any, key: str, array: Any) -> None:
        num_left[0] -= 1
        if num_left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(new, key, array)

    monkeypatch.setattr(packed_weights._NewFile, "add", full)
    _load(model)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left on device" in caplog.text
    assert [path.name for path in cache.iterdir() if path.suffix not in (".json", "")] == []
    assert list(cache.glob("making-*")) == []


KILLED = """
import os, sys
from pathlib import Path
from hypocenter.model.tensors import packed_weights
new = packed_weights._NewFile(Path(sys.argv[1]), "x.packed")
print("begun", flush=True)
sys.stdin.read()
os._exit(9)
"""


def test_what_killed_processes_leave_is_removed_and_what_others_make_is_not(cache: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(cache)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        (left,) = cache.glob("making-*")
        packed_weights._remove_leftovers(cache)
        assert left.exists()
        child.communicate(timeout=TIMEOUT_SECONDS)
    packed_weights._remove_leftovers(cache)
    assert not left.exists()


def test_two_that_pack_at_once_end_with_one_file(model: Path, cache: Path) -> None:
    with open_gguf(model) as file:
        arch = read_architecture(file)
        first = packed_weights.PackedWeights(file, "cpu", num_bytes=1)
        load_weights(file, arch, arch.context_length)
        first.keep("x", (np.zeros(10, np.uint8),))
        first.finish()
    assert len(_files(cache)) == 1
    # It is the other's now; what is not in it is packed, and what is there is right.
    assert _bytes(_load(model)) == _bytes(_load(DEMO))
