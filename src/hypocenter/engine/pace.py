"""How long a step may be that reads prompts while others wait for their next token.

It is told what steps took, and names the most tokens of a step that keeps within the target.
"""

from __future__ import annotations

#: A target that nobody names is so long, and at least so many times a step that reads no prompt:
#: shorter steps read prompts at a much lower rate.
_DEFAULT_SECONDS, _TIMES_ALONE = 0.05, 5.0
#: Steps differ a little, so that a step of just the target's length would often be longer.
_SHARE = 0.93
#: A step has room for so many tokens of prompts, whatever they take: or else they would starve.
_LEAST_PROMPT = 64
#: What is tried first.
_FIRST_PROMPT = 256
#: How much the room for prompts changes at once, downwards and upwards.
_DOWN, _UP = 0.5, 1.25
#: Of the room that a step must have used to tell anything about it.
_USED = 0.8
_WEIGHT = 0.1


class StepPace:
    """`target_seconds` between two tokens of a request; None: the default.

    `most` is the most tokens of a step. What prompts add to a step is taken to grow with their
    tokens, so the next room is told by the last one.
    """

    def __init__(self, target_seconds: float | None, most: int) -> None:
        self._target, self._most = target_seconds, most
        self._alone: float | None = None
        self._room = float(_FIRST_PROMPT)  # of prompts

    def note(self, num_tokens: int, num_generating: int, seconds: float) -> None:
        """A step of `num_tokens` took so long, of which `num_generating` were a request's next."""
        num_prompt = num_tokens - num_generating
        if not num_prompt:
            before = seconds if self._alone is None else self._alone
            self._alone = before + _WEIGHT * (seconds - before)
        elif num_generating and num_prompt >= _USED * min(self._room, self._most - num_generating):
            alone = min(self._alone or 0.0, seconds)
            wanted = max(_SHARE * self.target - alone, 0.0)
            change = wanted / max(seconds - alone, 1e-6)
            room = self._room * min(max(change, _DOWN), _UP)
            self._room = min(max(room, _LEAST_PROMPT), self._most)

    def room(self, num_generating: int) -> int:
        """The most tokens of a step in which so many requests get their next one."""
        if not num_generating:
            return self._most
        return min(num_generating + int(self._room), self._most)

    @property
    def target(self) -> float:
        """Seconds that a step may take."""
        if self._target is not None:
            return self._target
        return max(_DEFAULT_SECONDS, _TIMES_ALONE * (self._alone or 0.0))
