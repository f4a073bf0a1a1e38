"""Each path of CPU instructions gives the same integers, and the same sums of products in bf16."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from repository import SUPPORT

from hypocenter.device.cpu import target
from hypocenter.device.cpu.instructions import NEEDED
from hypocenter.device.cpu.target import cpu_features
from hypocenter.settings.environment import INSTRUCTIONS

CHILD = SUPPORT / "cpu_path_child.py"


#: Bytes; nibbles and bits, with minima; six bits, crumbs, and crumbs and bits, with a scale per 16
#: columns; sizes with signs, of three bits and of four, and those with small floats for scales. By
#: a few: a kernel for each is compiled without the faster instructions, too.
TYPES = (("Q8_0", "F16", "BF16"), ("Q5_K", "Q6_K"), ("Q2_K", "Q3_K"), ("IQ2_XS", "IQ3_S", "NVFP4"))


def child(path: str, *types: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HYPO_INSTRUCTIONS": path}
    return subprocess.run(
        [sys.executable, str(CHILD), *types],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("path", INSTRUCTIONS)
def test_products_are_the_same_to_the_last_bit(path: str, types: tuple[str, ...]) -> None:
    if "HYPO_INSTRUCTIONS" in os.environ and path != os.environ["HYPO_INSTRUCTIONS"]:
        pytest.skip(f"this run is on {os.environ['HYPO_INSTRUCTIONS']} alone")
    if missing := set(NEEDED[path]) - cpu_features():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    if path == "avx512-bf16" and target.cpu_name().startswith("znver"):  # `test_bf16.py` says why
        types = tuple(name for name in types if name not in ("F16", "BF16"))
    done = child(path, *types)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["path"] == path
    assert answer["wrong"] == dict.fromkeys(types, 0)
