"""The run that `hypo demo` breaks: the engine on the bundled model, with a defect in this process.

`python -m hypocenter.cli.demo_run DEVICE`. On a simulated GPU the positions of a step have 2 bytes
each, and a kernel reads them as 4-byte integers, with the checks off that would refuse them. On the
CPU a block table names a block that there is not, and the engine's check refuses it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hypocenter.base.errors import EXIT_OK, HypoError
from hypocenter.base.package import bundled_model
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.device import copies, devices
from hypocenter.device.memory import allocate
from hypocenter.engine.batch import Batch
from hypocenter.engine.runner import Runner
from hypocenter.model.layers.step_buffers import StepInputs
from hypocenter.record.recorder import open_recorder
from hypocenter.settings.config import EngineConfig, SamplingParams

ON_GPU = "the position buffer holds 2-byte elements, rope_write reads 4-byte integers"
ON_CPU = "a block table names block 40000, and the check sees it"
_PROMPT, _FAR_BLOCK = (72, 105, 300), 40_000
_SIZES: dict[str, Any] = {"context_length": 64, "max_batch_tokens": 4, "max_batch_requests": 2}


def plant(device: str) -> None:
    """Put the defect into the engine of this process."""
    if device == "cpu":
        _change_steps(_name_far_block)
        return
    _accept_all()
    allocate_inputs = vars(StepInputs)["allocate"].__func__

    def with_narrow(cls: Any, /, num_tokens: int, *sizes: int, **more: Any) -> StepInputs:
        inputs: StepInputs = allocate_inputs(cls, num_tokens, *sizes, **more)
        return replace(inputs, positions=_narrow(num_tokens, more["device"]))

    setattr(StepInputs, "allocate", classmethod(with_narrow))  # noqa: B010 (it is exchanged)
    _change_steps(lambda batch: replace(batch, positions=batch.positions.astype(np.int16)))


def _narrow(num_tokens: int, device: str) -> Tensor:
    """Positions of 2 bytes; a pointer of C has no type, and is taken for one of 4-byte integers."""
    positions = allocate("positions", "step", DType.I16, (num_tokens,), device=device)
    backend = devices.backend_of(device)
    return replace(positions, data=backend.argument(positions.address, DType.I32, num_tokens // 2))


def _name_far_block(batch: Batch) -> Batch:
    tables = batch.block_tables.copy()
    tables[0, 0] = _FAR_BLOCK
    return replace(batch, block_tables=tables)


def _change_steps(change: Any) -> None:
    run = Runner.run

    def run_changed(runner: Runner, batch: Batch, *given: Any, **named: Any) -> Any:
        return run(runner, change(batch), *given, **named)

    setattr(Runner, "run", run_changed)  # noqa: B010 (it is exchanged)


def _accept_all() -> None:
    """Switch off what would refuse the defect before it does harm; the recorder notes that."""
    import hypocenter.model.offline.specimens  # noqa: F401  (every module of kernels)

    for name, module in list(sys.modules.items()):
        if name.startswith("hypocenter.kernels."):
            contracts = [value for value in vars(module).values() if isinstance(value, Contract)]
            for contract in contracts:
                object.__setattr__(contract, "check", lambda **arguments: {})
    setattr(Runner, "_check", lambda runner, batch: None)  # noqa: B010 (it is exchanged)
    copies.arm_copies(False)
    recorder = open_recorder()
    recorder.arm("contracts", False)
    recorder.arm("step indices", False)


def main(words: Sequence[str]) -> int:
    """Generate with the defect; returns the exit status of the fault."""
    from hypocenter.engine.llm import LLM

    [device] = words
    try:
        plant(device)
        with LLM(bundled_model(), EngineConfig(device=device, **_SIZES)) as llm:
            llm.generate([list(_PROMPT)], SamplingParams(max_tokens=3, ignore_eos=True))
    except HypoError as error:
        open_recorder().record_failure(error)
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
