"""Every way in which decoder and sampler launch their GPU kernels, found by planning them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import devices
from hypocenter.device.launch import Launch
from hypocenter.device.offline.abstract import AbsentGroup, AbstractGpu, specimens
from hypocenter.device.offline.specimen import Specimen
from hypocenter.device.peers import Lane, LaneKind, StopWord
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.kernels.collective.peer_sum import LANES, PeerSum
from hypocenter.kernels.experts.choice import ExpertChoice
from hypocenter.kernels.rowwise.embedding import keep_rows
from hypocenter.kernels.sampling.drafting import (
    ChainState,
    StepTensors,
    advance_drafts,
    place_drafts,
    take_masks,
)
from hypocenter.kernels.sampling.sampling_plan import DeviceSampler, draws_of_all_forms
from hypocenter.kernels.weights.gpu_layout import UNITS
from hypocenter.model.facts.architecture import Architecture, Rope
from hypocenter.model.facts.experts import Experts
from hypocenter.model.facts.families import FAMILIES
from hypocenter.model.facts.latent import Latent
from hypocenter.model.facts.layer_shapes import LayerShape
from hypocenter.model.facts.part import WHOLE, Part
from hypocenter.model.facts.pooling import Pooling
from hypocenter.model.facts.recurrence import AnyRecurrence, Convolution, Recurrence
from hypocenter.model.facts.split import part_of
from hypocenter.model.facts.state_space import StateSpace
from hypocenter.model.layers.decoder import Decoder
from hypocenter.model.layers.points import KeptPoints
from hypocenter.model.layers.step_buffers import Cache, KVPages, StatePages, StepInputs
from hypocenter.model.tensors.specimen_weights import (
    allocate_undefined,
    undefined_weights,
    with_undefined_adapters,
)
from hypocenter.trace.points import Selection

# One model for each kernel variant that a family brings.
_MODELS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("llama", "normal rope, silu", {}),
    ("qwen3", "neox rope, norms on q and k", {}),
    ("gemma2", "gelu, post norms, soft caps", {"attn_softcap": 50.0, "final_softcap": 30.0}),
)

# Mixtures: softmax and sigmoid scores, with what else each of them brings.
_MIXTURES: dict[str, Experts] = {
    "qwen3moe": Experts(ExpertChoice(128, 8), width=768),
    "qwen2moe": Experts(
        ExpertChoice(60, 4, normalises=False, has_gate=True), 1408, shared_width=5632
    ),
    "granitemoe": Experts(ExpertChoice(8, 2), width=14336),
    "glm4moe": Experts(ExpertChoice(128, 8, "sigmoid"), 1408, shared_width=1408),
    "gpt-oss": Experts(ExpertChoice(32, 4), width=2880),
    "gemma4": Experts(ExpertChoice(128, 8), width=704),
    "deepseek2": Experts(
        ExpertChoice(256, 8, "sigmoid", num_groups=8, num_groups_used=4), 2048, shared_width=2048
    ),
}
# Softmax scores choose groups otherwise.
_GROUPS = Experts(ExpertChoice(160, 6, normalises=False, num_groups=8, num_groups_used=3), 1536)
# Heads that share a latent.
_LATENTS = {
    "deepseek2": Latent(rank=512, rope_dim=64, plain_dim=128, value_dim=128),
    "minicpm3": Latent(rank=256, rope_dim=32, plain_dim=64, value_dim=64),
}
# A layer with a state, and behind it one with attention.
_RECURRENCES: dict[str, AnyRecurrence] = {
    "qwen35": Recurrence((1,), 16, 32, key_dim=128, value_dim=128, num_taps=4),
    "lfm2": Convolution((1,), width=4096, num_taps=3),
    "granitehybrid": StateSpace((1,), 128, 64, state_dim=128, num_groups=1, num_taps=4),
    "falcon-h1": StateSpace((0,), 24, 64, 256, num_groups=1, num_taps=4, stands_beside=True),
}
# Heads in groups that share what writes and reads their states, and a norm.
_GROUPED = StateSpace((1,), 128, 64, state_dim=128, num_groups=8, num_taps=4)
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

# Logits of just more than 2**31 elements: each row takes time and memory of the host.
_HUGE = (16752, 128256, "sampling, 64-bit offsets")


def project_specimens() -> tuple[Specimen, ...]:
    """Each kernel of the project in each form that decoder or sampler launches it in.

    A form that is the same for several vendors is there once.
    """
    found: dict[tuple[object, ...], Specimen] = {}
    for vendor in VENDORS:
        for specimen in vendor_specimens(vendor):
            same = found.setdefault(form_of(specimen), specimen)
            if same.vendor != specimen.vendor:
                whose = "" if same.vendor in ("", "amd") else "nvidia"
                found[form_of(specimen)] = replace(same, vendor=whose)
    return tuple(found.values())


def vendor_specimens(vendor: str) -> Iterator[Specimen]:
    """The specimens that one vendor's GPUs are launched with, a form as often as it is met."""
    of_model = partial(_of_model, vendor)
    for family, _, arch in _MODELS:
        yield from of_model(family, DType.Q8_0, DType.F16, arch)
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
    yield from _of_encoders(vendor)
    yield from _of_gpt_oss(vendor)
    yield from _of_states(vendor)
    yield from _of_latents(vendor)
    yield from _of_parts(vendor)
    yield from _of_adapters(vendor)
    yield from _of_traces(vendor)
    yield from _of_blocks(vendor)
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
    yield from _of_drafts(vendor)


def _of_mixtures(vendor: str) -> Iterator[Specimen]:
    """Each way to choose, products of each form for as many rows as each way to cut them has."""

    def of(family: str, dtype: DType, num_tokens: int, **changes: Any) -> list[Specimen]:
        plan = AbstractModel(vendor, family, dtype, DType.F16, changes).plan(num_tokens)
        of_mixtures = ("route", "group", "round", "experts", "mix")
        return _own_specimens(of_mixtures, plan, f"{dtype.name.lower()}, experts")

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
        plan = AbstractModel(vendor, family, dtype, DType.F16, changes).plan(num_tokens)
        yield from _own_specimens(
            ("layer_norm", "activate"), plan, f"{dtype.name.lower()}, layer norms, no gate"
        )


def _of_encoders(vendor: str) -> Iterator[Specimen]:
    """What the embedding of a token gets added, and an activation of theirs."""
    changes = {"num_text_kinds": 2, "pooling": Pooling("mean", "all")}
    of_both = (DType.F32, DType.Q8_0), (1, 64, 1 << 20)
    for dtype, num_tokens in itertools.product(*of_both):
        plan = AbstractModel(vendor, "bert", dtype, DType.F16, changes).plan(num_tokens)
        yield from _own_specimens(("add_rows", "activate"), plan, f"{dtype.name.lower()}, encoders")


def _of_gpt_oss(vendor: str) -> Iterator[Specimen]:
    """Sinks in each form of attention, and the clamped gate with codes and without."""
    of_both = (DType.MXFP4, DType.F32), (DType.F16, DType.F32), (1, 64)
    for dtype, kv_dtype, num_tokens in itertools.product(*of_both):
        plan = AbstractModel(vendor, "gpt-oss", dtype, kv_dtype).plan(num_tokens)
        yield from _own_specimens(
            ("attention", "gate"), plan, f"{kv_dtype.name.lower()} cache, sinks, clamped gate"
        )
    model = AbstractModel(vendor, "gpt-oss", DType.MXFP4, DType.F16, attention="parts")
    plan = model.plan(64)
    yield from _own_specimens("softmax", plan, "sinks")


def _of_blocks(vendor: str) -> Iterator[Specimen]:
    """Caches of blocks: of heads and of latents, for prompts and for tokens."""
    own = ("attention", "kv_write", "latent_write")
    families = ("llama", "deepseek2")
    for family, kv_dtype, num_tokens in itertools.product(
        families, (DType.Q8_0, DType.Q4_0), (1, 64, 1 << 20)
    ):
        plan = AbstractModel(vendor, family, DType.Q8_0, kv_dtype).plan(num_tokens)
        yield from _own_specimens(own, plan, f"{kv_dtype.name.lower()} cache, {family}")
    # Heads of each size that a Hadamard matrix has, for tokens and beyond 2**31 elements.
    for head_dim, num_tokens in itertools.product((96, 64, 128, 256, 512), (1, 1 << 20)):
        model = AbstractModel(
            vendor,
            "llama",
            DType.Q8_0,
            DType.Q4_0,
            {"head_dim": head_dim},
            uses_hadamard=True,
        )
        yield from _own_specimens("hadamard", model.plan(num_tokens), f"heads of {head_dim}")


def _of_states(vendor: str) -> Iterator[Specimen]:
    """Layers that carry a state, and what gates their results and those of attention."""
    kinds: tuple[tuple[str, DType, dict[str, Any]], ...] = (
        ("qwen35", DType.F32, {}),
        ("qwen35", DType.Q8_0, {}),
        ("lfm2", DType.Q8_0, {}),
        ("granitehybrid", DType.Q8_0, {}),
        ("granitehybrid", DType.Q8_0, {"recurrence": _GROUPED}),
        ("falcon-h1", DType.Q8_0, {}),
    )
    for (family, dtype, changes), num_tokens in itertools.product(kinds, (1, 64, 1 << 20)):
        plan = AbstractModel(vendor, family, dtype, DType.F16, changes).plan(num_tokens)
        of_states = ("short_conv", "delta_rule", "ssm_scan", "gate", "rms_norm")
        yield from _own_specimens(of_states, plan, f"{family}, {dtype.name.lower()}, states")


def _of_latents(vendor: str) -> Iterator[Specimen]:
    """Attention over latents: few heads and many, caches of both types, prompts and tokens."""
    own = ("attention", "head_linear", "latent_write", "route")
    for dtype, kv_dtype, num_heads, num_tokens in itertools.product(
        (DType.Q8_0, DType.F32), (DType.F16, DType.F32), (16, 128), (1, 64, 1 << 20)
    ):
        if num_tokens > 64 and (num_heads > 16 or kv_dtype is DType.F32):
            continue
        changes = {"num_heads": num_heads, "experts": _GROUPS}
        plan = AbstractModel(vendor, "deepseek2", dtype, kv_dtype, changes).plan(num_tokens)
        yield from _own_specimens(own, plan, f"{kv_dtype.name.lower()} cache, latents")
    model = AbstractModel(vendor, "deepseek2", DType.Q8_0, DType.F16, attention="parts")
    plan = model.plan(64)
    parts = ("expand", "transpose", "scores", "weighted_sum")
    yield from _own_specimens(parts, plan, "latents")


def _of_adapters(vendor: str) -> Iterator[Specimen]:
    """What adapters of each type add, for a token, some and more than 2**31 elements."""
    for dtype, num_tokens in itertools.product((DType.F16, DType.F32), (1, 128, 1 << 20)):
        model = AbstractModel(vendor, "llama", DType.Q8_0, DType.F16, adapters=dtype)
        plan = model.plan(num_tokens)
        yield from _own_specimens("adapter", plan, f"{dtype.name.lower()} adapters")
        model = AbstractModel(vendor, "qwen3moe", DType.Q8_0, DType.F16, adapters=dtype)
        plan = model.plan(num_tokens)
        own = "experts_adapter"
        yield from _own_specimens(own, plan, f"{dtype.name.lower()} adapters of experts")


def _of_traces(vendor: str) -> Iterator[Specimen]:
    """What a trace of all points launches, for a token, some and more than 2**31 elements."""
    own = ("measure", "join_figures", "kv_read")
    for kv_dtype, num_tokens in itertools.product((DType.F16, DType.F32), (1, 64, 1 << 20)):
        model = AbstractModel(vendor, "llama", DType.Q8_0, kv_dtype, is_traced=True)
        yield from _own_specimens(
            own, model.plan(num_tokens), f"{kv_dtype.name.lower()} cache, trace"
        )
    model = AbstractModel(vendor, "qwen3moe", DType.Q8_0, DType.F16, is_traced=True)
    yield from _own_specimens(own, model.plan(64), "trace of experts")


def _of_parts(vendor: str) -> Iterator[Specimen]:
    """The launches of each of two parts of a model: the first one adds the residual, and joins what
    both make."""
    counts = (1, 64, 1 << 20)
    for dtype, num_tokens, rank in itertools.product((DType.F16, DType.Q8_0), counts, (0, 1)):
        part, even = Part(rank, 2), {"vocab_size": 128256}
        model = AbstractModel(vendor, "llama", dtype, DType.F16, even, part=part)
        plan = model.plan(num_tokens)
        yield from _own_specimens(
            ("linear", "join"), plan, f"{dtype.name.lower()}, a part of a model"
        )
    for num_tokens in counts:
        model = AbstractModel(vendor, "llama", DType.Q8_0, DType.F16, part=Part(0, 4))
        plan = model.plan(num_tokens)
        yield from _own_specimens("add_parts", plan, "one of four parts of a model")
    yield from specimens(_of_two_gpus(vendor), "two GPUs")


def _of_two_gpus(vendor: str) -> Iterator[Launch]:
    """The sums of few rows and of many where two GPUs write into each other's memory."""
    gpu = AbstractGpu(vendor)
    devices.use_backend(gpu)

    def place(name: str, kind: LaneKind) -> Tensor:
        return allocate_undefined(name, kind.dtype, kind.shape, gpu.name)

    lanes = {name: Lane(place(name, kind), place(name, kind)) for name, kind in LANES.items()}
    stop = StopWord(place("stop", LaneKind(DType.I32, (1,))), memoryview(bytearray(4)))
    sums = PeerSum.on(gpu.name, lanes, stop)
    for num_tokens in (1, 64):
        x = place("x", LaneKind(DType.F32, (num_tokens, 4096)))
        if (launch := sums.launch(x)) is not None:
            yield launch


def _of_attention(vendor: str) -> Iterator[Specimen]:
    """Prompts and single tokens, heads of other sizes, caches beyond 2**31 elements."""
    own = partial(_own_specimens, "attention")
    for dtype, head_dim, num_tokens in itertools.product(
        (DType.F16, DType.F32), (64, 80, 128, 256), (8, 64)
    ):
        model = AbstractModel(vendor, "llama", DType.Q8_0, dtype, {"head_dim": head_dim})
        label = f"heads of {head_dim}, {dtype.name.lower()} cache"
        yield from own(model.plan(num_tokens), label)
    for family, cap in (("llama", 0.0), ("gemma2", 50.0)):
        changes, label = {"attn_softcap": cap}, "single tokens, f16 cache"
        for num_tokens in (8, 16):
            model = AbstractModel(vendor, family, DType.Q8_0, DType.F16, changes)
            yield from own(model.plan(num_tokens, num_logit_rows=num_tokens), label)
        label += ", 64-bit offsets"
        for weights in (DType.Q8_0, DType.F16, DType.BF16):
            model = AbstractModel(vendor, family, weights, DType.F16, changes)
            yield from own(model.plan(8, max_blocks=1 << 18), label)


def _own_specimens(kernels: str | tuple[str, ...], plan: Plan, label: str) -> list[Specimen]:
    """The specimens of kernels whose names begin so."""
    return specimens([x for x in plan.launches if x.kernel.startswith(kernels)], label)


@dataclass(frozen=True, slots=True)
class AbstractModel:
    """A model of 8B's shape and one layer, or one of each kind, on a device that runs nothing.

    `changes` are other values of fields of its architecture or its layers; of a `part` of it, where
    it is split.
    """

    vendor: str
    family: str
    dtype: DType
    kv_dtype: DType
    changes: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "fused"
    part: Part = WHOLE
    #: The type of adapters, where it has some.
    adapters: DType | None = None
    #: Whether heads go through `hadamard` before they are rounded.
    uses_hadamard: bool = False
    #: Whether all points are traced.
    is_traced: bool = False

    def plan(
        self, num_tokens: int, num_logit_rows: int | None = None, max_blocks: int = 256
    ) -> Plan:
        """The plan of a step.

        It has a sequence for each 4096 tokens, but at least 32, and some logit rows where nobody
        says.
        """
        arch = self._architecture()
        group = None if self.part is WHOLE else AbsentGroup(self.part.rank, self.part.num_parts)
        gpu = AbstractGpu(self.vendor)
        devices.use_backend(gpu)
        num_sequences, has_states = max(32, num_tokens >> 12), arch.recurrence is not None
        inputs = StepInputs.allocate(
            num_tokens,
            num_sequences,
            max_blocks,
            device=gpu.name,
            has_states=has_states,
            arch=arch,
            num_adapters=0 if self.adapters is None else 2,
        )
        num_blocks = max(4096, num_tokens // 4, max_blocks)
        pages = KVPages.allocate(
            arch,
            num_blocks,
            16,
            self.kv_dtype,
            device=gpu.name,
            uses_hadamard=self.uses_hadamard,
        )
        cache = Cache(pages, StatePages.allocate(arch, num_sequences, device=gpu.name))
        weights = undefined_weights(arch, self.dtype, gpu.name)
        weights = with_undefined_adapters(weights, self.adapters)
        decoder = Decoder(arch, weights, inputs, cache, num_tokens, self.attention, group)
        if self.is_traced:
            decoder.points = KeptPoints(arch, Selection(), inputs, max_bytes=1 << 62)
        some = max(min(num_tokens, 4), num_tokens // 16)
        num_rows = some if num_logit_rows is None else num_logit_rows
        return decoder.plan(num_tokens, num_rows, is_adapted=self.adapters is not None)

    def _architecture(self) -> Architecture:
        arch, of_layer = architecture_of(self.family), {}
        for name, value in self.changes.items():
            if name in LayerShape.__dataclass_fields__:
                of_layer[name] = value
            else:
                arch = replace(arch, **{name: value})
        shape = replace(arch.layers[0], **of_layer)
        rope = replace(arch.rope, dim=shape.head_dim - shape.rank)
        arch = replace(arch, layers=(shape,) * arch.num_layers, rope=rope)
        return part_of(arch, self.part)


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
    plan = AbstractModel(vendor, family, dtype, kv_dtype, changes or {}, attention).plan(num_tokens)
    marks = [mark for mark in plan.marks if isinstance(mark, Launch)]
    return [*specimens(plan.launches, label), *specimens(marks, "marks")]


def sampling_plans(vendor: str, num_rows: int, vocab_size: int) -> list[Plan]:
    """The plans of a greedy choice and of one with every filter, on a device that runs nothing.

    Of each one for free rows, and one for rows with masks; and one for rows with biases.
    """
    gpu = AbstractGpu(vendor)
    devices.use_backend(gpu)
    logits = allocate_undefined("logits", DType.F32, (num_rows, vocab_size), gpu.name)
    sampler = DeviceSampler(gpu.name, vocab_size, num_rows)
    rows = draws_of_all_forms(vocab_size)
    return [sampler.plan(logits, [row] * num_rows) for row in rows]


def _of_sampling(vendor: str, num_rows: int, vocab_size: int, label: str) -> list[Specimen]:
    plans = sampling_plans(vendor, num_rows, vocab_size)
    return [specimen for plan in plans for specimen in specimens(plan.launches, label)]


def _of_drafts(vendor: str) -> list[Specimen]:
    """What runs between the steps of a draft model or a head, behind greedy choices and others,
    what puts its tokens into a step, and what is kept for a head."""
    gpu, most, rows, words = AbstractGpu(vendor), 7, 32, 4008
    devices.use_backend(gpu)

    def ids(*shape: int) -> Tensor:
        return allocate_undefined("ids", DType.I32, shape, gpu.name)

    builder = PlanBuilder(rows, gpu.name)
    state = ChainState(ids(1), ids(rows), ids(rows), ids(most, 2 * rows), ids(most, rows))
    names = ("token_ids", "positions", "slots", "sequence_rows", "logit_rows")
    of_tokens = {name: ids(rows) for name in names}
    for settings in (allocate_undefined("settings", DType.I64, (rows, 8), gpu.name), None):
        for hidden_rows in (ids(rows), None):
            step = StepTensors(
                **of_tokens,
                counts=ids(2),
                block_tables=ids(rows, 512),
                settings=settings,
                hidden_rows=hidden_rows,
            )
            advance_drafts(builder, state, step, num_rows=rows, block_size=16)
    for num_slots in (4096, 1 << 20):
        x, table = (
            allocate_undefined(name, DType.F32, (num, 4096), gpu.name)
            for name, num in (("x", rows), ("hidden_states", num_slots))
        )
        keep_rows(builder, x, ids(rows), table, ids(2))
    take_masks(builder, state.link, ids(most * rows, words), ids(rows, words))
    place_drafts(builder, ids(64), state.drafts, ids(64), ids(64), num_ids=128256)
    return specimens(builder.launches, "drafts")


def form_of(specimen: Specimen) -> tuple[object, ...]:
    """What a compiler makes something else of."""
    return (
        specimen.kernel,
        tuple(specimen.signature.items()),
        tuple(specimen.constants.items()),
        specimen.divisible,
        tuple(specimen.options.items()),
    )


def architecture_of(family: str) -> Architecture:
    rope, latent = Rope(base=500000.0, dim=128), _LATENTS.get(family)
    recurrence = _RECURRENCES.get(family)
    shape = LayerShape(num_kv_heads=8, head_dim=128, ffn_width=14336)
    if latent is not None:
        shape = LayerShape(1, latent.cached_dim, shape.ffn_width, rank=latent.rank)
    return Architecture(
        name=family,
        family=FAMILIES[family],
        layers=(shape,) * (max(recurrence.attention_layers) + 1 if recurrence else 1),
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
        recurrence=recurrence,
        latent=latent,
        embedding_scale=64.0 if FAMILIES[family].scaled_embedding else 1.0,
    )
