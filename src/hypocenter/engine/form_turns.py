"""Which requests have their turn in a step when it takes long to say what may come next in a form.

What may come next is said by one thread, a request after the other, and all that run wait for it. A
form whose state grows with each token takes milliseconds there, and a hundred answers in it half a
second: so only some of these step at a time, and everybody else steps as fast as before.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.engine.request import Request

#: What ordinary forms take is 0.05 to 0.5 ms; these always have their turn.
SLOW_SECONDS = 0.001
#: Of a step, for all slow forms together.
STEP_SECONDS = 0.02


class FormTurns:
    """Counts the steps in which some had no turn. Not thread-safe."""

    def __init__(self) -> None:
        self._num_steps = 0

    def take_turns(self, requests: Sequence[Request], max_tokens: int) -> list[Request]:
        """Choose those that step now, in their order. Of slow forms who waited longest come first,
        one at least. Who has more than `max_tokens` to read needs no mask yet, and always steps."""
        slow = [
            request
            for request in requests
            if request.mask_seconds > SLOW_SECONDS and request.num_pending <= max_tokens
        ]
        if sum(request.mask_seconds for request in slow) <= STEP_SECONDS:
            return list(requests)
        self._num_steps += 1
        left = STEP_SECONDS
        waiting = {request.id for request in slow}
        for request in sorted(slow, key=lambda one: one.form_turn):
            if left < STEP_SECONDS and request.mask_seconds > left:
                break
            left -= request.mask_seconds
            request.form_turn = self._num_steps
            waiting.remove(request.id)
        return [request for request in requests if request.id not in waiting]
