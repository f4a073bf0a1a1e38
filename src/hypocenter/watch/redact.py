"""Takes out of a bundle what a person typed: prompts in the command, token ids in step inputs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from hypocenter.record.bundle import Bundle
from hypocenter.record.events import PlanRecord, Stepped, TensorRecord, Values

#: Tensors of the engine that hold token ids.
TOKEN_TENSORS = frozenset({"token_ids", "context_ids"})
#: Options of `hypo` that are followed by a text.
_TEXT_OPTIONS = ("-p", "--prompt", "--stop")
_CODES = {"I8": "b", "I16": "h", "I32": "i", "I64": "q"}


def redact(bundle: Bundle) -> Bundle:
    """The same, with token ids inside the vocabulary replaced by 0.

    Others stay, since they are what a fault may come from. Where the vocabulary's size is unknown
    every id that is not negative is replaced.
    """
    holders = {tensor.id: tensor for tensor in bundle.tensors if tensor.name in TOKEN_TENSORS}
    size = vocabulary(bundle.plans, bundle.tensors)

    def without(values: tuple[Values, ...]) -> tuple[Values, ...]:
        return tuple(_zero(v, size) if v.tensor in holders else v for v in values)

    return msgspec.structs.replace(
        bundle,
        command=redacted_command(bundle.command),
        events=tuple(
            msgspec.structs.replace(event, inputs=without(event.inputs))
            if isinstance(event, Stepped)
            else event
            for event in bundle.events
        ),
        snapshots=tuple(
            msgspec.structs.replace(snapshot, values=without(snapshot.values))
            for snapshot in bundle.snapshots
        ),
        redacted=True,
    )


def redacted_command(command: Sequence[str]) -> tuple[str, ...]:
    """The command with each prompt replaced by its length."""
    shown = list(command)
    if "bench" in shown[:5]:  # behind `python -P -m hypocenter` at the latest
        return tuple(shown)  # its -p is a number
    for number, word in enumerate(shown):
        option, equals, text = word.partition("=")
        if option in _TEXT_OPTIONS and equals:
            shown[number] = f"{option}=<{len(text)} characters>"
        elif word in _TEXT_OPTIONS and number + 1 < len(shown):
            shown[number + 1] = f"<{len(shown[number + 1])} characters>"
        elif word.startswith("-p") and len(word) > 2 and not word.startswith("--"):
            shown[number] = f"-p<{len(word) - 2} characters>"
    return tuple(shown)


def vocabulary(plans: Sequence[PlanRecord], tensors: Sequence[TensorRecord]) -> int | None:
    """Rows of the table that token ids index, from the launch that looks them up."""
    by_id = {tensor.id: tensor for tensor in tensors}
    for launch in (launch for plan in plans for launch in plan.launches):
        facts = {fact.name: by_id.get(fact.tensor or -1) for fact in launch.facts}
        ids, table = facts.get("token_ids"), facts.get("table")
        if ids is not None and table is not None and table.shape:
            return table.shape[0]
    return None


def _zero(values: Values, size: int | None) -> Values:
    code = _CODES.get(values.dtype.upper())
    if code is None:
        return msgspec.structs.replace(values, data=bytes(len(values.data)))
    try:
        ids = array(code, values.data)
    except ValueError:  # no whole number of elements
        return msgspec.structs.replace(values, data=bytes(len(values.data)))
    kept = array(code, (0 if id >= 0 and (size is None or id < size) else id for id in ids))
    return msgspec.structs.replace(values, data=kept.tobytes())
