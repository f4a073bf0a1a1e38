"""One request from its prompt to its last piece of text.

Holds no scheduling and no arithmetic; a request knows nothing of the other requests.
"""

from __future__ import annotations

import enum
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from hypocenter.base.errors import as_exception
from hypocenter.base.results import Completion, Delta, Route, Timings, TokenLogprob, whole_calls
from hypocenter.conversation.harmony import NOTHING, AnswerDelta
from hypocenter.engine.kv_cache import BlockDigests
from hypocenter.engine.token_rules import TokenRules, ending_ids
from hypocenter.kernels.sampling.draw import columns_of, has_penalties
from hypocenter.record.keyed_digest import KeyedDigest
from hypocenter.record.prefixes import (
    ADAPTERS,
    ROTATION,
    SALT,
    SETTINGS,
    BlockPrefixes,
    salt_digest,
    settings_digest,
)
from hypocenter.record.recorder import current
from hypocenter.settings.config import SamplingParams

if TYPE_CHECKING:
    from hypocenter.engine.answer_text import AnswerText
    from hypocenter.engine.drafting.drafter import Drafter, StepLoad
    from hypocenter.engine.grammar import Matcher
    from hypocenter.engine.kv_cache import KVCache
    from hypocenter.model.facts.pooling import Pooling


class State(enum.Enum):
    """Where a request stands. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


#: Short enough for a person to type.
_SEED_BITS = 32


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What a request works with and ends by, beside its prompt and its parameters.

    Without `block_digests` it neither reads what the cache keeps nor leaves it anything. A
    `matcher` holds the output to a form, and `rules` say what single tokens may come. A text of
    more than `longrope_threshold` tokens is rotated by other factors (LongRoPE); None: there are
    none. With a `pooling` a vector is made of the prompt, of which the first `num_first` tokens are
    one text, and the others a second one (all are the first when None). What was begun elsewhere
    goes on behind the `output_ids` it had sent there: they are not sent again, and with the same
    seed what follows is what would have followed there. A `drafter` says which tokens are tried.
    """

    text: AnswerText
    end_ids: frozenset[int]
    context_length: int
    keeps_logits: bool = False
    block_digests: BlockDigests | None = None
    matcher: Matcher | None = None
    rules: TokenRules | None = None
    output_ids: Sequence[int] = ()
    longrope_threshold: int | None = None
    pooling: Pooling | None = None
    num_first: int | None = None
    drafter: Drafter | None = None
    #: What each adapter of the engine counts, empty where that is nothing; None: it has none.
    adapter_scales: tuple[float, ...] | None = None


class Request:
    """Prompt, parameters, and all that has become of them.

    `token_ids` are prompt and output; the keys and values of the first `num_computed` of them are
    in the cache. `output_ids` include the end token, whose text is never sent. With `keeps_logits`
    the request samples nothing: it is done when the logits of every prompt token are in `logits`.
    `logprobs` are those of `output_ids`, `prompt_logprobs` those of the prompt as far as it was
    read; both stay empty unless they are asked for. Of its prompt `num_cached` tokens were read
    from the cache before it was ever preempted. `uses_long_factors` says by which factors what is
    computed was rotated, where a long text has others.
    """

    #: What became of its prompt, where a vector is made of that.
    vector: npt.NDArray[Any] | None = None
    #: Computed tokens that run again: of an answer, behind drafts of which one was wrong.
    num_again = 0

    def __init__(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        plan: AnswerPlan,
    ) -> None:
        self.id = request_id
        self.prompt_ids = tuple(prompt_ids)
        # Every choice of one request is made with one seed, which its completion names.
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        self.params = replace(params, seed=seed)
        self.keeps_logits, self.pooling = plan.keeps_logits, plan.pooling
        self.matcher, self.rules, self.drafter = plan.matcher, plan.rules, plan.drafter
        self._adapters = plan.adapter_scales
        self.logits: list[npt.NDArray[Any]] = []  # f32 [num_tokens of a chunk, vocab_size] each
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # from the second token on
        self.token_ids = list(self.prompt_ids)
        self.output_ids: list[int] = []
        # `form_turn` is its last one, as `FormTurns` counts.
        self.num_computed = self.num_cached = self.num_preemptions = self.form_turn = 0
        self.state = State.WAITING
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.cancel_requested = False
        #: Pieces not yet taken; the stepping thread appends, the owner takes from the left.
        self.deltas: deque[Delta] = deque()
        #: Called by the stepping thread after each piece and at the end. It must be quick, and must
        #: not ask anything of the engine. One that raises ends this request with its error.
        self.on_news: Callable[[], None] | None = None
        #: Distinct token of the context to its count in the output; kept only for penalties.
        counted_ids = self.prompt_ids if has_penalties(params) else ()
        self.output_counts: dict[int, int] = dict.fromkeys(counted_ids, 0)
        self._block_digests = plan.block_digests
        self._longrope_threshold, self.uses_long_factors = plan.longrope_threshold, False
        self._end_ids = ending_ids(params, plan.end_ids)
        self._context_length, self._num_first = plan.context_length, plan.num_first
        self._text = plan.text
        self._digest: KeyedDigest | None = None
        self._num_digested = 0
        self._prefixes = BlockPrefixes()
        self._sent: list[AnswerDelta] = []
        self._num_prompt_tokens = 0
        self._started: float | None = None
        self._first_token: float | None = None
        self._last_token = 0.0
        for token_id in plan.output_ids:
            self._take(token_id)
            self._sent.append(self._push(token_id)[0])
        self._num_sent = self._num_resumed = len(self.output_ids)
        if self.has_outgrown:
            self._turn_long()

    @property
    def adapter_scales(self) -> tuple[float, ...]:
        """What each adapter counts; empty where that is nothing."""
        return self._adapters or ()

    @property
    def num_pending(self) -> int:
        """Tokens that must run before the next one can be chosen."""
        return len(self.token_ids) - self.num_computed

    @property
    def mask_seconds(self) -> float:
        """What it may take to say which tokens may come next in its form, and behind each of as
        many drafts as the last step had."""
        if self.matcher is None:
            return 0.0
        num_masks = 1 + (self.drafter.num_masks if self.drafter is not None else 0)
        return self.matcher.cost.seconds * num_masks

    @property
    def done(self) -> bool:
        return self.state is State.DONE

    @property
    def is_full(self) -> bool:
        """Whether no further token is allowed: by `max_tokens`, the context, or `keeps_logits`."""
        limit = self.params.max_tokens
        return (
            self.keeps_logits
            or (limit is not None and len(self.output_ids) >= limit)
            or len(self.token_ids) >= self._context_length
        )

    @property
    def num_kept(self) -> int:
        """The first so many positions have logits that are kept, or are read for logprobs."""
        if self.pooling is not None and self.pooling.rows == "first":
            return 1
        if self.keeps_logits:
            return len(self.prompt_ids)
        # The logits of a position tell of the token after it.
        return 0 if self.params.prompt_logprobs is None else len(self.prompt_ids) - 1

    @property
    def num_first(self) -> int:
        """So many tokens of its prompt are of the first text."""
        return len(self.prompt_ids) if self._num_first is None else self._num_first

    @property
    def first_kept(self) -> int:
        """The first position that is, of those before `num_kept`."""
        is_last = self.pooling is not None and self.pooling.rows == "last"
        return len(self.prompt_ids) - 1 if is_last else 0

    @property
    def all_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """The logprobs of each token of the prompt that was read, the first of which has none."""
        return None if self.params.prompt_logprobs is None else (None, *self.prompt_logprobs)

    @property
    def has_read_all(self) -> bool:
        """Whether nothing is left to run for a request that gets no further token."""
        num_wanted = self.num_kept if self.pooling is None else len(self.prompt_ids)
        return self.is_full and self.num_computed >= num_wanted

    @property
    def goes_on(self) -> bool:
        """Whether the token after the one that is being chosen can be chosen as things stand.

        It may turn out not to be wanted: an end token or a stop string is seen later.
        """
        limit = self.params.max_tokens
        return (
            self.state is State.RUNNING
            and not has_penalties(self.params)
            and self.matcher is None
            and not (self.rules is not None and self.rules.needs_tokens)
            and (limit is None or len(self.output_ids) + 1 < limit)
            and len(self.token_ids) + 1 < self._context_length
            and self._is_long(len(self.token_ids) + 1) == self.uses_long_factors
        )

    @property
    def room_for_drafts(self) -> int:
        """So many tokens may be tried behind the last one, with a token chosen after each.

        A text that becomes long on the way is not computed as it would be then.
        """
        room = self._context_length - len(self.token_ids) - 1
        if (limit := self.params.max_tokens) is not None:
            room = min(room, limit - len(self.output_ids) - 1)
        if self._longrope_threshold is not None and not self.uses_long_factors:
            room = min(room, self._longrope_threshold - len(self.token_ids))
        return max(room, 0)

    def is_awaited(self, load: StepLoad) -> bool:
        """Whether the token that is being chosen is worth waiting for: drafts may follow it."""
        if self.drafter is None or not (most := self.room_for_drafts):
            return False
        return self.drafter.is_awaited(self.token_ids, len(self.output_ids), most, load)

    def ends_with(self, token_id: int) -> bool:
        """Whether a token ends the answer."""
        return token_id in self._end_ids

    @property
    def has_outgrown(self) -> bool:
        """Whether it has become a long text, and what was computed of it is of no use."""
        return self._is_long(len(self.token_ids)) and not self.uses_long_factors

    def _is_long(self, num_tokens: int) -> bool:
        return self._longrope_threshold is not None and num_tokens > self._longrope_threshold

    @property
    def shares_blocks(self) -> bool:
        """Whether others may read what the request computes."""
        return self._block_digests is not None

    def digests_to_adopt(self, block_size: int) -> list[bytes]:
        """The digests of blocks that the request may read instead of computing them.

        One token is left to be computed, for its logits; and where all logits of the prompt are
        wanted, nothing of it may be left out.
        """
        num_tokens = self.first_kept if self.num_kept else len(self.token_ids) - 1
        return self.digests_of(num_tokens, block_size)

    def digests_to_keep(self, block_size: int) -> list[bytes]:
        """The digests of the full blocks that are computed, and are not written again."""
        return self.digests_of(self.num_computed - self.num_again, block_size)

    def digests_of(self, num_tokens: int, block_size: int) -> list[bytes]:
        """The digests of the full blocks of its first tokens; none where it shares none."""
        if self._block_digests is None:
            return []
        return self._block_digests.first(num_tokens // block_size, self.token_ids)

    def digest(self) -> str:
        """Keyed digest of all token ids so far, as little-endian 32-bit numbers."""
        self._digest = self._digest or KeyedDigest()
        new = self.token_ids[self._num_digested :]
        self._digest.add(struct.pack(f"<{len(new)}i", *new))
        self._num_digested += len(new)
        return self._digest.text()

    def mark_started(self) -> None:
        """The request runs for the first time."""
        if self._started is None:
            self._started = time.perf_counter()

    def adopt(self, num_tokens: int) -> None:
        """The keys and values of the first `num_tokens` are in the cache, computed or not by us."""
        self.num_computed, self.num_again = num_tokens, 0
        if not self.num_preemptions:
            # Of an answer that was begun elsewhere its own tokens may be there, too.
            self.num_cached = min(num_tokens, len(self.prompt_ids)) - self._num_prompt_tokens

    def advance(self, num_tokens: int) -> None:
        """`num_tokens` more tokens have their keys and values in the cache."""
        self.num_computed += num_tokens
        self.num_again = 0
        if self._first_token is None:
            self._num_prompt_tokens += num_tokens

    def restart(self) -> None:
        """The cache was taken away: everything runs again when there is room."""
        self.begin_anew()
        self.state = State.WAITING

    def begin_anew(self) -> None:
        """Nothing of it is computed any more."""
        self.num_computed = self.num_again = 0
        self.logits.clear()
        self.prompt_logprobs.clear()
        self.num_preemptions += 1
        if self.has_outgrown:
            self._turn_long()

    def _turn_long(self) -> None:
        self.uses_long_factors = True
        if self._block_digests is not None:
            self._block_digests = self._block_digests.of_long_texts()

    def accept(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Take the chosen token: text, stop strings, and whether the request is done with it.

        `logprob` is given where the parameters ask for it. Raises what the detokenizer and
        the matcher raise, and NoTokenLeft.
        """
        self._last_token = time.perf_counter()
        self._first_token = self._first_token or self._last_token
        self._take(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.rules is not None:
            self.rules.require_token()
        is_whole = self.matcher is not None and self.matcher.accept(token_id)
        if token_id in self._end_ids:
            self.finish("stop")
            return
        spoken, stopped = self._push(token_id)
        if stopped:
            self._send(spoken, "stop")
        elif is_whole:
            self.finish("stop", spoken)
        elif self.is_full:
            self.finish("length", spoken)
        elif spoken != NOTHING:
            self._send(spoken, None)

    def _take(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)
        if has_penalties(self.params):
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    def _push(self, token_id: int) -> tuple[AnswerDelta, bool]:
        """The text that may be sent with a token, and whether a stop string ended it."""
        return self._text.push(token_id, may_end=self._may_end)

    @property
    def _may_end(self) -> bool:
        """Whether text of the last token may complete a stop string."""
        return len(self.output_ids) > self.params.min_tokens

    def finish(self, reason: str, spoken: AnswerDelta = NOTHING) -> None:
        """End with `reason`, after `spoken` and whatever is still held back."""
        left, stopped = self._text.flush(may_end=self._may_end, is_cut=reason != "stop")
        self._send(spoken + left, "stop" if stopped else reason)

    def fail(self, error: Exception) -> None:
        """End with an error of its own; the owner raises it."""
        self.error = error
        self._record_answer(type(error).__name__)
        self.state = State.DONE
        self._tell()

    def completion(self, route: Route) -> Completion:
        """What became of the request, which must be done and without error."""
        assert self.finish_reason is not None, self.state
        return Completion(
            text="".join(spoken.content for spoken in self._sent),
            token_ids=tuple(self.output_ids),
            prompt_token_ids=self.prompt_ids,
            finish_reason=self.finish_reason,
            seed=self.params.seed or 0,
            timings=self.timings(),
            route=route,
            logprobs=self._logprobs_from(0),
            prompt_logprobs=self.all_prompt_logprobs,
            reasoning="".join(spoken.reasoning for spoken in self._sent),
            tool_calls=whole_calls(piece for spoken in self._sent for piece in spoken.calls),
        )

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; empty where none did."""
        return self._text.stop_string

    def timings(self) -> Timings:
        """Seconds from the first step to the first token, and from there to the last token."""
        started, first = self._started or 0.0, self._first_token
        return Timings(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self.num_cached,
            prompt_seconds=first - started if first else 0.0,
            num_generated_tokens=len(self.output_ids),
            generation_seconds=self._last_token - first if first else 0.0,
            num_drafted_tokens=self.drafter.num_drafted if self.drafter else 0,
            num_accepted_tokens=self.drafter.num_accepted if self.drafter else 0,
        )

    def _logprobs_from(self, start: int) -> tuple[TokenLogprob, ...] | None:
        """The logprobs of `output_ids[start:]`, without those that were sent elsewhere."""
        start = max(start - self._num_resumed, 0)
        return None if self.params.logprobs is None else tuple(self.logprobs[start:])

    def _send(self, spoken: AnswerDelta, finish_reason: str | None) -> None:
        token_ids = tuple(self.output_ids[self._num_sent :])
        logprobs = self._logprobs_from(self._num_sent)
        self._num_sent = len(self.output_ids)
        self._sent.append(spoken)
        self.finish_reason = finish_reason
        self.deltas.append(
            Delta(
                spoken.content, token_ids, finish_reason, logprobs, spoken.reasoning, spoken.calls
            )
        )
        if finish_reason is not None:
            self._record_answer()
            self.state = State.DONE  # last: whoever sees it finds everything else in place
        self._tell()

    def record_entry(self) -> None:
        """Write down what its tokens will be drawn by."""
        record = current()
        if record.is_on:
            settings = tuple(float(column) for column in columns_of(self.params))
            record.record_entry(self.id, len(self.prompt_ids), settings, self.params.seed or 0)

    def record_blocks(self, cache: KVCache, first: int, stop: int) -> None:
        """Write down which tokens its blocks `first` .. `stop` - 1 stand for."""
        record, size = current(), cache.block_size
        if record.is_on:
            prefixes = self._prefixes.of_blocks(first, stop, size, self.token_ids)
            blocks = cache.blocks(self.id)[first:stop]
            record.record_blocks(self.id, blocks, prefixes, first, self._made_with(cache))

    def _made_with(self, cache: KVCache) -> dict[str, str]:
        """What its keys and values depend on beside its tokens, and whose blocks it may read."""
        digests = self._block_digests
        found = {SALT: salt_digest(digests.salt)} if digests is not None else {}
        if self._longrope_threshold is not None:
            found[ROTATION] = "of long texts" if self.uses_long_factors else "of short texts"
        if self._adapters is not None:
            found[ADAPTERS] = settings_digest(self.adapter_scales)
        if cache.settings:
            found[SETTINGS] = cache.settings
        return found

    def _record_answer(self, failed: str = "") -> None:
        record = current()
        if record.is_on:
            record.record_answer(
                self.id, len(self.token_ids), self.digest(), self._digest_of_text(), failed
            )

    def _digest_of_text(self) -> str:
        """Keyed digest of what its owner was sent, each part with its length before it."""
        texts = ["".join(spoken.content for spoken in self._sent)]
        texts.append("".join(spoken.reasoning for spoken in self._sent))
        for call in whole_calls(piece for spoken in self._sent for piece in spoken.calls):
            texts += [call.name, call.arguments]
        digest = KeyedDigest((self.finish_reason or "").encode())
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.add(len(data).to_bytes(8, "little") + data)
        return digest.text()

    def _tell(self) -> None:
        try:
            if self.on_news is not None:
                self.on_news()
        except KeyboardInterrupt:  # meant for the thread that steps
            raise
        except BaseException as error:
            was_done = self.done
            if self.error is None:
                self.error = as_exception(error)
            else:
                self.error.add_note(f"and what was to tell of it raised {error!r}")
            self.state = State.DONE
            if not was_done:
                self._tell()  # of the end, which whoever waits must hear of
