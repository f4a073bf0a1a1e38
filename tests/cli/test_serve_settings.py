"""Options of `hypo serve` come from the command line, the environment and a file, in this order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from outside.terminal import assert_one_line, hypo_in_process

from hypocenter.base.errors import UsageError
from hypocenter.cli.app import app
from hypocenter.cli.options import EngineOptions
from hypocenter.cli.serve_options import ServeOptions
from hypocenter.cli.words.reading import in_our_words
from hypocenter.settings.environment import Environment

FILE = """
model = "m.gguf"
port = 9001
ctx-size = 512
spare = false
cors-origin = ["https://a.example", "https://b.example"]
chat-template-kwargs = {enable_thinking = false}
timeout = 5.5
reasoning = "off"
"""


def _started(
    monkeypatch: pytest.MonkeyPatch, *words: str, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What `hypo serve` is called with."""
    for name, value in (environ or {}).items():
        monkeypatch.setenv(name, value)
    Environment.read(os.environ)
    tokens, _ = in_our_words(["serve", *words], app)
    _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    engine = bound.arguments.get("engine") or EngineOptions()
    server = bound.arguments.get("server") or ServeOptions()
    models = bound.arguments.get("models")
    return {
        **vars(engine),
        **vars(server),
        "model": ", ".join(bound.arguments.get("model", ())) or (models and models.model),
    }


def _file(tmp_path: Path, text: str = FILE, mode: int = 0o600) -> str:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_file_says_what_the_command_line_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _started(monkeypatch, "--config", _file(tmp_path))
    assert found["model"] == "m.gguf"
    assert (found["port"], found["context_length"], found["spare"]) == (9001, 512, False)
    assert found["cors_origin"] == ("https://a.example", "https://b.example")
    assert found["chat_template_kwargs"] == '{"enable_thinking": false}'
    assert (found["timeout"], found["reasoning"]) == (5.5, "off")
    assert found["parallel"] == ServeOptions().parallel


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, FILE + 'max-queued = 3\napi-key = "of-the-file"\n')
    environ = {
        "HYPO_SERVE_PORT": "9002",
        "HYPO_SERVE_CTX_SIZE": "1024",
        "HYPO_SERVE_CONFIG": path,
        "HYPO_SERVE_SPARE": "1",
        "HYPO_SERVE_CORS_ORIGIN": "https://c.example,https://d.example",
    }
    words = ("-c", "2048", "--api-key", "of-the-line")
    found = _started(monkeypatch, *words, environ=environ)
    assert (found["context_length"], found["port"], found["max_queued"]) == (2048, 9002, 3)
    assert found["spare"] is True
    assert found["api_key"] == ("of-the-line",)
    assert found["cors_origin"] == ("https://c.example", "https://d.example")


@pytest.mark.parametrize(
    ("words", "model"),
    [((), "e.gguf"), (("a.gguf",), "a.gguf"), (("-m", "b.gguf"), "b.gguf"), (("-hf", "o/n"), None)],
)
def test_a_model_that_is_named_in_one_place_is_not_looked_for_in_the_next(
    words: tuple[str, ...], model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"HYPO_SERVE_MODEL": "e.gguf", "HYPO_SERVE_CONFIG": _file(tmp_path)}
    assert _started(monkeypatch, *words, environ=environ)["model"] == model


def test_one_of_two_rivals_leaves_the_other_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, 'chat-template-file = "t.jinja"\nkv-dtype = "q8_0"\n')
    found = _started(monkeypatch, "--config", path, "--chat-template", "chatml", "-ctk", "f32")
    assert found["chat_template"] == "chatml"
    assert (found["chat_template_file"], found["kv_dtype"]) == (None, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1\n", "prot in {path} is no option of hypo serve; did you mean port?"),
        ("frobnicate = 1\n", "frobnicate in {path} is no option of hypo serve (hypo serve"),
        ("no-spare = true\n", "no-spare in {path} is no option of hypo serve; did you mean spare?"),
        ('spare = "false"\n', "spare in {path} must be true or false"),
        ("port = true\n", "port in {path} must be a number or a text"),
        ("port = [1, 2]\n", "port in {path} must be a number or a text"),
        ("cors-origin = [1, [2]]\n", "cors-origin in {path} must be a list of texts"),
        ("[server]\nport = 1\n", "server in {path} is no option of hypo serve"),
        ("port = \n", "--config {path} is no TOML: "),
        ('config = "b.toml"\n', "config in {path} names another file"),
        ('port = "x"\n', "invalid value for port from {path}: "),
    ],
)
def test_a_line_of_the_file_that_is_wrong_is_told(text: str, said: str, tmp_path: Path) -> None:
    path = _file(tmp_path, text)
    done = hypo_in_process("serve", "--config", path)
    assert done.returncode == 2
    assert_one_line(done.stderr, said.format(path=path))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PROT", "1", "HYPO_SERVE_PROT is no option of hypo serve; did you mean HYPO_SERVE_PORT?"),
        ("SPARE", "maybe", "HYPO_SERVE_SPARE is 'maybe', but must be 1 or 0"),
        ("PORT", "x", "invalid value for HYPO_SERVE_PORT from the environment"),
        ("API_KEY", "sesame", "HYPO_SERVE_API_KEY is not read; HYPO_API_KEY has it"),
        ("ADMIN_KEY", "sesame", "HYPO_SERVE_ADMIN_KEY is not read; HYPO_ADMIN_KEY has it"),
    ],
)
def test_a_variable_that_is_wrong_is_told(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HYPO_SERVE_{name}", value)
    done = hypo_in_process("serve")
    assert done.returncode == 2
    assert_one_line(done.stderr, said)
    assert "sesame" not in done.stderr


@pytest.mark.parametrize(("mode", "is_open"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_with_a_key_is_not_open_to_everybody(
    mode: int, is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, 'admin-key = "sesame"\n', mode)
    if not is_open:
        assert _started(monkeypatch, "--config", path)["admin_key"] == "sesame"
        return
    with pytest.raises(UsageError, match=r"holds admin-key, and everybody .* chmod o-r") as refused:
        _started(monkeypatch, "--config", path)
    assert "sesame" not in str(refused.value)


def test_a_file_without_a_key_may_be_read_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _started(monkeypatch, "--config", _file(tmp_path, "port = 1\n", 0o644))["port"] == 1


def test_a_file_that_is_not_there_or_too_long_is_told(tmp_path: Path) -> None:
    done = hypo_in_process("serve", "--config", str(tmp_path / "none.toml"))
    assert done.returncode == 2
    assert_one_line(done.stderr, "none.toml: No such file or directory")
    path = _file(tmp_path, "#" * ((1 << 20) + 1))
    done = hypo_in_process("serve", "--config", path)
    assert_one_line(done.stderr, "is longer than 1048576 bytes")


def test_the_key_of_the_operator_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYPO_ADMIN_KEY", "sesame")
    assert ServeOptions().admin() == "sesame"
    assert ServeOptions(admin_key="given").admin() == "given"
    monkeypatch.delenv("HYPO_ADMIN_KEY")
    assert ServeOptions().admin() is None


def test_help_says_where_options_come_from() -> None:
    said = " ".join(hypo_in_process("serve", "--help").stdout.split())
    assert "HYPO_SERVE_PORT=8000" in said
    assert "The command line comes first, then the environment, then the file" in said
