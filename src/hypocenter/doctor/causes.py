"""What the doctor knows of each cause: the one table of causes."""

from __future__ import annotations

from hypocenter.doctor.diagnosis import Cause

#: What stands in the name of an index tensor, and the cause of an entry that lies outside.
_INDICES = {
    "token_ids": Cause.TOKEN_RANGE,
    "context_ids": Cause.TOKEN_RANGE,
    "positions": Cause.POSITION_RANGE,
    "block_tables": Cause.BLOCK_TABLE_RANGE,
    "counts": Cause.BAD_SCALAR,
}


def index_cause(value: int, *names: str) -> Cause:
    """The class of an index out of range, by the names that its tensor goes by."""
    if value == -1:
        return Cause.SENTINEL_CONSUMED
    found = (cause for known, cause in _INDICES.items() if any(known in name for name in names))
    return next(found, Cause.INDEX_RANGE)
