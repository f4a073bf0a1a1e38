"""`hypo demo`: a planted defect breaks a run, and the doctor examines it; then what to type next.

Nothing here is staged: the run, its record and the report are those of `hypo doctor -- lab run`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from hypocenter.cli.doctor import doctor, request
from hypocenter.cli.options import DoctorOptions
from hypocenter.cli.output import say, show
from hypocenter.errors import EXIT_FAULT
from hypocenter.lab.victim import Victim, victims

#: What breaks on a simulated GPU, and what breaks where there is no Triton to simulate one.
_ON_GPU, _ON_CPU = "positions_of_two_bytes", "block_table_refused"

NEXT = """
NEXT       your own program, unchanged:
             hypo doctor -- python train.py
           a model:
             hypo doctor -- run model.gguf -p 'Once upon a time'
           the Triton launches of a file, on the CPU:
             hypo check kernels.py
"""


def demo(verbs: Iterable[str]) -> None:
    """Break a run, print the doctor's report of it and the next commands.

    Leaves with the doctor's exit code where that found nothing; raises as `hypo doctor` does.
    """
    victim, device = choose()
    say(f"a planted defect: {victim.title}; running the engine with it on {device}")
    words = ("--", "lab", "run", victim.name, "--device", device)
    try:
        doctor(request(words, DoctorOptions(), verbs, as_json=False))
    except SystemExit as left:
        if left.code != EXIT_FAULT:
            raise
    show(NEXT)
    if device == "cpu":
        say("with Triton installed (pip install triton) the demo crashes a simulated GPU")


def choose() -> tuple[Victim, str]:
    """A victim that breaks with what is installed, and the device to run it on."""
    has_triton = importlib.util.find_spec("triton") is not None
    [victim] = victims([_ON_GPU if has_triton else _ON_CPU])
    return victim, victim.device if has_triton else "cpu"
