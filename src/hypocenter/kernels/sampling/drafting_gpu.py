"""Triton kernels of `drafting`; what they compute stands there."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.sampling.drafting import NUM_SETTINGS
from hypocenter.kernels.sampling.sampling_launches_gpu import power_of_two

_SETTINGS = tl.constexpr(NUM_SETTINGS)
_BLOCK = 1024
_PLACES = 256


# One compiled kernel for all numbers of rows: nothing depends on what they are divisible by.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "max_drafts",
        "max_rows",
        "max_blocks",
        "block_size",
        "first_hidden",
    ]
)
def advance_drafts_kernel(
    drafts_ptr,
    link_ptr,
    token_ids_ptr,
    num_wanted_ptr,
    first_positions_ptr,
    uniforms_ptr,
    block_tables_ptr,
    positions_ptr,
    slots_ptr,
    sequence_rows_ptr,
    logit_rows_ptr,
    counts_ptr,
    settings_ptr,
    hidden_rows_ptr,
    num_rows,
    max_drafts,
    max_rows,
    max_blocks,
    block_size,
    first_hidden,
    HAS_SETTINGS: tl.constexpr,
    HAS_HIDDEN_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: drafts[link, r] = token_ids[r]; positions[r] = first_positions[r] + link and what
    goes with it, where num_wanted[r] > link + 1; link = link + 1.
    Shapes: drafts i32 [max_drafts, max_rows]; link i32 [1]; token_ids, positions, slots,
    sequence_rows, logit_rows i32 [>= num_rows]; num_wanted, first_positions i32 [max_rows];
    uniforms i32 [max_drafts, 2 max_rows]; block_tables i32 [num_tables, max_blocks]; counts i32
    [2]; settings i64 [>= num_rows, 8]; hidden_rows i32 [>= num_rows].
    """
    link = tl.load(link_ptr)
    row = tl.arange(0, BLOCK)
    inside = (row < num_rows) & (link < max_drafts)
    chosen = tl.load(token_ids_ptr + row, mask=inside, other=0)
    tl.store(drafts_ptr + link * max_rows + row, chosen, mask=inside)
    goes_on = (tl.load(num_wanted_ptr + row, mask=inside, other=0) > link + 1) & inside
    position = tl.load(first_positions_ptr + row, mask=goes_on, other=0) + link
    at = block_tables_ptr + row * max_blocks + position // block_size
    block = tl.load(at, mask=goes_on, other=0)
    tl.store(positions_ptr + row, position, mask=goes_on)
    tl.store(slots_ptr + row, block * block_size + position % block_size, mask=goes_on)
    tl.store(sequence_rows_ptr + row, row, mask=goes_on)
    tl.store(logit_rows_ptr + row, row, mask=goes_on)
    num = tl.sum(goes_on.to(tl.int32), axis=0)
    tl.store(counts_ptr, num)
    tl.store(counts_ptr + 1, num)
    if HAS_HIDDEN_ROWS:
        tl.store(hidden_rows_ptr + row, first_hidden + row, mask=goes_on)
    if HAS_SETTINGS:
        half = uniforms_ptr + (link + 1) * 2 * max_rows + 2 * row
        low = tl.load(half, mask=goes_on, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(half + 1, mask=goes_on, other=0).to(tl.int64)
        column = row * _SETTINGS + (_SETTINGS - 1)
        tl.store(settings_ptr + column, (high << 32) | low, mask=goes_on)
    # A single warp: all of it has read `link` by now.
    tl.store(link_ptr, link + 1)


@triton.jit(do_not_specialize=["num_rows", "num_kept", "num_words"])
def take_masks_kernel(
    masks_ptr, masks_of_links_ptr, link_ptr, num_rows, num_kept, num_words, BLOCK: tl.constexpr
):
    """Formula: masks[r] = masks_of_links[link * num_rows + r].
    Shapes: masks i32 [num_rows, num_words]; masks_of_links i32 [num_kept, num_words]; link i32 [1].
    """
    row = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(link_ptr) * num_rows + row
    inside = (word < num_words) & (source < num_kept)
    value = tl.load(masks_of_links_ptr + source * num_words + word, mask=inside, other=-1)
    tl.store(masks_ptr + row * num_words + word, value, mask=inside)


@triton.jit(do_not_specialize=["num_places", "num_ids"])
def place_drafts_kernel(
    token_ids_ptr, drafts_ptr, targets_ptr, sources_ptr, num_places, num_ids, BLOCK: tl.constexpr
):
    """Formula: token_ids[targets[j]] = drafts[sources[j]], or 0 where that is no token.
    Shapes: token_ids i32 [num_tokens]; drafts i32 [max_drafts, max_rows], read flat; targets and
    sources i32 [num_places].
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + place, mask=place < num_places, other=-1)
    is_placed = target >= 0
    source = tl.load(sources_ptr + place, mask=is_placed, other=0)
    draft = tl.load(drafts_ptr + source, mask=is_placed, other=0)
    draft = tl.where((draft >= 0) & (draft < num_ids), draft, 0)
    tl.store(token_ids_ptr + target, draft, mask=is_placed)


def launch_advance(plan: BoundPlan, drafts: Tensor, block_tables: Tensor) -> None:
    """Append advance_drafts: one program of one warp for all rows."""
    max_drafts, max_rows = drafts.shape
    plan.add_gpu(
        advance_drafts_kernel,
        grid=(1,),
        max_drafts=max_drafts,
        max_rows=max_rows,
        max_blocks=block_tables.shape[1],
        BLOCK=power_of_two(max_rows),
        num_warps=1,
    )


def launch_take_masks(plan: BoundPlan, masks: Tensor, masks_of_links: Tensor) -> None:
    """Append take_masks: one program for 1024 words of each row."""
    num_rows, num_words = masks.shape
    plan.add_gpu(
        take_masks_kernel,
        grid=(num_rows, triton.cdiv(num_words, _BLOCK)),
        num_rows=num_rows,
        num_kept=masks_of_links.shape[0],
        num_words=num_words,
        BLOCK=_BLOCK,
    )


def launch_place(plan: BoundPlan, targets: Tensor) -> None:
    """Append place_drafts: one program for 256 places."""
    (num_places,) = targets.shape
    grid = (triton.cdiv(num_places, _PLACES),)
    plan.add_gpu(place_drafts_kernel, grid=grid, num_places=num_places, BLOCK=_PLACES)
