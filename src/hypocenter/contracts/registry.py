"""Every contract of the house, found by a kernel's facts; imports no Triton and no torch."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Collection

from hypocenter.base.package import module_files, module_name
from hypocenter.contracts.contract import Contract, named_contracts
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Declaration, LaunchRecord

_CALL = re.compile(r"\bContract\(")


@functools.cache
def contract_modules() -> tuple[str, ...]:
    """The modules of kernels that declare contracts, by their text; none is imported for that."""
    return tuple(
        module_name(path)
        for path in (*module_files("contracts"), *module_files("kernels"))
        if not path.stem.endswith(("_cpu", "_gpu", "contract")) and _CALL.search(path.read_text())
    )


@functools.cache
def all_contracts() -> tuple[Contract, ...]:
    """The contracts at the top of the ops' files, alone or in tuples, each once."""
    modules = map(importlib.import_module, contract_modules())
    named = (contract for module in modules for _, contract in named_contracts(vars(module)))
    return tuple({id(contract): contract for contract in named}.values())


def contract_at(place: str) -> Contract | None:
    """The contract that says of itself that it stands there, `Contract.place`; None if none does.

    A place may come from a bundle: only modules of kernels are imported for it.
    """
    module, _, name = place.partition(":")
    if module not in contract_modules():
        return None
    return dict(named_contracts(vars(importlib.import_module(module)))).get(name)


def contract_of(
    kernel: str, names: Collection[str], declaration: Declaration | None = None
) -> Contract | None:
    """The contract of a launch of `kernel` whose arguments have these names; None if there is none.

    For records that do not say where their contract stands. Kernels share contracts (lookup_float
    and lookup_codes), and contracts share names (expand of keys and of values), so the declaration,
    as recorded, decides among those that fit.
    """
    fitting = [contract for contract in all_contracts() if set(contract.names) == set(names)]
    equal = [contract for contract in fitting if contract.declaration == declaration]
    same_name = [contract for contract in fitting if kernel.startswith(contract.kernel)]
    return next(iter((*equal, *same_name, *fitting)), None)


def recorded_contract(bundle: Bundle, launch: LaunchRecord) -> Contract | None:
    """Does what `contract_of` does, of a launch in a bundle; of a program's own kernel there is
    none."""
    names = [fact.name for fact in launch.facts]
    if not names:  # every contract has some, and reading all of them takes its time
        return None
    declared = contract_at(launch.declared)
    if declared is not None and set(declared.names) == set(names):
        return declared
    return contract_of(launch.kernel, names, bundle.declaration(launch))
