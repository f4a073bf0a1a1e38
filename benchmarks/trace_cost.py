"""What a trace of all points costs a step, with and without it by turns in one process.

Prints a JSON line for decoding and one for a prompt: milliseconds of each turn, and the median of
the ratios. The target: 1.3 with all points of a model and without elements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

from hypocenter import LLM  # noqa: E402
from hypocenter.base.package import bundled_model  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--generate", type=int, default=128, help="tokens of a turn of decoding")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    given = parser.parse_args()
    for is_prompt in (False, True):
        print(json.dumps(measure(given, is_prompt)), flush=True)


def measure(given: argparse.Namespace, is_prompt: bool) -> dict[str, object]:
    """Turns of both kinds; each LLM has plans of its own, and both have run before."""
    context = given.prompt + given.generate + 64
    settings: dict[str, Any] = {"context_length": context, "kv_tokens": 4 * context}
    settings |= {"prefix_cache": False, "device": given.device}
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(given.model, **settings) as off,
        LLM(given.model, **settings) as on,
    ):
        trace = on.trace(Path(folder, "trace"))

        def turn(llm: LLM) -> float:
            """Milliseconds of a step."""
            ids = [3 + at % 200 for at in range(given.prompt if is_prompt else 8)]
            num = 1 if is_prompt else given.generate
            began = time.perf_counter()
            llm.generate(ids, max_tokens=num, temperature=0.0, ignore_eos=True)
            return (time.perf_counter() - began) / num * 1e3

        for llm in (off, on, off, on):
            turn(llm)
        pairs = [(turn(off), turn(on)) for _ in range(given.pairs)]
        trace.close()
    return {
        "what": f"a prompt of {given.prompt}" if is_prompt else "a step of decoding",
        "model": given.model.name,
        "device": given.device,
        "milliseconds": [[round(each, 3) for each in pair] for pair in pairs],
        "ratio": round(statistics.median(on / off for off, on in pairs), 2),
        "lowest_ratio": round(min(on for _, on in pairs) / min(off for off, _ in pairs), 2),
    }


if __name__ == "__main__":
    main()
