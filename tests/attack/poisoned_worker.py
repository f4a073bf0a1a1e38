"""The worker that everybody has, but for a request that it dies of: in a step, or while it reads.

`python -m attack.poisoned_worker SOCKET MODEL`, as a server starts its workers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Int32s
from hypocenter.base.tensor import Tensor
from hypocenter.engine.batch import Batch
from hypocenter.engine.runner import Runner
from hypocenter.worker import worker

#: Token ids that no other prompt has behind each other.
POISON = (7, 11, 7, 13, 7, 17)


def is_poisoned(token_ids: Int32s) -> bool:
    """Whether the poison stands anywhere in these."""
    if len(token_ids) < len(POISON):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, len(POISON))
    return bool((windows == np.array(POISON)).all(axis=1).any())


def main(words: Sequence[str]) -> int:
    """Serve as `worker.main` does; returns its exit code."""
    run = Runner.run

    def run_unless_poisoned(self: Runner, batch: Batch, **more: Any) -> Tensor:
        if is_poisoned(batch.token_ids):
            os.kill(os.getpid(), signal.SIGSEGV)
        return run(self, batch, **more)

    Runner.run = run_unless_poisoned  # type: ignore[method-assign]
    return worker.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
