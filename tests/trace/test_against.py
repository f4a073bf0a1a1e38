"""`hypo diff --against`: points of another engine beside ours, and whose fault a difference is.

The peer here is made of our own trace, in the layout of transformers; `tests/peer/test_against.py`
runs real ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import DEMO
from safetensors.numpy import save_file

from hypocenter.base.errors import EXIT_GATE, HypoError, UsageError
from hypocenter.cli.app import main
from hypocenter.cli.verbs import against
from hypocenter.engine.float64_steps import Float64Steps, NotComputed, exactly, weight_of
from hypocenter.engine.llm import LLM
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.peers import asking
from hypocenter.peers.asking import PEERS, PeerAnswer, require
from hypocenter.peers.own_weights import Differences, OtherFolder
from hypocenter.peers.pairing import trace_of
from hypocenter.peers.programs.llama_cpp_program import point_of
from hypocenter.peers.readings import FORMS, readings_of
from hypocenter.peers.verdict import judge
from hypocenter.trace.points import OF_LOGIT_ROWS, ModelTrace, PointPlace, TracedStep
from hypocenter.trace.reading import read_trace

PEER = PEERS["transformers"]
#: A head of the bundled model has so many columns.
HEAD = 64


def _trace(path: Path, **fields: Any) -> ModelTrace:
    with LLM(context_length=64, prefix_cache=False, **fields) as llm:
        trace = llm.trace(path, max_data_bytes=64 << 20)
        llm.generate("def read_lines(path):\n    ", max_tokens=3, temperature=0.0)
        trace.close()
    return read_trace(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> ModelTrace:
    return _trace(tmp_path_factory.mktemp("against") / "sound")


@pytest.fixture(scope="module")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> ModelTrace:
    path = tmp_path_factory.mktemp("against") / "base"
    return _trace(path, override_kv={"llama.rope.freq_base": 20000.0})


@pytest.fixture(scope="module")
def file() -> Any:
    with open_gguf(DEMO) as opened:
        yield opened


def _told(trace: ModelTrace) -> PeerAnswer:
    """What transformers would tell that computes as this trace does: all rows in one tensor, and
    of q and k the halves of each head behind each other."""
    tensors: dict[PointPlace, Any] = {}
    num = sum(len(step.token_ids) for step in trace.steps)
    for step in trace.steps:
        for place, point in step.points.items():
            assert point.values is not None
            rows = np.array(step.positions)
            rows = rows[list(step.logit_rows)] if place[0] in OF_LOGIT_ROWS else rows
            held = tensors.setdefault(place, np.zeros((num, point.shape[1]), np.float32))
            values = point.values
            if place[0] in ("q", "k", "q_rope", "k_cache"):
                pairs = values.reshape(len(values), -1, HEAD // 2, 2)
                values = pairs.swapaxes(2, 3).reshape(values.shape)
            held[rows] = values
    return PeerAnswer("transformers 0", None, tensors)


def _hold(ours: ModelTrace, answer: PeerAnswer, file: GGUFFile, other: Any = None) -> Any:
    return against.hold(PEER, answer, ours, file, other if other is not None else file)


def test_the_demo_has_heads_of_so_many_columns(file: GGUFFile) -> None:
    assert read_architecture(file).layers[0].head_dim == HEAD


def test_an_equal_peer_has_no_difference(sound: ModelTrace, file: GGUFFile) -> None:
    found = _hold(sound, _told(sound), file)
    assert found.verdict.whose == "nobody"
    assert found.verdict.farthest.relative == 0.0
    assert (found.verdict.num_points, found.verdict.missing) == (3 * 69, ())
    assert found.verdict.num_same_top == found.verdict.num_logit_rows == 3


@pytest.mark.parametrize(("noise", "whose"), [(0.01, "nobody"), (0.1, "theirs")])
def test_rounding_of_eight_bits_is_no_fault(
    noise: float, whose: str, sound: ModelTrace, file: GGUFFile
) -> None:
    answer = _told(sound)
    values = answer.tensors["logits", None]
    drawn = np.random.default_rng(1).standard_normal(values.shape) * values.std()
    answer.tensors["logits", None] = (values + noise * drawn).astype(np.float32)
    found = _hold(sound, answer, file)
    assert found.verdict.whose == whose
    assert found.verdict.num_judged == (3 if whose == "nobody" else 1)
    assert ("no fault: at all 3" in "\n".join(against.lines_of(found))) == (whose == "nobody")


def test_a_peer_that_rotates_wrongly_is_accused(
    sound: ModelTrace, other_base: ModelTrace, file: GGUFFile
) -> None:
    found = _hold(sound, _told(other_base), file)
    first = found.verdict.first
    assert (found.verdict.whose, first.name, first.layer) == ("theirs", "q_rope", 0)
    assert first.of_ours < 1e-5 < first.limit < first.of_theirs
    assert found.op == "the rotation of q by its positions in layer 0"
    assert [layer for layer, _ in found.verdict.growth] == [*range(6)]
    said = "\n".join(against.lines_of(found))
    assert said.startswith("transformers 0 is wrong at the rotation of q by its positions in layer")
    assert "float64 agrees with ours" in said


def test_the_other_way_round_we_are(
    sound: ModelTrace, other_base: ModelTrace, file: GGUFFile
) -> None:
    ours = replace(other_base, header=sound.header)
    found = _hold(ours, _told(sound), file)
    first = found.verdict.first
    assert (found.verdict.whose, first.name, first.layer) == ("ours", "q_rope", 0)
    assert "\n".join(against.lines_of(found)).startswith("ours is wrong at the rotation of q")


def test_both_are_when_both_rotate_wrongly(
    sound: ModelTrace, other_base: ModelTrace, file: GGUFFile
) -> None:
    answer = _told(other_base)
    answer.tensors["q_rope", 0] = answer.tensors["q_rope", 0] * np.float32(1.1)
    found = _hold(replace(other_base, header=sound.header), answer, file)
    assert (found.verdict.whose, found.verdict.first.name) == ("both", "q_rope")


def test_a_nan_is_an_error(sound: ModelTrace, file: GGUFFile) -> None:
    answer = _told(sound)
    answer.tensors["v", 4] = answer.tensors["v", 4].copy()
    answer.tensors["v", 4][2, 7] = np.nan
    found = _hold(sound, answer, file)
    first = found.verdict.first
    assert (found.verdict.whose, first.name, first.layer) == ("theirs", "v", 4)


def test_without_float64_nobody_is_accused(sound: ModelTrace, other_base: ModelTrace) -> None:
    with open_gguf(DEMO) as file:
        theirs = trace_of(PEER, _told(other_base), sound, read_architecture(file))
    found = judge(sound, theirs, None, "gemma models have no float64 form here")
    assert found.first is not None
    assert (found.whose, found.first.name, found.first.layer) == ("unknown", "q_rope", 0)
    assert judge(sound, sound, None, "").whose == "nobody"


def _not_rotated(self: Float64Steps, step: TracedStep, layer: int, name: str) -> Any:
    raise NotComputed("positions that are stretched so have no float64 form here")


def test_what_float64_has_no_form_of_is_not_passed_over(
    sound: ModelTrace, other_base: ModelTrace, file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Float64Steps, "_rotation", _not_rotated)
    found = _hold(sound, _told(other_base), file)
    verdict, first = found.verdict, found.verdict.first
    assert first is not None
    assert (verdict.whose, first.name, first.layer) == ("unknown", "q_rope", 0)
    assert verdict.not_explained == first
    assert 0 < verdict.num_judged < verdict.num_differing
    said = "\n".join(against.lines_of(found))
    assert "no fault" not in said
    assert "is not known: float64 was not asked (positions that are stretched" in said


def test_of_points_that_are_not_judged_no_more_is_said(
    sound: ModelTrace, file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: what differs there is rounding."""
    monkeypatch.setattr(Float64Steps, "_rotation", _not_rotated)
    answer = _told(sound)
    for place in (("q_rope", 0), ("logits", None)):
        answer.tensors[place] = answer.tensors[place] * np.float32(1.0001)
    found = _hold(sound, answer, file)
    assert (found.verdict.whose, found.verdict.not_explained) == ("nobody", None)
    said = "\n".join(against.lines_of(found))
    assert said.startswith("no fault: at 3 of 6 points that differ")
    assert "float64 was not asked everywhere (positions that are stretched" in said


def test_a_fault_behind_what_is_not_judged_says_so(
    sound: ModelTrace, other_base: ModelTrace, file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Float64Steps, "_rotation", _not_rotated)
    answer = _told(other_base)
    answer.tensors["v", 4] = answer.tensors["v", 4] * np.float32(1.5)
    found = _hold(sound, answer, file)
    assert found.verdict.whose == "theirs"
    assert (found.verdict.first.name, found.verdict.not_explained.name) == ("v", "q_rope")
    said = "\n".join(against.lines_of(found))
    assert "before that the two part at the rotation of q by its positions in layer 0" in said


OWN_FORM = "8-bit codes with a scale of four bits per 32 columns"


@pytest.mark.parametrize("form", [*FORMS, "f32", ""])
def test_the_form_in_which_each_reads_activations_is_named(
    form: str, sound: ModelTrace, file: GGUFFile
) -> None:
    judge, step = Float64Steps(file, sound), sound.steps[0]
    values = judge.point(step, "q", 0, FORMS.get(form, exactly))
    if not form:
        values = values * 1.01  # no rounding, but a fault
    point = replace(step.points["q", 0], values=values.astype(np.float32))
    other = replace(step, points={**step.points, ("q", 0): point})
    [found] = readings_of(file, [(step, other)], (judge, judge))
    assert (found.weights, found.name, found.layer) == ("Q8_0", "q", 0)
    assert (found.ours.form, found.theirs.form) == (OWN_FORM, form)
    assert found.ours.off_by_form < 1e-6 < 1e-3 < found.ours.off
    if form:
        assert found.theirs.off_by_form < 1e-6


def test_how_far_products_are_from_float64_is_told(sound: ModelTrace, file: GGUFFile) -> None:
    answer = _told(sound)
    answer.tensors["logits", None] = answer.tensors["logits", None] * np.float32(1.001)
    found = _hold(sound, answer, file)
    products = found.verdict.products
    assert products.num_points == 3
    assert 1e-4 < products.of_ours < 0.02
    said = "\n".join(against.lines_of(found))
    assert "at 3 products ours is 0." in said
    assert f"with weights in Q8_0 ours reads {OWN_FORM}: 0." in said


# What a folder has.


def _folder(path: Path, file: GGUFFile, changes: Mapping[str, Any] = {}, **config: Any) -> Path:
    """The bundled model as a folder of transformers."""
    arch = read_architecture(file)
    tensors: dict[str, Any] = {}
    for name in file.tensors:
        values = changes.get(name, weight_of(file, name)).astype(np.float32)
        part = name.split(".")[-2]
        if part in ("attn_q", "attn_k"):
            heads = arch.num_heads if part == "attn_q" else arch.layers[0].num_kv_heads
            pairs = values.reshape(heads, HEAD // 2, 2, -1)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        tensors[_NAMES[name] if name in _NAMES else _layer_name(name)] = np.ascontiguousarray(
            values
        )
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    said = {
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.layers[0].num_kv_heads,
        "rope_theta": arch.rope.base,
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    (path / "config.json").write_text(json.dumps(said | config))
    return path


_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _layer_name(name: str) -> str:
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}"


def test_the_folder_of_a_model_is_like_its_file(tmp_path: Path, file: GGUFFile) -> None:
    arch = read_architecture(file)
    folder = OtherFolder(_folder(tmp_path / "folder", file), arch)
    for name in file.tensors:
        found = folder.weight(name)
        assert found is not None, name
        np.testing.assert_array_equal(found, weight_of(file, name))
    unlike = Differences(file, arch, folder)
    for name in ("attn_norm", "q", "k", "q_rope", "attention", "attn_residual", "layer_out"):
        assert unlike(name, 3) == ()
    assert unlike("embedding", None) == unlike("logits", None) == ()


def test_what_was_converted_wrongly_is_named(tmp_path: Path, file: GGUFFile) -> None:
    one, other = (weight_of(file, f"blk.2.{name}.weight") for name in ("attn_norm", "ffn_norm"))
    keys = weight_of(file, "blk.3.attn_k.weight")
    # As a converter that puts rows of k as they were.
    rows = np.roll(keys, 1, axis=0)
    changes = {"blk.2.attn_norm.weight": other, "blk.2.ffn_norm.weight": one,
               "blk.3.attn_k.weight": rows}  # fmt: skip
    arch = read_architecture(file)
    path = _folder(tmp_path / "folder", file, changes, rope_theta=20000.0)
    unlike = Differences(file, arch, OtherFolder(path, arch))
    assert unlike("attn_norm", 1) == unlike("k", 2) == ()
    assert "blk.2.attn_norm.weight is" in unlike("attn_norm", 2)[0]
    assert "blk.3.attn_k.weight is" in unlike("k", 3)[0]
    assert unlike("q_rope", 0) == ("the base of the rotation is 10000 in ours and 20000 in theirs",)


def test_other_weights_are_nobodys_fault(
    sound: ModelTrace, other_base: ModelTrace, file: GGUFFile, tmp_path: Path
) -> None:
    folder = _folder(tmp_path / "folder", file, rope_theta=20000.0)
    found = _hold(sound, _told(other_base), file, folder)
    first = found.verdict.first
    assert (found.verdict.whose, first.name, first.layer) == ("weights", "q_rope", 0)
    assert first.of_theirs < first.limit
    said = "\n".join(against.lines_of(found))
    assert "neither engine is wrong" in said
    assert "20000 in theirs" in said


@pytest.mark.parametrize(("is_tied", "whose"), [(False, "unknown"), (True, "theirs")])
def test_a_peer_is_not_judged_by_our_weights(
    is_tied: bool, whose: str, sound: ModelTrace, file: GGUFFile, tmp_path: Path
) -> None:
    """A folder without a head of its own: of one that is not tied it is not known which it has."""
    folder = _folder(tmp_path / "folder", file, tie_word_embeddings=is_tied)
    answer = _told(sound)
    answer.tensors["logits", None] = answer.tensors["logits", None] * np.float32(1.2)
    found = _hold(sound, answer, file, folder)
    assert (found.verdict.whose, found.verdict.first.name) == (whose, "logits")
    assert ("has no output.weight" in found.verdict.not_judged) == (not is_tied)


def test_a_tensor_that_a_peer_lacks_is_not_ours(
    sound: ModelTrace, file: GGUFFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = _folder(tmp_path / "folder", file), "blk.2.attn_k.weight"
    weight = OtherFolder.weight
    monkeypatch.setattr(
        OtherFolder, "weight", lambda self, of: None if of == name else weight(self, of)
    )
    answer = _told(sound)
    answer.tensors["k", 2] = answer.tensors["k", 2] * np.float32(1.2)
    found = _hold(sound, answer, file, folder)
    assert (found.verdict.whose, found.verdict.first.name) == ("unknown", "k")
    assert f"has no {name}" in found.verdict.not_judged


def test_a_folder_that_stretches_positions_is_not_judged_by_our_rotation(
    sound: ModelTrace, other_base: ModelTrace, file: GGUFFile, tmp_path: Path
) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    folder = _folder(tmp_path / "folder", file, rope_scaling=scaling)
    found = _hold(sound, _told(other_base), file, folder)
    assert (found.verdict.whose, found.verdict.first.name) == ("unknown", "q_rope")


def test_weights_that_differ_within_their_types_are_told(
    sound: ModelTrace, file: GGUFFile, tmp_path: Path
) -> None:
    head = weight_of(file, "token_embd.weight")
    drawn = np.random.default_rng(2).standard_normal(head.shape) * head.std()
    changes = {"token_embd.weight": head + 3e-3 * drawn}
    folder = _folder(tmp_path / "folder", file, changes)
    answer = _told(sound)
    answer.tensors["logits", None] = answer.tensors["logits", None] * np.float32(1.01)
    found = _hold(sound, answer, file, folder)
    assert found.verdict.whose == "nobody"
    assert found.weights_apart == {"output.weight": pytest.approx(3e-3, rel=0.1)}
    said = "\n".join(against.lines_of(found))
    assert "within what their types explain: output.weight is 0.3 % apart" in said
    assert "within what" not in "\n".join(against.lines_of(_hold(sound, answer, file)))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json that can be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no \*.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "is damaged"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"[]"),
            "is no file of safetensors",
        ),
    ],
)
def test_a_folder_that_is_none_is_refused(
    break_it: Any, message: str, tmp_path: Path, file: GGUFFile
) -> None:
    folder = _folder(tmp_path / "folder", file)
    break_it(folder)
    with pytest.raises(UsageError, match=message):
        OtherFolder(folder, read_architecture(file))


# Asking.


@pytest.mark.parametrize(
    ("node", "op", "place"),
    [
        ("Qcur-3", "MUL_MAT", "q/3"),
        ("Qcur-3", "ROPE", "q_rope/3"),
        ("Kcur-0", "ROPE", "k_cache/0"),
        ("Vcur-11", "ADD", "v/11"),
        ("Qcur-3", "SCALE", None),
        ("l_out-7", "ADD", "layer_out/7"),
        ("result_norm", "MUL", "result_norm/"),
        ("embd", "GET_ROWS", "embedding/"),
        ("norm-3", "RMS_NORM", None),
        ("cache_k_l0 (view)", "VIEW", None),
    ],
)
def test_nodes_of_a_graph_are_points(node: str, op: str, place: str | None) -> None:
    assert point_of(node, op) == place


def test_a_peer_that_is_not_there_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(UsageError, match=r"no module llama_cpp; pip install llama-cpp-python, or"):
        require(PEERS["llama.cpp"], sys.executable, Path(DEMO))
    with pytest.raises(UsageError, match="--peer-python /nowhere/python: No such file"):
        require(PEERS["llama.cpp"], "/nowhere/python", Path(DEMO))
    with pytest.raises(UsageError, match="reads GGUF files; name one"):
        require(PEERS["llama.cpp"], sys.executable, Path(DEMO).parent)


def test_of_what_a_peer_said_the_error_is_told() -> None:
    lines = ["Traceback (most recent call last):", "ImportError: tokenizers>=0.22 is required"]
    assert asking._why([*lines, "Try: pip install transformers -U"]) == lines[1]
    assert asking._why(["llama.cpp cannot load x.gguf"]) == "llama.cpp cannot load x.gguf"
    assert asking._why([]) == "it said nothing"


def test_what_is_no_answer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "told.npz"
    for raw in (b"", b"PK\3\4"):
        path.write_bytes(raw)
        with pytest.raises(HypoError, match="cannot be read"):
            asking._read(PEER, path)
    held: dict[str, Any] = {"q/one": np.zeros(3), "facts": np.zeros(1, np.uint8)}
    np.savez(path, **held)
    with pytest.raises(HypoError, match="cannot be read"):
        asking._read(PEER, path)


def test_the_command_says_whose_fault_it_is(
    sound: ModelTrace,
    other_base: ModelTrace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = sound.steps[0].token_ids
    answer = replace(_told(other_base), token_ids=(*ids[:-1], 7))
    monkeypatch.setattr(against, "_trace_ours", lambda model, asked, progress: (sound, ids))
    monkeypatch.setattr(against, "require", lambda *given: None)
    monkeypatch.setattr(against, "ask", lambda *given: answer)
    with pytest.raises(SystemExit) as left:
        main(["diff", str(DEMO), "--against", "transformers", "--json"])
    assert left.value.code == EXIT_GATE
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"]["whose"], found["verdict"]["first"]["name"]) == ("theirs", "q_rope")
    assert found["other_tokens"][-1] == 7
    monkeypatch.setattr(against, "ask", lambda *given: _told(sound))
    with pytest.raises(SystemExit) as left:
        main(["diff", str(DEMO), "--against", "transformers"])
    assert left.value.code == 0
    assert "is wrong" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peer", "words", "message"),
    [
        (None, ["{folder}/nosuch.gguf"], "hypo: {folder}/nosuch.gguf: there is no such file"),
        ("other", [str(DEMO)], "has a vocabulary of 7 tokens, and"),
        ("empty", [str(DEMO)], "has no config.json"),
        ("nosuch", [str(DEMO)], "--peer-model {folder}/nosuch: there is no such file or folder"),
        (None, [str(DEMO), "--peer-python", "/nowhere/python"], "/nowhere/python: No such file"),
    ],
)
def test_what_cannot_be_held_is_told_before_anything_runs(
    peer: str | None,
    words: list[str],
    message: str,
    file: GGUFFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(against, "_trace_ours", lambda *given: pytest.fail("our model has run"))
    (tmp_path / "empty").mkdir()
    _folder(tmp_path / "other", file, vocab_size=7)
    words = [word.format(folder=tmp_path) for word in words]
    if peer is not None:
        monkeypatch.setattr(against, "require", lambda *given: None)
        words += ["--peer-model", str(tmp_path / peer)]
    with pytest.raises(SystemExit) as left:
        main(["diff", *words, "--against", "transformers"])
    assert left.value.code == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "--against", "llama.cpp"], "--against takes one model"),
        (["a"], "or a model and --against ENGINE"),
        (["a", "b", "--peer-model", "c"], "--peer-model and --peer-python are of --against"),
        (["a", "--against", "llama.cpp", "-n", "0"], "must be from 1 to 256"),
    ],
)
def test_what_does_not_fit_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["diff", *words])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
