"""The first place at which two recorded runs part: a launch, its arguments, its inputs or results.

Compares records; runs nothing and needs neither Triton nor torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from hypocenter.device.offline.specimen import is_of_device
from hypocenter.doctor.alignment import align, draw_pairs, draws_of, statistics_by_place, steps_of
from hypocenter.doctor.beside.answers import answers_of, texts_of_answers, was_asked_alike
from hypocenter.doctor.difference import Compared, Difference, Pair, RunDiff
from hypocenter.doctor.fact_text import (
    are_not_told,
    around,
    contents_text,
    dims_text,
    figures_text,
    first_element,
    is_close,
    is_equal,
    only_differing,
    short_text,
    tensor_facts,
)
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import (
    ArgumentRecord,
    Launched,
    LaunchRecord,
    Place,
    RequestRecord,
    Statistics,
    Stepped,
)
from hypocenter.record.gap import Gap
from hypocenter.record.keyed_digest import are_comparable

#: Differences of one launch or step that are told; the first is the one that matters.
MAX_TOLD = 16
#: Launches and steps that differ without a wrong result, at most.
MAX_PAIRS = 1 << 14
#: Types whose elements are equal or not: no rounding lies between them.
_COUNTED = ("I32", "I64", "BOOL")


def rundiff(good: Bundle, bad: Bundle) -> RunDiff:
    """Compare two runs step by step, as far as both are recorded and `bad` got."""
    runs = _Runs(good, bad)
    first = next(runs.walk(), None)
    return RunDiff(
        first.differences[:MAX_TOLD] if first else (),
        runs.compare_counts(),
        tuple(around(good, bad)),
        tuple(runs.unseen),
        answers_of(runs.good, runs.bad),
        texts_of_answers(runs.good, runs.bad),
        was_asked_alike(runs.good, runs.bad),
    )


def differing_pairs(good: Bundle, bad: Bundle) -> tuple[tuple[Pair, ...], Compared]:
    """All that differs, in order, up to the first result that is wrong, and that too.

    What comes after it follows from it, or may.
    """
    runs = _Runs(good, bad)
    pairs: list[Pair] = []
    for pair in runs.walk():
        pairs.append(pair)
        if pair.wrong is not None or len(pairs) >= MAX_PAIRS:
            break
    return tuple(map(runs.with_renames, pairs)), runs.compare_counts()


class _Runs:
    """Two runs side by side. `counts` says what was compared."""

    def __init__(self, good: Bundle, bad: Bundle) -> None:
        self.good, self.bad = BundleIndex(good), BundleIndex(bad)
        self.counts: Counter[str] = Counter()
        self._is_same_device = good.device == bad.device
        self._statistics = tuple(statistics_by_place(bundle) for bundle in (good, bad))
        self._draws = draws_of(self.good), draws_of(self.bad)
        self.unseen: list[Gap] = []
        #: Requests of GOOD that were compared before, and whether that began with the first step.
        self._met: set[int] = set()
        self._is_whole = False
        #: The names in BAD of GOOD's tensors, as launches were given them, and the other way round.
        self._names = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        self._swaps = defaultdict[object, set[tuple[str, str]]](set)
        #: Whether tokens lie in other places of the cache than in GOOD.
        self._is_moved = False
        for name, bundle in (("GOOD", good), ("BAD", bad)):
            if not bundle.statistics:
                self.unseen.append(
                    Gap.not_recorded(
                        "tensor statistics", f"{name} has none; run it with --launch-mode traced"
                    )
                )

    def with_renames(self, pair: Pair) -> Pair:
        """With `is_renamed`, as far as the launches so far tell."""
        facts = [
            msgspec.structs.replace(fact, is_renamed=fact.is_name and self._is_renamed(fact))
            for fact in pair.facts
        ]
        return msgspec.structs.replace(pair, facts=tuple(facts))

    def _is_renamed(self, fact: Difference) -> bool:
        return any(
            self._names[0][good] == {bad} and self._names[1][bad] == {good}
            for good, bad in self._swaps[fact.key]
        )

    def compare_counts(self) -> Compared:
        """How much has been compared so far."""
        names = ("steps", "launches", "arguments", "inputs", "statistics")
        return Compared(*(self.counts[name] for name in names))

    def walk(self) -> Iterator[Pair]:
        """What differs, launch by launch, as long as both runs compute the same text."""
        good, bad = steps_of(self.good), steps_of(self.bad)
        if not good or not bad:
            self.unseen.append(Gap.not_recorded("steps", "one of the runs has none"))
            return
        start = max(min(good), min(bad))
        self._is_whole = start == 1
        if start > min((*good, *bad)):
            self.unseen.append(
                Gap.not_recorded(f"steps before {start}", "one run has kept no record of them")
            )
        for step in sorted(step for step in good.keys() | bad.keys() if step >= start):
            for pair in self._step(step, good.get(step, []), bad.get(step, [])):
                yield pair
                if any(fact.parts_the_runs for fact in pair.facts):
                    return
            self.counts["steps"] += 1

    def _step(
        self, step: int, good: Sequence[Stepped | Launched], bad: Sequence[Stepped | Launched]
    ) -> Iterator[Pair]:
        def of_step(what: str, subject: str, one: str, other: str) -> Pair:
            fact = Difference(step=step, what=what, subject=subject, good=one, bad=other)
            return Pair(step=step, facts=(fact,))

        yield from draw_pairs(step, self._draws, good, bad)
        for one, other in zip(good, bad, strict=False):
            names = (self._name(self.good, one), self._name(self.bad, other))
            if names[0] != names[1] and not self._begin_otherwise(one, other):
                yield of_step("launch", "plan", *names)
            yield from self._event(step, names[1], one, other)
        if len(good) != len(bad):
            sizes = [f"{len(side)} plans or launches" for side in (good, bad)]
            yield of_step("end", "of the step", *sizes)

    def _begin_otherwise(self, good: Stepped | Launched, bad: Stepped | Launched) -> bool:
        """Whether a request begins here, and with other tokens."""
        if isinstance(good, Launched) or isinstance(bad, Launched):
            return False
        rows = zip(good.requests, bad.requests, strict=False)
        new = [(one.digest, other.digest) for one, other in rows if one.id not in self._met]
        return self._is_whole and any(are_comparable(*pair) and pair[0] != pair[1] for pair in new)

    def _name(self, index: BundleIndex, event: Stepped | Launched) -> str:
        if isinstance(event, Launched):
            return event.launch.kernel
        return plan.name or "plan" if (plan := index.plans.get(event.plan)) else "unknown plan"

    def _event(
        self, step: int, name: str, good: Stepped | Launched, bad: Stepped | Launched
    ) -> Iterator[Pair]:
        if isinstance(good, Launched) and isinstance(bad, Launched):
            places = Place(good.step, -1, good.seq), Place(bad.step, -1, bad.seq)
            yield from self._launch(step, name, places, (good.launch, bad.launch))
        if isinstance(good, Launched) or isinstance(bad, Launched):
            return
        found = list(self._requests(step, good.requests, bad.requests))
        if not any(difference.is_of_prompts for difference in found):
            found += self._inputs(good, bad)
        if found:
            self._is_moved |= any(fact.what in ("input", "request") for fact in found)
            yield Pair(step=step, facts=tuple(found))
        plans = self.good.plans.get(good.plan), self.bad.plans.get(bad.plan)
        if plans[0] is None or plans[1] is None:
            return
        last = self.bad.bundle.progress.submitted
        sides = plans[0].launches, plans[1].launches
        for first, second in align([[launch.kernel for launch in side] for side in sides]):
            number = second if second is not None else first
            assert number is not None
            if last and (last.step, last.plan) == (bad.step, bad.plan) and number > last.launch:
                kernel = sides[0][first].kernel if first is not None else sides[1][number].kernel
                fact = Difference(
                    step=step,
                    plan=name,
                    what="end",
                    subject="of the run",
                    good=f"goes on with {kernel}",
                    bad="ends there",
                    launch=number,
                    kernel=kernel,
                    place=Place(bad.step, bad.plan, number),
                )
                yield Pair(step=step, place=fact.place, facts=(fact,))
                return
            if first is None or second is None:
                yield self._alone(step, name, (good, bad), sides, (first, second))
                continue
            places = Place(good.step, good.plan, first), Place(bad.step, bad.plan, second)
            yield from self._launch(step, name, places, (sides[0][first], sides[1][second]))

    def _alone(
        self,
        step: int,
        plan: str,
        events: tuple[Stepped, Stepped],
        sides: Sequence[Sequence[LaunchRecord]],
        numbers: tuple[int | None, int | None],
    ) -> Pair:
        """A launch that one run alone has; of GOOD's the place is GOOD's."""
        side = 0 if numbers[0] is not None else 1
        number = numbers[side]
        assert number is not None
        kernel = sides[side][number].kernel
        place = Place(events[side].step, events[side].plan, number)
        told = (kernel, "absent") if side == 0 else ("absent", kernel)
        fact = Difference(
            step=step,
            plan=plan,
            what="launch",
            subject="",
            good=told[0],
            bad=told[1],
            launch=number,
            kernel=kernel,
            place=place if side else None,
        )
        return Pair(step=step, place=place if side else None, facts=(fact,))

    # -- requests and inputs --------------------------------------------------------------------

    def _requests(
        self, step: int, good: Sequence[RequestRecord], bad: Sequence[RequestRecord]
    ) -> Iterator[Difference]:
        if len(good) != len(bad):
            yield Difference(
                step=step, what="request", subject="count", good=str(len(good)), bad=str(len(bad))
            )
        for row, (one, other) in enumerate(zip(good, bad, strict=False)):
            digests = one.digest, other.digest
            is_first = self._is_whole and one.id not in self._met
            self._met.add(one.id)
            if not are_comparable(*digests):
                self._tell_of_keys(*digests)
            elif digests[0] != digests[1]:
                what = "prompt" if is_first else "tokens"
                if is_first and one.num_tokens != other.num_tokens:
                    what, digests = "prompt size", (f"{one.num_tokens}", f"{other.num_tokens}")
                first, second = digests
                yield Difference(step=step, what=what, subject=f"{row}", good=first, bad=second)
                if is_first:  # all else that differs follows from it
                    continue
            for name in ("row", "first_position", "num_tokens", "blocks"):
                pair = getattr(one, name), getattr(other, name)
                if pair[0] != pair[1]:
                    yield Difference(
                        step=step,
                        what="request",
                        subject=f"{row}, {name}",
                        good=short_text(pair[0]),
                        bad=short_text(pair[1]),
                    )

    def _tell_of_keys(self, good: str, bad: str) -> None:
        """Say once that two digests are there and say nothing of each other."""
        gap = Gap.not_recorded(
            "whether requests had the same token ids",
            "the bundles come from two machines or users, whose digests have different keys",
        )
        if good and bad and gap not in self.unseen:
            self.unseen.append(gap)

    def _inputs(self, good: Stepped, bad: Stepped) -> Iterator[Difference]:
        sides = [
            {self._name_of(index, values.tensor): values for values in event.inputs}
            for index, event in ((self.good, good), (self.bad, bad))
        ]
        filled = {
            self._name_of(self.good, good.filled_by_device),
            self._name_of(self.bad, bad.filled_by_device),
        }
        for name in dict.fromkeys((*sides[0], *sides[1])):
            one, other = (side.get(name) for side in sides)
            if name in filled and (one is None or other is None):
                self.unseen.append(
                    Gap.not_recorded(f"{name} of step {bad.step}", "a run did not live to learn it")
                )
                continue
            self.counts["inputs"] += 1
            at = ""
            if one is None or other is None:
                told = ["nothing" if v is None else f"{v.dtype} {v.shape}" for v in (one, other)]
            elif (one.dtype, one.shape) != (other.dtype, other.shape):
                told = [f"{v.dtype} {dims_text(v.shape)}" for v in (one, other)]
            elif one.data != other.data:
                at, told = first_element(one, other)
            else:
                continue
            yield Difference(
                step=good.step,
                what="input",
                subject=f"{name}{at}",
                good=told[0],
                bad=told[1],
                tensor=name,
            )

    def _name_of(self, index: BundleIndex, tensor: int) -> str:
        return record.name if (record := index.tensors.get(tensor)) else f"tensor {tensor}"

    # -- launches -------------------------------------------------------------------------------

    def _launch(
        self,
        step: int,
        plan: str,
        places: tuple[Place, Place],
        pair: tuple[LaunchRecord, LaunchRecord],
    ) -> Iterator[Pair]:
        good, bad = pair
        self.counts["launches"] += 1

        def differs(what: str, subject: str, one: object, other: object) -> Difference:
            return Difference(
                step=step,
                plan=plan,
                launch=places[1].launch,
                kernel=bad.kernel,
                place=places[1],
                what=what,
                subject=subject,
                good=short_text(one),
                bad=short_text(other),
            )

        if good.kernel != bad.kernel:
            facts = [differs("launch", "name", good.kernel, bad.kernel)]
            yield Pair(step=step, place=places[1], facts=tuple(facts))
            return
        facts = [*self._facts(pair, differs), *self._contents(places, pair, differs)]
        before = self.counts["statistics"]
        results = tuple(self._results(places, pair, differs))
        if facts or results:
            num_results = self.counts["statistics"] - before
            yield Pair(
                step=step,
                place=places[1],
                facts=tuple(facts),
                results=results,
                num_results=num_results,
            )

    def _facts(
        self, pair: tuple[LaunchRecord, LaunchRecord], differs: Callable[..., Difference]
    ) -> Iterator[Difference]:
        good, bad = pair
        if good.grid != bad.grid:
            yield differs("grid", "", good.grid, bad.grid)
        if good.num_warps != bad.num_warps:
            yield differs("option", "num_warps", good.num_warps, bad.num_warps)
        for one, other in ((good.constants, bad.constants), (good.options, bad.options)):
            for name in dict.fromkeys((*one, *other)):
                if one.get(name) != other.get(name) and not is_of_device(name):
                    yield differs("option", name, one.get(name), other.get(name))
        sides = [
            {
                argument.name: self._argument(index, argument)
                for argument in (*launch.facts, *launch.arguments)
            }
            for index, launch in zip((self.good, self.bad), pair, strict=True)
        ]
        for name in dict.fromkeys((*sides[0], *sides[1])):
            self.counts["arguments"] += 1
            one, other = sides[0].get(name) or {}, sides[1].get(name) or {}
            names = one.get("name"), other.get("name")
            if isinstance(names[0], str) and isinstance(names[1], str):
                self._names[0][names[0]].add(names[1])
                self._names[1][names[1]].add(names[0])
            if one == other:
                continue
            found = differs("argument", name, *only_differing(one or None, other or None))
            if names[0] and names[1] and one | {"name": names[1]} == other:
                found = msgspec.structs.replace(found, is_name=True)
                self._swaps[found.key].add((str(names[0]), str(names[1])))
            yield found

    def _argument(self, index: BundleIndex, argument: ArgumentRecord) -> dict[str, Any]:
        """What is comparable of an argument: never an address or an identity."""
        if argument.tensor is None:
            return {"value": argument.value}
        tensor = index.tensors.get(argument.tensor)
        if tensor is None:
            return {"tensor": "unknown"}
        allocation = index.allocations.get(tensor.allocation)
        room = allocation.num_bytes if allocation is not None else None
        return {**tensor_facts(tensor), "pointer": argument.value, "allocation bytes": room}

    def _contents(
        self,
        places: tuple[Place, Place],
        pair: tuple[LaunchRecord, LaunchRecord],
        differs: Callable[..., Difference],
    ) -> Iterator[Difference]:
        """Weights and tables that hold other numbers, at the first launch that reads them."""
        sides = self._sightings(places, pair, of_model=True)
        for name in [name for name in sides[0] if name in sides[1]]:
            one, other = sides[0][name], sides[1][name]
            tensor = self._name_of(self.bad, other.tensor)
            self.counts["arguments"] += 1
            if are_not_told(one, other, self._is_same_device):
                why = "the two runs have digests of other keys, or ran on other devices"
                self.unseen.append(Gap.not_examined(f"what {tensor} holds", why))
            elif not is_equal(one, other, self._is_same_device):
                found = differs("contents", name, contents_text(one), contents_text(other))
                yield msgspec.structs.replace(found, tensor=tensor)

    def _results(
        self,
        places: tuple[Place, Place],
        pair: tuple[LaunchRecord, LaunchRecord],
        differs: Callable[..., Difference],
    ) -> Iterator[Difference]:
        sides = self._sightings(places, pair, of_model=False)
        for name in [name for name in sides[0] if name in sides[1]]:
            one, other = sides[0][name], sides[1][name]
            tensor = self.bad.tensors.get(other.tensor)
            if self._is_moved and tensor is not None and tensor.owner == "kv_cache":
                why = "tokens lie in other places of it than in GOOD"
                gap = Gap.not_examined("what the cache held", why)
                if gap not in self.unseen:
                    self.unseen.append(gap)
                continue
            self.counts["statistics"] += 1
            if is_equal(one, other, self._is_same_device):
                continue
            # Without a sketch nobody knows how far apart the elements are.
            is_exact = tensor is not None and tensor.dtype in _COUNTED
            name = self._name_of(self.bad, other.tensor)
            found = differs("statistics", name, figures_text(one), figures_text(other))
            yield msgspec.structs.replace(
                found,
                is_rounding=bool(one.sketch and other.sketch)
                and not is_exact
                and is_close(one, other),
            )

    def _sightings(
        self,
        places: tuple[Place, Place],
        pair: tuple[LaunchRecord, LaunchRecord],
        *,
        of_model: bool,
    ) -> list[dict[str, Statistics]]:
        """What was seen of a launch's tensors: of the model's, or of all others.

        By argument, for a buffer may have another name in the other run."""
        found: list[dict[str, Statistics]] = []
        indices = (self.good, self.bad)
        for index, launch, of, place in zip(indices, pair, self._statistics, places, strict=True):
            names: dict[int, str] = {}
            for argument in (*launch.arguments, *launch.facts):  # a fact's name goes before
                if argument.tensor is not None:
                    names[argument.tensor] = argument.name
            found.append({})
            for figures in of.get(place, ()):
                tensor = index.tensors.get(figures.tensor)
                if (tensor is not None and tensor.owner == "model") is of_model:
                    name = names.get(figures.tensor, self._name_of(index, figures.tensor))
                    found[-1][name] = figures
        return found
