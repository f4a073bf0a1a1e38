"""Rung: whether each step's inputs are those of its requests, and whether the device had them.

What the scheduler meant stands in the step's records of its requests, and what the host put into
the inputs beside them. A traced run also has what each launch found there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.contracts.draws import uniform
from hypocenter.doctor.case import Case, array_of
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.contents import Snapshot
from hypocenter.record.engine_events import Entered
from hypocenter.record.events import (
    Place,
    RequestRecord,
    Stepped,
    Values,
)

NAME = "step inputs"

#: Columns of the sampler's settings, the last of which is the random number of a draw.
_COLUMNS = (
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "the random number",
)
_TEMPERATURE = _COLUMNS.index("temperature")


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of an input that is not what its step is about."""

    input: str
    entry: tuple[int, ...]
    value: float
    right: float
    text: str
    #: What the first launch that is given it calls it, once that is known.
    argument: str = ""

    @property
    def place(self) -> str:
        return f"{self.input}[{', '.join(map(str, self.entry))}]"


def step_inputs(case: Case) -> list[Claim]:
    """Inputs that are another token's or request's, or that the device found to be others."""
    found = [*_of_host(case), *_on_device(case)]
    confirmed = {claim.hypothesis.cause for claim in found}
    clean = []
    num_steps = sum(bool(event.requests) for event in case.steps)
    if num_steps and Cause.WRONG_INPUT not in confirmed:
        clean.append(
            row(
                Cause.WRONG_INPUT,
                Verdict.REFUTED,
                NAME,
                f"in {num_steps} steps positions, counts, logit rows and settings of the sampler "
                "are those of the step's requests",
                would_refute="an entry that belongs to another token or request",
            )
        )
    num_seen = sum(_is_step(case, snapshot) for snapshot in case.bundle.snapshots)
    if num_seen and Cause.CHANGED_INPUT not in confirmed:
        clean.append(
            row(
                Cause.CHANGED_INPUT,
                Verdict.REFUTED,
                NAME,
                f"before {num_seen} launches the inputs of their step held what the host had "
                "written",
                would_refute="an input that a launch found to be another",
            )
        )
    return found + clean


# -- what the host wrote ---------------------------------------------------------------------------


def _of_host(case: Case) -> Iterator[Claim]:
    """The first wrong entry of each input."""
    entered = {event.request: event for event in case.index.events_of(Entered)}
    requests_of: dict[int, tuple[RequestRecord, ...]] = {}
    done: set[str] = set()
    for event in case.steps:
        if event.requests:
            requests_of[event.step] = event.requests
        for name, check in _checks(requests_of.get(event.step, ()), event, entered).items():
            given = case.input_of(event, name)
            if given is None or name in done:
                continue
            wrong = check(given)
            first = _first_use(case, event, name)
            if wrong is not None and first is not None:
                done.add(name)
                yield _host_claim(case, *first, given, wrong, check)


_Check = Callable[[Array], _Entry | None]


def _checks(
    requests: tuple[RequestRecord, ...], event: Stepped, entered: Mapping[int, Entered]
) -> dict[str, _Check]:
    """By the name of an input: what finds its first entry that is not that of the requests."""
    if not event.requests:  # the plan of the sampler, which follows the decoder's
        return {"settings": lambda given: _wrong_settings(given, requests, entered)}
    checks: dict[str, _Check] = {"positions": lambda given: _wrong_position(given, requests)}
    if all(request.samples is not None for request in requests):
        rows = _logit_rows(requests)
        counts = (sum(request.num_tokens for request in requests), len(rows))
        checks["logit_rows"] = lambda given: _wrong_logit_row(given, rows)
        checks["counts"] = lambda given: _wrong_count(given, counts)
    return checks


def _wrong_position(given: Array, requests: tuple[RequestRecord, ...]) -> _Entry | None:
    start = 0
    for request in requests:
        end = min(start + request.num_tokens, len(given))
        right = request.first_position + np.arange(end - start)
        for at in np.flatnonzero(given[start:end] != right)[:1]:
            token, value = start + int(at), int(given[start + at])
            return _Entry(
                "positions",
                (token,),
                value,
                int(right[at]),
                f"positions[{token}] = {value}, but that token is the one at position "
                f"{int(right[at])} of request {request.id}",
            )
        start = end
    return None


def _logit_rows(requests: tuple[RequestRecord, ...]) -> list[tuple[int, RequestRecord, str]]:
    """The tokens whose logits are wanted, in the order of `engine/batch.py:make_batch`."""
    drawn, kept, start = [], [], 0
    for request in requests:
        end = start + request.num_tokens
        if request.samples:
            before_drafts = range(end - 1 - request.num_drafts, end - 1)
            drawn += [(row, request, "draws before a draft") for row in before_drafts]
            drawn.append((end - 1, request, "draws from its last token"))
        kept += [
            (start + number, request, "keeps the logits of that token")
            for number in range(request.first_kept, request.num_tokens)[: request.num_kept or 0]
        ]
        start += request.num_tokens
    return drawn + kept


def _wrong_logit_row(given: Array, rows: list[tuple[int, RequestRecord, str]]) -> _Entry | None:
    for at, (right, request, why) in enumerate(rows[: len(given)]):
        if int(given[at]) != right:
            return _Entry(
                "logit_rows",
                (at,),
                int(given[at]),
                right,
                f"logit_rows[{at}] = {int(given[at])}, but request {request.id} {why}, which is "
                f"row {right}",
            )
    return None


def _wrong_count(given: Array, counts: tuple[int, int]) -> _Entry | None:
    for at, (right, what) in enumerate(zip(counts, ("tokens", "rows of logits"), strict=True)):
        if at < len(given) and int(given[at]) != right:
            text = f"counts[{at}] = {int(given[at])}, but the step has {right} {what}"
            return _Entry("counts", (at,), int(given[at]), right, text)
    return None


def _wrong_settings(
    given: Array, requests: tuple[RequestRecord, ...], entered: Mapping[int, Entered]
) -> _Entry | None:
    if given.dtype != np.int64 or given.ndim != 2 or given.shape[1] != len(_COLUMNS):
        return None
    settings = given.view(np.float64)
    drawn = [
        (request, request.first_drawn + number)
        for request in requests
        if request.samples
        for number in range(1 + request.num_drafts)
    ]
    for at, (request, position) in enumerate(drawn[: len(settings)]):
        entry = entered.get(request.id)
        if entry is None or len(entry.settings) != len(_COLUMNS) - 1:
            continue  # what it came with was overwritten
        is_random = bool(entry.settings[_TEMPERATURE])
        right = (*entry.settings, uniform(entry.seed, position) if is_random else 0.0)
        for column in np.flatnonzero(settings[at] != np.array(right))[:1]:
            value = float(settings[at, column])
            name = _COLUMNS[column]
            return _Entry(
                "settings",
                (at, int(column)),
                value,
                right[column],
                f"settings[{at}, {int(column)}] = {value:g}, but {name} of request {request.id} "
                f"{f'for position {position} ' if name == _COLUMNS[-1] else ''}is "
                f"{right[column]:g}",
            )
    return None


def _host_claim(
    case: Case, use: LaunchMade, argument: str, given: Array, wrong: _Entry, check: _Check
) -> Claim:
    """At the first launch that is given the input, and by that launch's word for it."""
    mended = np.array(given)
    num_mended = 0
    while (left := check(mended)) is not None and num_mended < mended.size:
        right = np.float64(left.right).view(np.int64) if left.input == "settings" else left.right
        mended[left.entry] = right
        num_mended += 1
    return _claim(
        case,
        use,
        Cause.WRONG_INPUT,
        replace(wrong, argument=argument),
        Proof(
            wrong.text,
            f"{wrong.place} = {wrong.right:g}"
            + (f" and {num_mended - 1} more like it" if num_mended > 1 else ""),
            f"then every entry of {wrong.input} is that of the step's requests",
        ),
        f"Make {wrong.input} of each step from the requests that it runs, in their order",
        "the scheduler's record of the request naming that entry",
    )


# -- what the device found -------------------------------------------------------------------------


def _on_device(case: Case) -> Iterator[Claim]:
    """The first launch that found an input changed; what others found is evidence."""
    found: dict[int, _Changed] = {}
    right_at: dict[tuple[int, int, int], int] = {}  # the last launch that found it as it was
    for snapshot in case.bundle.snapshots:
        event = case.index.stepped.get((snapshot.step, snapshot.plan))
        if event is None:
            continue
        meant = _host_inputs(event)
        for values in snapshot.values:
            if values.tensor not in meant or values.tensor in found:
                continue
            at = _first_difference(meant[values.tensor], values)
            key = (snapshot.step, snapshot.plan, values.tensor)
            if at is None:
                right_at[key] = snapshot.launch
            else:
                host = array_of(meant[values.tensor])[at]
                pair = (float(host), float(array_of(values)[at]))
                place = Place(snapshot.step, snapshot.plan, snapshot.launch)
                found[values.tensor] = _find_change(
                    case, place, values.tensor, at, pair, right_at.get(key)
                )
    if found:
        yield _device_claim(case, list(found.values()))


def _is_step(case: Case, snapshot: Snapshot) -> bool:
    event = case.index.stepped.get((snapshot.step, snapshot.plan))
    meant = {} if event is None else _host_inputs(event)
    return any(values.tensor in meant for values in snapshot.values)


def _host_inputs(event: Stepped) -> dict[int, Values]:
    """What the host put into the step's inputs, by tensor."""
    return {
        values.tensor: values for values in event.inputs if values.tensor != event.filled_by_device
    }


def _first_difference(host: Values, device: Values) -> tuple[int, ...] | None:
    """Of what the host filled, the first entry that the device had otherwise."""
    if host.dtype != device.dtype or len(host.shape) != len(device.shape):
        return None
    common = tuple(map(min, host.shape, device.shape))
    part = tuple(map(slice, common))
    differs = np.argwhere(array_of(host)[part] != array_of(device)[part])
    return tuple(int(i) for i in differs[0]) if len(differs) else None


@dataclass(frozen=True, slots=True)
class _Changed:
    """An input that a launch found to be another: `entry` held `is_now`, and the host wrote `was`.

    `right_before` is the last launch of the step that found it as it was, if one looked at it.
    """

    use: LaunchMade
    argument: str
    tensor: int
    entry: str
    was: float
    is_now: float
    right_before: int | None

    @property
    def text(self) -> str:
        since = (
            "no launch before it looked at it"
            if self.right_before is None
            else f"launch {self.right_before} still found it right"
        )
        return (
            f"the host wrote {self.entry} = {self.was:g}, and this launch found {self.is_now:g} "
            f"there; {since}"
        )


def _find_change(
    case: Case,
    place: Place,
    tensor: int,
    at: tuple[int, ...],
    values: tuple[float, float],
    right_before: int | None,
) -> _Changed:
    launch = case.index.launch(place)
    name = next(
        (fact.name for fact in launch.facts if fact.tensor == tensor), case.tensors[tensor].name
    )
    use = LaunchMade(launch, place.step, case.index.seq(place), place)
    entry = f"{name}[{', '.join(map(str, at))}]"
    return _Changed(use, name, tensor, entry, *values, right_before)


def _device_claim(case: Case, found: list[_Changed]) -> Claim:
    first = found[0]
    claim = _claim(
        case,
        first.use,
        Cause.CHANGED_INPUT,
        first,
        Proof(
            f"before {first.use.where} {first.entry} is {first.is_now:g}, and the host wrote "
            f"{first.was:g}",
            f"{first.entry} = {first.was:g} (and the like)",
            f"then the launch finds in {first.argument} what the host wrote for this step",
        ),
        f"Look at what copies {first.argument} to the device, and at what else writes into its "
        "memory: copies of another step, and launches that write beside their own tensor",
        "the launch finding what the host wrote",
    )
    others = tuple(
        f"{change.use.where}, {change.use.launch.kernel}: {change.text}" for change in found[1:]
    )
    evidence = (*claim.hypothesis.evidence, *others)
    return replace(
        claim,
        hypothesis=msgspec.structs.replace(claim.hypothesis, evidence=evidence),
        tensors=tuple(change.tensor for change in found),
    )


# -- claims ----------------------------------------------------------------------------------------


def _first_use(case: Case, event: Stepped, name: str) -> tuple[LaunchMade, str] | None:
    """The step's first launch that is given the input of that name, and its argument."""
    put = {values.tensor for values in event.inputs if case.tensors[values.tensor].name == name}
    for use in case.index.launches_of(event):
        for argument, tensor in case.tensors_of(use.launch).items():
            if tensor.id in put:
                return use, argument
    return None


def _claim(
    case: Case,
    use: LaunchMade,
    cause: Cause,
    wrong: _Entry | _Changed,
    proof: Proof,
    fix: str,
    would_refute: str,
) -> Claim:
    argument, text = wrong.argument, wrong.text
    access = case.access(use.launch, argument)
    tensor = case.tensor_of(use.launch, argument)
    root = RootCause(
        cause=cause,
        sentence=f"{use.launch.kernel}: {text}",
        fix=fix,
        proof=proof,
        kernel=use.launch.kernel,
        argument=argument,
        tensor=tensor.name if tensor else None,
        place=use.place,
    ).at(access)
    tensors = (tensor.id,) if tensor else ()
    return proven(root, NAME, (f"{use.where}: {text}",), would_refute, use.seq, tensors)
