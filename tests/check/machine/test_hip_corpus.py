"""HIP kernels with a planted fault each, and their healthy twins, as AMD's machine code.

Truth lies in faults/hip/truth.toml. Needs clang; executed by our emulator of the machine
code, not on hardware.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from hypocenter.base.errors import HypoError
from hypocenter.check.machine.check_file import check_machine
from hypocenter.device.amd.hip import find_clang

CORPUS = ROOT / "faults" / "hip"
TRUTH: dict[str, Any] = tomllib.loads((CORPUS / "truth.toml").read_text())
#: clang 19 knows no gfx950.
ARCHS = ("gfx942", "gfx1100", "gfx1201")
#: The fast tier runs two that the interpreter cannot see; `scripts/test-amd` runs all.
FAST = ("missing_barrier", "unset_register")


@pytest.fixture(scope="module", autouse=True)
def clang() -> str:
    try:
        return find_clang()
    except HypoError as error:
        pytest.skip(str(error))


def _judge(name: str, archs: tuple[str, ...]) -> None:
    truth, path = TRUTH[name], CORPUS / f"{name}.toml"
    for arch in archs:
        (found,) = check_machine(path, (arch,), 60.0).findings
        assert (found.kind, found.argument or "") == (truth["kind"], truth["argument"])
        assert found.sites[0].expression == truth["line"]
        assert Path(found.sites[0].file).resolve() == CORPUS / f"{name}.hip"
        assert check_machine(CORPUS / f"{name}_healthy.toml", (arch,), 60.0).findings == ()


def test_the_collection_is_whole() -> None:
    assert len(TRUTH) >= 15
    assert {path.stem for path in CORPUS.glob("*.hip")} == set(TRUTH)


@pytest.mark.parametrize("name", FAST)
def test_a_planted_fault_is_named_and_its_twin_is_clean(name: str) -> None:
    _judge(name, ("gfx942",))


@pytest.mark.tier("amd")
@pytest.mark.parametrize("name", sorted(TRUTH))
def test_every_planted_fault_is_named_on_every_target(name: str) -> None:
    _judge(name, ARCHS)
