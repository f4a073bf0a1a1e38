"""What `hypo verify --quick` says of changed kernels: mistakes that people make, each planted in
the source of a copy of the package.

    python benchmarks/verify_figures.py cpu    # or sim:h200, emu:mi300x, cuda

Each device has a file of `benchmarks/results/`, written row by row; its first row has no mistake.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audit_figures import ROOT, write_as_they_come
from gguf import GGUFValueType
from models.demo_variants import demo_with

RESULTS = ROOT / "benchmarks" / "results"
MAX_SECONDS = 300
NUM_LONG_TOKENS = 4096


@dataclass(frozen=True)
class Plant:
    """`old` becomes `new` in a file below `kernels/`, at its occurrence `which`.

    `is_long` asks for the bundled model with a context in which a sum over keys has many parts: its
    own 512 tokens are one part on a CPU, so that nothing is ever put together there.
    """

    name: str
    file: str
    old: str
    new: str
    which: int = 0
    is_long: bool = False

    def text(self, text: str) -> str:
        """The file's text with the mistake. Raises ValueError where it has no place."""
        before = text.split(self.old)
        if len(before) < self.which + 2:
            raise ValueError(f"{self.file} has no {self.old!r} of number {self.which}")
        first, last = before[: self.which + 1], before[self.which + 1 :]
        return self.old.join(first) + self.new + self.old.join(last)


ON_CPU = (
    Plant("norm 0.1 % too large", "rowwise/norm_cpu.py", "np.float32(1) / np.sqrt(mean_square",
          "np.float32(1.001) / np.sqrt(mean_square"),
    Plant("rotation with the wrong sign", "attention/rope_cpu.py", "a * cos - b * sin",
          "a * cos + b * sin"),
    Plant("key in the next slot", "attention/rope_write_cpu.py", "slot % block_size",
          "(slot + 1) % block_size"),
    Plant("value's head begins at its first columns", "attention/kv_write_cpu.py",
          "load_first(v, at + d, head_dim - d)", "load_first(v, at, head_dim - d)"),
    Plant("another gate", "rowwise/activation_cpu.py", "mul(mul(x, sigmoid(x)), up)",
          "mul(mul(x, sigmoid(mul(splat(_STEEP), x))), up)"),
    Plant("row before the one asked for", "rowwise/embedding_cpu.py",
          "np.int64(get(rows, i)) * width", "max(np.int64(get(rows, i)) - 1, 0) * width"),
    Plant("row of the token before", "rowwise/embedding_cpu.py",
          "np.int64(get(token_ids, row))", "max(np.int64(get(token_ids, row)) - 1, 0)", 1),
    Plant("scores 1 % too large", "attention/attention_tile_cpu.py", "else LOG2_E * scale",
          "else LOG2_E * scale * np.float32(1.01)"),
    Plant("scale of a group 1 % too large", "linear/quantise_cpu.py", "put(scales, at, scale)",
          "put(scales, at, scale * np.float32(1.01))"),
    Plant("mean over a column too many", "rowwise/norm_cpu.py",
          "sum_lanes(squares) / np.float32(width)", "sum_lanes(squares) / np.float32(width + 1)"),
    Plant("parts of a sum over keys weighed alike", "attention/attention_cpu.py",
          "exp2(splat(new_top - top))", "exp2(splat(new_top - new_top))", is_long=True),
)  # fmt: skip
ON_GPU = (
    Plant("norm 0.1 % too large", "rowwise/norm_gpu.py", "return 1.0 / tl.sqrt(mean_square + eps)",
          "return 1.001 / tl.sqrt(mean_square + eps)"),
    Plant("rotation with the wrong sign", "attention/rope_gpu.py", "a * cos - b * sin",
          "a * cos + b * sin"),
    Plant("key and value in the other slot of a pair", "attention/rope_write_gpu.py",
          "tl.load(slots_ptr + token)", "tl.load(slots_ptr + token) ^ 1"),
    Plant("another gate", "rowwise/activation_gpu.py", "return x * _sigmoid(u) * up",
          "return x * _sigmoid(1.702 * u) * up"),
    Plant("row before the one asked for", "rowwise/embedding_gpu.py", "tl.load(rows_ptr + row)",
          "tl.maximum(tl.load(rows_ptr + row) - 1, 0)"),
    Plant("code one too large", "rowwise/embedding_gpu.py", "low = -zero * scale",
          "low = scale - zero * scale"),
    Plant("scores 1 % too large, in prompts", "attention/attention_gpu.py",
          "factor = factor * scale", "factor = factor * scale * 1.01"),
    Plant("scores 1 % too large, in steps of a token", "attention/attention_gpu.py",
          "factor = factor * scale", "factor = factor * scale * 1.01", 1),
    Plant("last chain of a sum alone", "linear/linear_codes_many_gpu.py", "total += acc",
          "total = acc"),
    Plant("rows scaled back by half", "linear/quantise_gpu.py", "((254 - field) << 23)",
          "((253 - field) << 23)"),
)  # fmt: skip


def rows(device: str) -> Iterator[dict[str, Any]]:
    """A row for the package as it is, and one for each mistake."""
    plants = ON_CPU if device == "cpu" else ON_GPU
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "hypocenter"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src" / "hypocenter", copy, ignore=ignored)
        long = demo_with(
            Path(folder) / "long.gguf",
            {"llama.context_length": (NUM_LONG_TOKENS, GGUFValueType.UINT32)},
        )
        yield {"plant": "none", **verified(folder, device)}
        for plant in plants:
            model = (str(long),) if plant.is_long else ()
            file = copy / "kernels" / plant.file
            right = file.read_text()
            file.write_text(plant.text(right))
            yield {"plant": plant.name, "file": plant.file, **verified(folder, device, *model)}
            file.write_text(right)


def verified(folder: str, device: str, *model: str) -> dict[str, Any]:
    """What the command says in a process that has the package in `folder`."""
    command = (sys.executable, "-m", "hypocenter", "verify", "--quick", "--json", "--quiet")
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, *model, "--device", device],
            env=environment,
            capture_output=True,
            check=False,
            timeout=MAX_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "none", "why": f"it took more than {MAX_SECONDS} s", "caught_by": []}
    seconds = round(time.perf_counter() - began, 1)
    if not done.stdout:
        why = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"verdict": "none", "why": "".join(why), "caught_by": [], "seconds": seconds}
    told = json.loads(done.stdout)
    found = [(s["name"], f["where"]) for s in told["stages"] for f in s["findings"]]
    return {
        "verdict": told["verdict"],
        "caught_by": sorted({stage for stage, _ in found}),
        "forms": sorted({where for stage, where in found if stage == "kernels"}),
        "not_run": told["not_run"],
        "seconds_of_looking": round(told["seconds"], 1),
        "seconds": seconds,
    }


def main() -> None:
    device = (sys.argv[1:] or ["cpu"])[0]
    out = RESULTS / f"verify-plants-{device.replace(':', '-')}.json"
    write_as_they_come(rows(device), {"device": device}, out)


if __name__ == "__main__":
    main()
