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
    """Whose turn it was when. Not thread-safe."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._last: dict[int, int] = {}  # by the request's id

    def take_turns(self, requests: Sequence[Request]) -> list[Request]:
        """Choose those that step now, in their order. Of slow forms who waited longest come first,
        one at least."""
        slow = [request for request in requests if request.mask_seconds > SLOW_SECONDS]
        if sum(request.mask_seconds for request in slow) <= STEP_SECONDS:
            self._last.clear()
            return list(requests)
        self._num_steps += 1
        left = STEP_SECONDS
        chosen: set[int] = set()
        for request in sorted(slow, key=lambda one: self._last.get(one.id, -1)):
            if chosen and request.mask_seconds > left:
                break
            left -= request.mask_seconds
            chosen.add(request.id)
        before, self._last = self._last, {}
        for request in slow:
            is_chosen = request.id in chosen
            self._last[request.id] = self._num_steps if is_chosen else before.get(request.id, -1)
        return [
            request for request in requests if request.id in chosen or request.id not in self._last
        ]
