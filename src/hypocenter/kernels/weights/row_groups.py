"""What packed layouts share: how many rows go together, how rows become lanes, and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypocenter.device.arrays import AnyArray, pad
from hypocenter.device.cpu.threads import num_threads

#: Rows that lie side by side in one vector, and rows to a multiple of which weights are padded.
LANES = 16
ROWS_PER_ITEM = 64
#: Groups of `LANES` rows whose records lie side by side: one reading of activations serves them.
GROUPS_PER_ITEM = ROWS_PER_ITEM // LANES
#: Rows that a thread packs at a time and threads that do, which bounds the memory that it takes.
SLAB_ROWS = 512
MAX_THREADS = 8


def padded_rows(num_rows: int) -> int:
    """Rows of a packed weight, and the pitch of activations: the next multiple of 64."""
    return -(-num_rows // ROWS_PER_ITEM) * ROWS_PER_ITEM


def in_groups(rows: AnyArray, num_columns: int, group: int = LANES) -> AnyArray:
    """[num_rows, n] to [ceil(num_rows / group), group, num_columns], what is missing zero."""
    rows = pad(rows, -len(rows) % group, num_columns - rows.shape[1])
    return rows.reshape(-1, group, num_columns)


def slabs(num_rows: int, slab_rows: int = SLAB_ROWS) -> Iterator[slice]:
    """All rows, some at a time."""
    return (slice(start, start + slab_rows) for start in range(0, num_rows, slab_rows))


def side_by_side(work: Callable[[Any], None], parts: Iterable[Any]) -> None:
    """`work` on each part, by as many threads as kernels take: NumPy lets go of Python's lock.

    Raises what `work` raises.
    """
    with ThreadPoolExecutor(min(num_threads(), MAX_THREADS)) as pool:
        for _ in pool.map(work, parts):
            pass
