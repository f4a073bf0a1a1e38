"""What tuning does to a kernel that works in place: it runs it on its own result.

Triton runs a kernel in each configuration on the tensors of the launch before it launches the best.
Decides by trial: a benchmark and the launch, against the launch alone. Runs nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hypocenter.base.dtypes import Array
from hypocenter.foreign.tuning_hooks import decorator_of
from hypocenter.replay.findings import ChangedResult, Finding, FindingKind, Site


def storage_bytes(tensor: torch.Tensor) -> Array:
    """The bytes of a tensor's storage, live."""
    raw: Array = torch.as_tensor(tensor.untyped_storage(), dtype=torch.uint8).numpy()
    return raw


def tensors_in(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among a launch's arguments, and those of descriptors."""
    found = {}
    for name, value in arguments.items():
        tensor = value if isinstance(value, torch.Tensor) else getattr(value, "base", None)
        if isinstance(tensor, torch.Tensor):
            found[name] = tensor
    return found


def changed_by_tuning(
    arguments: Mapping[str, Any],
    restore: Callable[[], None],
    launch: Callable[[], None],
    benchmark: Callable[[], None],
) -> ChangedResult | None:
    """The first argument that holds another result after a benchmark and the launch.

    Leaves the tensors as the launch alone leaves them.
    """
    tensors = tensors_in(arguments)
    restore()
    zeros = {name for name, tensor in tensors.items() if not tensor.any()}
    launch()
    alone = {name: storage_bytes(tensor).copy() for name, tensor in tensors.items()}
    restore()
    benchmark()
    launch()
    found = None
    for name, tensor in tensors.items():
        raw = storage_bytes(tensor)
        if found is None and not np.array_equal(raw, alone[name]):
            found = _difference(name, tensor, alone[name], name in zeros)
        np.copyto(raw, alone[name])
    return found


def _difference(
    name: str, tensor: torch.Tensor, alone: Array, was_zero: bool
) -> ChangedResult | None:
    once = torch.from_numpy(alone.copy()).view(tensor.dtype)
    once = once.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    differ = (once != tensor) & ~((once != once) & (tensor != tensor))
    if not differ.any():  # beside the tensor's own elements, or NaN both times
        return None
    at = tuple(int(i) for i in differ.nonzero()[0])
    return ChangedResult(name, at, once[at].item(), tensor[at].item(), was_zero)


def finding_of(
    kernel: str,
    function: Any,
    changed: ChangedResult,
    configuration: str | None,
    launched_at: Site | None,
) -> Finding:
    """The difference as a finding at the line of the decorator that tunes."""
    decorator = decorator_of(function)
    sites: tuple[Site, ...] = ()
    if decorator is not None:
        first = decorator.text.partition("\n")[0].strip()
        sites = (Site(decorator.file, decorator.line, function.__name__, first),)
    return Finding(
        kind=FindingKind.TUNED_IN_PLACE,
        kernel=kernel,
        operation="tuning",
        argument=changed.argument,
        element=changed.index,
        detail=f"{changed.text('one benchmark and the launch')}; pass "
        f'{changed.option}=["{changed.argument}"] to triton.autotune',
        sites=sites,
        configuration=configuration,
        launched_at=launched_at,
    )
