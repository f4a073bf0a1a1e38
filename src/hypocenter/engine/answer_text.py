"""The text of one answer as its tokens come: whole characters, thoughts apart, up to a stop string.

Stop strings are looked for in the answer, and not in thoughts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hypocenter.engine.stop_strings import StopStrings
from hypocenter.harmony import Spoken

if TYPE_CHECKING:
    from hypocenter.model.text.tokenizer import Detokenizer
    from hypocenter.thoughts import AnswerReader


class AnswerText:
    """`apart` tells thoughts from the answer; None: all is answer."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str], apart: AnswerReader | None
    ) -> None:
        self._detokenizer, self._apart = detokenizer, apart
        self._stop_strings = StopStrings(stop)

    def push(self, token_id: int, *, may_end: bool) -> tuple[Spoken, bool]:
        """What may be sent with a token, and whether a stop string ended the answer.

        `may_end`: its text may complete one. Raises what the detokenizer raises.
        """
        text = self._detokenizer.push(token_id)
        return self._up_to_stop(
            Spoken(text, "") if self._apart is None else self._apart.push(text), may_end
        )

    def flush(self, *, may_end: bool) -> tuple[Spoken, bool]:
        """What was held back, as `push` gives it; no more tokens will follow."""
        text = self._detokenizer.flush()
        spoken = Spoken(text, "")
        if self._apart is not None:
            spoken = self._apart.push(text) + self._apart.flush()
        left, stopped = self._up_to_stop(spoken, may_end)
        return left if stopped else left + Spoken(self._stop_strings.flush(), ""), stopped

    def _up_to_stop(self, spoken: Spoken, may_end: bool) -> tuple[Spoken, bool]:
        content, stopped = self._stop_strings.push(spoken.content, may_end=may_end)
        return Spoken(content, spoken.reasoning), stopped
