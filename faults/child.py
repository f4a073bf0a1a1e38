"""The process in which a victim runs: the real engine, on the lab's model, with the defect in it.

`python -m faults.child NAME [--twin] [--device D] [--outcome FILE]`. What became of it is
written as JSON, unless the process dies of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from faults.harmless import find
from faults.lab import Lab
from faults.victim import Planted
from hypocenter.base.errors import EXIT_OK, DeviceFault, HypoError
from hypocenter.record.recorder import open_recorder
from hypocenter.settings.config import SamplingParams


def run(victim: Planted, *, twin: bool, device: str = "", mode: str = "off") -> list[list[int]]:
    """Plant the defect, or nothing, and generate; returns the token ids of each prompt."""
    from hypocenter.engine.llm import LLM

    with Lab(device or victim.device) as lab:
        lab.config["launch_mode"] = mode
        (victim.twin if twin else victim.plant)(lab)
        with LLM(lab.model, lab.engine_config()) as llm:
            lab.run_hooks(llm)
            if lab.warm_up:
                llm.generate(lab.warm_up, SamplingParams(max_tokens=1, ignore_eos=True))
            params = SamplingParams(max_tokens=lab.num_tokens, ignore_eos=True, **lab.sampling)
            return [list(completion.token_ids) for completion in llm.generate(lab.prompts, params)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.child")
    parser.add_argument("victim")
    parser.add_argument("--twin", action="store_true")
    parser.add_argument("--device", default="")
    parser.add_argument("--mode", default="off")
    parser.add_argument("--outcome", type=Path)
    given = parser.parse_args()
    outcome: dict[str, Any] = {}
    status = EXIT_OK
    try:
        victim = find([given.victim])[0]
        outcome["token_ids"] = run(victim, twin=given.twin, device=given.device, mode=given.mode)
    except HypoError as error:
        open_recorder().record_failure(error)
        outcome |= {"error": type(error).__name__, "message": str(error)}
        if isinstance(error, DeviceFault):
            outcome |= {"is_asynchronous": error.is_asynchronous, "kind": error.kind}
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_code
    text = json.dumps(outcome)
    if given.outcome:
        given.outcome.write_text(text + "\n", "utf-8")
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
