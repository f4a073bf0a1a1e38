"""Inputs for an op, drawn from its contract: sizes at edges, numbers at extremes, any order of
pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.demands import Arg, evaluate
from hypocenter.device import copies, memory
from hypocenter.device.launch import compile_all, run
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.linear.quantise import ROUNDED, SCALED, TILES, prepare_operands
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.verify import operands
from hypocenter.verify.block_caches import draw_cache, is_of_blocks, read_cache, write_cache
from hypocenter.verify.form import Unit

#: A number that nothing right leaves behind, in what is to be written: NaN, and as an integer one
#: that is far outside.
_POISON = {DType.F32: np.float32(np.nan), DType.F16: np.uint16(0x7E00), DType.BF16: 0x7FC0}
_POISON_INT = 0x7FC0DEAD & 0x7FFFFFFF
#: What `kernels/recurrent/sequences.py` has of sequences, the live counts aside.
SEQUENCE_INPUTS = (
    *("state_slots", "state_sources", "checkpoint_slots", "checkpoint_stops"),
    *("sequence_starts", "sequence_rows", "positions"),
)
#: What says which sorted rows are whose, in the contracts of products of experts.
GROUP_INPUTS = ("experts", "firsts", "sizes", "found")
#: On the CPU rows of an expert may begin at multiples of 1, 4 or 16, by the bucket.
_ALIGNMENT = 16
#: Tokens of a sequence that goes on: more than any state keeps.
_CAME_BEFORE = 40


@dataclass(frozen=True, slots=True)
class DrawnCase:
    """How inputs are drawn: `live` rows of a bucket, numbers of 2**-`spread` to 2**`spread` by row,
    and whether some rows are zero."""

    name: str
    live: int
    spread: int = 0
    has_zeros: bool = False
    seed: int = 0


def cases_of(unit: Unit) -> list[DrawnCase]:
    """The cases of a unit, the most telling one first."""
    num_rows = unit.num_rows
    # What is stored as f16 as it is has room there.
    caches = (unit.arguments[arg.name] for arg in unit.written if arg.name.endswith("_cache"))
    is_stored = any(cache.dtype is DType.F16 for cache in caches)
    most = 8 if is_stored or unit.arguments.get("is_plain") else 20
    found = [
        DrawnCase("all rows", num_rows),
        DrawnCase("no row", 0),
        DrawnCase("all rows but one, sizes from 2^-8 to 2^8", max(num_rows - 1, 1), 8, seed=1),
        DrawnCase("one row", 1, seed=2),
        DrawnCase(f"rows of zeros, sizes from 2^-{most} to 2^{most}", num_rows, most, True, seed=3),
    ]
    if unit.has_sequences:  # such a step has a token
        found = [case for case in found if case.live]
    by_kind = {(case.live, case.spread, case.has_zeros): case for case in reversed(found)}
    return sorted(by_kind.values(), key=found.index)


class Drawer:
    """Draws inputs for units of one model and puts them where their launches read them."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._kept: dict[tuple[int, int], Tensor] = {}

    def draw(self, unit: Unit, case: DrawnCase) -> dict[str, Array]:
        """Fill the tensors of a unit; what they hold, by name, weights of the model left out.

        What is only written holds poison then.
        """
        rng = np.random.default_rng([case.seed, unit.num_rows])
        symbols, arguments = unit.symbols, unit.arguments
        self._poison(unit, rng)
        counts = np.full(2, case.live, np.int32)
        if unit.has_counts:
            copies.to_device(arguments["counts"], counts)
        values: dict[str, Any] = {**symbols, "counts": counts}
        has_operands = operands.kind_of([arg.name for arg in unit.given])
        for arg in unit.given:
            tensor = arguments[arg.name]
            if tensor is None or arg.name == "counts" or tensor.owner == "model":
                continue
            if unit.has_sequences and arg.name in SEQUENCE_INPUTS:
                continue  # drawn together
            if unit.has_groups and arg.name in GROUP_INPUTS:
                continue  # these too
            if arg.index is not None:
                values[arg.name] = self._index(arg, tensor, values, arguments, rng)
            elif tensor.dtype is DType.F32 and not (has_operands and _is_operand(arg.name)):
                drawn = _floats(tensor.shape, case, rng)
                if arg.name == "scales" and "owners" in arguments:
                    # Of adapters, of which not every sequence has each.
                    drawn[np.indices(drawn.shape).sum(axis=0) % 3 == case.seed % 3] = 0
                copies.to_device(tensor, drawn)
            elif is_of_blocks(tensor):
                draw_cache(arg.name, tensor, rng)
            elif tensor.dtype is DType.F16 and arg.name.endswith("_cache"):
                halves = rng.standard_normal(tensor.shape).astype(np.float16)
                copies.to_device(tensor, halves.view(np.uint16))
        if has_operands:
            self._fill_operands(unit, symbols, case, rng)
        together: dict[str, Array] = {}
        if unit.has_sequences:
            together = drawn_sequences(unit, case.live, rng)
        elif unit.has_groups:
            together = drawn_groups(unit, case.live, rng)
        for name, numbers in together.items():
            copies.to_device(arguments[name], numbers)
        return self.read(unit)

    def read(self, unit: Unit) -> dict[str, Array]:
        """What the tensors of a unit hold, by name; packed weights are left out."""
        names = dict.fromkeys(arg.name for contract in unit.contracts for arg in contract.args)
        return {
            name: read_cache(name, tensor) if is_of_blocks(tensor) else copies.to_host(tensor)
            for name in names
            if (tensor := unit.arguments[name]) is not None and not hasattr(tensor.data, "parts")
        }

    def write(self, unit: Unit, name: str, values: Array) -> None:
        """Put what `read` gave, or something like it, into a tensor of a unit."""
        tensor = unit.arguments[name]
        if is_of_blocks(tensor):
            write_cache(tensor, values)
        else:
            copies.to_device(tensor, values)

    def _poison(self, unit: Unit, rng: np.random.Generator) -> None:
        for arg in unit.written:
            tensor = unit.arguments[arg.name]
            if tensor is None:
                continue
            if is_of_blocks(tensor):
                draw_cache(arg.name, tensor, rng)
                continue
            if arg.name.endswith("_cache") and tensor.dtype in (DType.F16, DType.F32):
                # What is not written must stay, so it must be something.
                numbers = rng.standard_normal(tensor.shape).astype(np.float32)
                halves = numbers.astype(np.float16).view(np.uint16)
                copies.to_device(tensor, halves if tensor.dtype is DType.F16 else numbers)
                continue
            kind = copies.NUMPY_TYPES[tensor.dtype]
            poison = _POISON.get(tensor.dtype, _POISON_INT)
            if tensor.dtype is DType.I16:
                poison = 0x7FC0
            copies.to_device(tensor, np.full(tensor.shape, poison, kind))

    def _index(
        self,
        arg: Arg,
        tensor: Tensor,
        values: Mapping[str, Any],
        arguments: Mapping[str, Any],
        rng: np.random.Generator,
    ) -> Array:
        assert arg.index is not None
        bound = evaluate(arg.index.bound, values)
        assert bound is not None, arg.name
        if arg.name == "sequence_rows":
            bound = min(bound, arguments.get("num_sequences") or bound)
        shape = tensor.shape
        if arg.name == "ids" and len(shape) == 2 and bound >= shape[1]:
            # A token takes no expert twice.
            drawn = rng.random((shape[0], bound)).argsort(axis=1)[:, : shape[1]]
        elif arg.index.unique:
            drawn = rng.permutation(bound)[: tensor.num_elements]
            drawn = np.resize(drawn, shape)
        else:
            drawn = rng.integers(0, bound, shape)
            flat = drawn.reshape(-1)
            flat[0], flat[-1] = bound - 1, 0  # both ends occur
        found: Array = np.sort(drawn) if arg.index.monotone else drawn
        found = found.astype(np.int32)
        copies.to_device(tensor, found)
        return found

    def _fill_operands(
        self, unit: Unit, symbols: Mapping[str, Any], case: DrawnCase, rng: np.random.Generator
    ) -> None:
        """Have the device make the operands of drawn rows: they are what it makes of any."""
        arguments = unit.arguments
        names = [arg.name for arg in unit.given if arg.name.split("_")[0] == "weight"]
        weights = [arguments[name] for name in names]
        x = self._rows(unit.num_rows, padded_rows(int(symbols["num_columns"])))
        copies.to_device(x, _floats(x.shape, case, rng))
        live = memory.allocate("counts", "verify", DType.I32, (2,), device=self.device)
        copies.to_device(live, np.full(2, case.live, np.int32))
        plan = PlanBuilder(unit.num_rows, self.device)
        prepare_operands(plan, x, weights, operands.buffers_of(arguments), live)
        compile_all(plan.launches)
        run(plan.launches)

    def _rows(self, num_rows: int, width: int) -> Tensor:
        key = (num_rows, width)
        if key not in self._kept:
            self._kept[key] = memory.allocate("x", "verify", DType.F32, key, device=self.device)
        return self._kept[key]


def drawn_sequences(unit: Unit, live: int, rng: np.random.Generator) -> dict[str, Array]:
    """Inputs of up to three sequences that share `live` tokens: the first one begins, the others go
    on; every other one reads another slot than it writes; the first has a checkpoint where there
    is a slot for it."""
    arguments = unit.arguments
    found: dict[str, Array] = {
        name: np.zeros(arguments[name].shape, np.int32) for name in SEQUENCE_INPUTS
    }
    num_slots, most = arguments["state"].shape[0], arguments["state_slots"].shape[0]
    num = max(min(3, live, most, num_slots // 3, arguments.get("num_sequences") or 3), 1)
    slots = rng.permutation(num_slots)
    cuts = np.sort(rng.permutation(np.arange(1, live))[: num - 1])
    starts = np.array([0, *cuts, live])
    found["sequence_starts"][: num + 1] = starts
    for at in range(num):
        first, stop = starts[at], starts[at + 1]
        found["sequence_rows"][first:stop] = at
        found["positions"][first:stop] = np.arange(stop - first) + _CAME_BEFORE * (at > 0)
        found["state_slots"][at] = slots[at]
        found["state_sources"][at] = slots[at + num] if at % 2 else slots[at]
    if num_slots >= 3 * num and starts[1] > 1:
        found["checkpoint_slots"][0], found["checkpoint_stops"][0] = slots[2 * num], starts[1] - 1
    return found


def drawn_groups(unit: Unit, live: int, rng: np.random.Generator) -> dict[str, Array]:
    """Groups that share the first `live` sorted rows, one behind the other."""
    arguments = unit.arguments
    most_groups, num_experts = arguments["experts"].shape[0], arguments["weight"].shape[0]
    firsts: list[int] = []
    sizes: list[int] = []
    at = 0
    while at < live and len(firsts) < most_groups:
        size = _drawn_size(unit, live - at, most_groups - len(firsts), rng)
        firsts.append(at)
        sizes.append(size)
        at += size
    found = {name: np.zeros(most_groups, np.int32) for name in GROUP_INPUTS[:3]}
    num = len(firsts)
    # Experts in order, each once on the CPU, where a group has all rows of one.
    chosen = np.sort(rng.permutation(max(num_experts, num))[:num]) % num_experts
    found["experts"][:num], found["firsts"][:num], found["sizes"][:num] = chosen, firsts, sizes
    return {**found, "found": np.array([num], np.int32)}


def _drawn_size(unit: Unit, num_left: int, groups_left: int, rng: np.random.Generator) -> int:
    if unit.device != "cpu":
        return min(int(rng.integers(1, unit.arguments["shape"].group_rows + 1)), num_left)
    if groups_left == 1:
        return num_left
    size = int(rng.integers(1, max(num_left // 2, 1) + 1))
    return min(-(-size // _ALIGNMENT) * _ALIGNMENT, num_left)


def _is_operand(name: str) -> bool:
    names = {arg.name for contract in (TILES, ROUNDED, SCALED) for arg in contract.args}
    return name in names - {"x", "counts"} or name == "x_scales"


def _floats(shape: tuple[int, ...], case: DrawnCase, rng: np.random.Generator) -> Array:
    drawn = rng.standard_normal(shape).astype(np.float32)
    if case.spread:
        sizes = rng.integers(-case.spread, case.spread + 1, shape[0])
        drawn *= np.exp2(sizes).astype(np.float32).reshape(-1, *(1,) * (len(shape) - 1))
    if case.has_zeros:
        drawn[:: max(len(drawn) // 3, 1)] = 0
    return drawn
