"""Every way in which decoder and sampler launch their GPU kernels, found by planning them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hypocenter.config import SamplingParams
from hypocenter.device import devices, memory
from hypocenter.device.launch import Launch
from hypocenter.device.offline.abstract import AbstractGpu, specimens
from hypocenter.device.offline.specimen import Specimen
from hypocenter.device.plan import Plan
from hypocenter.kernels.experts.choice import ExpertChoice
from hypocenter.kernels.sampling.draw import TokenChoice, num_mask_words
from hypocenter.kernels.sampling.sampling_plan import DeviceSampler
from hypocenter.kernels.weights.gpu_layout import UNITS
from hypocenter.kernels.weights.packing import Packed
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.architecture import Architecture, Rope
from hypocenter.model.decoder import Decoder
from hypocenter.model.experts import Experts
from hypocenter.model.families import FAMILIES
from hypocenter.model.layer_shapes import LayerShape
from hypocenter.model.rope_tables import RopeTables
from hypocenter.model.step_buffers import KVPages, StepInputs
from hypocenter.model.weight_tensors import BesideDense, FeedForward, LayerWeights, Mixture, Weights
from hypocenter.tensor import DType, Tensor, contiguous_strides

# One model for each kernel variant that a family's facts bring.
_MODELS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("llama", "normal rope, silu", {}),
    ("qwen3", "neox rope, norms on q and k", {}),
    ("gemma2", "gelu, post norms, soft caps", {"attn_softcap": 50.0, "final_softcap": 30.0}),
)

# Mixtures: softmax and sigmoid scores, with what else each of their facts brings.
_MIXTURES: dict[str, Experts] = {
    "qwen3moe": Experts(ExpertChoice(128, 8), width=768),
    "qwen2moe": Experts(
        ExpertChoice(60, 4, normalises=False, has_gate=True), 1408, shared_width=5632
    ),
    "granitemoe": Experts(ExpertChoice(8, 2), width=14336),
    "glm4moe": Experts(ExpertChoice(128, 8, "sigmoid"), 1408, shared_width=1408),
    "gpt-oss": Experts(ExpertChoice(32, 4), width=2880),
    "gemma4": Experts(ExpertChoice(128, 8), width=704),
}
# Experts that one row meets, of more than 2**31 elements together.
_HUGE_MIXTURE = Experts(ExpertChoice(128, 8), width=8192)

# One weight type for each way of packing: products have their own forms for one row and for many.
_FORMS = (
    DType.F32, DType.F16, DType.BF16, DType.Q4_0, DType.Q4_K, DType.Q2_K, DType.Q3_K, DType.Q5_K,
    DType.Q6_K, DType.Q8_0,
)  # fmt: skip

# Rows of a bucket, one for each way in which products and attention are cut.
_BUCKETS = (1, 2, 4, 16, 32, 64, 512)
#: More of them where products have many forms, and those for two architectures alone.
_MORE_BUCKETS = {"hopper": (128, 256, 2048)}

#: Forms differ where the vendors' machines do.
VENDORS = ("amd", "nvidia", "hopper")

# Logits of more than 2**31 elements.
_HUGE = (1 << 15, 128256, "sampling, 64-bit offsets")


def project_specimens() -> tuple[Specimen, ...]:
    """Each kernel of the project in each form that decoder or sampler launches it in.

    A form that is the same for several vendors is there once.
    """
    found: dict[tuple[object, ...], Specimen] = {}
    for vendor in VENDORS:
        for specimen in _of_vendor(vendor):
            same = found.setdefault(form_of(specimen), specimen)
            if same.vendor != specimen.vendor:
                whose = "" if same.vendor in ("", "amd") else "nvidia"
                found[form_of(specimen)] = replace(same, vendor=whose)
    return tuple(found.values())


def _of_vendor(vendor: str) -> Iterator[Specimen]:
    of_model = partial(_of_model, vendor)
    for family, _, facts in _MODELS:
        yield from of_model(family, DType.Q8_0, DType.F16, facts)
    for dtype in UNITS:
        yield from of_model("llama", dtype, DType.F32)
    for dtype in (DType.F16, DType.Q8_0):
        yield from of_model("llama", dtype, DType.F16, num_tokens=1)
    for dtype in (DType.Q8_0, DType.Q4_0, DType.Q4_K, DType.Q6_K):
        yield from of_model("llama", dtype, DType.F16, num_tokens=16)
    for dtype in _FORMS:
        for num_tokens in (*_BUCKETS, *_MORE_BUCKETS.get(vendor, ())):
            yield from of_model("qwen3", dtype, DType.F16, num_tokens=num_tokens)
    for dtype, num_tokens in ((DType.F16, 64), (DType.F32, 64), (DType.F16, 1)):
        yield from of_model("llama", DType.Q8_0, dtype, attention="parts", num_tokens=num_tokens)
    # Rows that are no whole chains, and wider ones than a program takes at once.
    odd = {"width": 4160, "ffn_width": 17408}
    for num_tokens in (1, 64):
        yield from of_model("llama", DType.Q8_0, DType.F16, odd, num_tokens=num_tokens)
    yield from _of_attention(vendor)
    yield from _of_mixtures(vendor)
    yield from _of_layer_norms(vendor)
    yield from _of_gpt_oss(vendor)
    # Extents beyond 2**31 elements, which no memory is needed for here.
    caps = {"attn_softcap": 50.0, "final_softcap": 30.0}
    huge = 1 << 20
    for dtype in (DType.F16, DType.BF16, DType.Q8_0):
        yield from of_model("gemma2", dtype, DType.F16, caps, num_tokens=huge)
        # A matrix of that extent is met by a single row too.
        yield from of_model("llama", dtype, DType.F16, {"vocab_size": huge}, num_tokens=1)
    # And by the logit rows of a larger step.
    yield from of_model("llama", DType.Q8_0, DType.F16, {"vocab_size": huge}, num_tokens=512)
    yield from of_model("gemma2", DType.Q8_0, DType.F16, caps, num_tokens=huge, attention="parts")
    yield from _of_sampling(vendor, 32, 128256, "sampling")
    yield from _of_sampling(vendor, *_HUGE)


def _of_mixtures(vendor: str) -> Iterator[Specimen]:
    """Each way to choose, products of each form for as many rows as each way to cut them has."""

    def of(family: str, dtype: DType, num_tokens: int, **changes: Any) -> list[Specimen]:
        plan = abstract_plan(vendor, family, dtype, DType.F16, changes, num_tokens=num_tokens)
        of_mixtures = ("route", "group", "experts", "mix")
        launches = [launch for launch in plan.launches if launch.kernel.startswith(of_mixtures)]
        return specimens(launches, f"{dtype.name.lower()}, experts")

    for family in _MIXTURES:
        yield from of(family, DType.Q8_0, 64)
    for dtype in (DType.F16, DType.MXFP4):
        for num_tokens in (1, 16, 512):
            yield from of("gpt-oss", dtype, num_tokens)
    for dtype in _FORMS:
        for num_tokens in (1, 16, 512):
            yield from of("qwen3moe", dtype, num_tokens)
        for num_tokens in (2, 4):
            yield from of("granitemoe", dtype, num_tokens)
    for dtype in (DType.F16, DType.Q8_0):
        for num_tokens in (1, 16):
            yield from of("qwen3moe", dtype, num_tokens, experts=_HUGE_MIXTURE)
        yield from of("qwen3moe", dtype, 1 << 20)


def _of_layer_norms(vendor: str) -> Iterator[Specimen]:
    """Layer norms, and both activations that have no gate, for each number of rows they know."""
    # A feed-forward of the second width is more than a program takes at once.
    for family, dtype, num_tokens, ffn_width in itertools.product(
        ("starcoder2", "arcee"), (DType.F32, DType.Q8_0), (1, 16, 64, 1 << 20), (14336, 20480)
    ):
        changes = {"ffn_width": ffn_width}
        plan = abstract_plan(vendor, family, dtype, DType.F16, changes, num_tokens=num_tokens)
        launches = [x for x in plan.launches if x.kernel.startswith(("layer_norm", "activate"))]
        yield from specimens(launches, f"{dtype.name.lower()}, layer norms, no gate")


def _of_gpt_oss(vendor: str) -> Iterator[Specimen]:
    """Sinks in each form of attention, and the clamped gate with codes and without."""
    of_both = (DType.MXFP4, DType.F32), (DType.F16, DType.F32), (1, 64)
    for dtype, kv_dtype, num_tokens in itertools.product(*of_both):
        plan = abstract_plan(vendor, "gpt-oss", dtype, kv_dtype, num_tokens=num_tokens)
        launches = [x for x in plan.launches if x.kernel.startswith(("attention", "gate"))]
        yield from specimens(launches, f"{kv_dtype.name.lower()} cache, sinks, clamped gate")
    plan = abstract_plan(
        vendor, "gpt-oss", DType.MXFP4, DType.F16, num_tokens=64, attention="parts"
    )
    launches = [launch for launch in plan.launches if launch.kernel.startswith("softmax")]
    yield from specimens(launches, "sinks")


def _of_attention(vendor: str) -> Iterator[Specimen]:
    """Prompts and single tokens, heads of other sizes, caches beyond 2**31 elements."""
    for dtype, head_dim, num_tokens in itertools.product(
        (DType.F16, DType.F32), (64, 80, 128, 256), (8, 64)
    ):
        changes: dict[str, float] = {"head_dim": head_dim}
        label = f"heads of {head_dim}, {dtype.name.lower()} cache"
        yield from _attention_of(vendor, "llama", dtype, changes, label, num_tokens=num_tokens)
    for family, cap in (("llama", 0.0), ("gemma2", 50.0)):
        changes, label = {"attn_softcap": cap}, "single tokens, f16 cache"
        for num_tokens in (8, 16):
            yield from _attention_of(
                vendor,
                family,
                DType.F16,
                changes,
                label,
                num_tokens=num_tokens,
                num_logit_rows=num_tokens,
            )
        label += ", 64-bit offsets"
        for weights in (DType.Q8_0, DType.F16, DType.BF16):
            yield from _attention_of(
                vendor,
                family,
                DType.F16,
                changes,
                label,
                num_tokens=8,
                max_blocks=1 << 18,
                weights=weights,
            )


def _attention_of(
    vendor: str,
    family: str,
    dtype: DType,
    changes: Mapping[str, float],
    label: str,
    *,
    num_tokens: int,
    max_blocks: int = 256,
    num_logit_rows: int | None = None,
    weights: DType = DType.Q8_0,
) -> list[Specimen]:
    plan = abstract_plan(
        vendor,
        family,
        weights,
        dtype,
        changes,
        num_tokens=num_tokens,
        max_blocks=max_blocks,
        num_logit_rows=num_logit_rows,
    )
    return specimens([x for x in plan.launches if x.kernel.startswith("attention")], label)


def abstract_plan(
    vendor: str,
    family: str,
    dtype: DType,
    kv_dtype: DType,
    changes: Mapping[str, Any] | None = None,
    *,
    num_tokens: int,
    max_blocks: int = 256,
    num_logit_rows: int | None = None,
    attention: str = "fused",
) -> Plan:
    """The plan of a one-layer model of 8B's shape on a device that runs nothing.

    It has a sequence for each 4096 tokens, but at least 32, and some logit rows where nobody says.
    """
    facts, of_layer = _facts(family), {}
    for name, value in (changes or {}).items():
        if name in LayerShape.__dataclass_fields__:
            of_layer[name] = value
        else:
            facts = replace(facts, **{name: value})
    shape = replace(facts.layers[0], **of_layer)
    facts = replace(facts, layers=(shape,), rope=replace(facts.rope, dim=shape.head_dim))
    gpu = AbstractGpu(vendor)
    devices.use_backend(gpu)
    inputs = StepInputs.allocate(num_tokens, max(32, num_tokens >> 12), max_blocks, device=gpu.name)
    num_blocks = max(4096, num_tokens // 4, max_blocks)
    pages = KVPages.allocate(facts, num_blocks, 16, kv_dtype, device=gpu.name)
    decoder = Decoder(facts, _weights(facts, dtype, gpu.name), inputs, pages, num_tokens, attention)
    some = max(min(num_tokens, 4), num_tokens // 16)
    return decoder.plan(num_tokens, some if num_logit_rows is None else num_logit_rows)


def _of_model(
    vendor: str,
    family: str,
    dtype: DType,
    kv_dtype: DType,
    changes: Mapping[str, Any] | None = None,
    *,
    num_tokens: int = 64,
    attention: str = "fused",
) -> list[Specimen]:
    label = f"{dtype.name.lower()}, {kv_dtype.name.lower()} cache"
    if num_tokens > 1 << 16:
        label += ", 64-bit offsets"
    plan = abstract_plan(
        vendor, family, dtype, kv_dtype, changes, num_tokens=num_tokens, attention=attention
    )
    marks = [mark for mark in plan.marks if isinstance(mark, Launch)]
    return [*specimens(plan.launches, label), *specimens(marks, "marks")]


def sampling_plans(vendor: str, num_rows: int, vocab_size: int) -> list[Plan]:
    """The plans of a greedy choice and of one with every filter, on a device that runs nothing.

    Of each one for free rows, and one for rows with masks; and one for rows with biases.
    """
    gpu = AbstractGpu(vendor)
    devices.use_backend(gpu)
    logits = _allocate_undefined("logits", DType.F32, (num_rows, vocab_size), gpu.name)
    sampler = DeviceSampler(gpu.name, vocab_size, num_rows)
    some = np.zeros(1, np.int32)
    filters = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, repeat_penalty=1.1)
    draws = (TokenChoice(SamplingParams(), 0), TokenChoice(filters, 1, some, some))
    mask = np.full(num_mask_words(vocab_size), -1, np.int32)
    biased = replace(draws[0], bias_ids=some, biases=np.zeros(1))
    rows = [replace(draw, mask=given) for draw in draws for given in (None, mask)] + [biased]
    return [sampler.plan(logits, [row] * num_rows) for row in rows]


def _of_sampling(vendor: str, num_rows: int, vocab_size: int, label: str) -> list[Specimen]:
    plans = sampling_plans(vendor, num_rows, vocab_size)
    return [specimen for plan in plans for specimen in specimens(plan.launches, label)]


def form_of(specimen: Specimen) -> tuple[object, ...]:
    """What a compiler makes something else of."""
    return (
        specimen.kernel,
        tuple(specimen.signature.items()),
        tuple(specimen.constants.items()),
        specimen.divisible,
        tuple(specimen.options.items()),
    )


def _facts(family: str) -> Architecture:
    rope = Rope(base=500000.0, dim=128)
    return Architecture(
        name=family,
        family=FAMILIES[family],
        layers=(LayerShape(num_kv_heads=8, head_dim=128, ffn_width=14336),),
        width=4096,
        num_heads=32,
        vocab_size=128255,
        context_length=4096,
        norm_eps=1e-5,
        rope=rope,
        local_rope=rope,
        attn_scale=128**-0.5,
        attn_softcap=0.0,
        final_softcap=0.0,
        experts=_MIXTURES.get(family),
        embedding_scale=64.0 if FAMILIES[family].scaled_embedding else 1.0,
    )


def _allocate_undefined(name: str, dtype: DType, shape: tuple[int, ...], device: str) -> Tensor:
    return memory.allocate_undefined(name, "model", dtype, shape, device=device)


def _undefined_weight(name: str, dtype: DType, shape: tuple[int, ...], device: str) -> Tensor:
    """A packed weight, or a stack of them, whose arrays hold anything."""
    layout, (*stack, num_rows, num_columns) = UNITS[dtype], shape
    float_type = DType.I16 if dtype is DType.BF16 else dtype
    kinds = (float_type,) if layout.is_float else (DType.I32, DType.F16, DType.F16)
    all_rows = math.prod(stack) * num_rows
    bases = [_allocate_undefined(name, kind, (all_rows * num_columns,), device) for kind in kinds]
    numbers = () if layout.is_float else (float(layout.zero), 1.0)
    packed = Packed(dtype, (*(base.data for base in bases), *numbers), all_rows, num_columns)
    strides = contiguous_strides(shape)
    return Tensor(name, "model", dtype, shape, strides, 0, bases[0].allocation, packed)


def _weights(facts: Architecture, dtype: DType, device: str) -> Weights:
    def matrix(name: str, *shape: int, kind: DType = dtype) -> Tensor:
        return _undefined_weight(name, kind, shape, device)

    def vector(name: str, length: int) -> Tensor:
        return _allocate_undefined(name, DType.F32, (padded_rows(length),), device)

    def vector_if(wanted: bool, name: str, length: int) -> Tensor | None:
        return vector(name, length) if wanted else None

    family, width = facts.family, facts.width

    is_biased = family.experts is not None and family.experts.is_biased
    is_beside = family.experts is not None and family.experts.stands_beside

    def feed_forward(inner: int, *stack: int) -> FeedForward:
        up = matrix("up", *stack, inner, width)
        gate = matrix("gate", *stack, inner, width) if family.has_gate else None
        down = matrix("down", *stack, width, inner)
        if not (stack and is_biased):
            return FeedForward(gate, up, None, down)
        biases = {
            name: vector(name, stack[0] * padded_rows(length))
            for name, length in (("gate_bias", inner), ("up_bias", inner), ("down_bias", width))
        }
        return FeedForward(gate, up, None, down, **biases)

    def mixture(experts: Experts) -> Mixture:
        choice = experts.choice
        shared = experts.shared_width
        return Mixture(
            router=matrix("router", choice.num_experts + choice.has_gate, width, kind=DType.F32),
            bias=vector_if(choice.scores == "sigmoid", "bias", choice.num_experts),
            experts=feed_forward(experts.width, choice.num_experts),
            shared=feed_forward(shared) if shared else None,
            router_bias=vector_if(is_biased, "router_bias", choice.num_experts),
            factors=vector_if(is_beside, "factors", choice.num_experts),
            beside=BesideDense(*(vector(name, width) for name in BesideDense._fields))
            if is_beside
            else None,
        )

    (shape,) = facts.layers
    heads, kv_heads = facts.q_width(0), shape.kv_width
    has_ffn_norm = family.pre_norms and family.ffn_norm != ""
    has_biases = family is FAMILIES["llama"]  # some have, and most have not
    layer = LayerWeights(
        attn_norm=vector_if(family.pre_norms, "attn_norm", width),
        q=matrix("q", heads, width),
        k=matrix("k", kv_heads, width),
        v=None if family.norms_values else matrix("v", kv_heads, width),
        q_bias=vector_if(has_biases, "q_bias", heads),
        k_bias=vector_if(has_biases, "k_bias", kv_heads),
        v_bias=vector_if(has_biases, "v_bias", kv_heads),
        q_norm=vector_if(family.qk_norm, "q_norm", shape.head_dim),
        k_norm=vector_if(family.qk_norm, "k_norm", shape.head_dim),
        attn_output=matrix("attn_output", width, heads),
        attn_output_bias=None,
        post_attn_norm=vector_if(family.post_norms, "post_attn_norm", width),
        ffn_norm=vector_if(has_ffn_norm, "ffn_norm", width),
        dense=feed_forward(shape.ffn_width) if facts.is_dense(0) else None,
        mixture=mixture(facts.experts) if facts.experts else None,
        post_ffn_norm=vector_if(family.post_norms, "post_ffn_norm", width),
        attn_norm_bias=vector_if(family.layer_norms, "attn_norm_bias", width),
        ffn_norm_bias=vector_if(family.layer_norms and has_ffn_norm, "ffn_norm_bias", width),
        sinks=vector_if(family.has_sinks, "sinks", facts.num_heads),
        v_norm=vector_if(family.norms_values, "v_norm", shape.head_dim),
        scale=0.5 if family.scales_layers else 1.0,
    )
    turned = (facts.context_length, facts.rope.dim // 2)
    table = tuple(_allocate_undefined(name, DType.F32, turned, device) for name in ("cos", "sin"))
    pair = (table[0], table[1])
    token_table = matrix("token_embd", facts.vocab_size, width)
    norm = vector("output_norm", width)
    norm_bias = vector_if(family.layer_norms, "output_norm_bias", width)
    return Weights(
        token_table,
        (layer,),
        norm,
        token_table,
        RopeTables(pair, pair),
        0,
        output_norm_bias=norm_bias,
    )
