"""Gives bytes to the GGUF reader as a file and touches all it hands out; shared with the fuzzer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hypocenter.base.errors import BadModelFile
from hypocenter.model.gguf import inspection
from hypocenter.model.gguf.file import GGUFFile, open_gguf

#: The size of every file that was tried, so that a test run can say how many there were.
TRIED: list[int] = []


def refusal(path: Path, data: bytes) -> BadModelFile | None:
    """Write `data` to `path`, read everything; None if that works, else the reader's refusal.

    Any exception but BadModelFile passes through, and a refusal must be one bounded line with
    field and limit.
    """
    path.unlink(missing_ok=True)  # a new file: the old one may still be mapped
    path.write_bytes(data)
    TRIED.append(len(data))
    try:
        with open_gguf(path) as file:
            touch(file)
    except BadModelFile as error:
        refused = error
    else:
        return None
    message = str(refused)
    assert refused.field, message
    assert refused.limit, message
    assert message.startswith(f"{path}: "), message
    assert "\n" not in message, message
    assert len(message) < 1000, message
    return refused


def touch(file: GGUFFile) -> None:
    """Decode every value, read every byte of every tensor, check every float; single files only."""
    file_bytes = len(file.shard_bytes(0))
    for key, value in file.metadata.items():
        starts = file.metadata.entry(key).starts
        assert starts is None or starts[-1] - 8 <= file_bytes, f"{key!r} goes beyond the file"
        if not isinstance(value, bool | int | float | str | np.ndarray):
            list(value)
    end = 0
    for info in sorted(file.tensors.values(), key=lambda info: info.offset):
        assert info.offset >= end, f"{info} overlaps the tensor before"
        end = info.offset + info.num_bytes
        assert end <= file_bytes, info
        raw = file.raw(info.name)
        assert len(raw) == info.num_bytes, info
        assert not raw.flags.writeable, info
        int(raw.sum())
    lines = inspection.metadata_lines(file)
    assert all(len(line.shown) < 3000 for line in lines), lines
    inspection.type_counts(file)
    inspection.check(file)
