"""Every op on a device against its float64 reference, through the real door; runs on any device.

Shapes are odd on purpose. A case that names what a wrong kernel would give also proves that the
bound would see it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from ops.kernel_launch import random_rows

from hypocenter.base.tensor import WEIGHT_TYPES, DType, Tensor
from hypocenter.device import copies, devices, launch, memory
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import attention, kv_write, rope, rope_write
from hypocenter.kernels.linear import linear, operands, quantise
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.rowwise import activation, embedding, norm
from hypocenter.kernels.weights import gpu_layout, packing
from hypocenter.kernels.weights.block_types import dequantise
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.verify import bounds

Array = np.ndarray[Any, Any]
EPS = 2.0**-24
#: Appends what makes codes of five rows.
_Makes = Callable[[PlanBuilder, Operands], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One launch of an op: `out` afterwards is `exact` within `bound`, element by element.

    `wrong`: what the result would be with the fault that this case is for.
    """

    op: str
    label: str
    num_rows: int
    build: Callable[[PlanBuilder], None]
    out: Tensor
    exact: Array
    bound: Array | float
    wrong: Array | None = None


def run(device: str) -> dict[str, Any]:
    """Worst error of each op as a share of its bound, and every case that is outside it."""
    devices.open_device(device)
    worst: dict[str, float] = {}
    num_cases, failures = 0, []
    for case in cases(device):
        num_cases += 1
        try:
            share, problem = check(case, device)
        except Exception as error:  # the next case must still run
            share, problem = math.inf, f"{type(error).__name__}: {error}"[:500]
        worst[case.op] = max(worst.get(case.op, 0.0), share)
        if problem:
            failures.append({"op": case.op, "case": case.label, "problem": problem})
    return {
        "ok": not failures,
        "num_cases": num_cases,
        "worst_error_per_bound": {op: round(share, 4) for op, share in worst.items()},
        "failures": failures,
    }


def check(case: Case, device: str) -> tuple[float, str]:
    """The largest error as a share of its bound, and what is wrong (empty: nothing)."""
    plan = PlanBuilder(case.num_rows, device)
    case.build(plan)
    launch.run(plan.launches)
    got = copies.to_host(case.out)
    got = got[tuple(map(slice, case.exact.shape))].astype(np.float64)
    share = float(np.max(np.abs(got - case.exact) / case.bound, initial=0.0))
    if not share <= 1:  # so that NaN fails
        return math.inf if math.isnan(share) else share, f"error is {share:.3g} x the bound"
    if case.wrong is not None:
        seen = float(np.max(np.abs(case.wrong - case.exact) / case.bound))
        if seen < 10:
            return share, f"the planted fault is only {seen:.3g} x the bound"
    return share, ""


def cases(device: str) -> Iterator[Case]:
    """All cases, each made when it is asked for."""
    make = _Make(device)
    for dtype in WEIGHT_TYPES:
        for num_rows, num_outputs in ((1, 1), (3, 127), (5, 129), (33, 130), (127, 129)):
            yield make.linear(dtype, num_rows, num_outputs)
        yield from make.same_bits(dtype)
        yield make.lookup(dtype)
    for num_heads, width in ((1, 1), (1, 129), (3, 64), (1, 4096)):
        yield make.rms_norm(num_heads, width)
    for style in ("normal", "neox"):
        for head_dim, rope_dim in ((2, 2), (128, 128), (20, 12)):
            yield make.rope(style, head_dim, rope_dim)
            for dtype in (DType.F16, DType.F32) if device != "cpu" else ():
                yield from make.rope_write(style, head_dim, rope_dim, dtype)
    for shape in ((1, 1, 1, 1, 2), (17, 1, 6, 2, 64), (33, 33, 3, 3, 20), (127, 5, 8, 1, 128)):
        for window, softcap in ((0, 0.0), (7, 0.0), (0, 2.0)):
            for dtype in (DType.F16, DType.F32):
                yield make.attention(shape, window, softcap, dtype)
    for kind in ("silu", "gelu"):
        yield make.gate(kind)
        yield from make.codes_of_gate(kind)
    yield from make.codes_of_norm()
    if device.startswith("cuda"):  # forms of that many outputs are those of NVIDIA's GPUs alone
        for dtype in (DType.Q4_0, DType.Q4_K, DType.Q8_0, DType.Q6_K):
            yield from make.same_bits(dtype, num_outputs=4160, num_columns=1280)
        for dtype in (DType.Q4_0, DType.Q4_K):
            yield from make.same_bits(dtype, num_outputs=24640, num_columns=1280)
    yield make.scale()
    yield make.softcap()
    yield make.gather()
    yield make.narrow()


class _Make:
    """Makes cases whose tensors lie on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.rng = np.random.default_rng(7)

    def linear(self, dtype: DType, num_rows: int, num_outputs: int) -> Case:
        num_columns = 512 if dtype.is_quantised else 131
        raw = random_rows(dtype, num_outputs, num_columns)
        weights = dequantise(raw, dtype, num_columns).astype(np.float64)
        x = self.normal(num_rows, num_columns)
        x[:, -1] = 4  # so that the last column weighs enough to be missed
        bias, before = self.normal(num_outputs), self.normal(num_outputs)
        out = self.rows("out", np.tile(before, (num_rows, 1)))
        packed = packing.pack(raw, dtype, num_columns, device=self.device)
        weight = packing.place("weight", "benchmark", packed, device=self.device)
        x_rows, bias_row = self.rows("x", x, fill=np.nan), self.vector("bias", bias)
        counts = self.counts(num_rows)
        if self.device == "cpu" and dtype.is_quantised:
            # What is multiplied: codes and scales, which other cases hold against x itself.
            codes, scales, _ = quantise.reference(x)
            groups = codes.reshape(num_rows, -1, operands.GROUP) * scales[..., None].astype(float)
            x = groups.reshape(num_rows, -1)
        elif dtype is not DType.F32 and self.device != "cpu":
            x = quantise.reference_rounded(x, DType.F16 if dtype.is_quantised else dtype)
            if dtype.is_quantised:
                weights = gpu_layout.reference(raw, dtype, num_columns)
        exact = linear.reference(x, weights, bias) + before
        missed = np.flatnonzero(weights.any(axis=0))[-1]  # ternary weights are 0 at times
        size = np.abs(x) @ np.abs(weights).T + np.abs(bias) + np.abs(before)
        return Case(
            "linear",
            f"{dtype.name} [{num_rows}, {num_columns}] x [{num_outputs}, {num_columns}]",
            num_rows,
            lambda p: linear.linear(p, x_rows, weight, out, counts, bias=bias_row, accumulate=True),
            out,
            exact,
            (math.log2(num_columns) + 4) * EPS * size + EPS * np.abs(exact),
            exact - np.outer(x[:, missed], weights[:, missed]),
        )

    def same_bits(
        self, dtype: DType, num_outputs: int = 192, num_columns: int = 0
    ) -> Iterator[Case]:
        """The first rows of a product of 130 rows, made alone: equal in every bit."""
        num_columns = num_columns or (4096 if dtype.is_quantised else 4099)
        raw = random_rows(dtype, num_outputs, num_columns)
        packed = packing.pack(raw, dtype, num_columns, device=self.device)
        weight = packing.place("weight", "benchmark", packed, device=self.device)
        x = self.normal(130, num_columns)
        x *= np.exp2(self.rng.integers(-9, 9, x.shape)).astype(np.float32)

        def product(num_rows: int) -> tuple[Tensor, Callable[[PlanBuilder], None]]:
            given, counts = self.rows("x", x[:num_rows]), self.counts(num_rows)
            out = self.rows("out", np.full((num_rows, num_outputs), np.nan))
            return out, lambda p: linear.linear(p, given, weight, out, counts)

        whole, build = product(130)
        plan = PlanBuilder(130, self.device)
        build(plan)
        launch.run(plan.launches)
        expected = copies.to_host(whole).astype(np.float64)
        for num_rows in (1, 2, 4, 16, 64):
            out, build = product(num_rows)
            yield Case(
                "linear, alone", f"{dtype.name} {num_rows} of 130 rows, {num_outputs} outputs",
                num_rows, build, out, expected[:num_rows], 1e-300,
            )  # fmt: skip

    def lookup(self, dtype: DType) -> Case:
        raw = random_rows(dtype, 130, 256)
        ids = np.array([129, 0, 15, 16, 77], np.int32)
        table = packing.place(
            "table",
            "benchmark",
            packing.pack(raw, dtype, 256, device=self.device),
            device=self.device,
        )
        out, id_row = self.rows("out", np.zeros((5, 256))), self.put("ids", ids)
        counts = self.counts(5)
        values = dequantise(raw, dtype, 256).astype(np.float64)
        exact = values[ids]
        # scale * code + minimum may be rounded once or twice, and fields' products to f16 before.
        is_f16 = self.device != "cpu" and dtype.block_elements == 256
        bound = 8 * EPS * (np.abs(exact) + 64 * dtype.is_quantised) + 1e-30
        bound = bound + is_f16 * 2.0**-10 * np.abs(values).max()
        return Case(
            "lookup", dtype.name, 5,
            lambda p: embedding.lookup(p, id_row, table, out, counts),
            out, exact, bound, values[ids - 1],
        )  # fmt: skip

    def rms_norm(self, num_heads: int, width: int) -> Case:
        x, weight = self.normal(5, num_heads * width), self.normal(width)
        out = self.rows("out", np.ones_like(x))
        x_rows, weight_row = self.rows("x", x, np.nan), self.vector("w", weight)
        counts = self.counts(5)
        exact = norm.reference(x.reshape(5, num_heads, width), weight, 1e-5).reshape(5, -1)
        return Case(
            "rms_norm", f"{num_heads} x {width}", 5,
            lambda p: norm.rms_norm(
                p, x_rows, weight_row, 1e-5, out, counts, width=width, num_heads=num_heads,
                accumulate=True,
            ),
            out, exact + 1, (math.log2(width) + 8) * EPS * (np.abs(exact) + 1),
        )  # fmt: skip

    def rope(self, style: str, head_dim: int, rope_dim: int) -> Case:
        x = self.normal(6, 3, head_dim)
        positions = np.array([0, 1, 2, 511, 3, 100], np.int32)
        cos, sin = rope.tables(512, rope_dim, 10000.0)
        turned, places = self.rows("x", x.reshape(6, -1)), self.put("positions", positions)
        table, counts = (self.put("cos", cos), self.put("sin", sin)), self.counts(6)
        other = "neox" if style == "normal" else "normal"
        exact, wrong = (
            rope.reference(x, cos[positions], sin[positions], kind).reshape(6, -1)
            for kind in (style, other)
        )
        return Case(
            "rope", f"{style} {rope_dim} of {head_dim}", 6,
            lambda p: rope.rotate(
                p, turned, places, table, counts, num_heads=3, head_dim=head_dim, style=style
            ),
            turned, exact, 8 * EPS * float(np.abs(x).max()), wrong if rope_dim > 2 else None,
        )  # fmt: skip

    def rope_write(self, style: str, head_dim: int, rope_dim: int, dtype: DType) -> Iterator[Case]:
        """q and both sides of the cache as the parts leave them: equal in every bit."""
        num_heads, num_kv_heads = 5, 3
        values = [self.normal(6, num * head_dim) for num in (num_heads, *[num_kv_heads] * 2)]
        kind = np.float16 if dtype is DType.F16 else np.float32
        key_shape = (4, num_kv_heads, head_dim, 16)
        value_shape = (4, num_kv_heads, 16, -(-head_dim // 16) * 16)
        places = self.put("positions", np.array([0, 1, 2, 511, 3, 100], np.int32))
        slots = self.put("slots", np.array([47, 0, 16, 31, 7, 20], np.int32))
        cos, sin = rope.tables(512, rope_dim, 10000.0)
        table, counts = (self.put("cos", cos), self.put("sin", sin)), self.counts(5)

        def made() -> list[Tensor]:
            rows = [self.rows(name, x) for name, x in zip("qkv", values, strict=True)]
            caches = (("k_cache", key_shape), ("v_cache", value_shape))
            return rows + [self.put(name, np.zeros(shape, kind)) for name, shape in caches]

        parts = made()
        q, k, v, k_cache, v_cache = parts
        plan = PlanBuilder(6, self.device)
        for x, num in ((q, num_heads), (k, num_kv_heads)):
            rope.rotate(
                plan, x, places, table, counts, num_heads=num, head_dim=head_dim, style=style
            )
        kv_write.kv_write(plan, k, v, slots, k_cache, v_cache, counts)
        launch.run(plan.launches)

        def written(fused: list[Tensor], plan: PlanBuilder) -> None:
            q, k, v, k_cache, v_cache = fused
            rope_write.rope_write(
                plan, q, k, v, places, slots, table, k_cache, v_cache, counts,
                num_heads=num_heads, head_dim=head_dim, style=style,
            )  # fmt: skip

        for at in (0, 3, 4):
            fused = made()
            yield Case(
                "rope_write", f"{style} {rope_dim} of {head_dim} {dtype.name} {parts[at].name}", 6,
                functools.partial(written, fused),
                fused[at], copies.to_host(parts[at]).astype(np.float64), 1e-300,
            )  # fmt: skip

    def attention(
        self, shape: tuple[int, int, int, int, int], window: int, softcap: float, dtype: DType
    ) -> Case:
        """kv_write into pages in a shuffled order, then attention; what is not written is NaN."""
        num_keys, num_tokens, heads, kv_heads, head_dim = shape
        q = self.normal(num_tokens, heads, head_dim)
        k, v = self.normal(num_keys, kv_heads, head_dim), self.normal(num_keys, kv_heads, head_dim)
        if dtype is DType.F16:
            k, v = (values.astype(np.float16).astype(np.float32) for values in (k, v))
        num_blocks = -(-num_keys // 16)
        table = self.rng.permutation(num_blocks + 3)[:num_blocks].astype(np.int32)
        key_shape = (num_blocks + 3, kv_heads, head_dim, 16)
        value_shape = (num_blocks + 3, kv_heads, 16, -(-head_dim // 16) * 16)
        kind = np.float16 if dtype is DType.F16 else np.float32
        k_cache = self.put("k_cache", np.full(key_shape, np.nan, kind))
        v_cache = self.put("v_cache", np.full(value_shape, np.nan, kind))
        at = np.arange(num_keys)
        slots = self.put("slots", (table[at // 16] * 16 + at % 16).astype(np.int32))
        k_rows, v_rows = (
            self.rows(name, values.reshape(num_keys, -1)) for name, values in (("k", k), ("v", v))
        )
        tables = self.put("tables", np.stack([np.full_like(table, -1), table]))
        rows = self.put("rows", np.ones(num_tokens, np.int32))
        positions = self.put("positions", np.arange(num_keys)[-num_tokens:].astype(np.int32))
        out = self.rows("out", np.full((num_tokens, heads * head_dim), np.nan))
        q_rows = self.rows("q", q.reshape(num_tokens, -1))
        written, asked, scale = self.counts(num_keys), self.counts(num_tokens), head_dim**-0.5

        def build(plan: PlanBuilder) -> None:
            kv_write.kv_write(plan, k_rows, v_rows, slots, k_cache, v_cache, written)
            attention.attention(
                plan, q_rows, k_cache, v_cache, tables, rows, positions, out, asked,
                num_heads=heads, scale=scale, window=window, softcap=softcap,
            )  # fmt: skip

        scoring = bounds.Scoring(scale, window, softcap)
        found = bounds.of_attention(q, k, v, scoring, is_f16=dtype is DType.F16)
        exact, bound = (values.reshape(num_tokens, -1) for values in found)
        return Case(
            "kv_write + attention",
            f"{dtype.name} keys {num_keys} tokens {num_tokens} heads {heads}/{kv_heads} x "
            f"{head_dim} window {window} softcap {softcap}",
            num_keys, build, out, exact, bound,
        )  # fmt: skip

    def gate(self, kind: str) -> Case:
        opened, up = self.normal(5, 129) * 4, self.normal(5, 129) * 4
        out, up_rows, counts = self.rows("gate", opened), self.rows("up", up), self.counts(5)
        exact = activation.reference(opened, up, kind)
        return Case(
            "gate", kind, 5, lambda p: activation.gate(p, out, up_rows, kind, counts), out, exact,
            32 * EPS * (np.abs(exact) + 1e-3),
        )  # fmt: skip

    def codes_of_gate(self, kind: str) -> Iterator[Case]:
        opened, up = self.normal(5, 1100) * 4, self.normal(5, 1100) * 4
        gate_rows, up_rows, counts = self.rows("gate", opened), self.rows("up", up), self.counts(5)
        other = self.rows("gate", opened)

        def parts(plan: PlanBuilder, into: Operands) -> None:
            activation.gate(plan, other, up_rows, kind, counts)
            quantise.quantise(plan, other, 1100, into, counts)

        def at_once(plan: PlanBuilder, into: Operands) -> None:
            activation.gate_codes(plan, gate_rows, up_rows, kind, into, counts, width=1100)

        yield from self._same_codes("gate_codes", kind, parts, at_once)

    def codes_of_norm(self) -> Iterator[Case]:
        weight, counts = self.vector("w", self.normal(1100)), self.counts(5)
        x, hidden = (self.rows(name, self.normal(5, 1100)) for name in ("x", "hidden"))

        def parts(plan: PlanBuilder, into: Operands) -> None:
            norm.rms_norm(plan, x, weight, 1e-5, hidden, counts, width=1100)
            quantise.quantise(plan, hidden, 1100, into, counts)

        def at_once(plan: PlanBuilder, into: Operands) -> None:
            norm.rms_norm_codes(plan, x, weight, 1e-5, into, counts, width=1100)

        yield from self._same_codes("rms_norm_codes", "1100", parts, at_once)

    def _same_codes(self, op: str, label: str, parts: _Makes, at_once: _Makes) -> Iterator[Case]:
        """What an op makes at once of five rows of 1100 is in every bit what its parts make."""
        first, second = (
            Operands.allocate([DType.Q4_0], 5, 1100, device=self.device) for _ in range(2)
        )
        plan = PlanBuilder(5, self.device)
        parts(plan, first)
        launch.run(plan.launches)
        for name, made in first.written.items():
            out = second.written[name]
            if made is None or out is None:  # fragments are NVIDIA's alone
                continue
            # Groups and columns up to the last unit, as far as both fill them.
            exact = copies.to_host(made).astype(np.float64)
            if exact.ndim > 1:
                exact = exact[:, : 36 if name in ("scales", "sums") else 1152]
            yield Case(
                op, f"{label}, {name}", 5, lambda p: at_once(p, second), out, exact, 1e-300
            )  # fmt: skip

    def scale(self) -> Case:
        x = self.normal(3, 100)
        out, counts = self.rows("x", x), self.counts(2)
        exact = np.concatenate([x[:2].astype(np.float64) * 3, x[2:]])  # the last row is not live
        return Case(
            "scale", "2 of 3 rows", 3, lambda p: activation.scale(p, out, 3.0, counts), out, exact,
            EPS * np.abs(exact),
        )  # fmt: skip

    def softcap(self) -> Case:
        x = self.normal(3, 100) * 3
        out, counts = self.rows("x", x), self.counts(0, 3)
        return Case(
            "softcap", "cap 2", 3, lambda p: activation.softcap(p, out, 2.0, counts, count=1), out,
            2 * np.tanh(x.astype(np.float64) / 2), 16 * EPS * 2,
        )  # fmt: skip

    def gather(self) -> Case:
        x, rows = self.normal(7, 192), np.array([6, 0, 6], np.int32)
        out, x_rows = self.rows("out", np.zeros((3, 192))), self.rows("x", x)
        row_ids, counts = self.put("rows", rows), self.counts(7, 3)
        return Case(
            "gather", "3 of 7", 7, lambda p: embedding.gather(p, x_rows, row_ids, out, counts),
            out, x[rows].astype(np.float64), 1e-30, x[[5, 1, 5]],
        )  # fmt: skip

    def narrow(self) -> Case:
        x = self.normal(3, 128)
        out, x_rows = self.put("out", np.zeros((3, 101), np.float32)), self.rows("x", x)
        counts = self.counts(0, 3)
        return Case(
            "narrow", "128 to 101", 3, lambda p: embedding.narrow(p, x_rows, out, counts), out,
            x[:, :101].astype(np.float64), 1e-30,
        )  # fmt: skip

    # Tensors.

    def normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(np.float32)

    def put(self, name: str, values: Array) -> Tensor:
        """A device tensor of exactly these f32, f16 or i32 values."""
        kinds = {"float32": DType.F32, "float16": DType.F16, "int32": DType.I32}
        tensor = memory.allocate(
            name, "benchmark", kinds[values.dtype.name], values.shape, device=self.device
        )
        # Halves travel as bits.
        copies.to_device(tensor, values.view(np.uint16) if values.dtype == np.float16 else values)
        return tensor

    def rows(self, name: str, values: Array, fill: float = 0.0) -> Tensor:
        """Activations: rows padded to 64 columns, the padding holding `fill`."""
        wide = np.full((len(values), padded_rows(values.shape[1])), fill, np.float32)
        wide[:, : values.shape[1]] = values
        return self.put(name, wide)

    def vector(self, name: str, values: Array) -> Tensor:
        return self.put(name, np.pad(values, (0, padded_rows(len(values)) - len(values))))

    def counts(self, num_tokens: int, num_logit_rows: int = 0) -> Tensor:
        return self.put("counts", np.array([num_tokens, num_logit_rows], np.int32))
