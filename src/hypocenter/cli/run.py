"""`hypo run`: one answer to one prompt, streamed or as JSON; without a prompt, the chat.

Holds no engine and no options; it reads the prompt, hands out the pieces and says how fast it went.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from hypocenter.cli.answer import answer, closing_line, open_llm
from hypocenter.cli.options import PromptOptions, SamplingOptions
from hypocenter.cli.output import emit, say, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.config import EngineConfig, SamplingParams
from hypocenter.errors import UsageError
from hypocenter.results import Completion

if TYPE_CHECKING:
    from hypocenter.engine.llm import LLM

#: Far above any context; keeps `-f /dev/zero` from filling the memory.
MAX_PROMPT_BYTES = 64 << 20

HOW_TO_ASK = "give -p TEXT or -f FILE (-f - reads stdin)"


def run(
    path: str,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    config: EngineConfig,
    *,
    as_json: bool,
    quiet: bool = False,
) -> None:
    """Answer the prompt, or chat when there is none. Raises UsageError when neither is possible."""
    text = read_prompt(prompt)
    params = sampling.params(in_chat=text is None)
    if text is None and as_json:
        raise UsageError(f"--json needs a prompt: {HOW_TO_ASK}")
    if text is None and not (sys.stdin and sys.stdin.isatty()):
        raise UsageError(f"no prompt: {HOW_TO_ASK}; a chat needs a terminal")
    with ProgressDisplay(quiet=quiet) as progress, open_llm(path, config, progress) as llm:
        if text is None:
            from hypocenter.cli.chat import chat

            chat(llm, path, params, progress, quiet=quiet)
        elif as_json:
            _print_object(llm, path, text, params, progress)
        else:
            _print_answer(llm, text, params, progress, quiet=quiet)


def read_prompt(options: PromptOptions) -> str | None:
    """The text of -p or -f; None when neither is given. Raises UsageError or OSError."""
    if options.prompt is not None and options.file is not None:
        raise UsageError("both -p and -f; give the prompt once")
    if options.prompt is not None:
        # Bytes of the command line that are not UTF-8 arrive as surrogates.
        return _decode(options.prompt.encode(errors="surrogateescape"), "-p")
    if options.file is None:
        return None
    if options.file == "-":
        if not sys.stdin:
            raise UsageError("-f - reads the prompt from stdin, but stdin is closed")
        return _decode(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1), "stdin")
    try:
        with open(options.file, "rb") as file:
            return _decode(file.read(MAX_PROMPT_BYTES + 1), options.file)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(f"-f {options.file}: {error.strerror}") from error


def as_object(path: str, completion: Completion) -> dict[str, Any]:
    """What `--json` prints: the completion with its model and its speeds."""
    timings = completion.timings
    return {
        "model": path,
        **msgspec.to_builtins(completion),
        "timings": {
            **msgspec.to_builtins(timings),
            "prompt_tokens_per_second": timings.prompt_tokens_per_second,
            "generated_tokens_per_second": timings.generated_tokens_per_second,
        },
    }


def _print_answer(
    llm: LLM, text: str, params: SamplingParams, progress: ProgressDisplay, *, quiet: bool
) -> None:
    # On a terminal the prompt stands before its continuation, but is no part of the data. Below a
    # doctor stderr is none, and goes into a bundle.
    if sys.stdout and sys.stdout.isatty() and sys.stderr.isatty():
        progress.clear()
        print(text, end="", file=sys.stderr, flush=True)
    completion = answer(llm, llm.tokenizer.encode(text), params, progress)
    emit("\n")
    if not quiet:
        say(closing_line(completion))


def _print_object(
    llm: LLM, path: str, text: str, params: SamplingParams, progress: ProgressDisplay
) -> None:
    completion = answer(llm, llm.tokenizer.encode(text), params, progress, show=lambda text: None)
    show_json(as_object(path, completion))


def _decode(data: bytes, source: str) -> str:
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(f"{source}: the prompt is longer than {MAX_PROMPT_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source}: the prompt is not UTF-8: byte {data[error.start]:#04x} at {error.start}"
        ) from error
