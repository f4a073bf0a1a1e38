"""Which type each tensor of a quantised file gets, by the rules of llama.cpp (`llama-quant.cpp`).

A mix gives more bits to tensors that bear rounding badly, by what they are and by their layer. The
rules of architectures that are not run here (Falcon and others) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypocenter.base.tensor import DType
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.file_types import FILE_TYPES
from hypocenter.model.gguf.values import TensorInfo

#: The type of most tensors of each mix that is named otherwise than that type.
_BASES = {
    "Q2_K_S": DType.Q2_K,
    **dict.fromkeys(("Q3_K_S", "Q3_K_M", "Q3_K_L"), DType.Q3_K),
    **dict.fromkeys(("Q4_K_S", "Q4_K_M"), DType.Q4_K),
    **dict.fromkeys(("Q5_K_S", "Q5_K_M"), DType.Q5_K),
    "MXFP4_MOE": DType.MXFP4,
    "IQ2_S": DType.IQ2_XS,
    "IQ2_M": DType.IQ2_S,
    **dict.fromkeys(("IQ3_XS", "IQ3_M"), DType.IQ3_S),
}
_PLAIN = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"),
    *("TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "NVFP4"),
)
#: Those that `llama-quantize` does not have, though llama.cpp reads such files.
OF_NO_PROGRAM = ("NVFP4",)
#: Other names of mixes.
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_NUMBERS = {name.partition("_")[2]: number for number, name in FILE_TYPES.items()}


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of file: `number` is that of `general.file_type`, `base` the type of most tensors."""

    name: str
    number: int
    base: DType


#: By name, as `llama-quantize` has them, and NVFP4.
MIXES = {
    name: Mix(name, _NUMBERS[name], _BASES.get(name) or DType[name])
    for name in sorted((*_PLAIN, *_BASES), key=lambda name: _NUMBERS[name])
}

#: Parts of names of matrices that stay as they are: small, or what small errors spoil.
_KEPT = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel"),
    *("per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight"),
    *("indexer.k_proj.weight", "indexer.q_proj.weight", "attn_rel_b.weight"),
    *(".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd"),
    *(".patch_merger", "a.rvq.codebook", "mm.a.code_embd", "time_mix_first.weight"),
    *("time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight"),
    *("time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight"),
    *("time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight"),
    *("time_mix_g1.weight", "time_mix_g2.weight", "time_mix_decay_w1.weight"),
    *("time_mix_decay_w2.weight", "time_mix_lerp_fused.weight"),
)
_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_OUTPUT = "output.weight"
#: What a tensor does, by the first of these that its name has.
_ROLES = (
    ("attn_qkv.weight", "qkv"),
    ("attn_kv_b.weight", "kv_b"),
    ("attn_v.weight", "v"),
    ("attn_k.weight", "k"),
    ("attn_q.weight", "q"),
    ("attn_output.weight", "attention_output"),
    ("ffn_up", "up"),
    ("ffn_gate", "gate"),
    ("ffn_down", "down"),
)
_LIKE_V = ("v", "qkv", "kv_b")
#: Mixes of one and two bits, which have rules of their own, and those of them whose better tensors
#: get IQ3_S and not Q2_K.
_ONE_BIT = ("IQ1_S", "IQ1_M")
_FEW_BITS = (*_ONE_BIT, "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")
_BETTER_OF_THEM = ("IQ2_S", "IQ2_M")
#: Types that come out well only where columns have weights.
_NEED_WEIGHTS = (
    *(DType.IQ1_S, DType.IQ1_M, DType.IQ2_XXS, DType.IQ2_XS, DType.IQ2_S, DType.IQ3_XXS),
)
#: What takes the place of a type whose blocks do not fit into rows.
_FALLBACKS = {
    **dict.fromkeys((*_NEED_WEIGHTS, DType.IQ3_S, DType.IQ4_XS), DType.IQ4_NL),
    **dict.fromkeys((DType.Q2_K, DType.Q3_K), DType.Q4_0),
    **dict.fromkeys((DType.TQ1_0, DType.TQ2_0, DType.Q2_0), DType.Q4_0),
    DType.NVFP4: DType.IQ4_NL,
    DType.Q4_K: DType.Q5_0,
    DType.Q5_K: DType.Q5_1,
    DType.Q6_K: DType.Q8_0,
}
#: Embeddings that are not the output as well.
_OF_EMBEDDINGS = {
    **dict.fromkeys((*_ONE_BIT, "IQ2_XXS", "IQ2_XS"), DType.Q2_K),
    **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), DType.IQ3_S),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), DType.Q4_K),
    "NVFP4": DType.Q6_K,
}
#: Matrices of layers in NVFP4 beside which llama.cpp reads a factor (its llama-model.cpp, behind
#: `load_arch_tensors`). It refuses a file that has a factor beside another one.
_WITH_FACTORS = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate"),
    *(f"ffn_{part}{kind}" for part in ("gate", "up", "down") for kind in ("", "_shexp", "_exps")),
    *("ssm_in", "ssm_out", "ssm_alpha", "ssm_beta"),
    *("nextn.eh_proj", "nextn.shared_head_head"),
)
_ATTENTION_OUTPUTS = {
    "Q2_K": DType.Q3_K,
    "Q3_K_M": DType.Q4_K,
    "Q3_K_L": DType.Q5_K,
    "IQ3_XXS": DType.IQ3_S,
    "IQ3_M": DType.Q4_K,
}
#: Mixes that give attention's output five bits in models of eight experts.
_OUTPUTS_OF_EIGHT = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS", "IQ3_XS"),
    *("IQ3_XXS", "IQ3_S", "IQ3_M"),
)
#: Layers of models of 70 billion parameters, which share values among eight heads.
_LARGE = {("llama", 80), ("qwen2", 80)}
_LAYER = re.compile(r"blk\.\s*([+-]?[0-9]+)")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the rules ask of a model."""

    num_layers: int
    num_experts: int
    heads_per_kv: int
    is_large: bool

    @classmethod
    def of(cls, file: GGUFFile) -> ModelSizes:
        """Raises BadModelFile for a key that is missing or of another type."""
        arch = file.text("general.architecture")
        num_layers = file.integer(f"{arch}.block_count", low=1)
        num_heads = _first(file, f"{arch}.attention.head_count", 0)
        num_kv = _first(file, f"{arch}.attention.head_count_kv", num_heads)
        is_large = (arch, num_layers) in _LARGE and (arch != "llama" or num_heads != num_kv)
        num_experts = file.integer(f"{arch}.expert_count", 0)
        return cls(num_layers, num_experts, num_heads // num_kv if num_kv else 0, is_large)


def _first(file: GGUFFile, key: str, default: int) -> int:
    """An integer, or of an array, which has one for each layer, the first."""
    if key in file.metadata and file.metadata.entry(key).is_array:
        values = file.numbers(key)
        return int(values[0]) if values.size else default
    return file.integer(key, default)


def in_order(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Tensors as llama.cpp walks and writes them: those of no layer first, then layer by layer."""

    def key(info: TensorInfo) -> tuple[int, bytes]:
        return layer_of(info.name), info.name.encode("utf-8", "surrogateescape")

    return sorted(tensors, key=key)


def has_factor(name: str) -> bool:
    """Whether readers look for a factor of each matrix of a tensor, where that is of NVFP4."""
    part = name.split(".", 2)[-1].removesuffix(".weight")
    return name == _OUTPUT or (layer_of(name) >= 0 and part in _WITH_FACTORS)


def layer_of(name: str) -> int:
    """The layer of a tensor, -1 where it belongs to none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def is_quantised_by_name(info: TensorInfo) -> bool:
    """Whether mixes touch a tensor: a matrix, or several, of weights that bear it."""
    name = info.name
    return (
        len(info.shape) > 1
        and name.endswith("weight")
        and name not in _KEPT_NAMES
        and not any(part in name for part in _KEPT)
    )


@dataclass(slots=True)
class Chooser:
    """Chooses the type of one tensor after the other, in the order of `in_order`.

    `names`: of all tensors. `has_weights`: whether there is an importance matrix. `pure`: the type
    of the mix for all of them.
    """

    mix: Mix
    sizes: ModelSizes
    names: Iterable[str]
    has_weights: bool = False
    pure: bool = False
    _num_like_v: int = field(init=False)
    _is_tied: bool = field(init=False)
    _num_seen: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        names = list(self.names)
        self._num_like_v = sum(_role(name) in _LIKE_V for name in names)
        self._is_tied = _OUTPUT not in names

    def choose(self, info: TensorInfo) -> tuple[DType, DType]:
        """The type of this tensor, its own where it is left alone; and the one that was wanted."""
        if not is_quantised_by_name(info):
            return info.dtype, info.dtype
        base = self.mix.base
        wanted = base if self.pure or not base.is_quantised else self._by_role(info)
        return _that_fits(wanted, info.shape[-1]), wanted

    def _by_role(self, info: TensorInfo) -> DType:
        base, name = self.mix.base, self.mix.name
        is_embedding = info.name in EMBEDDINGS
        if info.name == _OUTPUT or (self._is_tied and is_embedding):
            if name == "MXFP4_MOE" or info.shape[-1] % base.block_elements:
                return DType.Q8_0
            if name == "IQ3_XXS" or name in _FEW_BITS:
                return DType.Q5_K
            return base if base is DType.Q8_0 else DType.Q6_K
        if name == "MXFP4_MOE":
            return DType.MXFP4 if len(info.shape) > 2 else DType.Q8_0
        if is_embedding:
            return _OF_EMBEDDINGS.get(name, base)
        if name == "NVFP4" and info.dtype is not base and not has_factor(info.name):
            return _FALLBACKS[base]
        role = _role(info.name)
        if name in _FEW_BITS:
            return self._of_few_bits(role)
        if role in _LIKE_V:
            return self._like_v(self._count("v"))
        if role == "k" and self.sizes.num_experts == 8:
            return DType.Q8_0
        if role in ("k", "q"):
            return {"IQ3_XS": DType.IQ3_XXS, "IQ3_XXS": DType.IQ2_S}.get(name, base)
        if role == "down":
            return self._down(self._layer(info.name, role))
        if role in ("gate", "up"):
            layer, num_layers = self._layer(info.name, role), self.sizes.num_layers
            is_inner = num_layers // 8 <= layer < 7 * num_layers // 8
            return DType.IQ3_XXS if name == "IQ3_XS" and is_inner else base
        return self._attention_output() if role == "attention_output" else base

    def _of_few_bits(self, role: str) -> DType:
        base, sizes = self.mix.base, self.sizes
        better = DType.IQ3_S if self.mix.name in _BETTER_OF_THEM else DType.Q2_K
        if role in _LIKE_V:
            return DType.Q4_K if sizes.heads_per_kv >= 4 or sizes.num_experts >= 4 else better
        if role == "k" and sizes.num_experts == 8:
            return DType.Q4_K
        if role == "down":
            return better if self._count("down") < sizes.num_layers // 8 else base
        if role == "attention_output":
            if sizes.num_experts == 8:
                return DType.Q5_K
            if self.mix.name in _ONE_BIT:
                return DType.IQ2_XXS
            return better if better is DType.IQ3_S else base
        return base

    def _layer(self, tensor: str, role: str) -> int:
        """The layer of a tensor of the feed-forward, by how many were before; those of experts may
        stand in any order, so their names say it."""
        number = self._count(role)
        return layer_of(tensor) if self.sizes.num_experts > 1 else number

    def _count(self, role: str) -> int:
        """How many tensors of the role were before."""
        number = self._num_seen.get(role, 0)
        self._num_seen[role] = number + 1
        return number

    def _like_v(self, number: int) -> DType:
        base, name, sizes = self.mix.base, self.mix.name, self.sizes
        found = base
        if name == "Q2_K":
            found = DType.Q4_K if sizes.heads_per_kv >= 4 else DType.Q3_K
        elif name == "Q2_K_S" and sizes.heads_per_kv >= 4:
            found = DType.Q4_K
        elif name == "Q3_K_M":
            found = DType.Q5_K if number < 2 else DType.Q4_K
        elif name == "Q3_K_L":
            found = DType.Q5_K
        elif name == "IQ3_M" or (base in (DType.IQ3_XXS, DType.IQ3_S) and sizes.heads_per_kv >= 4):
            found = DType.Q4_K
        elif name == "IQ3_XXS":
            found = base if self.has_weights else DType.IQ3_S
        elif base in (DType.IQ4_NL, DType.IQ4_XS) and sizes.heads_per_kv >= 4:
            found = DType.Q5_K
        elif name in ("Q4_K_M", "Q5_K_M") and _wants_more(number, self._num_like_v):
            found = DType.Q6_K
        elif name == "Q4_K_S" and number < 4:
            found = DType.Q5_K
        if sizes.is_large and found in (DType.Q3_K, DType.Q4_K):
            found = DType.Q5_K
        return DType.Q8_0 if sizes.num_experts == 8 else found

    def _down(self, layer: int) -> DType:
        base, name, num_layers = self.mix.base, self.mix.name, self.sizes.num_layers
        is_early = layer < num_layers // 8
        if name in ("Q4_K_M", "Q5_K_M") and _wants_more(layer, num_layers):
            return DType.Q6_K
        if name == "Q3_K_M":
            return DType.Q5_K if layer < num_layers // 16 else DType.Q4_K
        if name == "IQ3_M":
            wants_more = self.sizes.num_experts == 8 and _wants_more(layer, num_layers)
            return DType.Q4_K if is_early or wants_more else base
        if name == "IQ3_XXS" and not self.has_weights:
            return DType.Q4_K if is_early else DType.Q3_K
        always = {"Q2_K": DType.Q3_K, "Q3_K_L": DType.Q5_K}
        early = {"Q2_K_S": DType.Q4_K, "Q4_K_S": DType.Q5_K}
        if not self.has_weights:
            early |= {"IQ4_NL": DType.Q5_K, "IQ4_XS": DType.Q5_K}
        else:
            early |= {"Q4_0": DType.Q4_1, "Q5_0": DType.Q5_1}
        return always.get(name) or (early.get(name, base) if is_early else base)

    def _attention_output(self) -> DType:
        base, name = self.mix.base, self.mix.name
        if self.sizes.num_experts == 8:
            return DType.Q5_K if name in _OUTPUTS_OF_EIGHT else base
        return _ATTENTION_OUTPUTS.get(name, base)


def needs_weights(name: str, dtype: DType, mix: Mix) -> bool:
    """Whether a tensor of that type comes out well only with an importance matrix."""
    if name in (*EMBEDDINGS, _OUTPUT):
        return False
    return dtype in _NEED_WEIGHTS or (mix.name == "Q2_K_S" and dtype is DType.Q2_K)


def _role(name: str) -> str:
    if name == _OUTPUT or name in EMBEDDINGS:
        return ""
    return next((role for part, role in _ROLES if part in name), "")


def _wants_more(number: int, count: int) -> bool:
    """The first and last eighth of the layers, and each third between."""
    first = count // 8
    return number < first or number >= 7 * count // 8 or (number - first) % 3 == 2


def _that_fits(dtype: DType, num_columns: int) -> DType:
    """`dtype`, or what takes its place where rows are no whole blocks of it."""
    if num_columns % dtype.block_elements == 0:
        return dtype
    other = _FALLBACKS.get(dtype, dtype)
    return DType.F16 if num_columns % other.block_elements else other
