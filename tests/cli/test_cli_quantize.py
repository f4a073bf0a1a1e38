"""`hypo quantize`: the new file is told of, opened and run; what is wrong takes one line."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from models.unquantised_gguf import importance_of, write_imatrix, write_unquantised

from hypocenter.base.errors import EXIT_ERROR, EXIT_USAGE
from hypocenter.cli.app import main
from hypocenter.model.quantising import quantising


def ask(capfd: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """What a command says: its output, or where it fails its line."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert left.value.code == code
    out, err = capfd.readouterr()
    return err if code else out


def test_a_model_is_quantised_looked_at_and_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, out = write_unquantised(tmp_path / "in.gguf", ffn_width=256), tmp_path / "out.gguf"
    matrix = write_imatrix(tmp_path / "i.dat", importance_of(source))
    said = ask(capfd, "quantize", source, out, "q4_k_m", "--imatrix", matrix).splitlines()
    assert said[0].startswith(f"{out}: Q4_K_M, ")
    assert said[1] == "tensors: 13 Q4_K, 5 F32, 3 Q6_K"
    assert said[2].startswith(
        "set: general.quantization_version = 2, general.file_type = 15, quant"
    )
    assert said[3] == "the importance matrix has none of: token_embd.weight"
    seen = json.loads(ask(capfd, "inspect", out, "--check", "--json"))
    assert seen["metadata"]["general.file_type"]["value"] == 15
    assert seen["tensors"]["num_tensors"] == 21
    answer = json.loads(
        ask(capfd, "run", out, "-p", "ab", "-n", 3, "--device", "cpu", "--json", "--ignore-eos")
    )
    assert answer["finish_reason"] == "length"


def test_it_is_told_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_unquantised(tmp_path / "in.gguf", num_layers=1, ffn_width=272)
    out = tmp_path / "out.gguf"
    told = json.loads(ask(capfd, "quantize", source, out, "Q8_0", "--json"))
    assert told["num_bytes"] == out.stat().st_size < told["num_bytes_before"]
    assert told["num_tensors"] == {"F32": 3, "F16": 1, "Q8_0": 8}
    assert told["fallbacks"] == {"blk.0.ffn_down.weight": "F16"}
    assert told["metadata_set"] == {"general.quantization_version": 2, "general.file_type": 7}
    assert (told["metadata_left_out"], told["not_in_imatrix"]) == ([], [])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("IN", "OUT", "Q9_K"), EXIT_USAGE, "TYPE is 'Q9_K', but must be one of F32, F16, Q4_0"),
        (("IN", "IN", "Q8_0"), EXIT_USAGE, "in.gguf is the model itself; name another file"),
        (("IN", "FOLDER", "F16"), EXIT_USAGE, "a folder; name the new file itself"),
        (("IN", "new/", "F16"), EXIT_USAGE, "OUT is new/, a folder; name the new file itself"),
        (("no.gguf", "OUT", "Q8_0"), EXIT_USAGE, "no.gguf"),
        (("IN", "OUT", "Q8_0", "--imatrix", "no.dat"), EXIT_USAGE, "no.dat: there is no such file"),
        (("IN", "OUT", "Q8_0", "--imatrix", "IN"), EXIT_ERROR, "imatrix.datasets is missing, but"),
        (("IN", "OUT", "Q2_K_S"), EXIT_USAGE, "needs an importance matrix; give --imatrix FILE"),
    ],
)
def test_what_is_wrong_takes_one_line(
    words: tuple[str, ...],
    code: int,
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = write_unquantised(tmp_path / "in.gguf", num_layers=1, ffn_width=32)
    names = {"IN": source, "OUT": tmp_path / "out.gguf", "FOLDER": tmp_path}
    line = ask(capfd, "quantize", *(names.get(word, word) for word in words), code=code)
    assert said in line
    assert line.count("\n") == 1
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_stays_of_one_that_is_ended(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> Iterator[int]:
        assert len(list(tmp_path.iterdir())) == 2
        assert signal.getsignal(number) is not signal.SIG_DFL, "it would end the tests"
        signal.raise_signal(number)
        yield 1

    monkeypatch.setattr(quantising, "_write", write)
    source = write_unquantised(tmp_path / "in.gguf", num_layers=1, ffn_width=32)
    before = signal.signal(number, signal.SIG_DFL)  # tests may run under nohup
    try:
        with pytest.raises(SystemExit) as left:
            main(["quantize", str(source), str(tmp_path / "out.gguf"), "Q8_0"])
        assert left.value.code == 128 + number
        assert list(tmp_path.iterdir()) == [source]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_text_of_the_importance_matrix_makes_no_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("models.unquantised_gguf.DATASET", "\x1b]0;a\x07\nhypo: a line")
    source = write_unquantised(tmp_path / "in.gguf", num_layers=1, ffn_width=256)
    matrix = write_imatrix(tmp_path / "i.gguf", importance_of(source))
    said = ask(capfd, "quantize", source, tmp_path / "out.gguf", "Q8_0", "--imatrix", matrix)
    assert "\\x1b]0;a\\x07\\nhypo: a line" in said
    assert not any(line.startswith("hypo: a line") for line in said.splitlines())
