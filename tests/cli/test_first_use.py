"""What a newcomer types first, and what he is told."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from models.demo_variants import demo_that_chats
from models.tiny_gguf import write_tiny
from outside.terminal import TIMEOUT_SECONDS, assert_one_line, hypo, hypo_in_process, on_terminal
from repository import DEMO

from hypocenter import LLM
from hypocenter.base.errors import UsageError
from hypocenter.cli.answer import _speed
from hypocenter.cli.app import app, own_verbs
from hypocenter.cli.usage import VERBS
from hypocenter.cli.verbs import env

#: Hides packages from a command, as an installation without them would.
WITHOUT = """
import sys
for name in {packages}:
    sys.modules[name] = None
from hypocenter.cli import app
app.main({args})
"""


def _without(packages: list[str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(packages=packages, args=list(args))],
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "https://huggingface.co/x/y/resolve/main/model.gguf",
        "hf.co/x/y",
        "meta-llama/Llama-3-8B",
        "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    ],
)
def test_a_name_of_a_hub_is_told_from_a_path(name: str) -> None:
    done = hypo_in_process("run", name, "-p", "x")
    assert done.returncode == 1
    assert_one_line(done.stderr, "is not here, and HF_HUB_OFFLINE forbids to ask for it")


@pytest.mark.parametrize(
    "words", [("run", "llama3:8b", "-p", "x"), ("run", "llama3.2", "-p", "x"), ("pull", "llama3")]
)
def test_a_name_of_another_hub_is_answered_with_the_form_of_ours(words: tuple[str, ...]) -> None:
    done = hypo_in_process(*words)
    assert done.returncode == 2
    said = f"{words[1]!r} names no model of a hub, and no file; write OWNER/NAME or OWNER/NAME:TAG"
    assert_one_line(done.stderr, said, "such as unsloth/Qwen3-8B-GGUF:Q4_K_M")


@pytest.mark.parametrize("name", ["model.gguf", "models/x.gguf", "./a/b", "../a:b/c.gguf"])
def test_a_path_is_a_path(name: str) -> None:
    assert "there is no such file" in hypo_in_process("run", name, "-p", "x").stderr


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("inspct", "did you mean inspect; commands are"),
        ("xyzzy", "unknown command 'xyzzy'; commands are run, "),
    ],
)
def test_an_unknown_command_is_answered_with_all_there_are(word: str, hint: str) -> None:
    done = hypo_in_process(word)
    assert done.returncode == 2
    assert hint in done.stderr
    assert all(verb in done.stderr for verb in VERBS)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("server", "it is `hypo serve`"),
        ("chat", "`hypo run MODEL` is a chat"),
        ("show", "it is `hypo inspect`"),
    ],
)
def test_a_command_of_other_programs_is_answered_by_name(word: str, hint: str) -> None:
    done = hypo_in_process(word)
    assert done.returncode == 2
    assert done.stderr == f"hypo: unknown command {word!r}; {hint} (hypo --help)\n"


def test_the_commands_that_are_named_are_those_there_are() -> None:
    assert set(VERBS) == own_verbs()


@pytest.mark.parametrize(
    ("num_tokens", "speed", "text"),
    [
        (3, 72.94, "3 tokens, 72.9 tokens/s"),
        (2, 0.038, "2 tokens, 26.3 s a token"),
        (1, 0.0, "1 token"),
    ],
)
def test_speeds_are_readable(num_tokens: int, speed: float, text: str) -> None:
    assert _speed(num_tokens, speed) == text


@pytest.mark.parametrize(
    ("packages", "args", "message"),
    [
        (["triton"], ["run", "--device", "sim:h200", "-p", "x"], "pip install triton"),
        (["torch"], ["run", "--device", "cuda", "-p", "x"], "pip install torch"),
        (["triton"], ["kernels"], "pip install triton"),
    ],
)
def test_a_package_that_is_missing_is_named(
    packages: list[str], args: list[str], message: str
) -> None:
    done = _without(packages, *args)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "--device cpu" not in done.stderr
    assert "Traceback" not in done.stderr


def test_inspect_names_a_matrix_that_run_would_miss(tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_down.weight": None}
    path = write_tiny(tmp_path / "m.gguf", tensors=tensors, tokens=["a", "b"])
    done = hypo_in_process("inspect", str(path))
    assert "not runnable: " in done.stdout
    assert "blk.0.ffn_down.weight" in done.stdout
    assert "memory for a context" in done.stdout
    found = json.loads(hypo_in_process("inspect", "--json", str(path)).stdout)
    assert "blk.0.ffn_down.weight" in found["problem"]
    assert found["architecture"]["num_layers"] == 1


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_inspect_finds_nothing_wrong_with_what_runs(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", name)
    assert "not runnable" not in hypo_in_process("inspect", str(path)).stdout
    assert "not runnable" not in hypo_in_process("inspect", str(DEMO)).stdout


SPOKEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_another_chat_template_is_taken(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "hi"}]
    with LLM(DEMO, chat_template=SPOKEN) as llm:
        assert llm.chat_template is not None
        assert llm.chat_template.render(asked) == "<user>hi"
    with LLM(DEMO, chat_template="chatml") as llm:
        assert llm.chat_template is not None
        text = llm.chat_template.render(asked)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(UsageError, match="chat_template is 'x', but"):
        LLM(DEMO, chat_template="x")
    file = tmp_path / "t.jinja"
    file.write_text(SPOKEN)
    words = ("run", str(DEMO), "hi", "-n", "2", "--chat-template-file", str(file), "-q")
    done = hypo_in_process(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    file.write_text("no template")
    done = hypo_in_process("run", str(DEMO), "hi", "--chat-template-file", str(file))
    assert "is no chat template" in done.stderr


def test_a_slip_in_a_role_is_noticed(tmp_path: Path) -> None:
    with LLM(demo_that_chats(tmp_path / "chat.gguf")) as llm:
        with pytest.raises(UsageError, match=r"role is 'usr'; did you mean 'user'\?"):
            llm.encode_chat([{"role": "usr", "content": "x"}])
        assert llm.encode_chat([{"role": "critic", "content": "x"}])


def test_bytes_are_no_text() -> None:
    with LLM(DEMO) as llm, pytest.raises(UsageError, match="the text is bytes, but must be a str"):
        llm.tokenizer.encode(b"x")  # type: ignore[arg-type]


def test_an_architecture_is_no_slip(tmp_path: Path) -> None:
    done = hypo_in_process("inspect", str(write_tiny(tmp_path / "m.gguf", "mamba")))
    assert "did you mean" not in done.stdout


def test_the_cache_is_shown_and_cleared(tmp_path: Path) -> None:
    environ = {"HYPO_CACHE_DIR": str(tmp_path)}
    made = tmp_path / "kernels" / "x"
    made.mkdir(parents=True)
    (made / "code").write_bytes(bytes(3 << 20))
    (tmp_path / "keys").mkdir()
    assert "3.0 MiB  machine code" in hypo_in_process("cache", environ=environ).stdout
    (part, *_) = json.loads(hypo("cache", "clear", "--json", environ=environ).stdout)
    assert part["num_bytes"] == 0
    assert not made.exists()
    assert (tmp_path / "keys").exists(), "what cannot be made anew stays"


def test_completion_is_installed_for_the_shell(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "SHELL": "/bin/bash"}
    done = hypo("--install-completion", environ=environ)
    assert done.returncode == 0, done.stderr
    (script,) = tmp_path.rglob("completions/hypo")
    assert "--n-predict" in script.read_text()


def test_what_is_pasted_is_one_message(tmp_path: Path) -> None:
    path = demo_that_chats(tmp_path / "chat.gguf")
    words = ["run", str(path), "-n", "2", "--temp", "0", "-c", "512"]
    with on_terminal(words, term="xterm") as terminal:
        terminal.wait_for("> ")
        terminal.type("\x1b[200~one\ntwo\nthree\x1b[201~\r")
        at = terminal.wait_for("generation")
        terminal.wait_for("> ", after=at)
        terminal.type("\x04")
        terminal.wait()
    assert terminal.seen.count("generation") == 1


def test_a_model_that_is_missing_is_told_before_the_prompt_that_is_missing_as_well() -> None:
    done = hypo_in_process("run", "no-such.gguf")
    assert done.returncode == 2
    assert "no-such.gguf: there is no such file" in done.stderr


@pytest.mark.parametrize(("path", "kind"), [("/", "a directory"), ("/dev/null", "no regular file")])
def test_what_is_no_file_is_wrong_usage_as_a_missing_file_is(path: str, kind: str) -> None:
    done = hypo_in_process("run", path, "-p", "x")
    assert done.returncode == 2
    assert done.stderr == f"hypo: {path} is {kind}, but a model must be a GGUF file\n"


def _help(*words: str) -> list[str]:
    return hypo_in_process(*words, "--help", environ={"COLUMNS": "80"}).stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["run"], "Usage: hypo run [OPTIONS] [MODEL] [QUESTION]"),
        (["bench"], "Usage: hypo bench [OPTIONS] [MODEL]"),
        (["kernels"], "Usage: hypo kernels [OPTIONS] [FILE]"),
        (["demo"], "Usage: hypo demo"),
        (["embed"], "Usage: hypo embed [OPTIONS] MODEL [TEXTS...]"),
        (["kill-serve"], "Usage: hypo kill-serve [OPTIONS] [MODEL]"),
    ],
)
def test_usage_names_the_arguments(words: list[str], usage: str) -> None:
    assert _help(*words)[0] == usage


@pytest.mark.parametrize("verb", sorted(own_verbs()))
def test_help_of_a_verb_is_short_and_fits_into_eighty_columns(verb: str) -> None:
    """A line of a paragraph that is broken by the terminal leaves a line of a few words."""
    lines = _help(verb)
    assert lines[-1] == "Exit codes and --debug: hypo --help"
    assert not [line for line in lines if "[default: (" in line or '[default: ""]' in line]
    assert not [line for line in lines if "[default: False]" in line]
    text = app[verb].help
    assert text is not None
    assert [line for line in inspect.cleandoc(text).splitlines()[1:] if len(line) > 79] == []


def test_exit_codes_are_a_table_that_fits() -> None:
    lines = _help()
    table = lines[lines.index("Exit codes") + 1 :]
    codes = [line.split()[0] for line in table if not line.startswith(" " * 7)]
    assert codes == ["0", "1", "2", "3", "4", "5", "130", "141"]
    assert max(map(len, table)) < 80
    verbs = [line.split()[1] for line in lines if line.startswith("│ ") and line[2] not in " -"]
    assert verbs == list(VERBS)


def test_a_model_that_cannot_chat_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """A tokenizer that nobody knows would be told of once it is read."""
    path = write_tiny(tmp_path / "m.gguf", tokens=["a", "b"])
    for words in ([], ["--tokenizer-pre", "none-of-them"]):
        done = hypo_in_process("run", str(path), "a question", *words)
        assert done.returncode == 2
        assert_one_line(
            done.stderr, "m.gguf has no chat template, so it cannot chat: -p TEXT continues a text",
            "--chat-template chatml",
        )  # fmt: skip


def test_the_environment_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HYPO_API_KEY", "HYPO_ADMIN_KEY"):
        monkeypatch.setenv(name, "sesame")
    # Torch is asked by a process of its own, which takes seconds.
    monkeypatch.setattr(env, "_ask_torch", cache(env._ask_torch))
    for words in (["env"], ["env", "--json"]):
        said = hypo_in_process(*words).stdout
        assert "sesame" not in said
        assert said.count("set, not shown") == 2
