"""Steps of a draft model, one behind the other on a GPU: each token goes into the next step there.

A link is a step of one token for each request, the choice of the next one, and what makes the step
behind it (`kernels/sampling/drafting.py`): one plan, and so one graph. Nothing is read in between.
Says nothing of how many links are worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.base.dtypes import Array, Int32s
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.device.inputs import Inputs
from hypocenter.device.launch import compile_all
from hypocenter.device.plan import Plan, PlanBuilder, bucket
from hypocenter.engine.drafting.ahead import ChainRow, DraftsAhead, WrittenRow
from hypocenter.kernels.mark import mark
from hypocenter.kernels.sampling.drafting import (
    NUM_SETTINGS,
    ChainState,
    StepTensors,
    advance_drafts,
    place_drafts,
    take_masks,
)
from hypocenter.kernels.sampling.draw import TokenChoice, num_mask_words, settings_of
from hypocenter.kernels.sampling.sampling_plan import ChoiceKind, DeviceSampler
from hypocenter.record.recorder import current

if TYPE_CHECKING:
    from hypocenter.engine.runner import Runner

_GREEDY: ChoiceKind = (None, False)


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The model whose steps take the drafts: its input i32 [max_tokens] of token ids, how many
    tokens it knows, and how many of them a step tries at most."""

    token_ids: Tensor
    num_ids: int
    max_placed: int


class DraftChain:
    """Chains on `runner`, of up to `max_drafts` tokens of each request, for steps of `target`.

    `sampler` leaves what it chooses in the runner's token ids. Not safe from two threads.
    """

    def __init__(
        self, runner: Runner, sampler: DeviceSampler, target: DraftTarget, max_drafts: int
    ) -> None:
        self._runner, self._sampler, self._target = runner, sampler, target
        self._max_rows, self._max_drafts = runner.drawn_rows, max_drafts
        self._device = device = target.token_ids.device
        rows, most = self._max_rows, target.max_placed
        shapes: dict[str, tuple[int, ...]] = {
            "link": (1,),
            **dict.fromkeys(("num_wanted", "first_positions"), (rows,)),
            "uniforms": (max_drafts, 2 * rows),
        }
        self._inputs = Inputs("chain", "drafts", shapes, device=device)
        drafts = memory.allocate("drafts", "drafts", DType.I32, (max_drafts, rows), device=device)
        self._state = ChainState(**self._inputs.tensors, drafts=drafts)
        places = {"targets": (most,), "sources": (most,)}
        self._places = Inputs("places", "drafts", places, device=device)
        self._masks: Tensor | None = None  # of all links
        self._plans: dict[tuple[int, ChoiceKind, bool], Plan] = {}
        self._placing = self._placing_plan()

    def compile(self) -> None:
        """Have ready what chains launch that neither the runner nor the sampler has."""
        words = num_mask_words(self._runner.vocab_size)
        shapes = {"settings": (DType.I64, (self._max_rows, NUM_SETTINGS))}
        shapes |= dict.fromkeys(("masks", "masks_of_links"), (DType.I32, (1, words)))
        some = {
            name: memory.allocate(name, "drafts", *shape, device=self._device)
            for name, shape in shapes.items()
        }
        builder = PlanBuilder(1, self._device)
        take_masks(builder, self._state.link, some["masks_of_links"], some["masks"])
        for settings in (None, some["settings"]):
            self._advance(builder, 1, settings)
        plans = self._placing, Plan(builder, self._state.drafts)
        compile_all([launch for plan in plans for launch in plan.every_launch])
        for tensor in some.values():
            memory.free(tensor)

    def capture(self) -> None:
        """Capture what greedy chains run, of each number of requests that there is a plan for."""
        num_rows = 1
        while True:
            for is_link in (False, True):
                self._plan(min(num_rows, self._max_rows), _GREEDY, is_link=is_link).capture()
                current().end_step()
            if num_rows >= self._max_rows:
                break
            num_rows *= 2
        self._placing.capture()
        current().end_step()
        self._runner.wait()

    def write(
        self,
        logits: Tensor,
        rows: Sequence[ChainRow],
        draws: Sequence[Sequence[TokenChoice]],
        work: float | None,
    ) -> DraftsAhead:
        """Have the device write all drafts, the first ones chosen from `logits` f32 [num_rows,
        vocab_size], of which a step runs; nothing is waited for.

        `rows` that want most stand first. Of each link `draws` has how the token of each row that
        goes on so far is chosen, which hangs on no token.
        """
        kind = _kind_of(self._sampler, draws)
        self._put(rows, draws, is_greedy=kind[0] is None)
        num_rows = self._num_rows(len(rows))
        self._sampler.launch(memory.rows(logits, 0, len(rows)), draws[0])
        self._plan(num_rows, kind, is_link=False).run()
        if kind[1]:
            self._put_masks(draws[1:], num_rows)
        if len(draws) > 1:
            plan = self._plan(num_rows, kind, is_link=True)
            for link in range(1, len(draws)):
                self._record(plan, rows, draws[link], link)
                plan.run()
        wait = copies.to_host_later(self._state.drafts, len(draws))
        written = {row.request_id: WrittenRow(at, row.num) for at, row in enumerate(rows)}
        num_ids, most = self._target.num_ids, self._max_rows
        return DraftsAhead(written, wait, self._place, max_rows=most, num_ids=num_ids, work=work)

    def _place(self, targets: Int32s, sources: Int32s) -> None:
        """Put drafts into the token ids of the target's step, of which the rest is there."""
        filled = []
        for name, values in (("targets", targets), ("sources", sources)):
            padded = np.full(self._target.max_placed, -1, np.int32)
            padded[: len(values)] = values
            filled.append((self._places.tensors[name], padded))
        self._places.put(filled)
        self._placing.run()

    def _put(
        self, rows: Sequence[ChainRow], draws: Sequence[Sequence[TokenChoice]], *, is_greedy: bool
    ) -> None:
        """Fill the chain's inputs, with the random numbers of all links unless it is greedy."""
        state, num_wanted = self._state, np.zeros(self._max_rows, np.int32)
        num_wanted[: len(rows)] = [row.num for row in rows]
        filled: list[tuple[Tensor, Int32s]] = [
            (state.link, np.zeros(1, np.int32)),
            (state.num_wanted, num_wanted),
            (state.first_positions, np.array([row.num_tokens for row in rows], np.int32)),
        ]
        if not is_greedy:
            uniforms = np.zeros((len(draws), len(rows)))
            for number, of_link in enumerate(draws):
                uniforms[number, : len(of_link)] = [settings_of(draw)[-1] for draw in of_link]
            filled.append((state.uniforms, uniforms.view(np.int32)))
        self._inputs.put(filled)

    def _put_masks(self, draws: Sequence[Sequence[TokenChoice]], num_rows: int) -> None:
        """Have the masks of all links but the first one, which the sampler has, on the device."""
        words = num_mask_words(self._runner.vocab_size)
        masks = np.full((1 + len(draws), num_rows, words), -1, np.int32)
        for link, of_link in enumerate(draws, start=1):
            for row, draw in enumerate(of_link):
                if draw.mask is not None:
                    masks[link, row] = draw.mask
        copies.to_device(self._masks_of_links(), masks.reshape(-1, words))

    def _masks_of_links(self) -> Tensor:
        if self._masks is None:
            shape = (self._max_drafts * self._max_rows, num_mask_words(self._runner.vocab_size))
            self._masks = memory.allocate(
                "masks_of_links", "drafts", DType.I32, shape, device=self._device
            )
        return self._masks

    def _record(
        self,
        plan: Plan,
        rows: Sequence[ChainRow],
        draws: Sequence[TokenChoice],
        link: int,
    ) -> None:
        """Write down what the device has put into the inputs of a link, but for its tokens."""
        record = current()
        if not record.is_on:
            return
        inputs, size = self._runner.inputs, self._runner.block_size
        going_on = [row for row in rows if row.num > link]
        positions = [row.num_tokens + link - 1 for row in going_on]
        slots = [
            row.blocks[position // size] * size + position % size
            for row, position in zip(going_on, positions, strict=True)
        ]
        each = range(len(going_on))
        filled: list[tuple[Tensor, Array]] = [
            (inputs.positions, np.array(positions, np.int32)),
            (inputs.slots, np.array(slots, np.int32)),
            (inputs.sequence_rows, np.array(each, np.int32)),
            (inputs.logit_rows, np.array(each, np.int32)),
            (inputs.counts, np.array([len(each), len(each)], np.int32)),
        ]
        if inputs.hidden_rows is not None and self._runner.hidden is not None:
            first = self._runner.hidden.num_slots
            filled.append((inputs.hidden_rows, np.array(each, np.int32) + np.int32(first)))
        filled += self._sampler.settings_of(draws)
        record.record_step(plan, filled, filled_by_device=inputs.token_ids)

    def _num_rows(self, num_requests: int) -> int:
        return min(bucket(num_requests, self._runner.max_batch_tokens), self._max_rows)

    def _plan(self, num_rows: int, kind: ChoiceKind, *, is_link: bool) -> Plan:
        """What makes the step behind a choice; where it is a link, behind a step and its choice."""
        key = (num_rows, kind, is_link)
        if key not in self._plans:
            self._plans[key] = self._new_plan(*key)
        return self._plans[key]

    def _new_plan(self, num_rows: int, kind: ChoiceKind, is_link: bool) -> Plan:
        runner, builder = self._runner, PlanBuilder(num_rows, self._device)
        settings, masks = self._sampler.buffers_for(num_rows, kind)
        if is_link:
            if masks is not None:
                take_masks(builder, self._state.link, self._masks_of_links(), masks)
            step = runner.plan_of_answers(num_rows)
            builder.join(step)
            mark(builder)
            logits = memory.rows(step.result, 0, num_rows)
            builder.join(self._sampler.plan_of(logits, num_rows, kind))
        self._advance(builder, num_rows, settings)
        mark(builder)
        plan = Plan(builder, self._state.drafts)
        plan.name = f"drafts, {num_rows} rows, {'a link' if is_link else 'the next step'}"
        plan.compile()
        return plan

    def _advance(self, builder: PlanBuilder, num_rows: int, settings: Tensor | None) -> None:
        """Append what makes the next step."""
        inputs = self._runner.inputs
        tensors = StepTensors(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.sequence_rows,
            inputs.logit_rows,
            inputs.counts,
            inputs.block_tables,
            settings,
            inputs.hidden_rows,
        )
        runner = self._runner
        advance_drafts(
            builder,
            self._state,
            tensors,
            num_rows=num_rows,
            block_size=runner.block_size,
            first_hidden=runner.hidden.num_slots if runner.hidden is not None else 0,
        )

    def _placing_plan(self) -> Plan:
        builder = PlanBuilder(1, self._device)
        target, drafts = self._target, self._state.drafts
        places = self._places.tensors["targets"], self._places.tensors["sources"]
        place_drafts(builder, target.token_ids, drafts, *places, num_ids=target.num_ids)
        mark(builder)
        plan = Plan(builder, target.token_ids)
        plan.name = "drafts, into a step"
        return plan


def _kind_of(sampler: DeviceSampler, draws: Sequence[Sequence[TokenChoice]]) -> ChoiceKind:
    """How the tokens of a chain are chosen: as the first ones, and by masks where later ones have
    some."""
    filters, _ = sampler.kind_of(draws[0])
    is_masked = any(draw.mask is not None for link in draws[1:] for draw in link)
    return filters, is_masked
