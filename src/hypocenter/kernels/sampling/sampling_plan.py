"""The GPU's side of `sample`: static buffers, and the plan of kernels that a step's draws need.

The kernels are in `sampling_gpu.py`, their order in `sampling_launches_gpu.py`. A step copies its
settings to the device and one small tensor back: the chosen id and the number of bad logits of each
row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.device.forms import distinct
from hypocenter.device.launch import Launch
from hypocenter.device.op import Op
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.kernels.mark import mark
from hypocenter.kernels.sampling.draw import (
    Ids,
    TokenChoice,
    has_penalties,
    masks_of,
    num_mask_words,
    settings_of,
)
from hypocenter.kernels.sampling.sampling_contracts import (
    BIAS,
    BLOCK,
    CONTRACT,
    CONTRACT_MASKED,
    GREEDY,
    GREEDY_MASKED,
    NUM_STATES,
)
from hypocenter.record.recorder import current
from hypocenter.settings.config import SamplingParams

#: What a step lists of tokens that penalties, or biases, are for.
_CONTEXT = {"context_ids": DType.I32, "output_counts": DType.I32}
_BIASES = {"bias_ids": DType.I32, "biases": DType.I64}
#: What has an entry more than there are rows.
_STARTS = ("context_starts", "bias_starts")
_FEW = 256


# Without masks, and with them.
_GREEDY, _KEYS, _FILTERS = (
    tuple(Op(contract, gpu=f"sampling.sampling_launches_gpu.{launch}") for contract in contracts)
    for contracts, launch in (
        ((GREEDY, GREEDY_MASKED), "launch_greedy"),
        ((CONTRACT, CONTRACT_MASKED), "launch_keys"),
        ((CONTRACT, CONTRACT_MASKED), "launch_filters"),
    )
)
_ADD_BIASES = Op(BIAS, gpu="sampling.sampling_launches_gpu.launch_bias")

#: Whether tokens are searched for by count, and by mass; blocks of context, and of biases.
_Filters = tuple[bool, bool, int, int]
#: What decides which kernels a choice takes: its filters, None for a greedy one, and whether some
#: of its rows have masks.
ChoiceKind = tuple[_Filters | None, bool]


class DeviceSampler:
    """Buffers and plans for up to `max_rows` rows of `vocab_size` logits on one device.

    `mode` is the launch mode of every plan. `next_ids` i32 [as many as are drawn at once] gets the
    chosen ids too, 0 where there is none. Not safe from two threads.
    """

    def __init__(
        self,
        device: str,
        vocab_size: int,
        max_rows: int,
        mode: str = "off",
        next_ids: Tensor | None = None,
    ) -> None:
        self.vocab_size, self.max_rows = vocab_size, max_rows
        self._device, self._mode = device, mode
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._ran: dict[str, None] = {}
        num_blocks = -(-vocab_size // BLOCK)
        self._buffers = {
            "parts": self._tensor("parts", DType.I64, max_rows, num_blocks, 2),
            "outcomes": self._tensor("outcomes", DType.I32, max_rows, 2),
        }
        if next_ids is None:
            next_ids = self._buffers["next_ids"] = self._tensor("next_ids", DType.I32, max_rows)
        self._next_ids = next_ids
        self._context: dict[str, Tensor] = {}
        self._biases: dict[str, Tensor] = {}
        # What the host has put into the buffers for the next run.
        self._filled: list[tuple[Tensor, np.ndarray[Any, Any]]] = []

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that have run so far, in order of first use."""
        return tuple(self._ran)

    @property
    def num_graphs(self) -> int:
        """How many plans are replayed as captured graphs."""
        return sum(plan.is_captured for plan in self._plans.values())

    def sample(
        self, logits: Tensor, draws: Sequence[TokenChoice]
    ) -> Callable[[], list[tuple[int, int]]]:
        """Choose, and return what waits for (token id or -1, number of bad logits) of each row.

        It is one copy to the host, and the next choice may begin before it is waited for.
        """
        self.launch(logits, draws)
        outcomes = copies.to_host_later(self._buffers["outcomes"], len(draws))
        return lambda: [(int(token_id), int(num_bad)) for token_id, num_bad in outcomes()]

    def launch(self, logits: Tensor, draws: Sequence[TokenChoice]) -> None:
        """Choose; the ids lie in `next_ids` alone."""
        self._filled.clear()
        plan = self.plan(logits, draws)
        if self._filled:
            current().record_step(plan, self._filled, is_new=False)
        plan.run()
        self._ran.update(dict.fromkeys(plan.kernels))

    def plan(self, logits: Tensor, draws: Sequence[TokenChoice]) -> Plan:
        """The plan that chooses for `draws`, whose settings are copied to its buffers."""
        filters, is_masked = kind = self.kind_of(draws)
        if filters is not None:
            num_context = sum(ids.size for ids, _ in _contexts(draws))
            self._make_room(num_context, sum(draw.bias_ids.size for draw in draws))
            self._fill(draws)
        if is_masked:
            self._put_masks(draws)
        return self.plan_of(logits, len(draws), kind)

    def kind_of(self, draws: Sequence[TokenChoice]) -> ChoiceKind:
        """Which kernels choose for `draws`; nothing is copied."""
        contexts = _contexts(draws)
        most_biases = max((draw.bias_ids.size for draw in draws), default=0)
        is_masked = any(draw.mask is not None for draw in draws)
        params = [draw.params for draw in draws]
        is_greedy = all(param.temperature == 0 for param in params)
        if is_greedy and not contexts and not most_biases:
            return None, is_masked
        longest = max((ids.size for ids, _ in contexts), default=0)
        by_mass = any(param.temperature and param.top_p < 1 for param in params)
        by_count = by_mass or any(not param.temperature or param.top_k for param in params)
        return (by_count, by_mass, _num_blocks(longest), _num_blocks(most_biases)), is_masked

    def plan_of(self, logits: Tensor, num_rows: int, kind: ChoiceKind) -> Plan:
        """The plan of a kind of choice, for whose settings there is room."""
        key = (logits.address, num_rows, *kind)
        if key not in self._plans:
            self._plans[key] = self._make(logits, num_rows, *kind)
        return self._plans[key]

    def buffers_for(self, num_rows: int, kind: ChoiceKind) -> tuple[Tensor | None, Tensor | None]:
        """The settings and the masks that the first `num_rows` rows are chosen by: i64 [num_rows,
        8], the last column the bits of the random number, and i32 [num_rows, num_words]. None for
        what that kind of choice, which is without context and biases, does not read."""
        filters, is_masked = kind
        settings = masks = None
        if filters is not None:
            self._make_room(0, 0)
            settings = memory.rows(self._buffers["settings"], 0, num_rows)
        if is_masked:
            masks = memory.rows(self._masks(), 0, num_rows)
        return settings, masks

    def settings_of(
        self, draws: Sequence[TokenChoice]
    ) -> list[tuple[Tensor, np.ndarray[Any, Any]]]:
        """The buffer of settings and what it holds where a device has put the draws' random numbers
        there; nothing where there is none."""
        if "settings" not in self._buffers:
            return []
        return [(self._buffers["settings"], _settings(draws))]

    def free(self) -> None:
        """Give the buffers back; the sampler is of no use afterwards."""
        self._forget_plans()
        for tensor in (*self._buffers.values(), *self._context.values(), *self._biases.values()):
            memory.free(tensor)

    def _forget_plans(self) -> None:
        for plan in self._plans.values():
            plan.set_mode("off")  # or else what they captured could not be freed
        self._plans.clear()

    def _tensor(self, name: str, dtype: DType, *shape: int) -> Tensor:
        return memory.allocate(name, "sampler", dtype, shape, device=self._device)

    def _make_room(self, num_context: int, num_biases: int) -> None:
        """Buffers for everything but greedy choice, and for so many tokens of context and biases.

        Those for biases come with the first one.
        """
        rows, num_blocks = self.max_rows, self._buffers["parts"].shape[1]
        if "keys" not in self._buffers:
            self._buffers |= {
                "keys": self._tensor("keys", DType.I64, rows, self.vocab_size),
                "settings": self._tensor("settings", DType.I64, rows, 8),
                "states": self._tensor("states", DType.I64, rows, NUM_STATES),
                "counts": self._tensor("counts", DType.I32, rows, num_blocks, 16),
                "masses": self._tensor("masses", DType.I64, rows, num_blocks, 16),
                "context_starts": self._tensor("context_starts", DType.I32, rows + 1),
            }
        self._context = self._with_room(self._context, _CONTEXT, num_context)
        if num_biases:
            if "bias_starts" not in self._buffers:
                self._buffers["bias_starts"] = self._tensor("bias_starts", DType.I32, rows + 1)
            self._biases = self._with_room(self._biases, _BIASES, num_biases)

    def _with_room(
        self, lists: dict[str, Tensor], dtypes: Mapping[str, DType], num_entries: int
    ) -> dict[str, Tensor]:
        """The same lists, or larger ones where they have no room for so many entries."""
        if lists and next(iter(lists.values())).shape[0] >= num_entries:
            return lists
        if lists:
            self._forget_plans()  # they hold the smaller ones
        for tensor in lists.values():
            memory.free(tensor)
        room = max(_FEW, 1 << (num_entries - 1).bit_length())
        return {name: self._tensor(name, dtype, room) for name, dtype in dtypes.items()}

    def _fill(self, draws: Sequence[TokenChoice]) -> None:
        self._put(self._buffers["settings"], _settings(draws))
        penalised = [draw if has_penalties(draw.params) else None for draw in draws]
        sizes = [0 if draw is None else draw.context_ids.size for draw in penalised]
        starts = np.cumsum([0, *sizes], dtype=np.int32)
        self._put(self._buffers["context_starts"], starts)
        some = [draw for draw in penalised if draw is not None and draw.context_ids.size]
        if some:
            for name, tensor in self._context.items():
                self._put(tensor, np.concatenate([getattr(draw, name) for draw in some]))
        if any(draw.bias_ids.size for draw in draws):
            starts = np.cumsum([0, *(draw.bias_ids.size for draw in draws)], dtype=np.int32)
            self._put(self._buffers["bias_starts"], starts)
            self._put(self._biases["bias_ids"], np.concatenate([draw.bias_ids for draw in draws]))
            biases = np.concatenate([draw.biases for draw in draws])
            self._put(self._biases["biases"], biases.view(np.int64))

    def _put_masks(self, draws: Sequence[TokenChoice]) -> None:
        """Copy the masks to their buffer.

        They are not recorded: with 16 kB a row they would push the steps before out of the ring.
        """
        masks = masks_of(draws, self.vocab_size)
        assert masks is not None
        copies.to_device(self._masks(), masks)

    def _masks(self) -> Tensor:
        if "masks" not in self._buffers:
            shape = (self.max_rows, num_mask_words(self.vocab_size))
            self._buffers["masks"] = self._tensor("masks", DType.I32, *shape)
        return self._buffers["masks"]

    def _put(self, tensor: Tensor, values: np.ndarray[Any, Any]) -> None:
        self._filled.append((tensor, values))
        copies.to_device(tensor, values)

    def _make(
        self,
        logits: Tensor,
        num_rows: int,
        filters: _Filters | None,
        is_masked: bool,
    ) -> Plan:
        builder = PlanBuilder(num_rows, self._device)
        arguments = {"logits": logits}
        buffers = self._buffers | {"next_ids": self._next_ids}
        if not is_masked:
            buffers.pop("masks", None)
        for name, tensor in buffers.items():
            arguments[name] = memory.rows(tensor, 0, num_rows + (name in _STARTS))
        no_masks: dict[str, Any] = {} if is_masked else {"masks": None}
        sizes = {"vocab_size": logits.shape[1], "num_blocks": arguments["parts"].shape[1]}
        if filters is None:
            _add(builder, _GREEDY[is_masked], arguments, **no_masks, **sizes)
        else:
            arguments |= self._context | self._biases
            by_count, by_mass, num_context_blocks, num_bias_blocks = filters
            _add(builder, _KEYS[is_masked], arguments, **no_masks, **sizes)
            if num_bias_blocks:
                rows = {"parts": arguments["parts"], "vocab_size": sizes["vocab_size"]}
                _add(builder, _ADD_BIASES, arguments, num_bias_blocks=num_bias_blocks, **rows)
            searches = {"by_count": by_count, "by_mass": by_mass}
            blocks = {"num_context_blocks": num_context_blocks}
            _add(builder, _FILTERS[is_masked], arguments, **blocks, **searches, **sizes)
        mark(builder)
        plan = Plan(builder, arguments["outcomes"])
        plan.name = f"sampler, {num_rows} rows, {'greedy' if filters is None else 'filtered'}"
        if is_masked:
            plan.name += ", masked"
        plan.set_mode(self._mode)
        return plan


def _settings(draws: Sequence[TokenChoice]) -> np.ndarray[Any, Any]:
    """Bits of float64, i64 [num_draws, 8]."""
    return np.array([settings_of(draw) for draw in draws], np.float64).view(np.int64)


def _contexts(draws: Sequence[TokenChoice]) -> list[tuple[Ids, Ids]]:
    """Tokens and counts of the draws that depend on those before them."""
    return [
        (draw.context_ids, draw.output_counts)
        for draw in draws
        if has_penalties(draw.params) and draw.context_ids.size
    ]


def draws_of_all_forms(vocab_size: int) -> list[TokenChoice]:
    """Draws whose plans together hold every kernel: a greedy one and one with each filter, of free
    rows and of rows with masks, and one with biases."""
    some = np.zeros(1, np.int32)
    filters = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, repeat_penalty=1.1)
    draws = (TokenChoice(SamplingParams(), 0), TokenChoice(filters, 1, some, some))
    mask = np.full(num_mask_words(vocab_size), -1, np.int32)
    biased = replace(draws[0], bias_ids=some, biases=np.zeros(1))
    return [replace(draw, mask=given) for draw in draws for given in (None, mask)] + [biased]


def every_launch(device: str, vocab_size: int, max_rows: int, next_ids: Tensor) -> list[Launch]:
    """A launch in each form that a `DeviceSampler` has, for one row and for `max_rows`."""
    sampler = DeviceSampler(device, vocab_size, max_rows, next_ids=next_ids)
    logits = memory.allocate("logits", "sampler", DType.F32, (max_rows, vocab_size), device=device)
    try:
        launches: list[Launch] = []
        for num_rows in (1, max_rows):
            rows = memory.rows(logits, 0, num_rows)
            for draw in draws_of_all_forms(vocab_size):
                launches += sampler.plan(rows, [draw] * num_rows).every_launch
        return distinct(launches)
    finally:
        sampler.free()
        memory.free(logits)


def _add(plan: PlanBuilder, op: Op, tensors: Mapping[str, Tensor], **more: Any) -> None:
    """Append an op with the tensors that its contract names, and more."""
    plan.add(op, **{name: tensors[name] for name in op.contract.names}, **more)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _num_blocks(num_entries: int) -> int:
    """Blocks of a list of so many entries: a power of two, so that few plans serve all; 0 for 0."""
    return _power_of_two(-(-num_entries // BLOCK)) if num_entries else 0
