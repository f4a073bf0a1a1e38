"""Options of llama.cpp and vLLM are renamed, taken or refused by name, all of them at once."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from outside.terminal import assert_one_line, hypo_in_process

from hypocenter.cli.app import app
from hypocenter.cli.options import EngineOptions
from hypocenter.cli.serve_options import ServeOptions
from hypocenter.cli.usage import VERBS as ALL_VERBS
from hypocenter.cli.words.reading import (
    MAX_OPTIONS,
    Options,
    in_our_words,
    nearest,
    read,
    refusal,
)
from hypocenter.cli.words.table import (
    PEERS,
    VERBS,
    PeerOption,
    entries_of,
    names_and_operand,
    words_of,
)
from hypocenter.settings.config import EngineConfig

LINES = tomllib.loads((Path(__file__).parent / "peer_lines.toml").read_text())
OPTIONS = {verb: Options(app[verb].assemble_argument_collection()) for verb in VERBS}
#: Options of `serve` that words of the peers are mapped to. Lines that use those which are not
#: there are refused.
TO_COME = {
    name
    for name in (
        "--ssl-certfile", "--ssl-keyfile", "--uds", "--root-path", "--log-level", "--log-format",
        "--log-file",
    )
    if OPTIONS["serve"].find(name) is None
}  # fmt: skip
#: Values, one of which fits each entry that is about some values only.
VALUES = (
    "x", "0", "1", "-1", "auto", "none", "md", "json", "mp", "default", "fcfs", "assistant", "f16",
    "raw_logprobs", "generate", "layer", "high", "https://a.example", "debug", "deepseek", "20",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    verb: str
    name: str
    word: PeerOption
    value: str


def _cases() -> list[Case]:
    """Each entry of each name of each verb, with a value that it is about."""
    cases = []
    for verb in VERBS:
        for name, words in words_of(verb).items():
            if OPTIONS[verb].find(name):
                continue
            for place, word in enumerate(words):
                fitting = [
                    value
                    for value in VALUES
                    if next((at for at, other in enumerate(words) if other.fits(value)), -1)
                    == place
                ]
                if fitting:
                    cases.append(Case(verb, name, word, fitting[0]))
    return cases


def _values_of(case: Case) -> list[str]:
    operand = case.word.operand
    if operand.startswith("["):
        return [operand[1:-1].split("|")[-1]]
    return [case.value] * len(operand.split())


CASES = _cases()


@pytest.mark.parametrize("verb", VERBS)
def test_each_option_of_the_peers_is_renamed_taken_or_refused(verb: str) -> None:
    cases = [case for case in CASES if case.verb == verb]
    assert {case.word.fate for case in cases} == {"renamed", "taken", "refused"}
    assert len({case.name for case in cases}) > 400
    for case in cases:
        line = [case.name, *_values_of(case)]
        reading = read(verb, line, OPTIONS[verb])
        assert not reading.unknown
        if case.word.fate == "refused":
            assert reading.refused == {case.word.instead: [case.name]}
            said = refusal(verb, reading, OPTIONS[verb])
            assert said.startswith(f"hypo {verb} has no {case.name} ({case.word.instead}); see")
        elif case.word.fate == "taken":
            assert reading.words() == [], line
            assert reading.remark == f"{case.name}: not needed here"
        else:
            value = line[-1] if "{}" in case.word.to else None
            assert reading.words() == [value if part == "{}" else part for part in case.word.to]
            assert reading.remark is None


def test_no_option_of_a_peer_was_lost() -> None:
    """The numbers change with the releases that the tables are taken from."""
    names = {peer: {name for name, _, _ in entries_of(peer)} for peer in PEERS}
    assert {peer: len(found) for peer, found in names.items()} == {"llama_cpp": 436, "vllm": 365}


def test_each_word_stands_for_an_option_that_there_is() -> None:
    for case in CASES:
        if case.word.fate == "renamed" and case.word.to[0] not in TO_COME | {"--help"}:
            assert OPTIONS[case.verb].find(case.word.to[0]), (case.verb, case.name)


def test_what_stands_behind_an_option_is_so_for_each_of_its_entries() -> None:
    """The first one says how many words are swallowed."""
    for verb in VERBS:
        for name, words in words_of(verb).items():
            counted = [word for word in words if word.values] or words[:1]
            numbers = {(word.operand[:1] == "[", len(word.operand.split())) for word in counted}
            assert len(numbers) == 1, (verb, name)


def test_what_to_do_is_short() -> None:
    texts = {word.instead for verb in VERBS for words in words_of(verb).values() for word in words}
    assert all(len(text) <= 100 for text in texts), max(texts, key=len)
    assert not any(text.endswith(".") for text in texts)


@pytest.mark.parametrize("text", ["--a -b", "a", "-a,-b", "", "-a  N"])
def test_an_option_that_is_written_wrongly_is_found(text: str) -> None:
    with pytest.raises(ValueError, match="no list of names"):
        names_and_operand(text)


def _start(tokens: list[str]) -> tuple[EngineConfig, ServeOptions]:
    """What `hypo serve` starts with, up to the model itself."""
    _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    server = bound.arguments.get("server") or ServeOptions()
    server.keys()
    return (bound.arguments.get("engine") or EngineOptions()).config(), server


@pytest.mark.parametrize("peer", ["llama-server", "vllm"])
@pytest.mark.parametrize("number", range(30))
def test_a_line_of_a_peer_starts_or_is_refused_by_name(
    peer: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = LINES[peer][number]
    line = ["serve", *shlex.split(entry["line"])]
    monkeypatch.chdir(tmp_path)
    for word in line:
        if word.endswith(".jinja"):
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).write_text("{{ messages }}")
    refused = list(entry.get("refused", ())) + [name for name in line if name in TO_COME]
    if not refused:
        tokens, remark = in_our_words(line, app)
        _start(tokens)
        others = [word for word in line if word.startswith("-") and word not in tokens]
        assert all(name in (remark or "") or _is_renamed(name) for name in others)
        return
    done = hypo_in_process(*line)
    assert done.returncode == 2
    *remarks, said = done.stderr.splitlines(keepends=True)
    assert all("not needed here" in remark for remark in remarks)
    assert len(remarks) <= 1
    assert_one_line(said, *refused)


def _is_renamed(name: str) -> bool:
    words = words_of("serve").get(name.replace("_", "-") if name.startswith("--") else name, ())
    return any(word.fate == "renamed" for word in words)


def test_there_are_thirty_lines_of_each() -> None:
    assert {peer: len(lines) for peer, lines in LINES.items()} == {"llama-server": 30, "vllm": 30}
    assert sum("refused" in entry for lines in LINES.values() for entry in lines) in range(20, 45)


def test_what_changes_nothing_is_told_in_one_line_and_the_rest_goes_on() -> None:
    done = hypo_in_process(
        "run", "-p", "import os", "-n", "1", "-t", "1", "-ngl", "99", "-fa", "--mlock", "--no-mmap",
        "-cb", "-q",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "hypo: -ngl, -fa, --mlock, --no-mmap, -cb: not needed here\n"


def test_all_that_is_refused_is_told_at_once() -> None:
    done = hypo_in_process(
        "serve", "-fa", "--control-vector", "a.gguf", "--prot", "9", "-hfd", "a/b",
        "--temp", ".7", "--spec-type", "x",
    )  # fmt: skip
    assert done.returncode == 2
    assert_one_line(
        done.stderr,
        "hypo: hypo serve has no --prot (did you mean --port?), --control-vector (there are no",
        "-hfd, --spec-type (a draft model is a file and runs as the model does, see",
        "--temp (clients say it in each request",
        "; see hypo serve --help",
    )


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("-c4096 -t 2", ["-c4096", "-t", "2"]),
        ("-cb -c 64", ["-c", "64"]),
        ("-fa on -c 64", ["-c", "64"]),
        ("-fa model.gguf", ["model.gguf"]),
        ("-ngl=99 m.gguf", ["m.gguf"]),
        ("-ngl 0", ["--device", "cpu"]),
        ("-ngl 0 --device cpu", ["--device", "cpu"]),
        ("--device cpu -ngl 0", ["--device", "cpu"]),
        ("--max_model_len 64", ["--max_model_len", "64"]),
        ("-- -ngl", ["--", "-ngl"]),
        ("-mu https://a.example/m.gguf", ["-m", "https://a.example/m.gguf"]),
        ("--no-enable-prefix-caching", ["--no-prefix-cache"]),
        ("--no-async-scheduling --no-enable-lora", []),
        ("--spec-type ngram-simple --spec-draft-n-max 5", ["--spec", "ngram", "--draft-max", "5"]),
        ("--spec-method ngram --spec-tokens 5", ["--spec", "ngram", "--draft-max", "5"]),
        ("-md a.gguf --draft 5", ["-md", "a.gguf", "--draft", "5"]),
        ("--spec-model a.gguf --spec-tokens 5", ["--model-draft", "a.gguf", "--draft-max", "5"]),
        ("--default-chat-template-kwargs {}", ["--chat-template-kwargs", "{}"]),
    ],
)
def test_a_line_in_our_words(line: str, tokens: list[str]) -> None:
    assert in_our_words(["serve", *shlex.split(line)], app)[0] == ["serve", *tokens]


def test_a_prompt_may_be_the_name_of_an_option() -> None:
    for words in (["-p", "-ngl"], ["--prompt=-ngl"], ["--stop", "--mlock"], ["-n", "-1"]):
        assert in_our_words(["run", *words], app) == (["run", *words], None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run -st", "-st (hypo run MODEL 'a question' asks a chat once)"),
        ("run -ctq q8_0", "-ctq (did you mean -ctk?)"),
        ("run --context 5", "hypo run has no --context; see"),
        ("serve --dtype bfloat16", "--dtype (weights keep the type that they have in the file"),
        ("serve --speculative-config.method x", "--speculative-config.method (--model-draft"),
        ("serve --no-enable-chunked-prefill", "--no-enable-chunked-prefill (a long prompt"),
        ("serve --frobnicate", "hypo serve has no --frobnicate; see hypo serve --help"),
        ("bench -o csv", "-o (results are a table, or with --json one object)"),
        ("serve --chat-template a/b.jinja", "--chat-template-file a/b.jinja"),
    ],
)
def test_an_option_that_is_not_here_is_told_by_name(line: str, words: str) -> None:
    done = hypo_in_process(*shlex.split(line))
    assert done.returncode == 2
    assert_one_line(done.stderr, words)


def test_bench_takes_the_switches_of_llama_bench() -> None:
    line = "-fa 1 -mmp 0 -nkvo 0 -ngl 99 -p 512 -n 128 -o json --progress"
    tokens, remark = in_our_words(["bench", *line.split()], app)
    assert tokens == ["bench", "--json", "-p", "512", "-n", "128"]
    assert remark == "-fa, -mmp, -nkvo, -ngl, --progress: not needed here"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--prot", "--port"),
        ("--prt", "--port"),
        ("--ctx", "--ctx-size"),
        ("--max_quued", "--max-queued"),
        ("--uds", None),
        ("--temp", None),
        ("--workers", None),
        ("--no-webui", None),
        ("--main-gpu", None),
        ("-ng", None),
        ("--" + "port" * 50_000, None),
    ],
)
def test_a_guess_is_near_or_not_made(word: str, meant: str | None) -> None:
    names = [name for name in OPTIONS["serve"].names if name != word]
    assert nearest(word, names) == meant


def test_no_option_of_a_peer_is_guessed_to_be_ours_without_being_alike() -> None:
    """Words of the tables stand for all that people may type."""
    for verb in VERBS:
        for name in words_of(verb):
            if meant := nearest(name, OPTIONS[verb].names):
                alike = set(name.strip("-").split("-")) & set(meant.strip("-").split("-"))
                begins = meant.strip("-").startswith(name.strip("-"))
                assert alike or begins or abs(len(name) - len(meant)) <= 2, (name, meant)


@pytest.mark.parametrize(("word", "meant"), [("sevre", "serve"), ("rnu", "run"), ("tset", None)])
def test_a_verb_is_guessed_where_it_is_near(word: str, meant: str | None) -> None:
    assert nearest(word, ALL_VERBS) == meant


def test_thousands_of_options_are_refused_at_once() -> None:
    done = hypo_in_process("run", "-p", "x", *["--stop", "a"] * 4000)
    assert done.returncode == 2
    assert f"at most {MAX_OPTIONS}" in done.stderr
