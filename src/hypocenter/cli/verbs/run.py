"""`hypo run`: one answer to one prompt, streamed or as JSON; without a prompt, the chat.

Holds no engine and no options; it reads the prompt, hands out the pieces and says how fast it went.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.base.results import Completion
from hypocenter.cli.answer import (
    Shown,
    answer,
    as_user,
    closing_line,
    open_llm,
    system_message,
)
from hypocenter.cli.options import PromptOptions, SamplingOptions
from hypocenter.cli.output import emit, say, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.prompt_text import MAX_PROMPT_BYTES, decode, read_prompt
from hypocenter.cli.tool_options import TraceOptions
from hypocenter.model.gguf.file import open_gguf, require_file
from hypocenter.model.text.chat import template_names
from hypocenter.settings.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from hypocenter.engine.llm import LLM
    from hypocenter.engine.step_trace import StepTrace

HOW_TO_ASK = "give a QUESTION behind the model, -p TEXT or -f FILE (-f - reads stdin)"


def run(
    path: str,
    question: str | None,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    config: EngineConfig,
    output: TraceOptions,
) -> None:
    """Continue the prompt, answer the question, or chat when there is neither.

    Raises UsageError when none of them is possible.
    """
    as_json, quiet, trace = output.json, output.quiet, output
    require_file(Path(path))  # told before a prompt that is missing as well
    text = read_prompt(prompt)
    if text is not None and (question is not None or prompt.system is not None):
        extra = "-sys" if question is None else "a question"
        raise UsageError(f"{extra} is for a chat, and -p and -f are texts to continue; give one")
    is_terminal = bool(sys.stdin) and sys.stdin.isatty()
    if text is None and question is None and not is_terminal:
        question = _question_from_stdin()
    if text is None and question is None and as_json:
        raise UsageError(f"--json needs a prompt: {HOW_TO_ASK}")
    params = sampling.params(in_chat=text is None)
    if text is None:
        _require_chat_template(path, config)
    config = trace.config(replace(config, max_batch_requests=1))
    with ExitStack() as stack:
        progress = stack.enter_context(ProgressDisplay(quiet=quiet))
        llm = stack.enter_context(open_llm(path, config, progress))
        if trace.routes:
            llm.engine.runner.take_routes(trace.routes)
        if trace.file is not None:
            written = llm.trace(trace.file, trace.selection, max_data_bytes=trace.max_data_bytes)
            stack.callback(_tell_of_missing, written)
        if text is not None:
            token_ids = llm.tokenizer.encode(text)
        elif question is not None:
            token_ids = llm.encode_chat([*system_message(prompt.system), as_user(question)])
        else:
            from hypocenter.cli.chat import chat

            chat(llm, params, progress, system=prompt.system, quiet=quiet)
            return
        if as_json:
            _print_object(llm, path, token_ids, params, progress, is_chat=text is None)
        elif text is None:
            shown = Shown(quiet=quiet)
            completion = answer(llm, token_ids, params, progress, is_chat=True, shown=shown)
            _print_end(completion, quiet=quiet)
        else:
            _print_answer(llm, text, token_ids, params, progress, quiet=quiet)


def _tell_of_missing(trace: StepTrace) -> None:
    if steps := trace.missing_steps:
        shown = ", ".join(map(str, steps[:8])) + " ..." * (len(steps) > 8)
        say(f"the run had fewer steps than --trace-steps names; not in the trace: {shown}")


def _require_chat_template(path: str, config: EngineConfig) -> None:
    """Raises UsageError for a model that cannot chat, before anything of it is loaded."""
    with open_gguf(Path(path), config.override_kv) as file:
        if config.chat_template is None and not template_names(file):
            raise UsageError(
                f"{path} has no chat template, so it cannot chat: -p TEXT continues a text, and "
                "--chat-template chatml chats all the same"
            )


def _question_from_stdin() -> str:
    """What was piped to us; raises UsageError when that is nothing."""
    if sys.stdin:
        piped = decode(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1), "stdin").strip()
        if piped:
            return piped
    raise UsageError(f"no prompt: {HOW_TO_ASK}; a chat needs a terminal")


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
    llm: LLM,
    text: str,
    token_ids: list[int],
    params: SamplingParams,
    progress: ProgressDisplay,
    *,
    quiet: bool,
) -> None:
    # On a terminal the prompt stands before its continuation, but is no part of the data. Below a
    # doctor stderr is none, and goes into a bundle.
    if sys.stdout and sys.stdout.isatty() and sys.stderr.isatty():
        progress.clear()
        print(text, end="", file=sys.stderr, flush=True)
    completion = answer(llm, token_ids, params, progress, is_chat=False, shown=Shown(quiet=quiet))
    _print_end(completion, quiet=quiet)


def _print_end(completion: Completion, *, quiet: bool) -> None:
    emit("\n")
    if not quiet:
        say(closing_line(completion))


def _print_object(
    llm: LLM,
    path: str,
    token_ids: list[int],
    params: SamplingParams,
    progress: ProgressDisplay,
    *,
    is_chat: bool,
) -> None:
    completion = answer(llm, token_ids, params, progress, is_chat=is_chat, shown=None)
    show_json(as_object(path, completion))
