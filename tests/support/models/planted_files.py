"""Copies of the bundled model with a fault that its file can carry: other bytes in its tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from repository import DEMO

from hypocenter.model.gguf.file import GGUFFile, open_gguf


def edited(path: Path, edit: Callable[[GGUFFile], Mapping[str, Any]]) -> Path:
    """The bundled model with other bytes in the tensors that `edit` names."""
    shutil.copyfile(DEMO, path)
    with open_gguf(DEMO) as file, path.open("r+b") as out:
        for name, data in edit(file).items():
            out.seek(file.tensors[name].offset)
            out.write(np.ascontiguousarray(data).tobytes())
    return path


def swapped_norms(file: GGUFFile) -> dict[str, Any]:
    one, other = "blk.2.attn_norm.weight", "blk.2.ffn_norm.weight"
    return {one: file.raw(other), other: file.raw(one)}


def scales_off_by_a_block(file: GGUFFile) -> dict[str, Any]:
    raw = np.array(file.raw("blk.3.attn_k.weight")).reshape(-1, 34)
    raw[:, :2] = np.roll(raw[:, :2], 1, axis=0)
    return {"blk.3.attn_k.weight": raw}
