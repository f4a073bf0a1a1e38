"""In a process of its own: one recorded launch, made as often and in the forms that are asked for.

`device_runs.py` starts it, with what to do and where to leave what came of it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from hypocenter.replay.outcomes.forms import Ran, RunForm
from hypocenter.replay.reproduction import place_on_cpu, place_on_gpu, pointer_to

#: What a GPU runs, by Triton's names.
_BINARIES = ("cubin", "hsaco")


def make_runs(
    kernel: Any,
    grid: Sequence[int],
    memories: Mapping[int, Mapping[str, Any]],
    tensors: Mapping[str, Mapping[str, Any]],
    numbers: Mapping[str, Any],
    options: Mapping[str, Any],
) -> int:
    """Make the launch in each form of the file named first, and write a Ran of each to the second.

    `memories` and `tensors` are as for `reproduce`. Returns the exit status, which is 0.
    """
    asked, out = Path(sys.argv[1]), Path(sys.argv[2])
    found: list[Ran] = []
    for form in msgspec.msgpack.decode(asked.read_bytes(), type=list[RunForm]):
        try:
            found.append(_run(kernel, tuple(grid), memories, tensors, numbers, {**options}, form))
        except Exception as error:  # of a compiler or a driver: it is what there is to tell
            found.append(Ran(problem=f"{type(error).__name__}: {error}"))
        out.write_bytes(msgspec.msgpack.encode(found))  # a later form may end the process
    return 0


def _run(
    kernel: Any,
    grid: tuple[int, ...],
    memories: Mapping[int, Mapping[str, Any]],
    tensors: Mapping[str, Mapping[str, Any]],
    numbers: Mapping[str, Any],
    options: dict[str, Any],
    form: RunForm,
) -> Ran:
    is_on_cpu = os.environ.get("TRITON_INTERPRET") == "1"
    if not is_on_cpu and form.device >= torch.cuda.device_count():
        return Ran(problem=f"there is no GPU {form.device}")
    runs, compiled = [], None
    if not is_on_cpu:
        torch.cuda.set_device(form.device)
    for _ in range(form.num_runs):
        make = place_on_cpu if is_on_cpu else place_on_gpu
        places = {key: make(memory) for key, memory in memories.items()}
        pointers = {name: pointer_to(t, places, is_on_cpu) for name, t in tensors.items()}
        compiled = kernel[grid](**pointers, **numbers, **(options | form.options))
        if not is_on_cpu:
            torch.cuda.synchronize()
        held = {key: read() for key, (_, read) in places.items()}
        runs.append({name: held[t["memory"]][t["start"] :] for name, t in tensors.items()})
    stages = getattr(compiled, "asm", None) or {}
    binary = next((stages[name] for name in _BINARIES if name in stages), b"")
    card = name = ""
    if not is_on_cpu:
        properties = torch.cuda.get_device_properties(form.device)
        card, name = f"GPU-{getattr(properties, 'uuid', '')}", str(properties.name)
    return Ran(
        runs=tuple(runs),
        card=card,
        name=name,
        binary=hashlib.sha256(binary).hexdigest() if binary else "",
    )
