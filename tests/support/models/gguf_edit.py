"""Writes a GGUF file anew with other tensors, and with keys more; those it has stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

Tensors = dict[str, np.ndarray]


def rewritten(
    source: Path,
    target: Path,
    change: Callable[[Tensors], Tensors],
    keys: Mapping[str, int] = {},
) -> Path:
    """`target`, with the f32 tensors that `change` makes of those of `source`, by name; what is
    quantised there, or in half precision, is what it stands for. `keys` are new ones."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, item = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), kind, item)
    for name, value in keys.items():
        writer.add_uint32(name, value)
    tensors = {
        tensor.name: np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(
            [int(n) for n in tensor.shape[::-1]]
        )
        for tensor in reader.tensors
    }
    for name, values in change(tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
