"""What a draft model's steps do between one token and the next, so that no token passes the host.

Formulas and public ops, for GPUs alone: on a CPU the host is where the tokens are. Chooses nothing:
the sampler has left the tokens in `token_ids`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Index, Rule, Scalar
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder

#: Columns of the sampler's `settings`; the last one is the random number.
NUM_SETTINGS = 8

ADVANCE = Contract(
    "advance_drafts",
    Arg("drafts", (DType.I32,), "max_drafts, max_rows", "both"),
    Arg("link", (DType.I32,), "1", "both"),
    Arg("token_ids", (DType.I32,), ">= num_rows"),
    Arg("num_wanted", (DType.I32,), "max_rows"),
    Arg("first_positions", (DType.I32,), "max_rows"),
    Arg("uniforms", (DType.I32,), "max_drafts, 2 * max_rows"),
    Arg("block_tables", (DType.I32,), "num_tables, max_blocks"),
    Arg("positions", (DType.I32,), ">= num_rows", "both"),
    Arg("slots", (DType.I32,), ">= num_rows", "both"),
    Arg("sequence_rows", (DType.I32,), ">= num_rows", "both"),
    Arg("logit_rows", (DType.I32,), ">= num_rows", "both"),
    Arg("counts", (DType.I32,), "2", "write"),
    Arg("settings", (DType.I64,), f">= num_rows, {NUM_SETTINGS}", "both", optional=True),
    Arg("hidden_rows", (DType.I32,), ">= num_rows", "both", optional=True),
    Scalar("first_hidden", "first_hidden >= 0", "must not be below 0"),
    Scalar("num_rows", "num_rows > 0", "must be 1 or more"),
    Scalar("block_size", "block_size > 0", "must be 1 or more"),
    Rule("num_rows <= max_rows", "no more rows than there is room for drafts of"),
)
TAKE_MASKS = Contract(
    "take_masks",
    Arg("masks", (DType.I32,), "num_rows, num_words", "write"),
    Arg("masks_of_links", (DType.I32,), "num_kept, num_words"),
    Arg("link", (DType.I32,), "1"),
)
PLACE = Contract(
    "place_drafts",
    Arg("token_ids", (DType.I32,), "num_tokens", "both"),
    Arg("drafts", (DType.I32,), "max_drafts, max_rows"),
    Arg("targets", (DType.I32,), "num_places", index=Index("num_tokens", "the step", sentinel=-1)),
    Arg(
        "sources",
        (DType.I32,),
        "num_places",
        index=Index("max_drafts * max_rows", "the drafts", sentinel=-1),
    ),
    Scalar("num_ids", "num_ids > 0", "must be 1 or more"),
)
_ADVANCE = Op(ADVANCE, gpu="sampling.drafting_gpu.launch_advance")
_TAKE_MASKS = Op(TAKE_MASKS, gpu="sampling.drafting_gpu.launch_take_masks")
_PLACE = Op(PLACE, gpu="sampling.drafting_gpu.launch_place")


@dataclass(frozen=True, slots=True)
class ChainState:
    """What steps of a draft model carry from one to the next; all i32.

    link [1]: how many drafts of each row are there. num_wanted [max_rows]: how many there are to
    be; rows that want most stand first. first_positions [max_rows]: where the first draft of a row
    will stand. uniforms [max_drafts, 2 max_rows]: the random numbers that choose the drafts, as
    bits of float64. drafts [max_drafts, max_rows].
    """

    link: Tensor
    num_wanted: Tensor
    first_positions: Tensor
    uniforms: Tensor
    drafts: Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The inputs of a decoder's step, i32, and the sampler's settings, i64 [num_rows, 8]; None
    where the most likely tokens are taken. A head that drafts has `hidden_rows`, too."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sequence_rows: Tensor
    logit_rows: Tensor
    counts: Tensor
    block_tables: Tensor
    settings: Tensor | None
    hidden_rows: Tensor | None = None


def advance_drafts(
    plan: PlanBuilder,
    state: ChainState,
    step: StepTensors,
    *,
    num_rows: int,
    block_size: int,
    first_hidden: int = 0,
) -> None:
    """Append what keeps the tokens just chosen, and makes the next step of those that go on.

    With i = link, before it becomes i + 1: drafts[i, r] = token_ids[r]. Of the n rows with
    num_wanted > i + 1, which are the first ones: positions[r] = first_positions[r] + i, slots[r]
    where block_tables[r] has that position, sequence_rows[r] = logit_rows[r] = r, and the random
    number of settings[r] is that of i + 1; hidden_rows[r] = first_hidden + r. counts = (n, n). Of
    the others nothing changes.
    """
    plan.add(
        _ADVANCE,
        drafts=state.drafts,
        link=state.link,
        token_ids=step.token_ids,
        num_wanted=state.num_wanted,
        first_positions=state.first_positions,
        uniforms=state.uniforms,
        block_tables=step.block_tables,
        positions=step.positions,
        slots=step.slots,
        sequence_rows=step.sequence_rows,
        logit_rows=step.logit_rows,
        counts=step.counts,
        settings=step.settings,
        hidden_rows=step.hidden_rows,
        first_hidden=first_hidden,
        num_rows=num_rows,
        block_size=block_size,
    )


def take_masks(plan: PlanBuilder, link: Tensor, masks_of_links: Tensor, masks: Tensor) -> None:
    """Append masks[r] = masks_of_links[link * num_rows + r], i32 [num_rows, num_words] of i32
    [num_kept, num_words]; nothing where these are no rows of it."""
    plan.add(_TAKE_MASKS, masks=masks, masks_of_links=masks_of_links, link=link)


def place_drafts(
    plan: PlanBuilder,
    token_ids: Tensor,
    drafts: Tensor,
    targets: Tensor,
    sources: Tensor,
    *,
    num_ids: int,
) -> None:
    """Append token_ids[targets[j]] = the draft at sources[j], row by row, or 0 where that is none
    of `num_ids` tokens; nothing where targets[j] = -1. All i32."""
    given = {"token_ids": token_ids, "drafts": drafts, "targets": targets, "sources": sources}
    plan.add(_PLACE, num_ids=num_ids, **given)
