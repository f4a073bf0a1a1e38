"""In a process of its own: one recorded launch, made as often and in the forms that are asked for.

`device_runs.py` starts it, with what to do and where to leave what came of it.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import msgspec
import torch

from hypocenter.replay.forms import Ran, RunForm
from hypocenter.replay.reproduction import Recording, is_on_cpu

#: What a GPU runs, by Triton's names.
_BINARIES = ("cubin", "hsaco")


def make_runs(recording: Recording) -> int:
    """Make the launch in each form of the file named first, and write a Ran of each to the second.

    Returns the exit status, which is 0.
    """
    asked, out = Path(sys.argv[1]), Path(sys.argv[2])
    found: list[Ran] = []
    for form in msgspec.msgpack.decode(asked.read_bytes(), type=list[RunForm]):
        try:
            found.append(_run(recording, form))
        except Exception as error:  # of a compiler or a driver: it is what there is to tell
            found.append(Ran(problem=f"{type(error).__name__}: {error}"))
        out.write_bytes(msgspec.msgpack.encode(found))  # a later form may end the process
    return 0


def _run(recording: Recording, form: RunForm) -> Ran:
    card = name = ""
    if not is_on_cpu():
        if form.device >= torch.cuda.device_count():
            return Ran(problem=f"there is no GPU {form.device}")
        torch.cuda.set_device(form.device)
        properties = torch.cuda.get_device_properties(form.device)
        card, name = f"GPU-{getattr(properties, 'uuid', '')}", str(properties.name)
    runs, compiled = [], None
    for _ in range(form.num_runs):
        compiled, held = recording.make({**recording.options, **form.options})
        runs.append({n: held[t["memory"]][t["start"] :] for n, t in recording.tensors.items()})
    stages = getattr(compiled, "asm", None) or {}
    binary = next((stages[name] for name in _BINARIES if name in stages), b"")
    return Ran(
        runs=tuple(runs),
        card=card,
        name=name,
        binary=hashlib.sha256(binary).hexdigest() if binary else "",
    )
