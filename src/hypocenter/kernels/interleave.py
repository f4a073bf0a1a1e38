"""What packed layouts share: how many rows go together, and how rows become lanes."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Rows that lie side by side in one vector, and rows to a multiple of which weights are padded.
LANES = 16
ROWS_PER_ITEM = 64
#: Groups of `LANES` rows whose records lie side by side: one reading of activations serves them.
GROUPS_PER_ITEM = ROWS_PER_ITEM // LANES
#: Rows that are packed at a time, which bounds the memory that packing takes.
SLAB_ROWS = 1024


def padded(num_rows: int) -> int:
    """Rows of a packed weight, and the pitch of activations: the next multiple of 64."""
    return -(-num_rows // ROWS_PER_ITEM) * ROWS_PER_ITEM


def in_groups(rows: Array, num_columns: int, group: int = LANES) -> Array:
    """[num_rows, n] to [ceil(num_rows / group), group, num_columns], what is missing zero."""
    missing = (-len(rows) % group, num_columns - rows.shape[1])
    if any(missing):
        rows = np.pad(rows, ((0, missing[0]), (0, missing[1])))
    return rows.reshape(-1, group, num_columns)
