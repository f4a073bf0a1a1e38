"""Which models `hypo serve` is to have, and what is said of one that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from hypocenter import EngineConfig
from hypocenter.base.errors import UsageError
from hypocenter.cli.model_app import ModelOptions
from hypocenter.cli.serve_options import ServeOptions
from hypocenter.cli.served_models import ServedChoice, chosen_models
from hypocenter.cli.verbs.serve import _terms


def chosen(*given: str, models: ModelOptions | None = None, **options: Any) -> ServedChoice:
    return chosen_models(
        given, models or ModelOptions(), ServeOptions(**options), device="cpu", quiet=True
    )


def names(choice: ServedChoice) -> list[str]:
    return [name for one in choice.models for name in one.names or (Path(one.path).stem,)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    parts = ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf")
    for name in ("a.gguf", "b.gguf", "mmproj-a.gguf", "a.imatrix.gguf", "read.me", *parts):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.gguf").write_bytes(b"GGUF")
    return tmp_path


def config(folder: Path, text: str) -> str:
    (path := folder / "serve.toml").write_text(text)
    return str(path)


def test_one_model_is_loaded_at_the_start_and_several_on_demand(folder: Path) -> None:
    a, b = str(folder / "a.gguf"), str(folder / "b.gguf")
    assert not chosen(a).on_demand
    assert not chosen().on_demand, "the bundled one"
    assert chosen(a, sleep_idle_seconds=60.0).on_demand
    assert not chosen(a, a).on_demand, "named twice it is one"
    both = chosen(a, b)
    assert (names(both), both.on_demand) == (["a", "b"], True)


def test_a_folder_has_its_models_and_those_below_but_no_parts_of_others(folder: Path) -> None:
    found = chosen(models_dir=str(folder))
    assert (names(found), found.on_demand) == (["a", "b", "big", "c"], True)
    assert found.models[2].path.endswith("big-00001-of-00002.gguf")


@pytest.mark.parametrize(("kind", "is_listed"), [("adapter", False), ("model", True)])
def test_a_file_of_a_folder_says_what_it_is(folder: Path, kind: str, is_listed: bool) -> None:
    writer = gguf.GGUFWriter(folder / "terse.gguf", "llama")
    writer.add_string("general.type", kind)
    writer.add_string("general.description", "made for general.type adapter")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert ("terse" in names(chosen(models_dir=str(folder)))) == is_listed


def test_a_file_of_settings_has_a_table_for_each(folder: Path) -> None:
    text = """
        [models.first]
        path = "a.gguf"
        aliases = ["gpt-4o"]
        ctx_size = 512
        parallel = 3
        pinned = true
        [models.second]
        path = "deep/c.gguf"
        kv-tokens = 700
        max-queued = 0
        sleep-idle-seconds = 5
    """
    options: dict[str, Any] = {
        "config": config(folder, text),
        "sleep_idle_seconds": 60.0,
        "parallel": 8,
    }
    found = chosen(**options)
    assert names(found) == ["first", "gpt-4o", "second"]
    engine = EngineConfig(device="cpu", context_length=100)
    first, second = (_terms(one, ServeOptions(**options), engine)[0] for one in found.models)
    assert (first.engine.context_length, first.engine.max_batch_requests) == (512, 3)
    assert (first.is_pinned, first.idle_seconds, first.max_queued) == (True, 60, 512)
    assert first.engine.kv_tokens is None, "the worker takes what there is room for"
    assert (second.engine.context_length, second.engine.kv_tokens) == (100, 700)
    assert (second.is_pinned, second.idle_seconds, second.max_queued) == (False, 5, 0)
    assert second.path == str((folder / "deep" / "c.gguf").resolve()), "beside the file"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[models.a]\npath = "a.gguf"\npinnd = true', "pinnd is no key of .*; did you mean pinned"),
        ('[models.a]\npath = "a.gguf"\nzzz = 1', "zzz is no key of .*it may have path, aliases"),
        ("[models.a]\npinned = true", r"\[models.a\] in .*missing required field `path`"),
        ('[models.a]\npath = "a.gguf"\nparallel = "x"', r"\[models.a\] in .*parallel"),
        ("models = 3", r"models in .* must be tables: \[models.NAME\]"),
        ("[models]\na = 3", r"models in .* must be tables"),
    ],
)
def test_a_table_that_is_wrong_is_told(folder: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        chosen(config=config(folder, text))


def test_models_are_named_in_one_way(folder: Path) -> None:
    path = config(folder, '[models.a]\npath = "a.gguf"')
    with pytest.raises(UsageError, match=r"models are named by MODEL and --models-dir"):
        chosen("a.gguf", models_dir=str(folder))
    with pytest.raises(UsageError, match=r"named by --models-dir and \[models\] in"):
        chosen(config=path, models_dir=str(folder))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"models_dir": "/nowhere/at/all"}, "--models-dir /nowhere/at/all: No such file"),
        ({"models_dir": ".", "pin": ("aa",)}, "--pin 'aa' is no model that is served"),
        ({"models_dir": ".", "served_model_name": ("x",)}, "--alias names one model"),
        ({"models_dir": "deep/none"}, "has no GGUF file of a model"),
    ],
)
def test_what_cannot_be_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    (folder / "deep" / "none").mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=said):
        chosen(**options)
