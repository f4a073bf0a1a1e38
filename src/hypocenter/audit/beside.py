"""Gates that hold the model against another load of it: another device, two ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.equivalence import OwnGates
from hypocenter.audit.executed import OwnRecord
from hypocenter.audit.gates import Gate, not_audited
from hypocenter.audit.ways import Ways
from hypocenter.base.dtypes import Float64s
from hypocenter.base.errors import HypoError
from hypocenter.base.wording import count_text
from hypocenter.engine.llm import LLM
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig, is_simulated
from hypocenter.verify.outcome import Stage, Uncovered
from hypocenter.verify.rounding import reach_of_rounding

#: The simulated GPU that a CPU is held against.
SIM = "sim:h200"
#: Multiply-adds that it may take to do so: of the order of a minute.
MOST_SIMULATED = 1 << 26
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
        if other == SIM and (num_done := length * _num_weights(self.path)) > MOST_SIMULATED:
            why = (
                f"a processor that stands for {SIM} does at most {MOST_SIMULATED / 1e6:.0f} "
                f"million multiply-adds here, and {length} tokens are {num_done / 1e6:,.0f} "
                "million"
            )
            return not_audited("device", asks, why)
        whole: dict[str, Any] = {"tensor_parallel": 1, "cpu_moe": False, "n_cpu_moe": 0}
        with self._open_other(device=other, **whole) as found:
            if isinstance(found, HypoError):
                return not_audited("device", asks, f"{other} does not run it: {found}")

            def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
                yield self._read(found, length), self.own.read("at once", length)

            left = _left_of_amd(device)
            reach = self._own_reach(length) if device == "cpu" else self._reach(found, length)
            gate = Gate("device", asks, "devices", pairs, self.allowed, uncovered=left, reach=reach)
            return gate.run()

    def ranks(self) -> Stage:
        """The same prompt on one process, and on several with a part of the model each: one of the
        two is the model as it is loaded."""
        device, num_own = self.config.device, self.config.tensor_parallel
        num_other = 1 if num_own > 1 else _NUM_RANKS
        asks = f"do {max(num_own, num_other)} ranks give what one does?"
        if device == "cpu":
            return not_audited("ranks", asks, "ranks are of GPUs, and the model runs on the CPU")
        length = self._length(device, device)
        with self._open_other(tensor_parallel=num_other) as found:
            if isinstance(found, HypoError):
                do_not = "1 rank does not" if num_other == 1 else f"{num_other} ranks do not"
                return not_audited("ranks", asks, f"{do_not} run it: {found}")

            def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
                yield (
                    self.own.read(count_text(num_own, "rank"), length, num_processes=num_own),
                    self._read(found, length, num_processes=num_other),
                )

            reach = self._own_reach(length) if num_own == 1 else self._reach(found, length)
            return Gate("ranks", asks, "num_processes", pairs, self.allowed, reach=reach).run()

    def _length(self, device: str, other: str) -> int:
        is_slow = is_simulated(device) or is_simulated(other)
        return min(6, self.own.sizes.read) if is_slow else self.own.sizes.read

    def _own_reach(self, length: int) -> Callable[[], Float64s]:
        """How far rounding alone moves what the model gives, as it is loaded."""
        runner = self.own.ways.runner
        return lambda: reach_of_rounding(runner, lambda: self.own.read("at once", length).rows)

    def _reach(self, llm: LLM, length: int) -> Callable[[], Float64s]:
        """The same of another load."""
        runner = llm.engine.runner
        return lambda: reach_of_rounding(runner, lambda: self._read(llm, length).rows)

    def _read(self, llm: LLM, length: int, **asked: object) -> AuditedRun:
        ways = Ways(llm, self.record, llm.route().device)
        request = ways.reading(ways.ids(length))
        return ways.run("at once", [request], {"length": length, "chunks": (length,), **asked})

    @contextlib.contextmanager
    def _open_other(self, **fields: Any) -> Iterator[LLM | HypoError]:
        """The model with other settings in these fields, or why it cannot be had."""
        with contextlib.ExitStack() as stack:
            try:
                config = replace(self.config, **fields)
                found: LLM | HypoError = stack.enter_context(LLM(self.path, config))
            except HypoError as error:
                found = error
            yield found


def _num_weights(path: str) -> int:
    """All numbers of a model's tensors, each of which is a multiply-add of a token at most."""
    with open_gguf(Path(path)) as file:
        return sum(math.prod(tensor.shape) for tensor in file.tensors.values())


def _left_of_amd(device: str) -> tuple[Uncovered, ...]:
    """Why no emulated AMD GPU is held against a real one."""
    why = f"the model runs on {device}, which is no AMD GPU"
    if device.startswith("hip"):
        why = f"{device} is held against the CPU alone"
    return (Uncovered("an emulated AMD GPU beside a real one", why),)
