"""The one decoder: a transformer as its architecture describes it, written as ops over Tensors.

Its plain Python runs once per shape bucket and leaves a plan; it never touches data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from functools import cached_property, partial
from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.forms import likeness
from hypocenter.device.group import Group
from hypocenter.device.memory import rows
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.mark import mark, mark_layer
from hypocenter.kernels.rowwise.activation import (
    gate,
    gate_codes,
    scale,
)
from hypocenter.kernels.rowwise.embedding import add_rows, gather, keep_rows, lookup
from hypocenter.kernels.rowwise.layer_norm import layer_norm
from hypocenter.kernels.rowwise.norm import rms_norm
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.layers.activations import (
    Activations,
    LogitsBuffers,
    allocate_gathered,
)
from hypocenter.model.layers.adapting import Adapting
from hypocenter.model.layers.attending import Attending
from hypocenter.model.layers.heads import Heads
from hypocenter.model.layers.host_mixtures import HostMixtures
from hypocenter.model.layers.latent_attention import LatentAttention
from hypocenter.model.layers.layer_ops import BranchEnd, LayerOps, Norm, gated_operands
from hypocenter.model.layers.mixture import MixtureBuffers
from hypocenter.model.layers.points import NO_POINTS, Points
from hypocenter.model.layers.state_net import StateNet, allocate_net, first_of
from hypocenter.model.layers.step_buffers import Cache, StepInputs
from hypocenter.model.tensors.mixer_weights import MixerWeights
from hypocenter.model.tensors.table import (
    BesideDense,
    LayerInput,
    LayerWeights,
    Weights,
)


class Decoder(LayerOps):
    """Builds plans for one model over static inputs, a paged cache, and states if there are any."""

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        inputs: StepInputs,
        cache: Cache,
        max_tokens: int,
        attention: str = "fused",
        group: Group | None = None,
    ) -> None:
        """`group`: those that hold the other parts of the model.

        `attention` is one of config.ATTENTIONS; raises UsageError for parts on the CPU.
        """
        self.weights, self.inputs, self.pages = weights, inputs, cache.pages
        self._left = cache.hidden  # of tokens, for a head that drafts
        #: What a trace keeps of plans that are made from now on.
        self.points: Points = NO_POINTS
        self._page_of = {layer: at for at, layer in enumerate(arch.attention_layers)}
        self._state_net = allocate_net(arch, inputs, cache.states, max_tokens)
        device, num_sequences = inputs.counts.device, inputs.block_tables.shape[0]
        self._logits_buffers = LogitsBuffers(arch, num_sequences, device, group)
        self._buffers = Activations.allocate(arch, max_tokens, device=device)
        widest = max(arch.width, arch.mixer_width, arch.dense_width)
        operands = Operands.allocate(
            weights.dtypes, max_tokens, widest, device=device, in_bf16=weights.in_bf16
        )
        gathered = allocate_gathered(arch, max_tokens, device)
        beside = weights.adapters
        num_used = 1 if arch.experts is None else arch.experts.choice.num_used
        adapting = Adapting(beside, inputs, max_tokens, num_used) if beside else None
        gated = gated_operands(arch, weights.dtypes, max_tokens, device)
        super().__init__(arch, inputs.counts, operands, gated, group, gathered, adapting)
        on_host = [layer for layer in weights.layers if layer.is_on_host(device)]
        self._mixture = MixtureBuffers.allocate(
            arch,
            [
                x.mixture
                for x in weights.layers
                if x.mixture is not None and not x.is_on_host(device)
            ],
            max_tokens,
            device=device,
            in_bf16=weights.in_bf16,
        )
        self._host_mixtures = HostMixtures(arch, on_host, max_tokens) if on_host else None
        self._attending = Attending(arch, inputs, cache.pages, max_tokens, attention)
        is_fused = self._attending.is_fused
        ropes, uses_hadamard = weights.ropes, cache.pages.uses_hadamard
        self._heads, self._heads_of_long = (
            Heads(arch, by, inputs, is_fused=is_fused, uses_hadamard=uses_hadamard)
            for by in (ropes, ropes.of_long_texts())
        )
        self._latent = LatentAttention.allocate(
            arch, inputs, ropes.whole, max_tokens, uses_hadamard=uses_hadamard
        )

    def take_apart(self, ops: frozenset[str]) -> None:
        """Have plans from now on run these ops in parts (`settings/routes.py`), and no others."""
        self.in_parts = ops
        for heads in (self._heads, self._heads_of_long):
            heads.in_parts = "rope" in ops

    def ops_of_two_forms(self) -> frozenset[str]:
        """The ops of plans so far that `take_apart` changes."""
        has_parts = self._heads.has_parts or self._heads_of_long.has_parts
        return frozenset(self.ops_with_parts) | ({"rope"} if has_parts else set())

    def multiplied_as(self, weight: Tensor) -> DType:
        """The type in which activations are multiplied with a weight."""
        return self._operands.operands.multiplied_as(weight.dtype)

    @cached_property
    def unlike_layers(self) -> frozenset[int]:
        """Layers that are launched in all the forms that the whole model is launched in."""
        of_kind: dict[Hashable, int] = {}
        inputs = self._buffers.layer_inputs
        for index, layer in enumerate(self.weights.layers):
            page = self._page_of.get(index)
            pages = None if page is None else (self.pages.keys[page], self.pages.values[page])
            own_input = inputs[index] if inputs else None
            parts: tuple[Any, ...] = layer, self.arch.layers[index], pages, own_input
            if self._adapting is not None:
                parts += (self._adapting.beside(layer.matrices),)
            of_kind.setdefault(likeness(parts), index)
        return frozenset({*of_kind.values(), len(self.weights.layers) - 1})

    def plan(
        self,
        num_tokens: int,
        num_logit_rows: int,
        num_sequences: int | None = None,
        *,
        is_long: bool = False,
        is_adapted: bool = False,
        layers: Collection[int] | None = None,
    ) -> Plan:
        """The launches of a step of up to `num_tokens` tokens and `num_logit_rows` logit rows.

        The tokens belong to up to `num_sequences` sequences (all of them when None), and with
        `is_long` to texts that are longer than the original context. With `is_adapted` some have
        adapters. The result holds logits f32 [num_logit_rows, vocab_size], or the last hidden
        states when no logits are wanted. Only of the `layers` named, if any are: such a plan is to
        be compiled and never run.
        """
        plan = PlanBuilder(num_tokens, self.inputs.counts.device)
        b = self._buffers.first(num_tokens)
        counts = self.inputs.counts
        self._begin(plan, b, is_adapted=is_adapted)
        inputs_of = [w.layer_input for w in self.weights.layers if w.layer_input is not None]
        if inputs_of:
            products = zip(inputs_of, b.layer_inputs, strict=True)
            self._linear(plan, b.x, *((w.projection, out, None) for w, out in products))
        self._attending.begin(plan)
        step = (num_tokens, num_logit_rows, num_sequences)
        attend = partial(self._attending.attend, *step)
        mixture = self._mixture and self._mixture.first(num_tokens)
        net = first_of(self._state_net, num_tokens, num_sequences)
        latent = self._latent and self._latent.first(num_tokens)
        for index, layer in enumerate(self.weights.layers):
            if layers is not None and index not in layers:
                continue
            if net is not None and layer.mixer is not None and layer.attn_output is None:
                self._recur(plan, b, net, index, layer)
            elif latent is not None:
                self._attend_latents(plan, b, latent, index, layer, attend)
            else:
                heads = self._heads_of_long if is_long else self._heads
                self._attention(plan, b, index, layer, attend, heads, net)
            if not layer.is_parallel:
                self.points.keep(plan, "attn_residual", index, b.x, self.arch.width)
                self._feed_forward(plan, b, index, layer, mixture)
            if layer.layer_input is not None:
                self._add_input(plan, b, layer.layer_input, b.layer_inputs[index])
            if layer.scale != 1:
                scale(plan, b.x, layer.scale, counts)
            self.points.keep(plan, "layer_out", index, b.x, self.arch.width)
            mark_layer(plan, index, len(self.weights.layers))
        return Plan(plan, self._end(plan, b, num_logit_rows))

    def _begin(self, plan: PlanBuilder, b: Activations, *, is_adapted: bool) -> None:
        self._begin_operands()
        if self._adapting is not None:
            self._adapting.begin(is_adapted=is_adapted)
        self.points.begin(plan)
        self._embed(plan, b)
        self.points.keep(plan, "embedding", None, b.x, self.arch.width)

    def _embed(self, plan: PlanBuilder, b: Activations) -> None:
        """b.x = the embedding of each token, with what positions and kinds of texts add, normed."""
        inputs, arch, w = self.inputs, self.arch, self.weights.additions
        if arch.is_head:
            self._embed_for_head(plan, b)
            return
        lookup(plan, inputs.token_ids, self.weights.token_table, b.x, inputs.counts)
        if self._adapting is not None:
            self._adapting.add_embedding(plan, self.weights.token_table, b.x)
        if arch.embedding_scale != 1:
            scale(plan, b.x, arch.embedding_scale, inputs.counts)
        if w is None:
            return
        if w.positions is not None:
            add_rows(plan, b.x, w.positions, inputs.positions, inputs.counts)
        if w.kinds is not None:
            assert inputs.text_kinds is not None
            add_rows(plan, b.x, w.kinds, inputs.text_kinds, inputs.counts)
        width, eps = arch.width, arch.norm_eps
        layer_norm(plan, b.x, w.norm, w.norm_bias, eps, b.x, inputs.counts, width=width)

    def _embed_for_head(self, plan: PlanBuilder, b: Activations) -> None:
        """b.x = what a head makes of each token, and of what was left of the token before it."""
        inputs, w, counts = self.inputs, self.weights.layers[0].nextn, self.inputs.counts
        assert w is not None
        assert self._left is not None
        assert inputs.hidden_rows is not None
        lookup(plan, inputs.token_ids, self.weights.token_table, b.hidden, counts)
        if self.arch.embedding_scale != 1:
            scale(plan, b.hidden, self.arch.embedding_scale, counts)
        normed, codes = self._norm(plan, b.hidden, Norm(w.embedding_norm), b.hidden, w.of_embedding)
        self._linear(plan, normed, (w.of_embedding, b.x, None), ready=codes)
        gather(plan, self._left.table, inputs.hidden_rows, b.hidden, counts, count=0)
        normed, codes = self._norm(plan, b.hidden, Norm(w.hidden_norm), b.hidden, w.of_hidden)
        self._linear(plan, normed, (w.of_hidden, b.x, None), ready=codes, accumulate=True)

    def _end(self, plan: PlanBuilder, b: Activations, num_logit_rows: int) -> Tensor:
        """Append what follows the last layer, up to logits or hidden states, which it returns."""
        if self._left is not None and not self.arch.is_head:
            left = self._last_norm(plan, b.x, b.hidden, 0)
            keep_rows(plan, left, self.inputs.slots, self._left.table, self.inputs.counts)
        if not num_logit_rows:
            self.points.finish(plan)
            return b.x
        finish = self._logits if self.weights.makes_logits else self._features
        result = finish(plan, b, num_logit_rows)
        self.points.finish(plan, result)
        mark(plan)
        return result

    def _last_norm(self, plan: PlanBuilder, x: Tensor, out: Tensor, count: int) -> Tensor:
        """What the last norm makes of x, in `out`; x where there is no such norm."""
        w, counts, width = self.weights, self.inputs.counts, self.arch.width
        if w.output_norm is None:
            return x
        eps = self.arch.norm_eps
        if w.output_norm_bias is None:
            rms_norm(plan, x, w.output_norm, eps, out, counts, width=width, count=count)
        else:
            norm = w.output_norm, w.output_norm_bias
            layer_norm(plan, x, *norm, eps, out, counts, width=width, count=count)
        return out

    def _attention(
        self,
        plan: PlanBuilder,
        b: Activations,
        index: int,
        w: LayerWeights,
        attend: Callable[..., None],
        heads: Heads,
        net: StateNet | None,
    ) -> None:
        arch = self.arch
        pairs = [(w.q, b.q, w.q_bias), (w.k, b.k, w.k_bias), (w.v, b.v, w.v_bias)]
        pairs.append((w.attn_gate, b.attn_gate, None))
        products = [(one, out, bias) for one, out, bias in pairs if one is not None]
        assert w.attn_output is not None
        weights = list(w.read)
        if w.is_parallel:
            assert w.dense is not None
            weights += w.dense.read
        if net is not None and w.mixer is not None:
            weights += w.mixer.read
            products += net.products(w.mixer)
        norm = Norm(w.attn_norm, w.attn_norm_bias)
        normed, x_codes = self._norm(plan, b.x, norm, b.hidden, *weights)
        self._keep_norm(plan, "attn_norm", index, (normed, x_codes), b.x, norm)
        self._linear(plan, normed, *products, ready=x_codes)
        self._keep_heads(plan, b, index, w)
        self.points.measure(plan)
        if w.is_parallel:
            # x is read no more, so what this adds to it may come before attention's part.
            self._dense(plan, b, index, w, normed, x_codes)
        if net is not None and w.mixer is not None:
            self._add_mixed(plan, b, net, index, w.mixer)
        page = self._page_of[index]
        keys, values = self.pages.keys[page], self.pages.values[page]
        heads.prepare(plan, b, index, w, keys, values)
        self.points.keep(plan, "q_rope", index, b.q, arch.q_width(index))
        if arch.layers[index].kv_source is None:
            self.points.keep_cache(plan, index, (keys, values), arch.layers[index].value_dim)
        codes = None if w.attn_gate is not None else self._codes(b.q, w.attn_output)
        attend(
            plan,
            b,
            keys,
            values,
            window=arch.layers[index].window,
            softcap=arch.attn_softcap,
            codes=codes,
            sinks=w.sinks,
            keeps_out=self.points.wants("attention", index),
        )
        width = arch.num_heads * arch.layers[index].value_dim
        self.points.keep(plan, "attention", index, b.attended, width)
        self.points.measure(plan)
        attended = b.attended
        if w.attn_gate is not None:
            width, attended = arch.q_width(index), b.attn_gate
            codes = self._gate(plan, attended, b.attended, "sigmoid", w.attn_output, width)
        self._into_residual(
            plan,
            b,
            attended,
            BranchEnd(
                w.attn_output,
                w.attn_output_bias,
                w.post_attn_norm,
                Norm(w.attn_sum_norm, w.attn_sum_norm_bias),
            ),
            ready=codes,
            also=w.is_parallel,
        )

    def _keep_norm(
        self,
        plan: PlanBuilder,
        name: str,
        index: int | None,
        normed: tuple[Tensor, Operands | None],
        x: Tensor,
        norm: Norm,
    ) -> None:
        """Keep what `_norm` made of x; in parts it is there beside its codes."""
        if "norm" in self.in_parts:
            normed = normed[0], None
        self.points.keep_norm(plan, name, index, normed, x, norm)

    def _keep_heads(self, plan: PlanBuilder, b: Activations, index: int, w: LayerWeights) -> None:
        """Keep q, k and v as their products are; a layer may read those of another."""
        kv_width = self.arch.layers[index].kv_width
        self.points.keep(plan, "q", index, b.q, self.arch.q_width(index))
        for name, weight, x in (("k", w.k, b.k), ("v", w.v, b.v)):
            if weight is not None:
                self.points.keep(plan, name, index, x, kv_width)

    def _attend_latents(
        self,
        plan: PlanBuilder,
        b: Activations,
        latent: LatentAttention,
        index: int,
        layer: LayerWeights,
        attend: Callable[..., None],
    ) -> None:
        """b.x += what attention makes of it whose cache holds latents."""
        w = layer.latent
        assert w is not None
        norm = Norm(layer.attn_norm)
        normed, x_codes = self._norm(plan, b.x, norm, b.hidden, *w.read)
        self._keep_norm(plan, "attn_norm", index, (normed, x_codes), b.x, norm)
        self.points.measure(plan)
        self._linear(plan, normed, *latent.products(w, b), ready=x_codes)
        if w.q_up is not None:
            self._linear(plan, latent.norm_queries(plan, w), (w.q_up, latent.heads, None))
        keys, values = self.pages.keys[index], self.pages.values[index]
        latent.prepare(plan, b, w, keys, values)
        value_dim = self.arch.layers[index].value_dim
        attend(plan, b, keys, values, window=0, softcap=self.arch.attn_softcap, value_dim=value_dim)
        expanded = latent.expand(plan, w, b.attended)
        self._into_residual(plan, b, expanded, BranchEnd(w.output), ready=None)

    def _recur(
        self, plan: PlanBuilder, b: Activations, net: StateNet, index: int, layer: LayerWeights
    ) -> None:
        """b.x += what a layer makes of it that carries a state."""
        w = layer.mixer
        assert w is not None
        norm = Norm(layer.attn_norm)
        normed, x_codes = self._norm(plan, b.x, norm, b.hidden, *w.read)
        self._keep_norm(plan, "attn_norm", index, (normed, x_codes), b.x, norm)
        self.points.measure(plan)
        self._linear(plan, normed, *net.products(w), ready=x_codes)
        self._add_mixed(plan, b, net, index, w)

    def _add_mixed(
        self, plan: PlanBuilder, b: Activations, net: StateNet, index: int, w: MixerWeights
    ) -> None:
        """b.x += what a net makes of the products that a layer with a state begins with."""
        gated, result = net.apply(plan, index, w)
        codes = None
        if result is not None:
            codes = self._gate(plan, gated, result, net.gate_kind, w.output, net.width)
        self._into_residual(plan, b, gated, BranchEnd(w.output), ready=codes)

    def _feed_forward(
        self,
        plan: PlanBuilder,
        b: Activations,
        index: int,
        w: LayerWeights,
        mixture: MixtureBuffers | None,
    ) -> None:
        norm = Norm(w.ffn_norm, w.ffn_norm_bias)
        if w.mixture is None:
            assert w.dense is not None
            normed, x_codes = self._norm(plan, b.x, norm, b.hidden, *w.dense.read)
            self._keep_norm(plan, "ffn_norm", index, (normed, x_codes), b.x, norm)
            self.points.measure(plan)
            self._dense(plan, b, index, w, normed, x_codes)
            return
        self.points.measure(plan)
        if self._host_mixtures is not None and w.is_on_host(plan.device):
            self._host_mixtures.mix(plan, b.x, w, self.inputs.counts)
            return
        assert mixture is not None
        if w.mixture.beside is not None:
            self._mix_beside(plan, b, index, w, w.mixture.beside, mixture)
            return
        assert w.ffn_norm is not None
        self._mix(plan, b, w.ffn_norm, w.mixture, mixture)

    def _dense(
        self,
        plan: PlanBuilder,
        b: Activations,
        index: int,
        w: LayerWeights,
        x: Tensor,
        x_codes: Operands | None,
    ) -> None:
        """b.x += what the dense feed-forward makes of x; `x_codes` as in `_gate_up`."""
        assert w.dense is not None
        width = self.arch.layers[index].ffn_width
        b = b.of_width(width)
        codes = self._gate_up(plan, b, w.dense, x, x_codes, width)
        sum_norm = Norm(w.ffn_sum_norm, w.ffn_sum_norm_bias)
        end = BranchEnd(w.dense.down, w.dense.down_bias, w.post_ffn_norm, sum_norm)
        self._into_residual(plan, b, b.gate, end, ready=codes, is_last=not w.is_parallel)

    def _mix_beside(
        self,
        plan: PlanBuilder,
        b: Activations,
        index: int,
        w: LayerWeights,
        norms: BesideDense,
        mixture: MixtureBuffers,
    ) -> None:
        """x += the norm of what the dense feed-forward and experts make of x, each normed."""
        assert w.mixture is not None
        assert w.dense is not None
        assert w.post_ffn_norm is not None
        assert mixture.shared is not None
        counts, both, width = self.inputs.counts, mixture.shared, self.arch.layers[index].ffn_width
        b = b.of_width(width)
        norm = partial(rms_norm, plan, eps=self.arch.norm_eps, counts=counts, width=self.arch.width)
        norm(b.x, norms.router, out=b.hidden)
        mixture.choose(plan, b.hidden, w.mixture, counts, self._operands.next(b.x.shape[0]))
        norm(b.x, norms.experts, out=b.hidden)
        mixture.give(plan, b.hidden, w.mixture.experts, self._adapting)
        mixture.apply_experts(plan, w.mixture.experts, self._adapting)
        normed, x_codes = self._norm(plan, b.x, Norm(w.ffn_norm), b.hidden, *w.dense.read)
        codes = self._gate_up(plan, b, w.dense, normed, x_codes, width)
        self._linear(plan, b.gate, (w.dense.down, both, None), ready=codes)
        norm(both, norms.dense, out=both)
        mixture.mix_into(plan, b.hidden, counts, with_shared=False, accumulate=False)
        norm(b.hidden, norms.mixed, out=both, accumulate=True)
        norm(both, w.post_ffn_norm, out=b.x, accumulate=True)

    def _add_input(
        self, plan: PlanBuilder, b: Activations, w: LayerInput, projected: Tensor
    ) -> None:
        """x += what the layer's own embedding lets through; formula: transformers,
        `Gemma4TextModel.project_per_layer_inputs`.

        Factors before a norm divide its epsilon instead: a row of the table, and the norm's weight
        (`weights.py`), are to grow by the root of half their length; the projection is to shrink by
        the root of the width.
        """
        assert b.token_input is not None
        assert b.gated_input is not None
        arch, counts, inner = self.arch, self.inputs.counts, self.arch.input_width
        eps, kind = arch.norm_eps, arch.family.activation
        norm = partial(rms_norm, plan, counts=counts, accumulate=True)
        lookup(plan, self.inputs.token_ids, w.table, b.token_input, counts)
        wide_eps = eps * arch.width
        norm(projected, w.projection_norm, eps=wide_eps, out=b.token_input, width=inner)
        x, x_codes = self._norm(plan, b.x, Norm(None), b.hidden, w.gate)
        self._linear(plan, x, (w.gate, b.gated_input, None), ready=x_codes)
        codes = self._codes(b.gated_input, w.output)
        if codes is None:
            gate(plan, b.gated_input, b.token_input, kind, counts)
        else:
            gate_codes(plan, b.gated_input, b.token_input, kind, codes, counts, width=inner)
        self._linear(plan, b.gated_input, (w.output, b.hidden, None), ready=codes)
        norm(b.hidden, w.output_norm, eps=2 * eps / inner, out=b.x, width=arch.width)

    def _features(self, plan: PlanBuilder, b: Activations, num_rows: int) -> Tensor:
        """What the last layer says of tokens, f32 [num_rows, width padded to 64]."""
        found = rows(b.hidden, 0, num_rows)
        gather(plan, b.x, self.inputs.logit_rows, found, self.inputs.counts)
        return self._last_norm(plan, found, found, 1)

    def _logits(self, plan: PlanBuilder, b: Activations, num_logit_rows: int) -> Tensor:
        weights, counts = self.weights, self.inputs.counts
        hidden = rows(b.hidden, 0, num_logit_rows)
        logits = self._logits_buffers.product(num_logit_rows)
        gather(plan, b.x, self.inputs.logit_rows, hidden, counts)
        norm = Norm(weights.output_norm, weights.output_norm_bias)
        if self._left is not None and self.arch.is_head:
            self._last_norm(plan, hidden, hidden, 1)
            norm = Norm(None)
            keep_rows(plan, hidden, self._left.own_rows, self._left.table, counts, count=1)
        normed, x_codes = self._norm(plan, hidden, norm, hidden, weights.output, count=1)
        self._keep_norm(plan, "result_norm", None, (normed, x_codes), hidden, norm)
        product = (weights.output, logits, weights.output_bias)
        self._linear(plan, normed, product, count=1, ready=x_codes)
        return self._logits_buffers.finish(plan, logits, counts)
