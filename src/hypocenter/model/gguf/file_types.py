"""Names of `general.file_type`: what most tensors of a file are of.

Numbers and names are llama.cpp's (`enum llama_ftype` in include/llama.h), without LLAMA_FTYPE_.
"""

from __future__ import annotations

from collections import Counter

from hypocenter.model.gguf.file import GGUFFile

FILE_TYPES = {
    0: "ALL_F32",
    1: "MOSTLY_F16",
    2: "MOSTLY_Q4_0",
    3: "MOSTLY_Q4_1",
    7: "MOSTLY_Q8_0",
    8: "MOSTLY_Q5_0",
    9: "MOSTLY_Q5_1",
    10: "MOSTLY_Q2_K",
    11: "MOSTLY_Q3_K_S",
    12: "MOSTLY_Q3_K_M",
    13: "MOSTLY_Q3_K_L",
    14: "MOSTLY_Q4_K_S",
    15: "MOSTLY_Q4_K_M",
    16: "MOSTLY_Q5_K_S",
    17: "MOSTLY_Q5_K_M",
    18: "MOSTLY_Q6_K",
    19: "MOSTLY_IQ2_XXS",
    20: "MOSTLY_IQ2_XS",
    21: "MOSTLY_Q2_K_S",
    22: "MOSTLY_IQ3_XS",
    23: "MOSTLY_IQ3_XXS",
    24: "MOSTLY_IQ1_S",
    25: "MOSTLY_IQ4_NL",
    26: "MOSTLY_IQ3_S",
    27: "MOSTLY_IQ3_M",
    28: "MOSTLY_IQ2_S",
    29: "MOSTLY_IQ2_M",
    30: "MOSTLY_IQ4_XS",
    31: "MOSTLY_IQ1_M",
    32: "MOSTLY_BF16",
    36: "MOSTLY_TQ1_0",
    37: "MOSTLY_TQ2_0",
    38: "MOSTLY_MXFP4_MOE",
    39: "MOSTLY_NVFP4",
    40: "MOSTLY_Q1_0",
    41: "MOSTLY_Q2_0",
    1024: "GUESSED",
}


def quantisation_of(file: GGUFFile) -> str:
    """What most tensors of a file are of, such as Q4_K_M: as it says, else by their bytes."""
    number = file.metadata.get("general.file_type")
    name = FILE_TYPES.get(number, "") if isinstance(number, int) else ""
    if "_" in name:
        return name.partition("_")[2]
    num_bytes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        num_bytes[tensor.dtype.name] += tensor.num_bytes
    return num_bytes.most_common(1)[0][0] if num_bytes else ""
