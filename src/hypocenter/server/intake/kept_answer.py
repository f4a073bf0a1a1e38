"""What is kept of one request's answers, counted in the memory of all requests (`bodies.py`)."""

from __future__ import annotations

from hypocenter.server.api_error import ApiError
from hypocenter.server.intake.bodies import HeldBody
from hypocenter.wire.messages import Piece

#: What is kept of a token, its text and number, and of each part of a call: measured, rounded up.
TOKEN_BYTES, CALL_BYTES = 64, 128
#: What a byte of packed logprobs takes: itself, once more in a response that is kept by blocks, and
#: the JSON that is made of it, four times as long
#: in a chat's answer.
PACKED_TIMES = 6
#: An answer that takes less is not counted: most are short, and would only fail where others fill
#: the memory.
UNCOUNTED_BYTES = 64 << 10


class KeptAnswer:
    """`num_bytes` are about what is kept; without `held` nothing is bounded."""

    def __init__(self, held: HeldBody | None) -> None:
        self.num_bytes = 0
        self._held, self._num_counted = held, 0

    def add(self, piece: Piece) -> None:
        """Count a piece that came. Raises ApiError, status 413 where it is too much by itself, and
        429 where it is with what others hold."""
        num_packed = len(piece.logprobs) + len(piece.prompt_logprobs)
        self.num_bytes += TOKEN_BYTES * len(piece.token_ids) + CALL_BYTES * len(piece.calls)
        self.num_bytes += PACKED_TIMES * num_packed
        if self._held is None or (more := self._num_uncounted) <= 0:
            return
        if self.num_bytes > self._held.max_bytes + UNCOUNTED_BYTES:
            raise ApiError(
                413,
                f"the answer takes more than {self._held.max_bytes} bytes of memory, which are all "
                "that a client gets; ask for fewer choices, tokens or logprobs, or read a stream",
                code="answer_too_large",
            )
        self._held.take(more)
        self._num_counted += more

    def drop_logprobs(self, piece: Piece) -> None:
        """They were sent, and nobody needs them again."""
        self.num_bytes -= PACKED_TIMES * len(piece.logprobs)
        if self._held is not None and (less := -self._num_uncounted) > 0:
            self._held.give_back(less)
            self._num_counted -= less

    @property
    def _num_uncounted(self) -> int:
        """Bytes that are to be counted and are not; below 0 where too many are."""
        return max(self.num_bytes - UNCOUNTED_BYTES, 0) - self._num_counted
