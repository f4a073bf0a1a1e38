"""The command line as a person meets it: bad input, exit codes, pipes, terminals, JSON."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from gguf import GGUFValueType
from models.demo_variants import LONG_CONTEXT, demo_that_chats, demo_with
from models.gguf_files import STRING, GGUFWriter, Item
from outside.terminal import (
    AS_A_PERSON,
    HYPO,
    TIMEOUT_SECONDS,
    assert_one_line,
    hypo,
    hypo_in_process,
    lines_without_progress,
    on_terminal,
)
from repository import DEMO

from hypocenter.base.errors import OutOfBlocks, OutOfMemory, UnsupportedModel
from hypocenter.cli.model_app import ModelOptions
from hypocenter.cli.options import EngineOptions, SamplingOptions, message_of
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig, SamplingParams
from hypocenter.settings.setting import defaults

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_that_chats(tmp_path_factory.mktemp("chat") / "chat.gguf")


@pytest.fixture
def endless(chat_model: Path) -> list[str]:
    """Arguments that make the model talk until it is stopped."""
    return [str(chat_model), "-c", str(LONG_CONTEXT), "-n", "-1", "-t", "1", "--ignore-eos"]


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["rnu"], ["unknown command 'rnu'; did you mean run; commands are run, inspect"]),
        (["run", "--tmp", "1"], ["hypo run has no --tmp (did you mean --temp?)"]),
        (["run", "--top-k", "1.5"], ["--top-k", "whole number"]),
        (["run", "--temp", "warm"], ["--temp", '"warm"']),
        (["run", "--temp", "-1", "-p", "x"], ["--temp/--temperature is -1.0", "from 0.0 to 100.0"]),
        (["run", "--temp", "nan", "-p", "x"], ["--temperature is nan"]),
        (["run", "-n", "-2", "-p", "x"], ["-n/--predict is -2", "or -1"]),
        (["run", "-t", "0", "-p", "x"], ["-t/--threads is 0"]),
        (["run", "--kv-dtype", "q4", "-p", "x"], ["--kv-dtype is 'q4'", "f16, f32, q8_0, q4_0"]),
        (
            ["run", "--kv-dtype", "Q8_0", "--device", "cuda", "--attention", "parts", "-p", "x"],
            ["--kv-dtype is 'q8_0', but parts of attention read no blocks"],
        ),
        (
            ["bench", "-ctk", "q8_0", "-ctv", "q4_0"],
            ["-ctk/--cache-type-k q8_0 and -ctv/--cache-type-v q4_0 differ", "one type: give both"],
        ),
        (
            ["run", "-ctk", "q8_0", "-p", "x"],
            ["-ctk/--cache-type-k q8_0", "-ctv/--cache-type-v f16"],
        ),
        (
            ["warm", "--kv-dtype", "f16", "-ctk", "q8_0", "-ctv", "q8_0"],
            ["--kv-dtype f16, -ctk/--cache-type-k q8_0 and -ctv/--cache-type-v q8_0 differ"],
        ),
        (["run", "-ctk", "q5_1", "-ctv", "q5_1", "-p", "x"], ["is 'q5_1'", "f16, f32, q8_0, q4_0"]),
        (["run", "--kv-dtype", "", "-p", "x"], ["is ''", "f16, f32, q8_0, q4_0"]),
        (["run", "--device", "tpu", "-p", "x"], ["--device is 'tpu'"]),
        (["run", "--stop", "", "-p", "x"], ["--stop is '', but an empty text"]),
        (["run", "-p", "x", "--tokenizer-pre", "gpt2"], ["--tokenizer-pre is 'gpt2'", "'gpt-2'"]),
        (["run", "a.gguf", "-m", "b.gguf", "-p", "x"], ["a.gguf", "b.gguf", "name it once"]),
        (["run", "a.gguf", "Hello", "there"], ["'there'", "in quotes"]),
        (["run", "-s", "-2", "-p", "x"], ["-s/--seed is -2", "from 0 to", "-1: another one"]),
        (["run", "--device", "sim:h20", "-p", "x"], ["did you mean sim:h200", "sim:rx7900xtx"]),
        (["env", "foo"], ["unexpected argument 'foo' of hypo env", "hypo env --help"]),
        (["inspect", "a", "b"], ["unexpected argument 'b' of hypo inspect", "one MODEL"]),
        (["inspect", "-c", "x"], ["-c", "whole number"]),
        (["run", "-p", "x", "-f", "y"], ["both -p and -f"]),
        (["run", "-p"], ["-p requires an argument"]),
        (["run"], ["no prompt", "-p TEXT", "-f FILE", "a chat needs a terminal"]),
        (["run", "--json"], ["no prompt", "-p TEXT"]),
        (["run", "-f", "no-such-file"], ["no-such-file"]),
        (["run", "no-such-model.gguf", "-p", "x"], ["no-such-model.gguf", "no such file"]),
        (["inspect", "-c", "0"], ["-c/--ctx-size is 0"]),
        (["bench", "-r", "0"], ["-r/--repetitions is 0"]),
        (["bench", "-p", "0", "-n", "0"], ["nothing to measure"]),
        (["bench", "-p", "8,-1"], ["-p/--n-prompt is -1"]),
        (["bench", "-d", "1,x"], ["-d", "whole number"]),
        (["bench", "-d", "1,-1"], ["-d/--n-depth is -1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_is_one_line_and_exit_code_2(args: list[str], parts: list[str]) -> None:
    done = hypo_in_process(*args)
    assert_one_line(done.stderr, *parts)
    assert (done.returncode, done.stdout) == (2, "")


def test_an_error_names_the_option_of_a_setting_it_speaks_of() -> None:
    error = UnsupportedModel("m.gguf", "tokenizer.ggml.pre", "x", "no", "say by tokenizer_pre")
    assert message_of(error).endswith("say by tokenizer_pre")
    error.settings = ("tokenizer_pre",)
    assert message_of(error).endswith("say by --tokenizer-pre")
    assert "-c/--ctx-size" in message_of(OutOfBlocks(1, 0, 4))
    assert "-c/--ctx-size" in message_of(OutOfMemory("cpu", 1, 2, 3))


def _html(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html><body>404: not found</body></html>\n" * 10)


def _truncated(path: Path) -> None:
    path.write_bytes(DEMO.read_bytes()[:-1000])


def _no_header(path: Path) -> None:
    path.write_bytes(b"GGU")


def _unknown_architecture(path: Path) -> None:
    demo_with(path, {"general.architecture": ("lama", GGUFValueType.STRING)})


def _unsupported_type(path: Path) -> None:
    """The first tensor's type becomes 9 (Q8_1); its offset in the file follows its name."""
    data = bytearray(DEMO.read_bytes())
    name = b"output_norm.weight"
    at = data.index(name) + len(name)
    num_dims = int.from_bytes(data[at : at + 4], "little")
    at += 4 + 8 * num_dims
    data[at : at + 4] = (9).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (_html, "GGUF"),
        (_truncated, "model.gguf"),
        (_no_header, "model.gguf"),
        (_unknown_architecture, "lama"),
        (_unsupported_type, "Q8_1"),
    ],
)
def test_a_bad_model_is_one_line_and_exit_code_1(
    tmp_path: Path, make: Callable[[Path], None], part: str
) -> None:
    model = tmp_path / "model.gguf"
    make(model)
    done = hypo_in_process("run", str(model), "-p", "x")
    assert_one_line(done.stderr, str(model), part)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_file_name_cannot_write_to_the_terminal() -> None:
    done = hypo_in_process("inspect", "no\x1b[31m\nsuch.gguf")
    assert_one_line(done.stderr, r"no\x1b[31m\nsuch.gguf")


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    done = hypo_in_process("run", "-f", "-", stdin="word " * 600)
    assert_one_line(done.stderr, "maximum context length is 512 tokens")
    assert "--ctx-size" not in done.stderr, "the model was trained for no more"
    assert (done.returncode, done.stdout) == (2, "")
    done = hypo_in_process("run", "-f", "-", "-c", "64", stdin="word " * 200)
    assert_one_line(done.stderr, "length is 64 tokens", "raise -c/--ctx-size, up to 512")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_context_beyond_the_trained_length_is_refused() -> None:
    done = hypo_in_process("run", "-c", "513", "-p", PROMPT)
    assert_one_line(done.stderr, "-c/--ctx-size is 513", "512")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("source", ["-p", "-f"])
def test_a_prompt_that_is_not_utf8_is_refused(tmp_path: Path, source: str) -> None:
    bad = b"caf\xe9"
    (tmp_path / "prompt").write_bytes(bad)
    given = bad if source == "-p" else os.fsencode(tmp_path / "prompt")
    done = subprocess.run([*HYPO, "run", source, given], capture_output=True, text=True, timeout=60)
    assert_one_line(done.stderr, "not UTF-8", "0xe9 at 3")
    assert done.returncode == 2


#: `hypo run` on one device after the other, where neither package is.
WITHOUT_GPU_PACKAGES = """
import sys
sys.modules["triton"] = sys.modules["torch"] = None
from hypocenter.cli.app import main
for device in sys.argv[1:]:
    try:
        main(["run", "--device", device, "-p", "x"])
    except SystemExit as left:
        print(left.code)
"""


def test_a_device_without_its_package_says_what_to_install() -> None:
    torch = "needs torch, which is not installed: pip install torch (for AMD its ROCm build"
    told = {
        "sim:h200": "needs triton, which is not installed: pip install triton; it needs no GPU",
        "cuda": torch,
        "hip:1": torch,
        "sim:foo": "known are sim:mi300x, sim:h200, sim:rx7900xtx",  # told before what it needs
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GPU_PACKAGES, *told],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["2"] * len(told)
    lines = lines_without_progress(done.stderr)
    for line, part in zip(lines, told.values(), strict=True):
        assert_one_line(line, part)
    assert "'sim:foo'" in lines[-1]
    assert "triton" not in lines[-1]


def test_a_model_that_computes_nan_is_named_with_the_way_to_look_at_it(tmp_path: Path) -> None:
    model = _with_bytes(tmp_path / "broken.gguf", "output_norm.weight", b"\x00\x00\xc0\x7f" * 30)
    done = hypo_in_process("run", str(model), "-p", "x", "-n", "2", "-t", "1")
    assert_one_line(done.stderr, f"{model}: logits row 0", "NaN", f"hypo inspect {model} --check")
    assert done.returncode == 1
    checked = hypo_in_process("inspect", str(model), "--check")
    assert checked.returncode == 4
    assert "... and 22 more" in checked.stdout  # 8 of them are shown


def _with_bytes(path: Path, tensor: str, changed: bytes) -> Path:
    """The bundled model with other bytes at the beginning of a tensor."""
    data = bytearray(DEMO.read_bytes())
    with open_gguf(DEMO) as file:
        at = file.tensors[tensor].offset
    data[at : at + len(changed)] = changed
    path.write_bytes(data)
    return path


def test_output_that_has_nowhere_to_go_is_an_error() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$0" -m hypocenter run -p x -n 1 -t 1 >&-', sys.executable],
        stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert_one_line(done.stderr, "stdout is closed")
    assert done.returncode == 1


def test_debug_anywhere_shows_the_traceback() -> None:
    for args, environ in (
        (["--debug", "inspect", "no.gguf"], {}),
        (["inspect", "no.gguf", "--debug"], {}),
        (["inspect", "no.gguf"], {"HYPO_DEBUG": "1"}),
    ):
        done = hypo_in_process(*args, environ=environ)
        assert done.stderr.startswith("Traceback"), done.stderr
        assert done.stderr.splitlines()[-1].startswith("hypo: no.gguf"), done.stderr
        assert done.returncode == 2


def test_a_misspelt_variable_of_ours_is_refused() -> None:
    done = hypo_in_process("env", environ={"HYPO_CACHEDIR": "/tmp"})
    assert_one_line(done.stderr, "HYPO_CACHEDIR", "HYPO_CACHE_DIR")
    assert done.returncode == 2


def test_a_path_of_instructions_that_nobody_knows_is_refused() -> None:
    done = hypo_in_process("env", environ={"HYPO_INSTRUCTIONS": "avx3"})
    assert_one_line(done.stderr, "'avx3'", "avx512-bf16, avx512-vnni, avx-vnni, avx2, plain")
    assert done.returncode == 2


def test_an_unexpected_exception_names_its_type_and_the_way_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hypocenter.cli import app
    from hypocenter.cli.verbs import env

    def fail(*, as_json: bool) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(env, "env", fail)
    with pytest.raises(SystemExit) as left:
        app.main(["env"])
    assert left.value.code == 1
    assert_one_line(capsys.readouterr().err, "KeyError: 'planted'", "--debug")


# -- what is shown -------------------------------------------------------------------------------


def test_help_loads_no_arrays_and_no_compiler() -> None:
    program = (
        "import sys\nfrom hypocenter.cli.app import main\n"
        "try:\n    main(['run', '--help'])\nexcept SystemExit as left:\n"
        "    heavy = {'numpy', 'numba', 'llvmlite', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "    sys.exit(f'loaded {heavy}' if heavy else left.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_is_fast() -> None:
    """Beside what the library for command lines costs; numba alone would add three times that."""
    library = min(_processor_seconds("-c", "import cyclopts, rich.console") for _ in range(2))
    best = min(_processor_seconds("-m", "hypocenter", "--help") for _ in range(2))
    assert best < 3 * library, f"{best:.2f} s, beside {library:.2f} s"


def _processor_seconds(*args: str) -> float:
    """What a run of Python costs: unlike the clock nearly the same on a busy machine."""
    before = os.times()
    subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, timeout=60, check=True)
    after = os.times()
    return (
        after.children_user - before.children_user + after.children_system - before.children_system
    )


def test_help_names_every_verb_and_every_exit_code() -> None:
    shown = hypo_in_process("--help").stdout
    for verb in ("run", "inspect", "bench", "env"):
        assert re.search(rf"\b{verb}\b", shown), shown
    codes = ("0    done", "1    error", "2    wrong usage", "3    GPU fault", "4    a check failed")
    for code in (*codes, "130", "141"):
        assert code in shown, shown


def test_help_is_a_verb_too() -> None:
    assert hypo_in_process("help").stdout == hypo_in_process("--help").stdout
    assert hypo_in_process("help", "bench").stdout == hypo_in_process("bench", "--help").stdout


def test_version_is_that_of_the_package() -> None:
    import hypocenter.cli.app

    done = hypo("--version")
    assert done.stdout.strip() == hypocenter.cli.app._version()
    assert re.fullmatch(r"hypo \d+\.\d+\.\d+", done.stdout.strip())


def test_options_have_every_field_and_default_of_the_configuration() -> None:
    sampling = vars(SamplingOptions()).keys()
    of_programs = {"logprobs", "prompt_logprobs", "allowed_token_ids", "stop_token_ids"}
    of_programs |= {"min_tokens", "bad_words", "include_stop_str_in_output", "regex", "choice"}
    of_programs |= {"drafts", "lora"}  # of a command line, adapters are options of the engine
    assert sampling | of_programs == defaults(SamplingParams).keys()
    assert SamplingOptions().params() == SamplingParams()
    assert SamplingOptions().params(in_chat=True).max_tokens is None
    assert SamplingOptions(max_tokens=5).params(in_chat=True).max_tokens == 5
    assert SamplingOptions(max_tokens=-1).params().max_tokens is None
    engine = vars(EngineOptions()).keys()
    of_serve = {"max_batch_requests", "kv_tokens"}
    not_at_the_command_line = {"block_size", *of_serve}
    of_a_field = {"chat_template_file", "cache_type_k", "cache_type_v"}
    assert (engine - of_a_field) | not_at_the_command_line == defaults(EngineConfig).keys()
    assert EngineOptions().config() == EngineConfig()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("-ctk q8_0 -ctv Q8_0", "q8_0"),
        ("--cache-type-k q4_0 --cache-type-v q4_0", "q4_0"),
        ("-ctk f16", "f16"),
        ("--cache-type-v f16", "f16"),
        ("--kv-dtype f32 -ctk f32", "f32"),
    ],
)
def test_the_cache_has_the_type_that_llama_cpp_spells_twice(
    monkeypatch: pytest.MonkeyPatch, words: str, name: str
) -> None:
    asked: list[EngineConfig] = []
    monkeypatch.setattr(
        "hypocenter.cli.verbs.bench.bench",
        lambda path, tests, config, *, as_json: asked.append(config),
    )
    done = hypo_in_process("bench", *words.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert [config.kv_dtype for config in asked] == [name]


@pytest.mark.parametrize("word", ["-b", "--batch-size", "--max-num-batched-tokens"])
def test_a_step_takes_as_many_tokens_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    asked: list[EngineConfig] = []
    monkeypatch.setattr(
        "hypocenter.cli.verbs.bench.bench",
        lambda path, tests, config, *, as_json: asked.append(config),
    )
    done = hypo_in_process("bench", word, "64")
    assert (done.returncode, done.stderr) == (0, "")
    assert [config.step_tokens for config in asked] == [64]


def test_the_bundled_model_is_the_one_the_library_takes() -> None:
    assert ModelOptions().path(None) == str(DEMO)
    assert DEMO.is_file()


def test_inspect_shows_metadata_tensors_memory_and_hash() -> None:
    done = hypo_in_process("inspect", "-c", "1024", "--check", "--json")
    report = json.loads(done.stdout)
    values = {key: entry["value"] for key, entry in report["metadata"].items()}
    assert values["general.architecture"] == "llama"
    assert values["llama.block_count"] == 6
    assert values["tokenizer.ggml.add_bos_token"] is True
    assert isinstance(values["llama.rope.freq_base"], float)
    assert values["tokenizer.ggml.tokens"]["length"] == 4096
    assert len(values["tokenizer.ggml.tokens"]["first"]) == 6
    assert all(isinstance(kind, int) for kind in values["tokenizer.ggml.token_type"]["first"])
    assert sum(count["num_tensors"] for count in report["tensors"]["by_type"]) == 56
    # 6 layers, 2 key/value heads of 64, keys and values, two bytes each.
    assert report["memory"]["kv_f16_bytes"] == 1024 * 6 * 2 * 64 * 2 * 2
    # Blocks of 32, two of them to a head.
    assert report["memory"]["kv_q8_0_bytes"] == 1024 * 6 * 2 * 2 * 34 * 2
    assert report["memory"]["kv_q4_0_bytes"] == 1024 * 6 * 2 * 2 * 18 * 2
    assert report["memory"]["beyond_trained_length"] is True
    digest = subprocess.run(["sha256sum", DEMO], capture_output=True, text=True, check=True).stdout
    assert report["check"]["sha256"] == {str(DEMO): digest.split()[0]}
    assert report["check"]["num_bad_floats"] == 0
    shown = hypo_in_process("inspect", "-c", "1024").stdout
    assert "Q8_0" in shown
    assert "the model takes 512 at most" in shown


def test_inspect_check_finds_a_nan_scale_and_fails(tmp_path: Path) -> None:
    # A Q8_0 block begins with its scale; this one is NaN.
    bad = _with_bytes(tmp_path / "nan.gguf", "blk.0.attn_q.weight", b"\x00\x7e")
    done = hypo_in_process("inspect", str(bad), "--check")
    assert done.returncode == 4
    assert_one_line(done.stderr, "1 of", "NaN")
    assert "is nan" in done.stdout
    assert "more" not in done.stdout


def test_inspect_shows_a_file_that_cannot_run(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    _unknown_architecture(model)
    done = hypo_in_process("inspect", str(model))
    assert done.returncode == 0
    assert "not runnable" in done.stdout
    assert "lama" in done.stdout


def test_inspect_shows_a_file_without_its_weights(tmp_path: Path) -> None:
    """A file of a vocabulary alone is what one inspects because `run` refuses it."""
    path = tmp_path / "vocab.gguf"
    fields = [("general.architecture", Item(STRING, "llama")), ("general.name", Item(STRING, "it"))]
    path.write_bytes(GGUFWriter().build(fields))
    done = hypo_in_process("inspect", str(path))
    assert done.returncode == 0, done.stderr
    assert "general.name" in done.stdout
    assert "not runnable: " in done.stdout
    assert hypo_in_process("run", str(path), "-p", "x").returncode == 1


def test_inspect_answers_a_hostile_file_in_few_and_harmless_characters(tmp_path: Path) -> None:
    """One key of 60,000 characters beside 4,000 short ones made lines of 60,000 each."""
    fields: list[tuple[str | bytes, Item]] = [
        ("general.architecture", Item(STRING, "none")), ("k" * 60_000, Item(STRING, "x")),
    ]  # fmt: skip
    fields += [(f"k.{number}", Item(STRING, "x")) for number in range(4000)]
    fields.append(("title\x1b]0;evil\x07\x9b2J\u202e", Item(STRING, "x")))
    path = tmp_path / "clear\x1b[2J\n.gguf"
    path.write_bytes(GGUFWriter().build(fields))
    text = hypo_in_process("inspect", str(path))
    assert text.returncode == 0
    assert len(text.stdout) < 10 * path.stat().st_size
    assert "\\x1b[2J" in text.stdout
    as_json = hypo_in_process("inspect", str(path), "--json")
    assert all(c.isprintable() or c == "\n" for c in text.stdout + as_json.stdout)
    assert fields[-1][0] in json.loads(as_json.stdout)["metadata"]


# -- what runs -----------------------------------------------------------------------------------


def test_run_streams_text_to_stdout_and_figures_to_stderr() -> None:
    done = hypo("run", "-p", PROMPT, "-n", "8", "-t", "1")
    assert done.returncode == 0, done.stderr
    same = hypo_in_process("run", "-f", "-", "-n", "8", "-t", "1", "--json", stdin=PROMPT)
    again = json.loads(same.stdout)
    assert done.stdout == again["text"] + "\n"
    last = done.stderr.splitlines()[-1]
    num_prompt = len(again["prompt_token_ids"])
    assert re.fullmatch(
        rf"hypo: prompt {num_prompt} tokens, [\d.]+ tokens/s; "
        r"generation 8 tokens, [\d.]+ tokens/s; length",
        last,
    ), done.stderr


def test_quiet_leaves_the_answer_alone() -> None:
    run = ["run", "-p", PROMPT, "-n", "4", "-t", "1"]
    done = hypo_in_process(*run, "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == hypo_in_process(*run).stdout


def test_nothing_asked_for_is_nothing_read() -> None:
    done = hypo_in_process("run", "-p", PROMPT, "-n", "0", "-t", "1")
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"hypo: prompt [1-9]\d* tokens, not read; length", last), done.stderr


def test_more_threads_than_cores_are_told_and_not_claimed() -> None:
    done = hypo_in_process("run", "-p", PROMPT, "-n", "1", "-t", "999", "--json")
    num_threads = json.loads(done.stdout)["route"]["num_threads"]
    assert num_threads < 999
    assert_one_line(done.stderr, "--threads is 999", f"may use {num_threads} CPUs")


@pytest.mark.parametrize("kv_dtype", ["f16", "f32", "q8_0", "q4_0", "q4_0_hadamard"])
@pytest.mark.tier("sim", fast=lambda case: case.kv_dtype in ("f16", "q8_0"))
def test_json_says_what_ran(kv_dtype: str) -> None:
    args = ["run", str(DEMO), "-p", PROMPT, "-n", "4", "-t", "1", "--kv-dtype", kv_dtype, "--json"]
    answer = json.loads(hypo_in_process(*args).stdout)
    assert answer["model"] == str(DEMO)
    assert len(answer["token_ids"]) == 4
    assert answer["finish_reason"] == "length"
    assert answer["timings"]["num_prompt_tokens"] == len(answer["prompt_token_ids"])
    assert answer["timings"]["generated_tokens_per_second"] > 0
    route = answer["route"]
    ran = (route["device"], route["kv_dtype"].lower(), route["num_threads"])
    assert ran == ("cpu", kv_dtype, 1)
    assert route["weight_dtype"]
    assert route["instruction_set"]
    assert route["kernels"]


def test_stop_strings_and_seed_reach_the_engine() -> None:
    run = ["run", "-p", PROMPT, "-n", "12", "-t", "1", "--json"]
    sampled = [*run, "--temp", "1", "--seed"]
    texts = [json.loads(hypo_in_process(*sampled, seed).stdout)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    free = [json.loads(hypo_in_process(*sampled, "-1").stdout) for _ in range(2)]
    assert free[0]["seed"] != free[1]["seed"]
    again = json.loads(hypo_in_process(*sampled, str(free[0]["seed"])).stdout)
    assert again["text"] == free[0]["text"]
    greedy = json.loads(hypo_in_process(*run).stdout)["text"]
    stop = greedy[4:7]
    cut = hypo_in_process(*run, "--stop", "@@", "--stop", stop)
    answer = json.loads(cut.stdout)
    assert answer["text"] == greedy[: greedy.index(stop)]
    assert answer["finish_reason"] == "stop"


def test_a_bias_is_written_as_llama_cpp_has_it() -> None:
    run = ["run", "-p", PROMPT, "-n", "6", "-t", "1", "--json"]
    free = json.loads(hypo_in_process(*run).stdout)["token_ids"]
    raised = json.loads(hypo_in_process(*run, "-l", "300+100").stdout)["token_ids"]
    assert raised == [300] * 6
    lowered = [
        json.loads(hypo_in_process(*run, "--logit-bias", f"{free[0]}{bias}").stdout)["token_ids"]
        for bias in ("-inf", "-100", "-99.5")
    ]
    assert lowered[0] == lowered[1] == lowered[2]
    assert free[0] not in lowered[0]
    both = hypo_in_process(*run, "-l", f"{free[0]}-inf", "-l", f"{lowered[0][0]}-inf")
    assert json.loads(both.stdout)["token_ids"][0] not in (free[0], lowered[0][0])
    for text, told in (
        ("300", "-l/--logit-bias is '300', but must be TOKEN_ID+BIAS or TOKEN_ID-BIAS"),
        ("a+1", "-l/--logit-bias is 'a+1', but must be TOKEN_ID+BIAS"),
        ("300+101", "-l/--logit-bias is 101.0 for token 300, but must be from -100 to 100"),
        ("99999+1", "-l/--logit-bias is 99999, but the vocabulary has 4096 tokens"),
    ):
        done = hypo_in_process(*run, "-l", text)
        assert (done.returncode, done.stdout) == (2, "")
        assert told in done.stderr


def test_bench_prints_a_table_that_can_be_compared_with_llama_bench() -> None:
    done = hypo_in_process("bench", "-p", "16,8", "-n", "4", "-d", "0,32", "-r", "2", "-t", "1")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert rows[0] == [
        "model", "size", "params", "backend", "threads", "test", "t/s", "of bandwidth",
    ]  # fmt: skip
    assert [row[5] for row in rows[2:]] == [
        "pp16", "pp8", "tg4", "pp16 @ d32", "pp8 @ d32", "tg4 @ d32",
    ]  # fmt: skip
    assert rows[2][:5] == ["llama Q8_0", "5.86 MiB", "5.77 M", "CPU", "1"]
    assert re.fullmatch(r"[\d.]+ ± [\d.]+", rows[2][6])
    assert [bool(row[7]) for row in rows[2::3]] == [False, False], "prompts have no share"


@pytest.mark.tier("sim")
def test_bench_counts_sequences_together_and_says_what_loading_took() -> None:
    done = hypo_in_process(
        *("bench", "-p", "0", "-n", "4", "-np", "1,3", "-d", "0,20", "-r", "1", "-t", "1"), "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [test["name"] for test in found["tests"]] == [
        "tg4", "tg4 x3", "tg4 @ d20", "tg4 x3 @ d20",
    ]  # fmt: skip
    assert [test["num_tokens"] for test in found["tests"]] == [4, 12, 4, 12]
    assert found["load_seconds"] > 0
    assert "load" in hypo_in_process("bench", "-p", "1", "-n", "0", "-r", "1").stderr


def test_bench_refuses_tests_that_do_not_fit() -> None:
    done = hypo_in_process("bench", "-p", "16", "-n", "4", "-d", "500")
    assert done.returncode == 2
    assert_one_line(done.stderr, "need 516 positions", "trained for 512", "lower -p, -n, -d or -np")


# -- pipes, interrupts, terminals ----------------------------------------------------------------


def test_a_reader_that_goes_away_ends_it_without_a_word(endless: list[str]) -> None:
    process = subprocess.Popen(
        [*HYPO, "run", *endless, "-p", PROMPT],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(TIMEOUT_SECONDS) == 141
    assert all(line.startswith("hypo: ") and line.endswith("...") for line in stderr.splitlines())


@pytest.mark.parametrize("args", [["run", "--help"], ["--help"], ["help"], []], ids=" ".join)
@pytest.mark.tier("whole", fast=lambda case: case.args in (["run", "--help"], []))
def test_a_reader_of_the_help_that_goes_away_is_no_error(args: list[str]) -> None:
    process = subprocess.Popen([*HYPO, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    with process:
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT_SECONDS) == 141


def test_ctrl_c_ends_a_single_answer_with_130(endless: list[str]) -> None:
    process = subprocess.Popen(
        [*AS_A_PERSON, "run", *endless, "-p", PROMPT],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, stderr = process.stdout.read(), process.stderr.read()
        assert process.wait(TIMEOUT_SECONDS) == 130
    assert first + rest
    assert stderr.splitlines()[-1] == "hypo: interrupted"
    assert "Traceback" not in stderr


def test_a_chat_on_a_terminal(endless: list[str]) -> None:
    with on_terminal(["run", *endless]) as terminal:
        at = terminal.wait_for("Ctrl-D leaves")
        for question in ("hello", "again"):
            at = terminal.wait_for("> ", after=at)
            terminal.type(f"{question}\n")
            at = terminal.wait_for(f"{question}\r\n", after=at)
            terminal.wait_for_more(at + 1)  # the answer has begun
            terminal.type("\x03")
            at = terminal.wait_for("cancelled", after=at)
        terminal.wait_for("> ", after=at)
        terminal.type("\x04")
        assert terminal.wait() == 0
    counts = [int(n) for n in re.findall(r"prompt (\d+) tokens", terminal.seen)]
    assert len(counts) == 2
    assert counts[1] > counts[0], "the second question brings the history along"
    assert "Traceback" not in terminal.seen


def test_a_full_chat_forgets_its_oldest_turns_and_goes_on(chat_model: Path) -> None:
    args = ["run", str(chat_model), "-c", "64", "-n", "12", "-t", "1", "--ignore-eos"]
    with on_terminal(args) as terminal:
        at = terminal.wait_for("> ")
        for question in ["hello there"] * 4 + ["word " * 80] + ["and now"]:
            terminal.type(f"{question}\n")
            at = terminal.wait_for("\n> ", after=at)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "the context is full: the oldest 2 messages are left out" in terminal.seen
    assert terminal.seen.count("generation 12 tokens") == 5, "all but the one that is too long"
    assert terminal.seen.count("maximum context length is 64 tokens") == 1


class _Words:
    """Of an LLM what `fitting` asks: every word of every message is a token."""

    context_length = 40

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [0 for message in messages for _ in message["content"].split()]


def test_what_is_kept_of_a_conversation_leaves_room() -> None:
    from hypocenter.cli.chat import fitting

    def kept(*lengths: int, system: int = 0, max_tokens: int | None = None) -> list[int]:
        roles = itertools.cycle(["user", "assistant"])
        messages = [{"role": next(roles), "content": "x " * length} for length in lengths]
        if system:
            messages.insert(0, {"role": "system", "content": "s " * system})
        left, token_ids = fitting(cast(Any, _Words()), messages, max_tokens)
        found = [message["content"].count(" ") for message in left]
        assert len(token_ids) == sum(found)
        return found

    assert kept(30) == [30]
    assert kept(50) == [50]  # alone too long; the engine refuses it
    assert kept(10, 10, 10) == [10, 10, 10]
    assert kept(10, 10, 11) == [11]
    assert kept(10, 10, 11, max_tokens=9) == [10, 10, 11]
    assert kept(9, 1, 8, 2, 7, 3, 6) == [8, 2, 7, 3, 6]
    assert kept(9, 1, 8, 2, 7, 3, 25) == [25]
    assert kept(9, 1, 8, 2, 7, 3, 6, system=10) == [10, 7, 3, 6]
    assert kept(9, 1, 35, system=10) == [10, 35]


@pytest.mark.tier("whole")
def test_ctrl_c_at_the_question_clears_the_line_and_stays(chat_model: Path) -> None:
    with on_terminal(["run", str(chat_model), "-n", "2", "-t", "1"]) as terminal:
        at = terminal.wait_for("> ")
        terminal.type("half a questio")
        at = terminal.wait_for("half a questio", after=at)
        time.sleep(0.2)  # between its echo and its next wait readline notices no signal
        terminal.type("\x03")
        terminal.wait_for("> ", after=at)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "generation" not in terminal.seen


def test_a_question_is_answered_by_the_chat_template(chat_model: Path) -> None:
    run = ("run", str(chat_model), "-n", "4", "-t", "1", "--temp", "0", "--json")
    asked = json.loads(hypo_in_process(*run[:2], "import", *run[2:]).stdout)
    piped = json.loads(hypo_in_process(*run, stdin="import\n").stdout)
    assert asked["prompt_token_ids"] == piped["prompt_token_ids"]
    assert asked["text"] == piped["text"]
    raw = json.loads(hypo_in_process(*run, "-p", "import").stdout)
    assert len(raw["prompt_token_ids"]) < len(asked["prompt_token_ids"])
    system = json.loads(hypo_in_process(*run, "-sys", "Be brief.", stdin="import").stdout)
    assert len(system["prompt_token_ids"]) > len(asked["prompt_token_ids"])
    for wrong in (["-p", "x", "-sys", "y"], ["question", "-p", "x"]):
        done = hypo_in_process("run", str(chat_model), *wrong)
        assert done.returncode == 2
        assert_one_line(done.stderr, "is for a chat", "give one")


@pytest.mark.tier("whole")
def test_commands_of_a_chat_are_not_asked(chat_model: Path) -> None:
    with on_terminal(["run", str(chat_model), "-n", "2", "-t", "1"]) as terminal:
        at = terminal.wait_for("> ")
        terminal.type("/help\n")
        at = terminal.wait_for("/clear forgets", after=at)
        at = terminal.wait_for("> ", after=at)
        terminal.type("/system Be brief.\n")
        at = terminal.wait_for("a new conversation, with the system message", after=at)
        at = terminal.wait_for("> ", after=at)
        terminal.type("/foo bar\n")
        at = terminal.wait_for("there is no /foo; /help tells what there is", after=at)
        at = terminal.wait_for("> ", after=at)
        terminal.type("import os\n")
        at = terminal.wait_for("generation", after=at)
        at = terminal.wait_for("> ", after=at)
        terminal.type("/clear\n")
        at = terminal.wait_for("forgotten, but for the system message", after=at)
        at = terminal.wait_for("> ", after=at)
        terminal.type("/bye\n")
        assert terminal.wait() == 0
    assert terminal.seen.count("generation") == 1


def test_a_prompt_may_look_like_an_option() -> None:
    done = hypo_in_process("run", "-p", "-ngl", "--n-predict", "1", "-t", "1")
    assert done.returncode == 0, done.stderr


def test_the_bundled_model_says_that_it_cannot_chat() -> None:
    with on_terminal(["run"]) as terminal:
        assert terminal.wait() == 2
    assert "has no chat template" in terminal.seen
    assert "-p TEXT" in terminal.seen


@pytest.mark.tier("sim")  # compiles all kernels of the model anew
def test_the_log_tells_compiling_from_loading(tmp_path: Path) -> None:
    args = ["run", "-p", PROMPT, "-n", "1", "-t", "1", "-q"]
    environ = {"HYPO_CACHE_DIR": str(tmp_path), "HYPO_LOG": "info"}
    first, second = (hypo(*args, environ=environ).stderr for _ in range(2))
    assert "compiled in" in first
    assert "loaded" not in first
    assert "loaded" in second
    assert "compiled in" not in second


@pytest.mark.tier("sim")  # compiles all kernels of the model anew
def test_caches_that_cannot_be_written_cost_one_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    done = hypo(
        "run",
        "-p",
        PROMPT,
        "-n",
        "2",
        "-t",
        "1",
        environ={"HYPO_CACHE_DIR": str(blocked / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    warnings = [line for line in done.stderr.splitlines() if "compiled anew" in line]
    assert len(warnings) == 1, done.stderr
    assert "set HYPO_CACHE_DIR to a folder you can write" in warnings[0]
    assert "first run only" not in done.stderr


@pytest.mark.parametrize("args", [["inspect", "--json"], ["run", "-p", PROMPT, "-n", "2"]])
def test_a_full_disk_behind_stdout_is_one_line(args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*HYPO, *args, *(["-t", "1", "-q"] if args[0] == "run" else [])],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    assert done.returncode == 1
    assert_one_line(done.stderr, "stdout: No space left on device")
