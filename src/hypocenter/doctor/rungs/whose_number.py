"""Whose a number of a launch's output is: which request, which of its tokens, which layer."""

from __future__ import annotations

from hypocenter.doctor.case import Case
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import Stepped

#: Kernels whose rows are those that logits are wanted of, though no `count` says so.
_OF_LOGITS = ("gather", "narrow")


def whose(case: Case, use: LaunchMade, index: tuple[int, ...] | None) -> tuple[str, ...]:
    """Of which request, token and layer the number at `index` is, the first that is none."""
    event = case.event_of(use)
    token = _token_of(case, use, event, index[0]) if index and event is not None else None
    if token is None or event is None:
        return ()
    layer = None if _is_of_logits(use) else case.layer_of(use)
    in_layer = f" in layer {layer}" if layer is not None else ""
    start = 0
    for request in event.requests:
        if start <= token < start + request.num_tokens:
            position = request.first_position + token - start
            return (
                f"the first NaN or infinity belongs to request {request.id}, its token at "
                f"position {position}{in_layer}",
            )
        start += request.num_tokens
    return ()


def _token_of(case: Case, use: LaunchMade, event: Stepped, row_number: int) -> int | None:
    """The token of the step that a row of the output belongs to, of all or of those with logits."""
    if not _is_of_logits(use):
        return row_number
    rows = case.input_of(event, "logit_rows")
    return int(rows[row_number]) if rows is not None and row_number < rows.size else None


def _is_of_logits(use: LaunchMade) -> bool:
    count = next((fact.value for fact in use.launch.facts if fact.name == "count"), None)
    return count == 1 or use.launch.kernel in _OF_LOGITS
