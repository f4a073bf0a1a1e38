"""How many tokens a draft model writes ahead of a request, by what became of earlier ones.

Runs no model. What a step of the draft model takes is measured, so the number of tokens that are
tried may differ from run to run. The tokens of an answer do not.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from hypocenter.engine.drafting.drafter import Drafter, RowCosts, StepLoad
from hypocenter.engine.grammar import Matcher
from hypocenter.engine.token_rules import TokenRules
from hypocenter.kernels.sampling.draw import has_penalties
from hypocenter.settings.config import SamplingParams

#: What is taken to be the share of right tokens before any was tried.
_FIRST_ODDS = 0.6
#: Tokens that drafts may have cost before they are ever right: somebody chose that model. Where
#: it gained for requests before, so much of that may be lost beside.
_FIRST_LOSS, _CREDIT = 0.75, 1.5
#: What one token that was tried weighs: for its own request, and for those that come later.
_WEIGHT, _WEIGHT_OF_OTHERS = 0.1, 0.02
#: Steps that are looked back on, and how many are needed before they count.
_NUM_TIMED, _FEWEST_TIMED = 15, 5
#: Rounds that are looked back on; a guess counts as one of much work; no step costs nothing.
_NUM_ROUNDS, _FAR, _LEAST_COST = 48, 8.0, 0.005


def needs_host(params: SamplingParams, matcher: Matcher | None, rules: TokenRules | None) -> bool:
    """Whether the host must see each token before the next one is drawn, as forms, penalties and
    words to avoid demand, or lists biases beside it."""
    return (
        matcher is not None
        or has_penalties(params)
        or (rules is not None and (rules.needs_tokens or bool(rules.bias_ids.size)))
    )


class DraftRecord:
    """What is known of a draft model: how often it is right, and what its steps take.

    `cost` is that of one of its steps of a single row, where one of the model takes 1. Until some
    were timed it is `guessed_cost`. `gained` counts tokens, less what they cost, of all requests.

    With `is_chained` most drafts are written without the host (`chain.py`). What that takes is seen
    with the model's step alone, as one round.
    """

    def __init__(self, costs: RowCosts, guessed_cost: float, *, is_chained: bool = False) -> None:
        self.costs, self.is_chained = costs, is_chained
        self.odds, self.gained = _FIRST_ODDS, 0.0
        self._guessed_cost = guessed_cost
        self._own: deque[float] = deque(maxlen=_NUM_TIMED)
        self._of_model: deque[float] = deque(maxlen=_NUM_TIMED)
        self._rounds: deque[tuple[float, float]] = deque(maxlen=_NUM_ROUNDS)
        self._line: tuple[float, float] | None = None

    @property
    def cost(self) -> float:
        if min(len(self._own), len(self._of_model)) < _FEWEST_TIMED:
            return self._guessed_cost
        return statistics.median(self._own) / statistics.median(self._of_model)

    @property
    def awaits_steps(self) -> bool:
        """Whether a round cannot be judged yet: too few steps without drafts were timed."""
        return self.is_chained and len(self._of_model) < _FEWEST_TIMED

    def prices(self, *, is_chained: bool) -> tuple[float, float]:
        """What a round takes beside the model's step, whose unit is a step without drafts: apart
        from all drafts, and for each step of a single row of the draft model."""
        if not is_chained:
            return self.costs.apart, self.cost
        if self._line is None:
            self._line = _line_through(self._rounds, self.costs.apart, self._guessed_cost)
        return self._line

    def note_own(self, num_rows: int, seconds: float) -> None:
        """A step of the draft model took that."""
        self._own.append(seconds / self.costs.of(num_rows))

    def note_step(self, num_rows: int, seconds: float, *, is_ahead: bool = False) -> None:
        """A step of the model took that, which was launched ahead or was not."""
        apart = 0.0 if is_ahead else self.costs.apart
        self._of_model.append(seconds / (self.costs.of(num_rows) + apart))

    def note_round(self, num_rows: int, work: float, seconds: float) -> None:
        """A round took that: steps of the draft model, in steps of a single row, and one of the
        model of so many rows."""
        if len(self._of_model) >= _FEWEST_TIMED:
            unit = statistics.median(self._of_model)
            self._rounds.append((work, seconds / unit - self.costs.of(num_rows)))
            self._line = None


def _line_through(
    rounds: Iterable[tuple[float, float]], apart: float, cost: float
) -> tuple[float, float]:
    """Where the line through medians of equal work begins, and how it rises. What is guessed counts
    as two rounds, so that it says the slope while all rounds are alike."""
    by_work: dict[float, list[float]] = {}
    for work, taken in rounds:
        by_work.setdefault(round(work, 2), []).append(taken)
    points = [(0.0, apart, 1.0), (_FAR, apart + _FAR * cost, 0.25)]
    points += [(work, statistics.median(some), len(some)) for work, some in by_work.items()]
    weight = sum(w for _, _, w in points)
    x = sum(w * x for x, _, w in points) / weight
    y = sum(w * y for _, y, w in points) / weight
    spread = sum(w * (at - x) ** 2 for at, _, w in points)
    slope = max(sum(w * (at - x) * (of - y) for at, of, w in points) / spread, _LEAST_COST)
    return max(y - slope * x, 0.0), slope


class ModelDrafter(Drafter):
    """Says how many tokens a draft model writes for one request.

    `num_read` counts tokens of the request that the draft model has read. Those of the prompt, and
    the `num_begun` of an answer that was begun elsewhere, are no loss: it reads them once.
    """

    def __init__(
        self,
        max_drafts: int,
        record: DraftRecord,
        num_begun: int = 0,
        *,
        passes_host: bool = False,
        runs_again: bool = False,
    ) -> None:
        """`passes_host`: each of its drafts does, as `needs_host` has it."""
        self._is_chained = record.is_chained and not passes_host
        credit = min(max(record.gained, 0.0), _CREDIT)
        first_loss = _FIRST_LOSS + credit
        super().__init__(max_drafts, record.costs, first_loss, runs_again=runs_again)
        self._record, self._num_begun = record, num_begun
        self._odds = record.odds
        self.num_read = 0

    def num_to_write(self, num_tokens: int, num_output: int, most: int, load: StepLoad) -> int:
        """How many tokens to write behind `num_tokens`, `num_output` of which are the answer."""
        if self._record.awaits_steps:
            return 0
        most = min(most, self._max_drafts)
        num_unread = self._num_unread(num_tokens, num_output)

        def price_of(num: int) -> float:
            again = self._price_again(self._odds, num, load)
            return self._price_of(num, num_unread, load) + again

        return self._number(self._odds, most, num_output, price_of) if most > 0 else 0

    def is_awaited(
        self, token_ids: Sequence[int], num_output: int, most: int, load: StepLoad
    ) -> bool:
        return self.num_to_write(len(token_ids) + 1, num_output + 1, most, load) > 0

    def spend(self, num: int, num_tokens: int, num_output: int, load: StepLoad) -> None:
        """So many tokens are written, as `num_to_write` said."""
        self._lose(self._price_of(num, self._num_unread(num_tokens, num_output), load))

    def _lose(self, price: float) -> None:
        super()._lose(price)
        self._record.gained -= price

    def _num_unread(self, num_tokens: int, num_output: int) -> int:
        return min(num_tokens - self.num_read, num_output - self._num_begun)

    def _learn(self, were_right: Sequence[bool]) -> None:
        self._record.gained += sum(were_right)
        for is_right in were_right:
            self._odds += _WEIGHT * (is_right - self._odds)
            self._record.odds += _WEIGHT_OF_OTHERS * (is_right - self._record.odds)

    def _price_of(self, num: int, num_unread: int, load: StepLoad) -> float:
        """Tokens that one of the answers that are written for loses by its drafts."""
        costs, num_writing = self._costs, load.num_writing
        alone = costs.of(load.num_rows)
        rows = costs.of(load.num_rows + num * num_writing) - alone
        # The first step reads what is new, too: the last token, and what came before it.
        written = costs.of(num_writing - 1 + max(num_unread, 1))
        written += (num - 1) * costs.of(num_writing)
        apart, cost = self._record.prices(is_chained=self._is_chained)
        more = max(rows, 0.0) + apart + cost * written
        return more * load.num_answers / (alone * num_writing)
