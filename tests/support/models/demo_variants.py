"""Makes variants of the bundled model: with other metadata, or with another architecture's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from repository import DEMO

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def demo_with(
    path: Path, metadata: dict[str, tuple[Any, GGUFValueType]],
    types: Mapping[str, GGMLQuantizationType] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write the bundled model to `path` with these keys added or replaced, tensors of these names
    in other types, and these tensors of f32 beside its own."""
    reader = GGUFReader(DEMO)
    arch = metadata.get("general.architecture", ("llama", None))[0]
    writer = GGUFWriter(path, arch)
    for field in reader.fields.values():
        if field.name in metadata or field.name.startswith("GGUF."):
            continue
        if field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type)
    for key, (value, kind) in metadata.items():
        if key != gguf.Keys.General.ARCHITECTURE:
            writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if types and tensor.name in types:
            kind = types[tensor.name]
            data = quantize(dequantize(data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: At some thousand tokens a second an answer of this length is never over before a test stops it.
LONG_CONTEXT = 1 << 16


def demo_that_chats(path: Path) -> Path:
    """The bundled model with a chat template and a long context, for which it was not trained."""
    return demo_with(
        path,
        {
            "tokenizer.chat_template": (CHAT_TEMPLATE, GGUFValueType.STRING),
            "llama.context_length": (LONG_CONTEXT, GGUFValueType.UINT32),
        },
    )
