"""`hypo diff --against` with real engines: a sound model, and planted faults by op and layer."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from gguf import GGUFValueType
from models.demo_variants import demo_with
from models.planted_files import edited, scales_off_by_a_block, swapped_norms
from repository import DEMO

from hypocenter.base import package
from hypocenter.base.errors import EXIT_GATE
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.tool_options import AgainstOptions
from hypocenter.cli.verbs import against
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.layers.attending import Attending
from hypocenter.peers.asking import PEERS, ask
from peer.comparison import Peer

#: Seconds that one comparison of the bundled model may take.
_SECONDS = 60


@pytest.fixture(params=["transformers", "llama.cpp"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def python(engine: str, peer: Peer) -> str:
    """The interpreter that has it."""
    return sys.executable if engine == "transformers" else str(peer.python)


def _diff(engine: str, python: str, *words: str) -> tuple[int, Any]:
    began = time.monotonic()
    ended = subprocess.run(
        [*package.module_command(package.NAME), "diff", str(DEMO), "--against", engine,
         "--peer-python", python, "--json", *words],
        capture_output=True, check=False, env=os.environ,
    )  # fmt: skip
    assert ended.returncode in (0, EXIT_GATE), ended.stderr.decode()
    assert time.monotonic() - began < _SECONDS
    return ended.returncode, json.loads(ended.stdout)


def test_the_bundled_model_has_no_fault(engine: str, python: str) -> None:
    code, found = _diff(engine, python)
    verdict = found["verdict"]
    assert (code, verdict["whose"], found["other_tokens"]) == (0, "nobody", None)
    # All points of all four steps, and most of them differ by rounding.
    assert (verdict["num_points"], verdict["missing"]) == (4 * 69, [])
    assert verdict["num_judged"] > 4 * 40
    assert verdict["num_same_top"] == verdict["num_logit_rows"] == 4


@pytest.mark.parametrize(
    ("plant", "point", "layer", "what"),
    [
        ("base", "q_rope", 0, "the base of the rotation is 10000 in ours and 20000 in theirs"),
        ("norms", "attn_norm", 2, "blk.2.attn_norm.weight is "),
        ("scales", "k", 3, "blk.3.attn_k.weight is "),
    ],
)
def test_a_planted_file_is_found(
    tmp_path: Path, engine: str, python: str, plant: str, point: str, layer: int, what: str
) -> None:
    path = tmp_path / "planted.gguf"
    if plant == "base":
        demo_with(path, {"llama.rope.freq_base": (2e4, GGUFValueType.FLOAT32)})
    else:
        edited(path, swapped_norms if plant == "norms" else scales_off_by_a_block)
    code, found = _diff(engine, python, "--peer-model", str(path))
    first = found["verdict"]["first"]
    assert (code, found["verdict"]["whose"]) == (EXIT_GATE, "weights")
    assert (first["name"], first["layer"]) == (point, layer)
    assert first["unlike"][0].startswith(what)


@pytest.mark.parametrize("plant", ["base", "norms", "scales"])
def test_an_engine_that_computes_so_is_accused(
    tmp_path: Path, engine: str, python: str, plant: str
) -> None:
    """The peer reads the planted file, and is judged by the sound one."""
    path = tmp_path / "planted.gguf"
    if plant == "base":
        demo_with(path, {"llama.rope.freq_base": (2e4, GGUFValueType.FLOAT32)})
    else:
        edited(path, swapped_norms if plant == "norms" else scales_off_by_a_block)
    found = _held(engine, python, path)
    first = found.verdict.first
    assert first is not None
    wanted = {"base": ("q_rope", 0), "norms": ("attn_norm", 2), "scales": ("k", 3)}[plant]
    assert (found.verdict.whose, (first.name, first.layer)) == ("theirs", wanted)


def test_a_mask_that_hides_one_position_too_many_is_ours(engine: str, python: str) -> None:
    """In one layer."""
    attend, calls = Attending.attend, itertools.count()

    def hiding(*given: Any, **named: Any) -> None:
        if next(calls) % 6 == 4:  # each plan asks for the layers in order
            named["window"] = 5
        attend(*given, **named)

    with mock.patch.object(Attending, "attend", hiding):
        found = _held(engine, python, Path(DEMO))
    first = found.verdict.first
    assert first is not None
    assert (found.verdict.whose, first.name, first.layer) == ("ours", "attention", 4)


def _held(engine: str, python: str, peer_model: Path) -> against.AgainstReport:
    asked = AgainstOptions(against=engine, quiet=True)  # type: ignore[arg-type]
    ours, _ = against._trace_ours(Path(DEMO), asked, ProgressDisplay(quiet=True))
    answer = ask(PEERS[engine], python, peer_model, asked.prompt, against._tokens(ours))
    with open_gguf(DEMO) as file:
        return against.hold(PEERS[engine], answer, ours, file, file)
