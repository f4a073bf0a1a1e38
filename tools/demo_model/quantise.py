"""Rewrites an F16 or F32 GGUF file with its matrices in another type; norms stay F32.

The block encodings are those of the `gguf` package, so the engine's own decoders are checked
against files that they had no part in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import cyclopts
import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType

Kind = Literal["F16", "Q8_0", "Q4_0"]

FILE_TYPES: dict[str, LlamaFileType] = {
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
SOURCE_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
#: Written anew: they describe the file, not the model. The writer adds the architecture itself.
OWN_KEYS = ("general.architecture", "general.file_type", "general.quantization_version")


def quantise(source: Path, output: Path, kind: Kind) -> None:
    """Write `output` with every matrix as `kind`, every other tensor as F32.

    Raises ValueError when a tensor of `source` is already quantised, when a row does not fill
    whole blocks, or when `source` and `output` are the same file.
    """
    if output.exists() and output.samefile(source):
        raise ValueError(f"{output}: source and output are the same file; name another output")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(output, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in OWN_KEYS:
            continue
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        _add(writer, source, tensor, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(
    writer: gguf.GGUFWriter, source: Path, tensor: gguf.ReaderTensor, kind: GGMLQuantizationType
) -> None:
    if tensor.tensor_type not in SOURCE_TYPES:
        raise ValueError(
            f"{source}: {tensor.name} is {tensor.tensor_type.name}, but must be F16 or F32; "
            "quantise from the unquantised file"
        )
    if tensor.data.ndim != 2:
        kind = GGMLQuantizationType.F32
    block_elements = gguf.GGML_QUANT_SIZES[kind][0]
    if tensor.data.shape[-1] % block_elements:
        raise ValueError(
            f"{source}: a row of {tensor.name} has {tensor.data.shape[-1]} elements, "
            f"but {kind.name} needs a multiple of {block_elements}"
        )
    data = gguf.quants.quantize(tensor.data.astype(np.float32), kind)
    writer.add_tensor(tensor.name, data, raw_dtype=kind)


def main(source: Path, output: Path, *, kind: Kind = "Q8_0") -> None:
    """Quantise a GGUF file.

    Parameters
    ----------
    source
        F16 or F32 file to read.
    output
        GGUF file to write.
    kind
        Type of the matrices.
    """
    quantise(source, output, kind)
    print(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    cyclopts.run(main)
