"""How many tokens of a request are tried in a step, and which: by what became of earlier ones.

All of it follows from tokens and from how many requests a step has, and from no clock. A text that
goes on as it did before is gone through several tokens a step. Where it does not, or where many
requests fill the steps, nothing is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypocenter.engine.drafting.ngrams import Ngrams

#: Tokens that drafts may have cost, measured in steps without, for each token of the answer. So an
#: answer that repeats nothing is slower by that share at most, beside what may be lost at first.
#: Where drafts were wrong so often that none is worth its price, much less is spent on trying.
_SHARE_LOST, _SHARE_TRYING = 0.01, 0.003
#: What is taken to be the share of right tokens before any was tried, by how many tokens match:
#: up to 4, 8, 16, and more.
_FIRST_ODDS = (0.4, 0.6, 0.75, 0.85)
#: What one token that was tried weighs in what is known.
_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What a step takes by its rows, where one of a single row takes 1.

    Rows are taken by 16, 4 or 1, and each of up to eight begun costs `eight` beside.
    `apart`: what it takes longer where it is not launched ahead. `first_loss`: tokens that drafts
    of a text itself may have cost before they are ever right.
    """

    fixed: float
    single: float
    four: float
    sixteen: float
    eight: float = 0.0
    apart: float = 0.0
    first_loss: float = 0.75

    def of(self, num_rows: int) -> float:
        sixteens, left = divmod(num_rows, 16)
        fours, singles = divmod(left, 4)
        cost = self.fixed + self.sixteen * sixteens + self.four * fours + self.single * singles
        return cost + self.eight * (-(-num_rows // 8))


#: Measured with Q4_K on two cores of an AMD EPYC that others used, too. With Q8_0 rows take less.
CPU_COSTS = RowCosts(fixed=0.65, single=0.35, four=1.05, sixteen=3.6, first_loss=0.4)
#: Measured with the shape of an 8B in Q4_K_M on an H200: 4 rows take 1.03, 8 take 1.09, 16 take
#: 1.41. A step that waits for its token takes half a step more, there and with a tiny model.
GPU_COSTS = RowCosts(fixed=0.67, single=0.01, four=0.04, sixteen=0.16, eight=0.32, apart=0.5)


def costs_on(device: str) -> RowCosts:
    return CPU_COSTS if device == "cpu" else GPU_COSTS


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step has without the drafts of a request: rows, and how many answers go on by one.

    A draft model goes on with `num_writing` of these together.
    """

    num_rows: int
    num_answers: int
    num_writing: int = 1


def best_number(odds: float, most: int, price_of: Callable[[int], float]) -> tuple[int, bool]:
    """The number of drafts that gains most, each right with these odds where all before it are, and
    whether it gains; one where none does, for odds may have changed."""
    best, most_gained, gained, still_right = 1, 0.0, 0.0, 1.0
    for num in range(1, most + 1):
        still_right *= odds
        gained += still_right
        if (gain := gained - price_of(num)) > most_gained:
            best, most_gained = num, gain
    return best, most_gained > 0


class Drafter:
    """What becomes of the tokens that are tried for one request: at most `max_drafts` a step.

    With `runs_again` those that were right run again where one behind them was wrong.
    `num_drafts` counts steps that tried some, and `num_drafted` tokens that were tried.
    `accepted_at` counts those that the sampler chose, by their place behind the last token.
    """

    def __init__(
        self, max_drafts: int, costs: RowCosts, first_loss: float, *, runs_again: bool = False
    ) -> None:
        """`first_loss`: tokens that drafts may have cost before they are ever right."""
        assert max_drafts > 0, max_drafts
        self._max_drafts, self._costs, self._first_loss = max_drafts, costs, first_loss
        self._runs_again, self._load = runs_again, StepLoad(1, 1)
        self._lost = 0.0
        self.num_drafts = self.num_drafted = 0
        #: Masks that the last step took beside that of its first token, where a form says some.
        self.num_masks = 0
        self.accepted_at = [0] * max_drafts

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)

    def begin(self, num: int, load: StepLoad) -> None:
        """`num` of the tokens proposed last are tried in a step of that load."""
        self._load = load

    def is_awaited(
        self, token_ids: Sequence[int], num_output: int, most: int, load: StepLoad
    ) -> bool:
        """Whether to wait for the next token, so that what follows it can be tried."""
        raise NotImplementedError

    def settle(self, num: int, num_accepted: int) -> None:
        """Note that the first `num_accepted` of `num` tokens that were tried were right."""
        self._learn([True] * num_accepted + [False] * (num_accepted < num))
        self._lost -= num_accepted
        if num_accepted < num and self._runs_again:
            self._lose(self._price_of_rows(num_accepted, self._load))
        self.num_drafts += 1
        self.num_drafted += num
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def _lose(self, price: float) -> None:
        """Drafts have cost so many tokens."""
        self._lost += price

    def _learn(self, were_right: Sequence[bool]) -> None:
        """Note which of the tokens tried last were right, up to the first that was not."""
        raise NotImplementedError

    def _price_of_rows(self, num: float, load: StepLoad) -> float:
        """Tokens that all answers of a step lose by `num` more rows."""
        alone = self._costs.of(load.num_rows)
        # Rows that run again are few, and a part of one on the average.
        more = self._costs.of(load.num_rows + math.ceil(num)) - alone
        share = num / math.ceil(num) if num else 0.0
        return max(more, 0.0) * share * load.num_answers / alone

    def _price_again(self, odds: float, num: int, load: StepLoad) -> float:
        """What it costs on the average that right ones of `num` drafts run again."""
        if not self._runs_again:
            return 0.0
        mean = sum(right * odds**right * (1 - odds) for right in range(1, num))
        return self._price_of_rows(mean, load)

    def _left(self, num_output: int, *, gains: bool = True) -> float:
        """Tokens that drafts may still cost an answer of that length; fewer where none `gains`."""
        share = _SHARE_LOST if gains else _SHARE_TRYING
        return self._first_loss + share * num_output - self._lost

    def _number(
        self, odds: float, most: int, num_output: int, price_of: Callable[[int], float]
    ) -> int:
        """How many tokens to try, each right with these odds; 0 where too much was lost already."""
        num, gains = best_number(odds, most, price_of)
        left = self._left(num_output, gains=gains)
        while num and price_of(num) > left:
            num -= 1
        return num


class NgramDrafter(Drafter):
    """Tries what followed the same tokens before in prompt and answer."""

    def __init__(self, max_drafts: int, costs: RowCosts, *, runs_again: bool = False) -> None:
        super().__init__(max_drafts, costs, costs.first_loss, runs_again=runs_again)
        self._ngrams = Ngrams()
        self._odds = list(_FIRST_ODDS)
        self._kind = 0  # of the last drafts

    def propose(
        self, token_ids: Sequence[int], num_output: int, most: int, load: StepLoad
    ) -> list[int]:
        """Up to `most` tokens that may follow `token_ids`, of which `num_output` are the answer."""
        if not self._ngrams.may_match(token_ids):  # most often, quickly told
            return []
        most = min(most, self._max_drafts)
        if most < 1 or self._price_of_rows(1, load) > self._left(num_output):
            return []
        if (match := self._ngrams.find(token_ids)) is None:
            return []
        kind = min((match.num_tokens - 1).bit_length() - 2, len(_FIRST_ODDS) - 1)
        odds = self._odds[kind]

        def price_of(num: int) -> float:
            return self._price_of_rows(num, load) + self._price_again(odds, num, load)

        num = self._number(odds, most, num_output, price_of)
        self._kind = kind
        # Beyond the last token the text is taken to go on repeating itself.
        period = len(token_ids) - match.start
        return [token_ids[match.start + number % period] for number in range(num)]

    def is_awaited(
        self, token_ids: Sequence[int], num_output: int, most: int, load: StepLoad
    ) -> bool:
        """Where the next token turns out to be another than the text had before, that was for
        nothing."""
        price = self._costs.apart * load.num_answers
        if price > self._left(num_output):
            return False
        if len(self.propose(token_ids, num_output, most, load)) < 2:
            return False
        self._lost += price
        return True

    def begin(self, num: int, load: StepLoad) -> None:
        super().begin(num, load)
        self._lose(self._price_of_rows(num, load))

    def _learn(self, were_right: Sequence[bool]) -> None:
        odds = self._odds[self._kind]
        for is_right in were_right:
            odds += _WEIGHT * (is_right - odds)
        self._odds[self._kind] = odds
