"""Adds to a step the tokens that its requests try, as far as there is room and they may come.

Computes no mask and chooses no token: the request's form and rules say what may come.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.base.dtypes import Int32s
from hypocenter.base.errors import GrammarError, NoTokenLeft
from hypocenter.engine.batch import Chunk
from hypocenter.engine.drafting.ahead import NOTHING, WrittenDrafts
from hypocenter.engine.drafting.draft_model import DraftModel
from hypocenter.engine.drafting.drafter import NgramDrafter, StepLoad
from hypocenter.engine.drafting.model_drafter import ModelDrafter
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.request import Request

_Masks = list[Int32s | None]


def with_drafts(
    chunks: list[Chunk],
    cache: KVCache,
    num_tokens: int,
    num_drawn: int,
    model: DraftModel | None = None,
) -> list[Chunk]:
    """The chunks of a step, each with the tokens that its request tries, which the draft model
    writes where there is one.

    The step has room for `num_tokens` more tokens, and chooses at most `num_drawn`. No request
    gives up its room for that.
    """
    if all(chunk.request.drafter is None for chunk in chunks):
        return chunks
    num_rows = sum(chunk.num_tokens for chunk in chunks)
    num_answers = sum(chunk.is_answer for chunk in chunks)
    left = min(num_tokens, num_drawn - sum(chunk.num_drawn for chunk in chunks))
    written = NOTHING
    if model is not None:
        written = _write_ahead(chunks, model, cache, left, num_rows)
    found = []
    for chunk in chunks:
        load = StepLoad(num_rows, num_answers)
        tried = _with_drafts(chunk, cache, left, load, written)
        left -= len(tried.drafts)
        num_rows += len(tried.drafts)
        found.append(tried)
    return found


def _may_try(chunk: Chunk) -> bool:
    """A state that is left for others takes the place of the one before drafts."""
    is_free = chunk.samples and chunk.is_answer and not chunk.checkpoint_at
    return chunk.request.drafter is not None and is_free


def _write_ahead(
    chunks: list[Chunk], model: DraftModel, cache: KVCache, most: int, num_rows: int
) -> WrittenDrafts:
    """What the draft model writes for each request that tries tokens, by its id."""
    answers = [chunk for chunk in chunks if _may_try(chunk)]
    load = StepLoad(num_rows, sum(chunk.is_answer for chunk in chunks), max(len(answers), 1))
    each = most // load.num_writing
    wanted: list[tuple[Request, int]] = []
    for chunk in answers:
        request, drafter = chunk.request, chunk.request.drafter
        if isinstance(drafter, ModelDrafter):
            room = min(each, request.room_for_drafts, cache.num_tokens_that_fit(request.id))
            of_text = len(request.token_ids), len(request.output_ids)
            if num := drafter.num_to_write(*of_text, room, load):
                drafter.spend(num, *of_text, load)
                wanted.append((request, num))
    num_later = max(load.num_answers, 1)
    later = StepLoad(num_later, num_later, num_later)
    reading = [chunk for chunk in chunks if not chunk.is_answer and _will_try(chunk.request, later)]
    return model.write(wanted, reading)


def _will_try(request: Request, load: StepLoad) -> bool:
    """Whether a draft model is worth it for a request whose prompt is still read, by the load that
    steps have behind it."""
    drafter = request.drafter
    if not isinstance(drafter, ModelDrafter):
        return False
    return drafter.num_to_write(drafter.num_read + 1, 1, request.room_for_drafts, load) > 0


def _with_drafts(
    chunk: Chunk, cache: KVCache, most: int, load: StepLoad, written: WrittenDrafts
) -> Chunk:
    request, drafter = chunk.request, chunk.request.drafter
    if drafter is None or not _may_try(chunk):
        return chunk
    most = min(most, request.room_for_drafts, cache.num_tokens_that_fit(request.id))
    ahead, num_ahead = written.ahead, 0
    drafts = written.ids.get(request.id, [])[:most]
    if ahead is not None and (num_ahead := min(ahead.num_of(request.id), most)):
        drafts = [0] * num_ahead  # not known yet
    if isinstance(drafter, NgramDrafter):
        drafts = drafter.propose(request.token_ids, len(request.output_ids), most, load)
    # A draft model takes a mask for each draft, too.
    drafter.num_masks = len(drafts) * (2 if isinstance(drafter, ModelDrafter) else 1)
    if not drafts:
        return chunk
    drafts, masks = (_mask_all if num_ahead else _leave_out)(request, drafts)
    if not drafts:
        return chunk
    cache.append(request.id, len(drafts))
    drafter.begin(len(drafts), load)
    if cache.states is not None:
        chunk = chunk.leaving((cache.states.spare_of(request.id), chunk.stop))
    return chunk.trying(drafts, masks, ahead if num_ahead else None)


def _leave_out(request: Request, drafts: list[int]) -> tuple[list[int], _Masks]:
    """The first drafts, those that may be chosen and do not end the answer, and what may come
    before each and after the last one. Where that cannot be told, fewer are tried."""
    num = next((at for at, draft in enumerate(drafts) if request.ends_with(draft)), len(drafts))
    drafts = drafts[:num]
    if request.matcher is None and request.rules is None:
        return drafts, [None] * (num + 1)
    matcher = request.matcher.copy() if request.matcher is not None else None
    masks: _Masks = []
    output_ids = request.output_ids[:]
    for draft in [*drafts, None]:
        form = matcher.mask() if matcher is not None else None
        try:
            mask = _mask(request, output_ids, form)
        except NoTokenLeft:
            break
        if matcher is not None and matcher.has_failed:
            break
        masks.append(mask)
        narrows = request.rules is None or request.rules.narrows_drafts
        if draft is None or (narrows and not _may_come(draft, mask)):
            break
        output_ids.append(draft)
        try:
            if matcher is not None and matcher.accept(draft):  # nothing follows
                break
        except GrammarError:
            break
    return drafts[: max(len(masks) - 1, 0)], masks


def _mask_all(request: Request, drafts: list[int]) -> tuple[list[int], _Masks]:
    """Drafts that nobody has seen, and what may come before each and after the last one, which
    hangs on no token. One that may not come, or that ends the answer, is seen to be wrong, or to
    end it, like any other."""
    masks: _Masks = []
    for number in range(len(drafts) + 1):
        num_output, mask = len(request.output_ids) + number, None
        if request.rules is not None:
            mask = request.rules.mask(request.output_ids, num_output, None)
        masks.append(mask)
    return drafts, masks


def _mask(request: Request, output_ids: Sequence[int], form: Int32s | None) -> Int32s | None:
    if request.rules is None:
        return form
    return request.rules.mask_or_raise(output_ids, len(output_ids), form)


def _may_come(token_id: int, mask: Int32s | None) -> bool:
    return mask is None or bool(int(mask[token_id // 32]) >> token_id % 32 & 1)
