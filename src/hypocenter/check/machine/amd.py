"""`hypocenter.amd`: launches of AMD's code, executed by our emulator of it; not hardware."""

from __future__ import annotations

from hypocenter.check.machine.launch import MachineReport, code_of_file, launch
from hypocenter.check.machine.memory import unwritten
from hypocenter.check.machine.queue import Queue
from hypocenter.device.amd.kernarg import LaunchShape

__all__ = ["LaunchShape", "MachineReport", "Queue", "code_of_file", "launch", "unwritten"]
