"""The interactive chat of `hypo run`: a loop of line, answer, history; nothing else asks a person.

Ctrl-C stops the answer, a second Ctrl-C before it has stopped leaves the program; Ctrl-D leaves.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from bisect import bisect_left
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from hypocenter.base.errors import HypoError
from hypocenter.cli import interrupt
from hypocenter.cli.answer import Shown, answer, as_user, closing_line, system_message
from hypocenter.cli.options import message_of
from hypocenter.cli.output import emit, say
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.settings.config import SamplingParams

if TYPE_CHECKING:
    from hypocenter.engine.llm import LLM


PROMPT = "> "
#: Of a full context a quarter is kept free for the answer, but no more than this.
MAX_ROOM_TOKENS = 1024
#: A path or a comment may begin a message: /etc/hosts, // and /* are no commands.
_COMMAND = re.compile("/[A-Za-z?][A-Za-z_-]*")
WELCOME = "Ctrl-C stops an answer, Ctrl-D leaves, /help tells more"
HELP = (
    "/clear forgets the conversation; /system TEXT begins anew with a system message, "
    "without TEXT with none; /bye leaves"
)


def chat(
    llm: LLM,
    params: SamplingParams,
    progress: ProgressDisplay,
    *,
    system: str | None = None,
    quiet: bool = False,
) -> None:
    """Talk until Ctrl-D or /bye, with a model that has a chat template."""
    messages = system_message(system)
    llm.encode_chat([*messages, as_user("hello")])  # a template that is broken is refused at once
    progress.clear()
    with contextlib.suppress(ImportError):
        import readline  # line editing and history for input()

        if os.environ.get("TERM", "dumb") != "dumb":
            # What is pasted is one message, whatever line ends it has.
            readline.parse_and_bind("set enable-bracketed-paste on")
    if not quiet:
        say(WELCOME)
    while (line := _ask()) is not None:
        command, _, rest = line.strip().partition(" ")
        if command in ("/bye", "/exit", "/quit"):
            return
        if command == "/help":
            say(HELP)
        elif command == "/clear":
            messages = [message for message in messages if message["role"] == "system"]
            rest = ", but for the system message" if messages else ""
            say(f"the conversation is forgotten{rest}")
        elif command == "/system":
            messages = system_message(rest.strip() or None)
            say(f"a new conversation, with {'the' if messages else 'no'} system message")
        elif _COMMAND.fullmatch(command):
            say(f"there is no {command}; /help tells what there is")
        elif command:
            asked = [*messages, as_user(line)]
            messages = _answer(llm, asked, params, progress, quiet=quiet) or messages


def _answer(
    llm: LLM,
    asked: list[dict[str, str]],
    params: SamplingParams,
    progress: ProgressDisplay,
    *,
    quiet: bool,
) -> list[dict[str, str]] | None:
    """Stream one answer; returns the conversation with it, or None after an error was shown."""
    try:
        with _interrupt_flag() as interrupted:
            kept, token_ids = fitting(llm, asked, params.max_tokens)
            if len(kept) < len(asked) and len(token_ids) <= llm.context_length:
                num = len(asked) - len(kept)
                say(f"the context is full: the oldest {num} messages are left out from now on")
            completion = answer(
                llm,
                token_ids,
                params,
                progress,
                lambda: bool(interrupted),
                is_chat=True,
                shown=Shown(quiet=quiet),
            )
    except HypoError as error:
        say(message_of(error))
        return None
    emit("\n")
    if not quiet:
        say(closing_line(completion))
    return [*kept, {"role": "assistant", "content": completion.text}]


def fitting(
    llm: LLM, messages: list[dict[str, str]], max_tokens: int | None
) -> tuple[list[dict[str, str]], list[int]]:
    """The newest turns that leave room for an answer, and their token ids.

    A leading system message and the last message always stay, even where they leave no room.
    """
    length = llm.context_length
    room = min(length // 4, MAX_ROOM_TOKENS, MAX_ROOM_TOKENS if max_tokens is None else max_tokens)
    system, turns = messages[:1], messages[1:]
    if system[0]["role"] != "system":
        system, turns = [], messages
    starts = [place for place, message in enumerate(turns) if message["role"] == "user"]

    def leaves_room(start: int) -> bool:
        return len(llm.encode_chat([*system, *turns[start:]])) + room <= length

    oldest = starts[0]
    if not leaves_room(oldest):
        # Halving, because each try encodes the whole conversation.
        last = len(starts) - 1
        oldest = starts[bisect_left(starts, True, min(1, last), last, key=leaves_room)]
    kept = [*system, *turns[oldest:]]
    return kept, llm.encode_chat(kept)


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[list[bool]]:
    """A list that is filled by the first Ctrl-C; the second one raises KeyboardInterrupt.

    A flag, because an exception in the middle of a step would leave the engine half done.
    """
    pressed: list[bool] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            interrupt.note(number, frame)
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
            say("Ctrl-D or /bye leaves")
        except EOFError:
            print(file=sys.stderr)
            return None
