"""Launches of sampling on a GPU: which kernels run in which order, over which blocks.

The kernels are in `sampling_gpu.py`.
"""

from __future__ import annotations

from typing import Any

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.kernels.sampling import sampling_gpu as gpu
from hypocenter.kernels.sampling.sampling_contracts import BLOCK

#: Blocks of tokens that one turn of a level's loop adds up.
_TILE = 64


def launch_greedy(plan: BoundPlan, parts: Tensor, masks: Tensor | None) -> None:
    """Append the best token of each block, and then of each row."""
    num_rows, num_blocks, _ = parts.shape
    plan.add_gpu(
        gpu.greedy_blocks_kernel if masks is None else gpu.greedy_masked_blocks_kernel,
        grid=(num_blocks, num_rows),
        BLOCK=BLOCK,
    )
    plan.add_gpu(gpu.greedy_rows_kernel, grid=(num_rows,), BLOCK=power_of_two(num_blocks))


def launch_keys(plan: BoundPlan, parts: Tensor, masks: Tensor | None) -> None:
    """Append the key of each token."""
    num_rows, num_blocks, _ = parts.shape
    kernel = gpu.sample_keys_kernel if masks is None else gpu.sample_masked_keys_kernel
    _add(plan, kernel, (num_blocks, num_rows), BLOCK=BLOCK)


def launch_bias(plan: BoundPlan, parts: Tensor, num_bias_blocks: int) -> None:
    """Append the sums of keys and biases."""
    _add(plan, gpu.sample_bias_kernel, (num_bias_blocks, parts.shape[0]), BLOCK=BLOCK)


def launch_filters(
    plan: BoundPlan,
    logits: Tensor,
    parts: Tensor,
    num_context_blocks: int,
    by_count: bool,
    by_mass: bool,
) -> None:
    """Append penalties, the highest, one or two searches for a cutoff, weights, and the draw."""
    num_rows, num_blocks, _ = parts.shape
    over_blocks, over_rows = (num_blocks, num_rows), (num_rows,)
    power = power_of_two(num_blocks)
    if num_context_blocks:
        grid = (num_context_blocks, num_rows)
        _add(plan, gpu.sample_penalise_kernel, grid, BLOCK=BLOCK)
    _add(plan, gpu.sample_peaks_kernel, over_blocks, BLOCK=BLOCK)
    _add(plan, gpu.sample_start_kernel, over_rows, BLOCK=power)
    levels = [(shift, False) for shift in range(60, -1, -4)]
    id_bits = (logits.shape[1] - 1).bit_length() or 1
    levels += [(shift, True) for shift in reversed(range(0, id_bits, 4))]
    for search_by_mass in [False] * by_count + [True] * by_mass:
        for shift, by_rank in levels:
            _add(
                plan,
                gpu.sample_bins_kernel,
                over_blocks,
                shift=shift,
                BY_RANK=by_rank,
                BLOCK=BLOCK,
                num_warps=16,  # 16 bins of every token: with fewer, registers spill
            )
            _add(
                plan,
                gpu.sample_level_kernel,
                over_rows,
                shift=shift,
                BY_MASS=search_by_mass,
                BY_RANK=by_rank,
                IS_LAST=by_rank and shift == 0,
                TILE=_TILE,
            )
    _add(plan, gpu.sample_weights_kernel, over_blocks, BLOCK=BLOCK)
    _add(plan, gpu.sample_draw_kernel, over_rows, BLOCK=BLOCK, NUM_BLOCKS=power)


def _add(plan: BoundPlan, jit: Any, grid: tuple[int, ...], **given: Any) -> None:
    # Fused operations would round otherwise than the reference.
    plan.add_gpu(jit, grid=grid, enable_fp_fusion=False, **given)


def power_of_two(number: int) -> int:
    """The smallest one that is no less than `number`."""
    return 1 << (number - 1).bit_length()
