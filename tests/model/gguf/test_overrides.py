"""Metadata that a person gives in place of a file's own: how it is written, read and refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from models.tiny_gguf import write_tiny
from outside.terminal import hypo_in_process

from hypocenter import LLM
from hypocenter.base.errors import BadModelFile, BadSetting, UsageError
from hypocenter.base.package import bundled_model
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.facts.layer_shapes import lost_window
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.metadata_text import parse_metadata, require_metadata

WINDOW = "llama.attention.sliding_window"


def test_values_are_written_as_llama_cpp_has_them() -> None:
    texts = ("a.b=int:-3,c=float:1e6", "d=bool:true", "e=str:x, y=z,f=str:")
    wanted = {"a.b": -3, "c": 1e6, "d": True, "e": "x, y=z", "f": ""}
    assert parse_metadata("override_kv", texts) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a=int:x", "override_kv a is 'x', but must be of type int"),
        ("a=bool:1", "override_kv a is '1', but must be true or false"),
        ("a=u32:1", "must be KEY=TYPE:VALUE"),
        ("=int:1", "must be KEY=TYPE:VALUE"),
        ("a b=int:1", "must be KEY=TYPE:VALUE"),
    ],
)
def test_what_is_written_otherwise_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        parse_metadata("override_kv", (text,))


@pytest.mark.parametrize(
    "values",
    [[], {1: 1}, {"a": None}, {"a": [1]}, {"a": 1 << 63}, {"a": float("nan")}, {"a": "\ud800"},
     {"a": "x" * (2 << 20)}, {"a" * 129: 1}, {f"a{i}": i for i in range(129)}],
)  # fmt: skip
def test_what_no_file_holds_is_refused(values: Any) -> None:
    with pytest.raises(BadSetting, match="override_kv"):
        require_metadata("override_kv", values)
    with pytest.raises(BadSetting):
        LLM(override_kv=values)


def test_values_stand_for_the_files_own_and_beside_them(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    given: dict[str, Any] = {
        "llama.context_length": 32,
        WINDOW: 8,
        "general.name": "né",
        "x.flag": True,
    }
    with open_gguf(path, given) as file:
        arch = read_architecture(file)
        assert (arch.context_length, arch.layers[0].window) == (32, 8)
        assert file.text("general.name") == "né"
        assert file.flag("x.flag") is True
        assert file.metadata[WINDOW] == 8
        assert {*given} <= {*file.metadata}
        assert len(file.metadata) == len({*file.metadata})
        assert file.integer("llama.block_count") == 1
        file.require_overrides_read()


def test_a_value_of_the_wrong_type_says_where_it_is_from(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    refused = pytest.raises(BadModelFile, match=r"'string \(by override_kv\)'.* one integer")
    with open_gguf(path, {"llama.context_length": "64"}) as file, refused:
        read_architecture(file)


def test_a_value_that_nothing_reads_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(
        UsageError, match=r"gives 'llama.context_lenth'.*mean 'llama\.context_length"
    ):
        LLM(override_kv={"llama.context_length": 64, "llama.context_lenth": 64})


def test_the_engine_runs_by_them() -> None:
    with LLM(override_kv={"llama.rope.freq_base": 7.0}) as other, LLM() as own:
        ids = own.encode("import os")
        assert other.engine.runner.arch.rope.base == 7.0
        assert own.engine.runner.arch.rope.base != 7.0
        wanted = own.generate(ids, max_tokens=8, ignore_eos=True).token_ids
        assert other.generate(ids, max_tokens=8, ignore_eos=True).token_ids != wanted


def test_the_command_line_takes_them() -> None:
    asked = ("run", "-p", "a", "-n", "1", "--override-kv")
    assert hypo_in_process(*asked, "llama.rope.freq_base=float:7").returncode == 0
    assert "nothing of this model reads" in hypo_in_process(*asked, "nothing=int:8").stderr


def test_the_first_mistral_says_that_its_window_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told(context_length: int, **overrides: Any) -> str:
        with open_gguf(bundled_model(), overrides) as file:
            return lost_window(file, "llama", context_length)

    first = {"general.name": "Mistral 7B Instruct v0.1"}
    assert told(8192, **first).endswith(f"--override-kv {WINDOW}=int:4096 puts it back")
    assert told(4096, **first) == ""
    assert told(8192, **first, **{WINDOW: 4096}) == ""
    assert told(8192, **{"general.name": "Mistral 7B Instruct v0.2"}) == ""
    assert told(8192) == ""
    with caplog.at_level(logging.WARNING, "hypocenter.engine"):
        LLM(context_length=8192, override_kv={**first, "llama.context_length": 8192}).close()
    assert caplog.text.count("puts it back") == 1
