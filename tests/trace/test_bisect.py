"""`hypo bisect`: the op and the one piece that explain a difference, and what it says when none
does."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from models.demo_variants import demo_with
from models.planted_files import edited, scales_off_by_a_block, swapped_norms
from repository import DEMO, PACKAGE_DIR

from hypocenter.base import package
from hypocenter.base.errors import EXIT_GATE, UsageError
from hypocenter.cli.trace_report import examine
from hypocenter.cli.verbs import bisect
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.routes import read_routes
from hypocenter.trace.narrowing import NoTimeLeft, narrow
from hypocenter.trace.points import ModelTrace, TracedStep, TraceHeader


@pytest.mark.parametrize("culprits", [{"c"}, {"b", "g"}, {"a", "d", "e"}])
def test_what_is_needed_is_left(culprits: set[str]) -> None:
    asked: list[tuple[str, ...]] = []

    def explains(some: Sequence[str]) -> bool:
        asked.append(tuple(some))
        return culprits <= set(some)

    found, is_shown = narrow("abcdefgh", explains)
    assert (set(found), is_shown) == (culprits, True)
    assert len(asked) == len(set(asked))


def test_nothing_is_claimed_that_was_not_shown() -> None:
    assert narrow("abc", lambda some: False) == ((), False)

    def late(some: Sequence[str]) -> bool:
        if len(some) < 4:
            raise NoTimeLeft
        return True

    assert narrow("abcd", late) == (("a", "b", "c", "d"), False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("softmax=parts", "there is no op 'softmax'; there are norm"),
        ("norm=joined", "norm has no form 'joined'; give fused or parts"),
        ("norm=parts,norm=fused", "norm is given as parts too"),
    ],
)
def test_a_route_that_is_none_is_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_routes([words])


def test_pieces_of_models_are_exchanged(tmp_path: Path) -> None:
    path = edited(tmp_path / "norms.gguf", swapped_norms)
    other = demo_with(
        tmp_path / "base.gguf", {"llama.rope.freq_base": (2e4, GGUFValueType.FLOAT32)}
    )
    with open_gguf(DEMO) as a, open_gguf(path) as b, open_gguf(other) as c:
        pair = bisect._of_models(a, b, tmp_path)
        assert pair.pieces == ("blk.2.attn_norm.weight", "blk.2.ffn_norm.weight")
        with open_gguf(pair.exchange(pair.pieces).model) as mended:
            for name in a.tensors:
                np.testing.assert_array_equal(mended.raw(name), a.raw(name))
        with open_gguf(pair.exchange(pair.pieces[:1]).model) as mended:
            np.testing.assert_array_equal(mended.raw(pair.pieces[0]), a.raw(pair.pieces[0]))
            np.testing.assert_array_equal(mended.raw(pair.pieces[1]), b.raw(pair.pieces[1]))
        pair = bisect._of_models(a, c, tmp_path)
        assert pair.pieces == ("llama.rope.freq_base",)
        assert pair.exchange(pair.pieces).keys == ("llama.rope.freq_base=float:10000.0",)


def test_unlike_sides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give two of one kind"):
        bisect._pair(str(DEMO), "norm=parts", Path(DEMO), tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="neither hypocenter nor src/hypocenter"):
        bisect._pair(str(tmp_path), str(tmp_path), Path(DEMO), tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no such model or folder"):
        bisect._pair("nowhere", "nowhere", Path(DEMO), tmp_path, None)  # type: ignore[arg-type]


#: Of the processor, which one of the bundled model may take.
_SECONDS = 60


def _bisect(a: Path | str, b: Path | str) -> tuple[int, Any]:
    command = [*package.module_command(package.NAME), "bisect", str(a), str(b), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([*command, "--budget", "600"], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(f"{seconds:.1f} processor seconds")
    assert seconds < _SECONDS
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.tier("sim")
@pytest.mark.parametrize(
    ("plant", "op", "layer", "pieces"),
    [
        ("base", "q_rope", 0, ["llama.rope.freq_base"]),
        ("norms", "attn_norm", 2, ["blk.2.attn_norm.weight", "blk.2.ffn_norm.weight"]),
        ("scales", "k", 3, ["blk.3.attn_k.weight"]),
    ],
)
def test_a_planted_model_is_found(
    tmp_path: Path, plant: str, op: str, layer: int, pieces: list[str]
) -> None:
    path = tmp_path / "planted.gguf"
    if plant == "base":
        demo_with(path, {"llama.rope.freq_base": (2e4, GGUFValueType.FLOAT32)})
    else:
        edited(path, swapped_norms if plant == "norms" else scales_off_by_a_block)
    code, found = _bisect(DEMO, path)
    assert code == EXIT_GATE
    assert (found["point"], found["layer"]) == (op, layer)
    assert (found["pieces"], found["is_shown"]) == (pieces, True)


@pytest.mark.tier("sim")
def test_a_changed_source_is_found(tmp_path: Path) -> None:
    """A mask that hides one position too many in one layer, beside a change of no effect."""
    tree = tmp_path / "tree"
    shutil.copytree(PACKAGE_DIR, tree / package.NAME)
    decoder = tree / package.NAME / "model" / "layers" / "decoder.py"
    text, window = decoder.read_text(), "window=arch.layers[index].window,"
    assert window in text
    decoder.write_text(text.replace(window, "window=5 if index == 4 else 0,"))
    admission = tree / package.NAME / "engine" / "admission.py"
    admission.write_text(admission.read_text() + "# changes nothing\n")
    code, found = _bisect(PACKAGE_DIR.parent, tree)
    assert code == EXIT_GATE
    assert (found["point"], found["layer"]) == ("attention", 4)
    assert (found["pieces"], found["is_shown"]) == (["model/layers/decoder.py"], True)
    assert "index == 4" in found["detail"]
    wrong = found["found"]["first_wrong"]
    assert (wrong["name"], wrong["layer"]) == ("attention", 4)


@pytest.mark.tier("sim")
def test_forms_of_ops_give_the_same_bits() -> None:
    assert _bisect("usual", "norm=parts,gate=parts,rope=parts") == (0, {"difference": None})


@pytest.mark.parametrize(("as_json", "says"), [(False, "step 0 has other token ids"), (True, "{")])
def test_models_that_tokenise_otherwise_are_not_equal(
    as_json: bool, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    header = TraceHeader("", 1, "", "no-such-model", 1, "llama", 0, "cpu", "f16", {}, (), {})
    one, other = (
        ModelTrace(header, (TracedStep(0, (token,), (0,), (0,), (), {}),)) for token in (1, 2)
    )
    with pytest.raises(SystemExit) as left:
        bisect._tell_without_op(examine(one, other), (one, other), as_json=as_json)
    assert left.value.code == EXIT_GATE
    said = capsys.readouterr().out
    assert says in said
    assert "no difference" not in said
    assert "null}" not in said
    with pytest.raises(UsageError, match="nothing can be compared"):
        bisect._tell_without_op(examine(one, one), (one, other), as_json=as_json)
