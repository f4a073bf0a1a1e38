"""Rung: broken hardware of a card, by what its own checks and NVIDIA's kernel module reported.

The error code of its memory compares what is read with what was written, whatever a launch asks
for: a report of it is of the card. A report that may be of another card or program stays open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypocenter.base.errors import ErrorKind
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.runtime_text import code_in
from hypocenter.record.xid_text import HARDWARE_XIDS, XidSeen, hardware_xids

NAME = "card hardware"
#: Before every event: what runs on such a card shows anything.
_FIRST = -1
_REFUTE = "the same run without a report of the card"
_NEXT = (
    "Take the card out of use: reset it (`nvidia-smi --gpu-reset -i NUMBER`) when nothing runs "
    "there, look at `nvidia-smi -q -d ECC,ROW_REMAPPER`, and have it replaced if it comes again"
)


def card_hardware(case: Case) -> list[Claim]:
    """Whether the card itself is broken; nothing is said where nothing reported it."""
    return list(_claims(case))


def _claims(case: Case) -> Iterator[Claim]:
    fault = case.bundle.fault
    seen = list(dict.fromkeys(_xids(case)))
    ours = [xid for xid in seen if HARDWARE_XIDS[xid.number].ends_work and _is_ours(case, xid)]
    if fault.error_kind is ErrorKind.HARDWARE:
        said = f"the runtime said: {fault.error or fault.message}"
        yield _root(said, _way_out(seen), tuple(map(_text, seen)))
    elif ours:
        others = tuple(_text(xid) for xid in seen if xid != ours[0])
        yield _root(_text(ours[0]), _way_out(ours), others)
    elif seen:
        new = (
            f"what befell it while this ran cannot be told to be why the run {_how_it_ended(case)}"
        )
        yield row(
            Cause.CARD_HARDWARE,
            Verdict.INCONCLUSIVE,
            NAME,
            *map(_text, seen),
            f"{new}; {_way_out(seen)}",
            would_refute=_REFUTE,
        )
    elif worse := [card for card in case.bundle.cards if card.new_ecc_errors]:
        yield row(
            Cause.CARD_HARDWARE,
            Verdict.INCONCLUSIVE,
            NAME,
            *(
                f"GPU {card.index} ({card.bus or card.uuid}) counted {card.new_ecc_errors} errors "
                "of its memory that could not be corrected while this ran"
                for card in worse
            ),
            _NEXT,
            would_refute=_REFUTE,
        )


def _xids(case: Case) -> Iterator[XidSeen]:
    """What the kernel's log has; else what NVML told, which names no process."""
    logged = list(hardware_xids(case.bundle.kernel_log))
    yield from logged
    if not logged:
        for card in case.bundle.cards:
            for number in card.xids:
                if number in HARDWARE_XIDS:
                    yield XidSeen(number=number, card=card.bus or str(card.index))


def _is_ours(case: Case, xid: XidSeen) -> bool:
    """Whether a report is of what this program ran on, and of how it ended."""
    fault = case.bundle.fault
    if fault.kind == "none":
        return False
    is_of_device = (
        fault.error_kind in (ErrorKind.FOUND_LATER, ErrorKind.ENDLESS)
        or fault.kind == "hang"
        or code_in(fault.message) is not None
    )
    if xid.pid is not None:
        return xid.pid == case.bundle.pid and (is_of_device or fault.kind == "crash")
    return is_of_device and len(case.bundle.cards) == 1


def _text(xid: XidSeen) -> str:
    of = f" for process {xid.pid}" if xid.pid is not None else ""
    return f"GPU {xid.card} reported Xid {xid.number}{of}: {HARDWARE_XIDS[xid.number].meaning}"


def _way_out(seen: Sequence[XidSeen]) -> str:
    if not seen:
        return _NEXT
    # Of several the one that asks for most: a card off the bus, memory that harms all. What says
    # which memory it was comes before the 48 that it belongs to.
    order = (79, 95, 64, 172, 171, 48, 74, 94, 63)
    worst = min(seen, key=lambda xid: order.index(xid.number))
    text = HARDWARE_XIDS[worst.number].way_out.format(card=worst.card)
    return text[0].upper() + text[1:]


def _how_it_ended(case: Case) -> str:
    return "ended well" if case.bundle.fault.kind == "none" else "ended as it did"


def _root(said: str, fix: str, evidence: tuple[str, ...]) -> Claim:
    root = RootCause(
        cause=Cause.CARD_HARDWARE,
        sentence=f"{said}: the card itself failed, and no launch made it",
        fix=fix,
        proof=Proof(
            said,
            "a card whose own checks pass",
            "these checks compare what the card holds with what was written there, and no access "
            "of a launch, right or wrong, makes one fail",
        ),
    )
    return proven(root, NAME, evidence, _REFUTE, _FIRST)
