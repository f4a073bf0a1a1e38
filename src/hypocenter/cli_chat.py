"""The interactive chat of `hypo run`: a loop of line, answer, history; nothing else asks a person.

Ctrl-C stops the answer, a second Ctrl-C before it has stopped leaves the program; Ctrl-D leaves.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hypocenter.cli_progress import ProgressDisplay
from hypocenter.cli_run import answer, closing_line, emit, say
from hypocenter.config import SamplingParams
from hypocenter.errors import HypoError, UsageError

if TYPE_CHECKING:
    from hypocenter.engine.llm import LLM

PROMPT = "> "
WELCOME = "Ctrl-C stops an answer, Ctrl-D leaves"


def chat(llm: LLM, path: str, params: SamplingParams, progress: ProgressDisplay) -> None:
    """Talk until Ctrl-D. Raises UsageError when the model has no chat template."""
    if llm.chat_template is None:
        raise UsageError(f"{path} has no chat template; continue a text with -p TEXT instead")
    progress.done()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    say(WELCOME)
    messages: list[dict[str, str]] = []
    while (line := _ask()) is not None:
        if line.strip():
            messages.append({"role": "user", "content": line})
            _answer(llm, messages, params, progress)


def _answer(
    llm: LLM, messages: list[dict[str, str]], params: SamplingParams, progress: ProgressDisplay
) -> None:
    """Stream one answer and add it to `messages`; an error takes the question back and is shown."""
    try:
        with _interrupt_flag() as interrupted:
            token_ids = llm.encode_chat(messages)
            completion = answer(llm, token_ids, params, progress, lambda: bool(interrupted))
    except HypoError as error:
        messages.pop()
        say(str(error))
        return
    emit("\n")
    messages.append({"role": "assistant", "content": completion.text})
    say(closing_line(completion))


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[list[bool]]:
    """A list that is filled by the first Ctrl-C; the second one raises KeyboardInterrupt.

    A flag, because an exception in the middle of a step would leave the engine half done.
    """
    pressed: list[bool] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def _ask() -> str | None:
    """The next line; None at the end of input. Ctrl-C clears what was typed."""
    while True:
        try:
            if sys.stdout.isatty():
                return input(PROMPT)
            # stdout is data, so that the mark of the prompt must not go there.
            print(PROMPT, end="", file=sys.stderr, flush=True)
            return input()
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return None
