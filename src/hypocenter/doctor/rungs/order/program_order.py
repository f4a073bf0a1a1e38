"""The order of a torch program's work: what was seen to use one memory without any.

The proof is made anew from the record: what was asked for between two uses is walked through, once
as it was and once with the wait that is missing. Of a Triton launch a few programs are replayed, to
see whether they touch what the other use touches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Culprit, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.kernel_text import is_index_in
from hypocenter.order.ledger import are_ordered
from hypocenter.order.text import doing_of, failure_of, fix_of, missing_at, sentence_of
from hypocenter.record.events import OUTSIDE_PLANS, Launched, LaunchRecord, Place
from hypocenter.record.gap import Gap
from hypocenter.record.order_events import Disorder, Disordered, OrderWatched, UseRecord
from hypocenter.replay.arguments import Argument
from hypocenter.replay.terms import KernelText, Schedule, SeenReplay
from hypocenter.replay.touched import share_bytes, touched_bytes

NAME = "order"
CAUSES_OF = {
    Disorder.WAIT: Cause.MISSING_WAIT,
    Disorder.HOST_READ: Cause.READ_IN_FLIGHT,
    Disorder.HOST_WRITE: Cause.REWRITTEN_IN_FLIGHT,
    Disorder.REUSED: Cause.REUSED_IN_FLIGHT,
}
_WOULD_REFUTE = {
    Disorder.WAIT: "a wait between the two uses",
    Disorder.HOST_READ: "a wait of the host for the copy before it reads",
    Disorder.HOST_WRITE: "a wait of the host for the copy before it writes",
    Disorder.REUSED: "record_stream for that stream, or a wait for it before the memory is free",
}
#: Seconds that the replay of a launch's few programs may take, and of all of them.
_REPLAY_SECONDS, _MAX_REPLAYS = 1.0, 16


def program_order(case: Case) -> list[Claim]:
    """What a program that is not this package's was seen to use without order."""
    watched = next((e for e in case.bundle.events if isinstance(e, OrderWatched)), None)
    found = [e for e in case.bundle.events if isinstance(e, Disordered)]
    if watched is None and not found:
        case.leave_unseen(
            Gap.not_recorded(
                "the order of streams",
                "the events and waits of this run were not watched",
            )
        )
        return []
    seen = _Touched(case)
    claims = [claim for pair in found if (claim := _claim(pair, seen)) is not None]
    if watched is not None and watched.problem:
        case.leave_unseen(Gap.not_recorded("a part of the order of streams", watched.problem))
    elif watched is not None:
        claims += _rows_of_clean(watched, {claim.hypothesis.cause for claim in claims})
    if watched is not None and watched.num_dropped:
        more = count_text(watched.num_dropped, "other pair")
        case.leave_unseen(Gap.left_out(f"{more} of uses without order"))
    case.leave_unseen(
        Gap.not_recorded(
            "memory that is used past torch and Triton",
            "by kernels of other libraries, by NumPy, by threads that do not begin with torch's "
            "modes; collectives count in the stream that asked for them",
        )
    )
    return claims


def _rows_of_clean(watched: OrderWatched, confirmed: set[Cause]) -> Iterator[Claim]:
    streams = count_text(len(watched.streams), "stream")
    asked = count_text(watched.num_operations, "operation") + " of torch's and "
    asked += count_text(watched.num_launches, "Triton launch", "Triton launches")
    texts = {
        Cause.MISSING_WAIT: f"{asked} in {streams} are ordered wherever they use the same memory",
        Cause.READ_IN_FLIGHT: "the host read no memory that a copy was still being made into",
        Cause.REWRITTEN_IN_FLIGHT: "the host wrote no memory that a stream still used",
        Cause.REUSED_IN_FLIGHT: "no memory was given out again while another stream might use it",
    }
    for kind, cause in CAUSES_OF.items():
        if cause not in confirmed:
            yield row(
                cause,
                Verdict.REFUTED,
                NAME,
                texts[cause],
                would_refute=f"two uses without {_WOULD_REFUTE[kind]}",
            )


def _claim(one: Disordered, seen: _Touched) -> Claim | None:
    """None where the record itself orders the two, or where they share no byte."""
    first, second, cause = one.first, one.second, CAUSES_OF[one.kind]
    if one.is_cut:
        text = f"{sentence_of(one)}; what was asked for first between the two is not recorded"
        return row(cause, Verdict.INCONCLUSIVE, NAME, text, would_refute=_WOULD_REFUTE[one.kind])
    if are_ordered(first.stream, second.stream, one.between):
        return None
    if not are_ordered(first.stream, second.stream, one.between, with_wait=True):
        return None
    if not one.is_whole and one.is_same:
        shares, why = seen.share(first, second)
        if shares is False:
            return None
        if shares is None:
            text = f"{sentence_of(one)}; whether they touch the same bytes is not known: {why}"
            return row(
                cause, Verdict.INCONCLUSIVE, NAME, text, would_refute=_WOULD_REFUTE[one.kind]
            )
    launch = seen.launch_of(second) or seen.launch_of(first)
    file, _, line = second.site.rpartition(":")
    where = one.freed if one.kind is Disorder.REUSED and one.freed else second.site
    root = RootCause(
        cause=cause,
        sentence=f"{sentence_of(one)}.",
        fix=fix_of(one),
        proof=Proof(
            failure_of(one),
            fix_of(one),
            "walked through again with it, the second use lies behind the first",
        ),
        kernel=launch.kernel if launch is not None else None,
        argument=(second.argument if second.launch else first.argument) if launch else None,
        tensor=one.tensor or None,
        file=file or None,
        line=int(line) if line.isdigit() else None,
        expression=doing_of(second),
        place=seen.place_of(second) or seen.place_of(first),
        culprit=Culprit(where, missing_at(one)) if where else None,
    )
    return proven(root, NAME, (), _WOULD_REFUTE[one.kind], one.seq)


class _Touched:
    """Which bytes Triton launches touch, by the replay of a few of their programs."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._launches = {
            event.seq: event for event in case.bundle.events if isinstance(event, Launched)
        }
        self._kept: dict[tuple[int, str], tuple[Array, bool] | str] = {}
        self._num_replays = 0

    def launch_of(self, use: UseRecord) -> LaunchRecord | None:
        event = self._launches.get(use.launch) if use.launch > 0 else None
        return event.launch if event is not None else None

    def place_of(self, use: UseRecord) -> Place | None:
        event = self._launches.get(use.launch) if use.launch > 0 else None
        return Place(event.step, OUTSIDE_PLANS, event.seq) if event is not None else None

    def share(self, first: UseRecord, second: UseRecord) -> tuple[bool | None, str]:
        """Whether both touch a byte; None with the reason where that is not found out."""
        one, other = self._bytes(first), self._bytes(second)
        for found in (one, other):
            if isinstance(found, str):
                return None, found
        assert not isinstance(one, str)
        assert not isinstance(other, str)
        if share_bytes(one[0], other[0]):
            return True, ""
        if one[1] and other[1]:
            return False, ""
        return None, "a few programs of each were replayed, and touch different bytes"

    def _bytes(self, use: UseRecord) -> tuple[Array, bool] | str:
        """Starts and ends of what it touches, and whether that is all; or why it is not known."""
        if not use.launch:
            return np.array([[use.address, use.end]], np.int64), True
        key = use.launch, use.argument
        if key not in self._kept:
            self._kept[key] = self._replay(use)
        return self._kept[key]

    def _replay(self, use: UseRecord) -> tuple[Array, bool] | str:
        place, launch = self.place_of(use), self.launch_of(use)
        if place is None or launch is None:
            return f"the launch of {use.what} is not recorded any more"
        if self._num_replays >= _MAX_REPLAYS:
            return "too many launches would have to be replayed"
        if why := self._hangs_on_values(launch, use.argument):
            return why
        try:
            from hypocenter.replay.recorded import replay_place
        except (MissingPackage, ImportError) as error:
            return f"it needs the replay of launches: {error}"
        self._num_replays += 1
        num = int(np.prod([max(size, 1) for size in launch.grid], dtype=np.int64)) or 1
        programs = sorted({0, num // 2, num - 1})
        done: list[Argument] = []
        try:
            replay_place(
                self._case.index,
                place,
                text=KernelText(self._case.allow_source),
                schedule=Schedule(programs, budget_seconds=_REPLAY_SECONDS),
                seen=SeenReplay(lambda rebuilt, arguments: done.extend(arguments)),
            )
        except HypoError as error:
            return f"{use.what} was not replayed: {error}"
        argument = next((given for given in done if given.name == use.argument), None)
        if argument is None or argument.region.data is None:
            return f"{use.argument} of {use.what} is too large to be replayed"
        spans = touched_bytes(argument, writes=True, reads=True) + use.address
        return spans, num <= len(programs)

    def _hangs_on_values(self, launch: LaunchRecord, argument: str) -> str:
        """Why a replay does not know its addresses: they come of what a tensor holds."""
        source = self._case.sources.get(launch.source)
        if source is None:
            return f"the text of {launch.kernel} is not recorded"
        access = self._case.access(launch, argument)
        if access is None:
            return f"the text of {launch.kernel} does not say where it finds {argument}"
        for other in launch.arguments:
            is_other = other.tensor is not None and other.name != argument
            if is_other and is_index_in(source, access.expression, other.name):
                return f"where {launch.kernel} finds {argument} hangs on what {other.name} holds"
        return ""
