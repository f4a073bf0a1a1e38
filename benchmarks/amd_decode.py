"""How long a decode step of the bundled model takes as AMD's machine code, on each emulated GPU.

The first answer makes the plans and decodes their objects; it is told apart. Then a step is what
--steps more tokens of an answer take, over their number. Prints a line for each device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

from hypocenter import LLM  # noqa: E402

DEVICES = ("mi300x", "mi355x", "rx7900xtx", "rx9070xt")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=6, help="decode steps on each device")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    model = next((ROOT / "src").rglob("*.gguf"))
    rows = {}
    for device in DEVICES:
        rows[device] = _seconds(model, device, given.steps)
        told = (f"{name} {seconds} s" for name, seconds in rows[device].items())
        print(f"{device}: {', '.join(told)}", flush=True)
    if given.json is not None:
        figures = {
            "date": time.strftime("%Y-%m-%d"),
            "model": model.name,
            "steps": given.steps,
            "cores": os.cpu_count(),
            "seconds": rows,
        }
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _seconds(model: Path, device: str, num_steps: int) -> dict[str, float]:
    """Of the first answer of two tokens, and of a step: what so many more tokens take."""
    with LLM(model, device=f"emu:{device}", context_length=128) as llm:
        first, few, many = (_answer(llm, count) for count in (2, 2, 2 + num_steps))
    step, cpu_step = ((many[i] - few[i]) / num_steps for i in (0, 1))
    return {
        "first answer": round(first[0], 2),
        "step": round(step, 2),
        "processor seconds of a step": round(cpu_step, 2),
    }


def _answer(llm: LLM, num_tokens: int) -> tuple[float, float]:
    """Seconds of the clock, and of this process's processors."""
    begin = time.monotonic(), time.process_time()
    llm.generate("def", max_tokens=num_tokens, ignore_eos=True)
    return time.monotonic() - begin[0], time.process_time() - begin[1]


if __name__ == "__main__":
    sys.exit(main())
