"""Gates that hold the model against another load of it: another device, two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.equivalence import OwnGates
from hypocenter.audit.executed import OwnRecord
from hypocenter.audit.gates import Gate, not_audited
from hypocenter.audit.ways import Ways
from hypocenter.base.errors import UsageError
from hypocenter.engine.llm import LLM
from hypocenter.settings.config import EngineConfig, is_simulated
from hypocenter.verify.outcome import Stage, Uncovered

#: The simulated GPU that a CPU is held against.
SIM = "sim:h200"
_NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class Beside:
    """The model at `path`, loaded once more to be held against `own`."""

    path: str
    own: OwnGates
    config: EngineConfig
    record: OwnRecord
    allowed: float

    def device(self) -> Stage:
        """The same prompt on another kind of device."""
        device = self.config.device
        other = SIM if device == "cpu" else "cpu"
        asks = f"are results those of {other}?"
        length = self._length(device, other)
        with self._open_other(replace(self.config, device=other)) as found:
            if isinstance(found, UsageError):
                return not_audited("device", asks, f"{other} does not run it: {found}")

            def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
                yield self._read(found, length), self.own.read("at once", length)

            left = () if device.startswith("hip") else _no_amd_card(device)
            return Gate("device", asks, "devices", pairs, self.allowed, uncovered=left).run()

    def ranks(self) -> Stage:
        """The same prompt on two processes, each with a part of the model."""
        asks = f"do {_NUM_RANKS} ranks give what one does?"
        device = self.config.device
        if device == "cpu":
            return not_audited("ranks", asks, "ranks are of GPUs, and the model runs on the CPU")
        length = self._length(device, device)
        with self._open_other(replace(self.config, tensor_parallel=_NUM_RANKS)) as found:
            if isinstance(found, UsageError):
                return not_audited("ranks", asks, f"{_NUM_RANKS} ranks do not run it: {found}")

            def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
                yield (
                    self.own.read("one rank", length, num_processes=1),
                    self._read(found, length, num_processes=_NUM_RANKS),
                )

            return Gate("ranks", asks, "num_processes", pairs, self.allowed).run()

    def _length(self, device: str, other: str) -> int:
        is_slow = is_simulated(device) or is_simulated(other)
        return min(6, self.own.sizes.read) if is_slow else self.own.sizes.read

    def _read(self, llm: LLM, length: int, **asked: object) -> AuditedRun:
        ways = Ways(llm, self.record, llm.route().device)
        request = ways.reading(ways.ids(length))
        return ways.run("at once", [request], {"length": length, "chunks": (length,), **asked})

    @contextlib.contextmanager
    def _open_other(self, config: EngineConfig) -> Iterator[LLM | UsageError]:
        """The model under another configuration, or why it cannot be had."""
        with contextlib.ExitStack() as stack:
            try:
                found: LLM | UsageError = stack.enter_context(LLM(self.path, config))
            except UsageError as error:
                found = error
            yield found


def _no_amd_card(device: str) -> tuple[Uncovered, ...]:
    why = f"the model runs on {device}, which is no AMD GPU"
    return (Uncovered("an emulated AMD GPU beside a real one", why),)
