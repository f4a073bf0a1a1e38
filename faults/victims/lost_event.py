"""The step waits for an event that nobody ever records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.device import devices
from hypocenter.device.sim.queue import SimEvent
from hypocenter.doctor.causes import Cause


def waiting(*, recorded: bool) -> Any:
    def before(runner: Any, batch: Any) -> Any:
        device = runner.config.device
        with devices.stream(device, "draft"):
            event = devices.record_event(device)
        lost = replace(event, id=event.id + 1_000_000, handle=SimEvent())
        devices.wait_event(device, event if recorded else lost)
        return batch

    return before


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.before_step(waiting(recorded=False))


def twin(lab: Lab) -> None:
    lab.disarm()
    lab.before_step(waiting(recorded=True))


VICTIM = Victim(
    name="lost_event",
    title="the main stream waits for an event of a branch that was not taken",
    truth=Truth(causes=(Cause.LOST_EVENT,), kernels=("",)),
    symptom="hang",
    source="vllm#54269",
    plant=plant,
    twin=twin,
)
