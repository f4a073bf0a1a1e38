"""Whether the same requests give the same bits, run after run."""

from __future__ import annotations

from collections.abc import Iterator

from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.equivalence import OwnGates
from hypocenter.audit.gates import Gate

_NUM_TOGETHER = 3


def repeats(own: OwnGates, num_runs: int) -> Gate:
    """The same batch of requests `num_runs` times: the runs differ in nothing but the blocks that
    the cache gives them."""

    def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
        first = own.together(_NUM_TOGETHER)
        for _ in range(num_runs - 1):
            yield first, own.together(_NUM_TOGETHER)

    asks = f"do {num_runs} runs of the same requests give the same bits?"
    return Gate("repeats", asks, "", pairs)
