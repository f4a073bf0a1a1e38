"""How a prompt becomes a request: what is checked of it, and what it is given on its way."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hypocenter.base.errors import BadSetting, ContextOverflow, OutOfBlocks, UsageError
from hypocenter.engine.answer_text import AnswerText
from hypocenter.engine.arguments import require_in_vocabulary
from hypocenter.engine.drafting.drafter import Drafter, NgramDrafter, costs_on
from hypocenter.engine.drafting.model_drafter import DraftRecord, ModelDrafter, needs_host
from hypocenter.engine.grammar import Grammars
from hypocenter.engine.kv_cache import BlockDigests, KVCache
from hypocenter.engine.request import AnswerPlan, Request
from hypocenter.engine.scheduler import Scheduler
from hypocenter.engine.token_rules import token_rules
from hypocenter.settings.adapters import Scales
from hypocenter.settings.config import SamplingParams

if TYPE_CHECKING:
    from hypocenter.conversation.thoughts import AnswerReader
    from hypocenter.engine.runner import Runner
    from hypocenter.model.text.tokenizer import Tokenizer

CLOSED = "the model is closed; open it anew"


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What is asked of a request beside its prompt and how it is sampled.

    Only requests of one `cache_salt` read each other's blocks. With `output_ids` it goes on behind
    an answer begun elsewhere. `reader` separates thoughts and calls from the answer; calls are held
    to `call_form`; `turn_ids` end the answer too. `form` and `bad_word_ids` are what
    `Grammars.read` and `spellings` said elsewhere.
    """

    keeps_logits: bool = False
    cache_salt: str = ""
    output_ids: Sequence[int] = ()
    reader: AnswerReader | None = None
    call_form: str | None = None
    turn_ids: frozenset[int] = frozenset()
    form: str = ""
    bad_word_ids: Sequence[Sequence[int]] | None = None
    #: Whether a vector is made of the prompt, or a score, and how many of its tokens are the query.
    embeds: bool = False
    num_first: int | None = None


PLAIN = RequestTerms()


class Admission:
    """Makes requests, and lets them in between two steps."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        cache: KVCache,
        *,
        has_prefix_cache: bool,
        draft_record: DraftRecord | None = None,
    ) -> None:
        self._draft_record = draft_record
        self._runner, self._tokenizer, self._cache = runner, tokenizer, cache
        self._has_prefix_cache = has_prefix_cache
        self._grammars = Grammars(tokenizer, runner.vocab_size)
        self._request_ids = itertools.count()
        self._inbox: deque[Request] = deque()  # submitted, not yet with the scheduler

    def request(
        self, prompt_ids: Sequence[int], params: SamplingParams, terms: RequestTerms
    ) -> Request:
        """A checked request; raises what `Engine.request` does."""
        runner, tokenizer = self._runner, self._tokenizer
        pooling = runner.arch.pooling
        self._require_kind(terms)
        self._require_room(prompt_ids, terms.output_ids)
        scales = self._adapter_scales(params)
        adapters = runner.adapters.digest(scales or ()) if runner.adapters is not None else b""
        digests = BlockDigests(self._cache.block_size, terms.cache_salt, adapters)
        matcher = self._grammars.matcher(params, terms.output_ids, terms.call_form, terms.form)
        rules = token_rules(params, tokenizer, runner.vocab_size, terms.bad_word_ids)
        passes_host = needs_host(params, matcher, rules)
        plan = AnswerPlan(
            text=AnswerText(tokenizer.detokenizer(at_start=False), params, terms.reader),
            end_ids=tokenizer.end_ids | terms.turn_ids,
            context_length=runner.context_length,
            keeps_logits=terms.keeps_logits or pooling is not None,
            block_digests=digests if self._has_prefix_cache else None,
            matcher=matcher,
            rules=rules,
            output_ids=terms.output_ids,
            longrope_threshold=runner.longrope_threshold,
            pooling=pooling,
            # A model that knows one kind of text has no row for another.
            num_first=terms.num_first if runner.arch.num_text_kinds > 1 else None,
            drafter=self._drafter(params, len(terms.output_ids), passes_host=passes_host),
            adapter_scales=scales,
        )
        request = Request(next(self._request_ids), prompt_ids, params, plan)
        self._cache.prefetch(request.digests_to_adopt(self._cache.block_size))
        return request

    def _drafter(
        self, params: SamplingParams, num_begun: int, *, passes_host: bool
    ) -> Drafter | None:
        config = self._runner.config
        if not config.tries_tokens or not params.drafts:
            return None
        runs_again = self._cache.states is not None
        if self._draft_record is not None:
            return ModelDrafter(
                config.draft_max,
                self._draft_record,
                num_begun,
                passes_host=passes_host,
                runs_again=runs_again,
            )
        return NgramDrafter(config.draft_max, costs_on(config.device), runs_again=runs_again)

    def _adapter_scales(self, params: SamplingParams) -> tuple[float, ...] | None:
        """What each adapter counts; None where there are none. Raises BadSetting for a name that is
        none of theirs."""
        asked = cast("Scales | None", params.lora)  # as its setting keeps it
        if self._runner.adapters is not None:
            return self._runner.adapters.scales(asked)
        if asked:
            limit = "no adapter is open; open the model with lora"
            raise BadSetting("lora", asked[0][0], limit)
        return None

    def _require_kind(self, terms: RequestTerms) -> None:
        """Raises UsageError where a model that writes is to give a vector, or the reverse."""
        arch = self._runner.arch
        if terms.embeds and arch.pooling is None:
            raise UsageError(
                f"this {arch.name} model writes text and gives no vectors; open it with pooling "
                "mean or last to have some of it, or take an embedding model"
            )
        if arch.pooling is not None and not terms.embeds:
            what = "scores of documents" if arch.pooling.scores else "vectors of texts"
            raise UsageError(
                f"this {arch.name} model gives {what} and writes no text (pooling "
                f"{arch.pooling.kind}); open one that writes"
            )

    def _require_room(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        runner, cache = self._runner, self._cache
        if not prompt_ids:
            raise UsageError("the prompt has no tokens; give it at least one")
        if (num_tokens := len(prompt_ids) + len(output_ids)) > runner.context_length:
            raise ContextOverflow(num_tokens, runner.context_length, runner.arch.context_length)
        num_needed = -(-num_tokens // cache.block_size)
        if num_needed > cache.num_blocks:
            raise OutOfBlocks(num_needed, cache.num_blocks, cache.num_blocks)
        cache.look_at_memory()
        if num_needed > cache.num_reachable_blocks:
            raise cache.shortage(num_needed)
        require_in_vocabulary("prompt", prompt_ids, runner.vocab_size)
        require_in_vocabulary("output", output_ids, runner.vocab_size)

    def submit(self, request: Request) -> None:
        """Have it let in before the next step; any thread may ask for that."""
        self._inbox.append(request)

    def admit(self, scheduler: Scheduler, *, is_closed: bool) -> None:
        """Take in what was submitted, and end what was cancelled or outlived the engine."""
        while self._inbox:
            request = self._inbox.popleft()
            if not request.done:
                scheduler.add(request)
        for request in [*scheduler.running, *scheduler.waiting]:
            if is_closed:
                scheduler.fail(request, UsageError(CLOSED))
            elif request.cancel_requested:
                scheduler.finish(request, "cancelled")
            elif request.has_read_all:
                scheduler.finish(request, "length")
