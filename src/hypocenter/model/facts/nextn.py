"""Heads that draft (multi-token prediction): what the layers behind a model's last one say of it.

A head reads a token together with what the model left of the token before, and says which token
follows. With e the token's embedding and h what is left of the token before, behind the model's
last norm: x = W_e rms(e) + W_h rms(h), one layer of the model's kind, a norm, and the model's own
output or one of the head's. `eh_proj` holds W_e and W_h side by side. Of a token that it wrote
itself h is what its own norm gave. Sources: DeepSeek-V3 (arXiv 2412.19437, 2.2); llama.cpp's
src/models/qwen35.cpp and glm-dsa.cpp, and vLLM's glm4_moe_mtp.py, deepseek_mtp.py and
qwen3_next_mtp.py. vLLM reads h of its own token before that norm in the first two, where llama.cpp
reads it behind; we follow llama.cpp, whose files we read. Layouts that are not known, as MiMo's,
which has W_h first, are refused.
"""

from __future__ import annotations

from dataclasses import replace

from hypocenter.base.errors import BadSetting
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile

#: What each head that we know has of its own, whatever its layer is.
_OF_EACH = ("nextn.enorm", "nextn.hnorm", "nextn.eh_proj", "attn_norm", "attn_output")


def head_of(file: GGUFFile, arch: Architecture) -> Architecture:
    """The first head of a model of `arch`: an architecture of one layer.

    Raises BadSetting where the file has none, or one that we do not run.
    """
    if reason := why_no_head(file, arch):
        raise BadSetting("spec", "mtp", f"{reason}; use ngram, or a draft model")
    first = arch.num_layers
    # Also in models of experts a head may have a feed-forward for all tokens.
    has_experts = f"blk.{first}.ffn_gate_inp.weight" in file.tensors
    experts = replace(arch.experts, num_dense=0) if arch.experts and has_experts else None
    return replace(
        arch,
        layers=arch.draft_layers[:1],
        draft_layers=(),
        first_layer=first,
        experts=experts,
        recurrence=None,
    )


def why_no_head(file: GGUFFile, arch: Architecture) -> str:
    """Why no head of the model of `file` drafts; empty where one does."""
    if not arch.draft_layers:
        return "this file has no layers that propose tokens (MTP)"
    if not arch.family.has_head:
        return f"what a head of {arch.name} models computes is not known here"
    if not any(name.startswith(f"blk.{arch.num_layers}.") for name in file.tensors):
        return "its keys name layers that propose tokens (MTP), but it has no tensors of them"
    prefix = f"blk.{arch.num_layers}."
    lacking = [name for name in _OF_EACH if f"{prefix}{name}.weight" not in file.tensors]
    return f"the head lacks {prefix}{lacking[0]}.weight" if lacking else ""
