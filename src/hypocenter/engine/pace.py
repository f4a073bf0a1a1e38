"""How long a step may be that reads prompts while others wait for their next token.

It is told what steps took, and names the most tokens of a step that keeps within the target.

A step of a GPU costs what its plan does, which is that of the next power of two of tokens: one of
576 tokens takes as long as one of 1,024. So the room is such a power, and what each takes is noted.

Prompts that wait cost more than long steps: whoever reads makes no tokens. So where nobody names a
target, a few steps read all that wait, however long these then are.
"""

from __future__ import annotations

from hypocenter.device.plan import bucket

#: A target that nobody names is so long, and at least so many times a step that reads no prompt.
_DEFAULT_SECONDS, _TIMES_ALONE = 0.02, 2.9
#: Without a named target, all prompts that wait are read in so many steps, if room is for less.
_STEPS_OF_BACKLOG = 4
#: A step has room for so many tokens of prompts, whatever they take: or else they would starve.
_LEAST_PROMPT = 64
#: What is tried first.
_FIRST_TOKENS = 256
#: A size that was never run is taken to last so many times as long as half of it.
_TIMES_HALF = 1.5
#: Steps after which one that was too long is tried again: what made it so may be over.
_STEPS_KNOWN = 1000
#: Part that a new step has in what is known of its size, and what it counts for at most.
_WEIGHT, _WEIGHT_TRIED, _MOST_TIMES = 0.25, 0.5, 2.0


class StepPace:
    """`target_seconds` between two tokens of a request; None: the default.

    `most` is the most tokens of a step.
    """

    def __init__(self, target_seconds: float | None, most: int) -> None:
        self._target, self._most = target_seconds, most
        self._alone: float | None = None
        #: Of steps that read prompts, by their bucket: what they take, and when one was run last.
        self._seconds: dict[int, float] = {}
        self._ran: dict[int, int] = {}
        self._num_steps = 0

    def note(self, num_tokens: int, num_generating: int, seconds: float) -> None:
        """A step of `num_tokens` took so long, of which `num_generating` were a request's next."""
        self._num_steps += 1
        if num_tokens == num_generating:
            self._alone = _blend(self._alone, seconds, _WEIGHT)
        elif num_generating:
            size = bucket(num_tokens, self._most)
            before, weight = self._seconds.get(size), _WEIGHT
            if self._seconds and not self._is_known(size):  # it is tried, perhaps again
                expected, weight = self._estimate(size), _WEIGHT_TRIED
                before = min(before or expected, _MOST_TIMES * expected)
            self._seconds[size] = _blend(before, seconds, weight)
            self._ran[size] = self._num_steps

    def room(self, num_generating: int, num_pending: int = 0) -> int:
        """The most tokens of a step in which so many requests get their next one, and where so many
        tokens of prompts wait."""
        if not num_generating:
            return self._most
        size = bucket(min(num_generating + _LEAST_PROMPT, self._most), self._most)
        while size < self._most and self._is_within_target(min(2 * size, self._most)):
            size = min(2 * size, self._most)
        if self._target is None:
            wanted = num_generating + num_pending // _STEPS_OF_BACKLOG
            while size < self._most and min(2 * size, self._most) <= wanted:
                size = min(2 * size, self._most)
        return size

    def _is_within_target(self, size: int) -> bool:
        if not self._seconds:
            return size <= _FIRST_TOKENS
        return self._estimate(size) <= self.target

    def _is_known(self, size: int) -> bool:
        return self._num_steps - self._ran.get(size, -_STEPS_KNOWN) < _STEPS_KNOWN

    def _estimate(self, size: int) -> float:
        """What a step of such a bucket takes, or may take by what the nearest one does."""
        if self._is_known(size):
            return self._seconds[size]
        if smaller := [known for known in self._seconds if known < size]:
            nearest = max(smaller)
            return self._seconds[nearest] * _TIMES_HALF ** ((size // nearest).bit_length() - 1)
        nearest = min(self._seconds)
        return self._seconds[nearest] * size / nearest

    @property
    def target(self) -> float:
        """Seconds that a step may take."""
        if self._target is not None:
            return self._target
        return max(_DEFAULT_SECONDS, _TIMES_ALONE * (self._alone or 0.0))


def _blend(before: float | None, seconds: float, weight: float) -> float:
    """What is known, a little nearer to what a step has just taken."""
    if before is None:
        return seconds
    return before + weight * (min(seconds, _MOST_TIMES * before) - before)
