"""What a launch of which all is known writes, as its replay makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES, Array, bf16_to_f32
from hypocenter.base.errors import NotReplayed
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.events import OUTSIDE_PLANS, Place, TensorRecord
from hypocenter.replay.arguments import Argument
from hypocenter.replay.corrections import element_bytes, elements_of
from hypocenter.replay.rebuild import Rebuilt
from hypocenter.replay.recorded import replay_place
from hypocenter.replay.terms import KernelText, Schedule, SeenReplay


@dataclass(frozen=True, slots=True)
class Written:
    """What a tensor holds after a launch, and which of its elements the launch wrote."""

    tensor: TensorRecord
    rows: Array  # its shape, and the bytes of an element
    is_written: Array  # its shape

    def differs(self, other: Written) -> Array:
        """Which elements hold other bytes, of those that are written both times."""
        found: Array = (self.rows != other.rows).any(axis=-1)
        return found & self.is_written & other.is_written

    def number(self, index: tuple[int, ...]) -> float | int:
        """An element, for a type that NumPy or this package knows."""
        data = np.ascontiguousarray(self.rows[index])
        if self.tensor.dtype == "BF16":
            return float(bf16_to_f32(data.view(np.uint16))[0])
        kind = (
            np.dtype(np.float16) if self.tensor.dtype == "F16" else NUMPY_DTYPES[self.tensor.dtype]
        )
        value: float | int = data.view(kind)[0].item()
        return value


def written_with(
    bundle: Bundle, outcome: LaunchOutcome, *, allow_source: bool, budget_seconds: float
) -> Mapping[str, Written]:
    """What the launch of an outcome writes when its tensors hold what is `given`, by parameter.

    Raises as `replay_place` does, and NotReplayed where not every program was run.
    """
    place = Place(outcome.step, OUTSIDE_PLANS, outcome.launch)
    index = BundleIndex(msgspec.structs.replace(bundle, outcomes=(outcome,)))
    found: dict[str, Written] = {}

    def keep(rebuilt: Rebuilt, done: Sequence[Argument]) -> None:
        for argument in done:
            tensor, region = rebuilt.tensors.get(argument.name), argument.region
            if tensor is None or region.data is None or not argument.was_written:
                continue
            width = element_bytes(tensor.dtype) or 1
            wrote = np.repeat(region.writer != 0, region.granule)[: region.data.size]
            rows = elements_of(region.data[argument.start :], tensor, width)
            whole = elements_of(wrote[argument.start :], tensor, width)
            if rows is not None and whole is not None:
                found[argument.name] = Written(tensor, rows.copy(), np.asarray(whole.all(axis=-1)))

    report = replay_place(
        index,
        place,
        text=KernelText(allow_source),
        schedule=Schedule(budget_seconds=budget_seconds),
        seen=SeenReplay(keep),
    )
    if not report.coverage.is_complete:
        raise NotReplayed(index.launch(place).kernel, "was not replayed whole")
    return found
