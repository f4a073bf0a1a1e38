"""One launch of a program of anybody's, as the doctor gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from bundles import Run

from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import FOREIGN, OUTSIDE_PLANS, Launched, Values
from hypocenter.record.fault_record import FaultRecord


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

    def diagnosis(self) -> Diagnosis:
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
        values = tuple(
            Values(run.tensors[name].id, self.tensors[name][0], array.shape, array.tobytes())
            for name, array in self.held.items()
        )
        snapshot = Snapshot(1, OUTSIDE_PLANS, run.seq, values)
        bundle = msgspec.structs.replace(bundle, snapshots=(snapshot,) if values else ())
        return diagnose(bundle, allow_source=True)
