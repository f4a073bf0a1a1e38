"""One launch of a program of anybody's, as the doctor gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.bundle import Bundle
from hypocenter.record.contents import LaunchOutcome, Snapshot
from hypocenter.record.events import FOREIGN, OUTSIDE_PLANS, Launched, Values
from hypocenter.record.fault_record import FaultRecord
from recorded.bundles import Run


@dataclass(frozen=True)
class Launch:
    """`tensors` are types and shapes by name, `held` what some held, `strides` those of views."""

    text: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    scalars: dict[str, int] = field(default_factory=dict)
    grid: tuple[int, ...] = (1,)
    constants: dict[str, int] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def diagnosis(self, good: Bundle | None = None) -> Diagnosis:
        return diagnose(self.bundle(), good, allow_source=True)

    def bundle(self, gave: Mapping[str, Any] | None = None) -> Bundle:
        """A run of it; with `gave` it is known what these tensors held after it."""
        run = Run()
        for name, (dtype, shape) in self.tensors.items():
            run.tensor(name, dtype, *shape, owner=FOREIGN, strides=self.strides.get(name))
        run.step += 1
        launch = run.launch(
            self.text.split("def ")[1].split("_kernel")[0],
            {},
            {name: name for name in self.tensors} | self.scalars,
            source=self.text,
            grid=self.grid,
            site="program.py:40",
            constants=self.constants,
        )
        run.emit(Launched, launch=launch)
        bundle = run.bundle(FaultRecord(kind="none", message=""))
        values = tuple(self._values(run, name, array) for name, array in self.held.items())
        if gave is not None:
            after = tuple(self._values(run, name, array) for name, array in gave.items())
            outcome = LaunchOutcome(step=1, launch=run.seq, given=values, gave=after)
            return msgspec.structs.replace(bundle, outcomes=(outcome,))
        snapshot = Snapshot(1, OUTSIDE_PLANS, run.seq, values)
        return msgspec.structs.replace(bundle, snapshots=(snapshot,) if values else ())

    def _values(self, run: Run, name: str, array: Any) -> Values:
        return Values(run.tensors[name].id, self.tensors[name][0], array.shape, array.tobytes())
