"""What the command line says of itself, and of words that it does not understand."""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError
from cyclopts.exceptions import UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from hypocenter.base.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_PIPE, EXIT_USAGE
from hypocenter.cli.words.reading import nearest

EPILOGUE = f"""\
hypo COMMAND --help tells of one of them. Anywhere, --debug shows the traceback
of an error. Data goes to stdout, everything else to stderr.

Exit codes
  {EXIT_OK:<4} done
  {EXIT_ERROR:<4} error: a bad model file, a failed read
  {EXIT_USAGE:<4} wrong usage: an option, a value, a missing file, a long prompt
  3    GPU fault; of the doctor any fault
  4    a check failed: inspect, kernels, check, guard, replay, diff, bisect,
       kill-serve, verify, audit
  5    verify or audit missed an error that it planted: believe nothing of it
  {EXIT_INTERRUPTED:<4} interrupted by Ctrl-C
  {EXIT_PIPE:<4} nobody reads the output"""
_EPILOGUE_OF_A_VERB = "Exit codes and --debug: hypo --help"


def usage_message(error: CycloptsError) -> str:
    """One sentence that ends with where help is."""
    if isinstance(error, UnusedCliTokensError):
        return _unexpected_argument(" ".join(error.unused_tokens or ()), error.command_chain or ())
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        return _unknown_command(error.unused_tokens[0])
    verb = " ".join(["hypo", *(error.command_chain or ())])
    if isinstance(error, UnknownOptionError):
        return _unknown_option(error, verb)
    text = " ".join(str(error).split())
    return f"{text[:1].lower()}{text[1:]} See {verb} --help"


#: The verbs, those that are typed most first.
VERBS = (
    "run",
    "inspect",
    "serve",
    "bench",
    "perplexity",
    "eval",
    "embed",
    "bench-serve",
    "kill-serve",
    "warm",
    "doctor",
    "guard",
    "check",
    "verify",
    "audit",
    "demo",
    "replay",
    "diff",
    "bisect",
    "kernels",
    "env",
    "cache",
    "models",
    "pull",
    "quantize",
    "mcp",
)
#: What other programs call what is done here otherwise, or not yet.
_OF_OTHERS = {
    "chat": "`hypo run MODEL` is a chat",
    "server": "it is `hypo serve`",
    "show": "it is `hypo inspect`",
    "stop": "Ctrl-C or SIGTERM ends a server",
    "create": "`hypo run FILE.gguf` takes a file as it is",
    "list": "it is `hypo models`",
    "rm": "it is `hypo models remove`",
    "ps": "nothing runs in the background",
}


def _unknown_command(word: str) -> str:
    if word in _OF_OTHERS:
        return f"unknown command {word!r}; {_OF_OTHERS[word]} (hypo --help)"
    near = nearest(word, VERBS)
    hint = f"did you mean {near}; " if near else ""
    return f"unknown command {word!r}; {hint}commands are {', '.join(VERBS)} (hypo --help)"


def _unknown_option(error: UnknownOptionError, verb: str) -> str:
    """cyclopts by itself would name any option, however unlike."""
    word = (error.token.keyword or error.token.value).partition("=")[0]
    names = [name for argument in error.argument_collection for name in argument.names]
    near = nearest(word, [name for name in names if name.startswith("-")])
    hint = f" (did you mean {near}?)" if near else ""
    return f"{verb} has no {word}{hint}; see {verb} --help"


def _usage_line(name: str, function: Callable[..., None]) -> str:
    """`Usage: hypo run [OPTIONS] [MODEL] [QUESTION]`, from the parameters of a verb's function."""
    words = ["Usage: hypo", name]
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters):
        words.append("[OPTIONS]")
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            words.append(f"[{parameter.name.upper()}...]")
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            shown = parameter.name.upper()
            words.append(shown if parameter.default is parameter.empty else f"[{shown}]")
    return " ".join(words)


def finish_help(app: App) -> None:
    """Verbs in the order of their use, their arguments by name, and a short end."""
    for place, name in enumerate(VERBS):
        app[name].sort_key = place
        app[name].help_epilogue = _EPILOGUE_OF_A_VERB
        for path in [(name,), *((name, below) for below in app[name] if not below.startswith("-"))]:
            command = app[path[0]][path[1]] if path[1:] else app[name]
            if command.usage is None and command.default_command is not None:
                command.usage = _usage_line(" ".join(path), command.default_command)


#: Options of the doctor that the word behind them belongs to.
_WITH_VALUE = frozenset({"--good", "--out", "-o", "--deadline"})


def forgotten_dashes(tokens: Sequence[str], verbs: Sequence[str]) -> str | None:
    """What to say of `hypo doctor run -p x`, whose command should stand behind `--`."""
    if tokens[:1] != ["doctor"] or "--" in tokens:
        return None
    at = 1
    while at < len(tokens) and tokens[at].startswith("-"):
        at += 2 if tokens[at] in _WITH_VALUE else 1
    if at >= len(tokens) or os.path.lexists(tokens[at]):
        return None
    word = tokens[at]
    is_command = word in verbs or (len(tokens) > at + 1 and shutil.which(word) is not None)
    if not is_command:
        return None
    options = shlex.join(["hypo", *tokens[:at]])
    return f"put the command behind --: {options} -- {shlex.join(tokens[at:])}"


def _unexpected_argument(extra: str, verbs: Sequence[str]) -> str:
    ways_out = {
        "run": "a question or a prompt (-p) stands in quotes",
        "inspect": "it takes one MODEL",
        "bench": "it takes one MODEL",
        "serve": "it takes one MODEL",
    }
    verb = " ".join(["hypo", *verbs])
    way_out = ways_out.get(verbs[-1] if verbs else "", "it takes none")
    return f"unexpected argument {extra!r} of {verb}; {way_out}; see {verb} --help"
