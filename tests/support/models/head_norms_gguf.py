"""How converters lay norms of heads out in a GGUF file: one tensor for all of a layer; writes none.

Follows llama.cpp's conversion script of StableLM, whose checkpoints have one for each head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

#: The layer's part, whether of queries or of keys, and the head.
_OF_HEAD = re.compile(r"(.*\.[qk]_layernorm)\.norms\.(\d+)(\.weight)")


def with_joined_norms(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors, but one [num_heads, head_dim] for the norms of a layer's heads."""
    joined: dict[str, Any] = {}
    of_heads: dict[str, dict[int, Any]] = {}
    for name, tensor in tensors.items():
        if found := _OF_HEAD.fullmatch(name):
            of_heads.setdefault(found[1] + found[3], {})[int(found[2])] = tensor
        else:
            joined[name] = tensor
    for name, heads in of_heads.items():
        if sorted(heads) != list(range(len(heads))):
            raise ValueError(f"{name}: heads {sorted(heads)} do not follow one another from 0")
        joined[name] = torch.stack([heads[head] for head in sorted(heads)])
    return joined
