"""Every contract of the house, found by a kernel's facts; imports no Triton and no torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection

from hypocenter.base.package import kernel_module
from hypocenter.contracts.contract import Contract
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Declaration, LaunchRecord

_FILES = (
    "activation",
    "attention",
    "collectives",
    "delta_rule",
    "embedding",
    "experts",
    "gate_norm",
    "grouping",
    "head_linear",
    "kv_write",
    "latent_write",
    "layer_norm",
    "linear",
    "linear_gate",
    "mark",
    "mixing",
    "norm",
    "peer_sum",
    "quantise",
    "rope",
    "rope_write",
    "routing",
    "sampling",
    "sampling_contracts",
    "short_conv",
    "ssm_scan",
    "unfused",
)


@functools.cache
def all_contracts() -> tuple[Contract, ...]:
    """The contracts at the top of the ops' files, alone or in tuples, each once."""
    found: dict[int, Contract] = {}
    for file in _FILES:
        module = importlib.import_module(kernel_module(file))
        for value in vars(module).values():
            several = value if isinstance(value, tuple) else (value,)
            found |= {
                id(contract): contract for contract in several if isinstance(contract, Contract)
            }
    return tuple(found.values())


def contract_of(
    kernel: str, names: Collection[str], declaration: Declaration | None = None
) -> Contract | None:
    """The contract of a launch of `kernel` whose arguments have these names; None if there is none.

    Kernels share contracts (lookup_float and lookup_codes), and contracts share names (expand of
    keys and of values), so the declaration, as recorded, decides among those that fit.
    """
    fitting = [contract for contract in all_contracts() if set(contract.names) == set(names)]
    equal = [contract for contract in fitting if contract.declaration == declaration]
    same_name = [contract for contract in fitting if kernel.startswith(contract.kernel)]
    return next(iter((*equal, *same_name, *fitting)), None)


def recorded_contract(bundle: Bundle, launch: LaunchRecord) -> Contract | None:
    """As `contract_of`, of a launch in a bundle; of a program's own kernel there is none."""
    names = [fact.name for fact in launch.facts]
    if not names:  # every contract has some, and reading all of them takes its time
        return None
    return contract_of(launch.kernel, names, bundle.declaration(launch))
