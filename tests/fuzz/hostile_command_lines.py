"""Hostile command lines: options, values, file names and variables; `scripts/test-fuzz` runs it.

Every word goes to the real command in this process. Only what a right command line sets to work is
left out: the engine, what compiles or replays kernels, and every program that would be started.
Each must end with an exit code of ours and in one line, in bounded time and memory.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(1, str(Path(__file__).parents[2]))

from models.gguf_files import GGUFWriter, every_tensor, every_value
from models.tiny_gguf import write_tiny
from outside.hostile import answer_problem, run_trials

from faults.harmless import find
from faults.victim_run import run_child
from hypocenter.base.errors import HypoError
from hypocenter.cli.app import app
from hypocenter.settings.environment import KNOWN

#: Where a right command line has been understood, and work would begin.
DOORS = (
    "hypocenter.engine.llm.LLM.__init__",
    "hypocenter.cli.verbs.doctor.watch",
    "hypocenter.cli.verbs.kernels.compile_all",
    "hypocenter.cli.verbs.kernels.Worker.start",
    "hypocenter.cli.verbs.kill_serve.run_kills",
    "hypocenter.server.serve._serve",
    "hypocenter.check.check.check",
    "hypocenter.replay.recorded.replay_place",
)
#: Not those that name folders, which a command may fill, nor the one that asks for tracebacks.
VARIABLES = sorted({*KNOWN, "HYPO_NONSENSE"} - {"HYPO_RUN_DIR", "HYPO_CACHE_DIR", "HYPO_DEBUG"})
OF_SERVE = ("HYPO_SERVE_PORT", "HYPO_SERVE_CONFIG", "HYPO_SERVE_SPARE", "HYPO_SERVE_NONSENSE")
NUMBERS = (
    "0", "-0", "1", "-1", "2", "1.5", "1e3", "1e400", "-1e400", "nan", "inf", "-inf", "0x10",
    "1_000", "٣", "９", str(2**31), str(2**63), str(2**64), "9" * 400, "9" * 5000,
    "1" + "0" * 309, " 1 ", "+1", "1,2", "1,,2", ",", "1e-400", "1/2", "true", "None",
)  # fmt: skip
TEXTS = (
    "", " ", "-", "--", "---", "--=", "=", "x", "\x1b]0;title\x07\x1b[2J",
    "\u202e\u2028\x9b\xa0\x7f", "a\nb", "\udcff\udcfe", "é漢🙂", "x" * 70_000, "%s{0}",
    "--json=maybe", "--no-json", "-abc", "*", "$(x)", "`x`", ";", "&&", "\\", "'", '"', "[",
    "@file", "cpu", "cuda", "hip", "sim:mi300x", "sim:", "sim:x", "f16", "f32", "off", "traced",
    "guarded", "checked", "fused", "bf16", "exact", "all", "gfx942", "sm_90", "gfx942,,x",
    "mean_over_bytes", "llama-bpe", "-ngl", "-fa", "--mlock=on", "--lora", "--dtype", "--api-keys",
)  # fmt: skip
PATHS = (
    "good.gguf", "odd.gguf", "bundle", "empty", "folder", "folder/", "./good.gguf", "good.gguf/x",
    "missing.gguf", "script.py", "script.py:add", "script.py:", "new", "folder/new", "loop",
    "text", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/proc/self/environ",
    "/dev/tty", ".", "..", "x" * 255, "x/" * 2000, "a\x1b[2J.gguf", "\udcff.gguf", "～", "~",
)  # fmt: skip
STDINS = ("", "", "hi", "\x00", "/help\n/exit\n", "x" * 100_000, "é漢🙂\x1b[2J\n")


def words_of_verbs() -> list[str]:
    """Every verb."""
    return [name for name in app if not name.startswith("-")]


def words_of_options() -> tuple[str, ...]:
    """Every spelling of every option, of all verbs, and some that are nobody's."""
    found = {"--nonsense", "-zz", "--help", "-h", "--version", "-V", "-ngl", "-hf", "-cnv"}
    apps = [app, *(app[name] for name in app if not name.startswith("-"))]
    for each in apps:
        with contextlib.suppress(Exception):  # one that has no command of its own
            for argument in each.assemble_argument_collection():
                found.update(name for name in argument.names if name.startswith("-"))
    return tuple(sorted(found))


def hostile_line(source: random.Random, options: tuple[str, ...], verbs: list[str]) -> list[str]:
    """A verb, and then words of all sorts; the right ones are the more likely."""
    line = source.choice(verbs).split() if source.random() < 0.95 else [any_word(source, options)]
    if source.random() < 0.7:
        line.append(source.choice(PATHS[:10]))
    for _ in range(source.choice((0, 1, 1, 2, 3, 8))):
        way = source.random()
        if way < 0.65:
            option = source.choice(options)
            value = any_word(source, options)
            line += [f"{option}={value}"] if source.random() < 0.3 else [option, value]
        else:
            line.append(any_word(source, options))
    if source.random() < 0.01:
        line += [source.choice(options)] * 300
    # The system ends a word at a null character, so no command line has one.
    return [word.replace("\x00", "") for word in line]


def any_word(source: random.Random, options: tuple[str, ...]) -> str:
    return source.choice(source.choice((NUMBERS, NUMBERS, TEXTS, PATHS, options)))


def lay_out(folder: Path) -> None:
    """What PATHS names."""
    write_tiny(folder / "good.gguf", tokens=["<unk>", "<s>", "</s>", "a", "b", "c", "d"])
    (folder / "odd.gguf").write_bytes(GGUFWriter().build(every_value(), every_tensor()))
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "text").write_text("Once upon a time")
    (folder / "script.py").write_text("raise SystemExit('never run')\n")


def prepare(seeds_folder: Path) -> Callable[[random.Random, Path], str]:
    """Make the files once; every trial has a copy of them as its current folder."""
    files = seeds_folder / "files"
    files.mkdir()
    lay_out(files)
    run_child(find(["rope_base_zero"])[0], seeds_folder / "victim", twin=False)
    shutil.copytree(seeds_folder / "victim" / "bundle", files / "bundle")
    options = words_of_options()
    verbs = [*words_of_verbs(), "run", "inspect", "help", "doctor --", "doctor -- run"]
    for door in DOORS:
        mock.patch(door, at_the_door).start()

    def trial(source: random.Random, folder: Path) -> str:
        line = hostile_line(source, options, verbs)
        (folder / "line.txt").write_text("\n".join(map(repr, line)))
        current = folder / "current"
        shutil.copytree(files, current, symlinks=True)
        environ = {}
        if source.random() < 0.1:
            word = any_word(source, options).replace("\x00", "")
            environ[source.choice((*VARIABLES, *OF_SERVE))] = word
        before = os.getcwd()
        os.chdir(current)
        try:
            with mock.patch.dict(os.environ, environ):
                return answer_problem(*line, stdin=source.choice(STDINS))
        finally:
            os.chdir(before)

    return trial


def at_the_door(*words: Any, **named: Any) -> NoReturn:
    raise HypoError("understood")


if __name__ == "__main__":
    run_trials("command lines", __doc__ or "", prepare)
