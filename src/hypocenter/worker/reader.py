"""The reader's program: makes token ids and forms of what clients send, and has no engine.

Whatever a stranger's text takes, it takes here: a question has an alarm on processor time and a
limit on memory, and whoever exceeds one ends this process alone. The server starts another one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from hypocenter.base.errors import EXIT_OK, HypoError
from hypocenter.engine.conversations import AnswerRules, PromptReader
from hypocenter.engine.grammar import Grammars
from hypocenter.engine.grammar_worker import bound_memory
from hypocenter.engine.token_rules import spellings
from hypocenter.model.gguf.file import open_gguf
from hypocenter.wire.frames import read_frame, write_frame
from hypocenter.wire.messages import (
    MAX_FRAME_BYTES,
    NO_REQUEST,
    Ask,
    FormRead,
    FromReader,
    ReaderReady,
    ReadForm,
    ReadingLimits,
    StartReader,
    Told,
    ToReader,
)
from hypocenter.worker.outbox import failure_for_client, failure_of


def main(words: Sequence[str]) -> int:
    """Answer what comes by standard input up to its end; returns the exit code."""
    # Ctrl-C, a reload and a new log are for the server, which ends us.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # What a library prints must not get between our answers.
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    start = _next(source)
    if not isinstance(start, StartReader):
        return EXIT_OK
    try:
        reader = Reader(start)
    except HypoError as error:  # the server tells of it
        write_frame(sink, failure_of(NO_REQUEST, error))
        return error.exit_code
    write_frame(sink, ReaderReady())
    with reader:
        if start.reads_forms:
            reader.learn_vocabulary()
        bound_memory(start.limits.memory_bytes)
        while (question := _next(source)) is not None:
            write_frame(sink, _within_time(reader, question, start.limits))
    return EXIT_OK


class Reader:
    """What one model's file says of texts; answers a question at a time."""

    def __init__(self, start: StartReader) -> None:
        self._model = Path(start.model)
        with open_gguf(self._model, start.config.override_kv) as file:
            self._prompts = PromptReader(file, start.config)
        self._tokenizer = self._prompts.tokenizer
        self._grammars = Grammars(self._tokenizer, self._tokenizer.vocab_size)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *raised: object) -> None:
        self._prompts.close()

    def learn_vocabulary(self) -> None:
        """Be ready for forms."""
        self._grammars.learn_vocabulary()

    def answer(self, question: Ask | ReadForm) -> FromReader:
        """What the server is told; an error of the question's own is an answer as well."""
        try:
            if isinstance(question, ReadForm):
                compiled = self._grammars.read(question.field, question.text)
                return FormRead(question.id, compiled)
            return self._tell(question)
        except HypoError as error:
            return failure_for_client(question.id, error, self._model)

    def _tell(self, question: Ask) -> Told:
        tokenizer, max_chars = self._tokenizer, question.max_chars or None
        if question.messages is not None:
            told = question.template_variables
            ids: Sequence[int] = self._prompts.conversations.encode(
                question.messages,
                told,
                question.tools,
                add_generation_prompt=question.add_generation_prompt,
                continue_final_message=bool(question.continues),
                max_chars=max_chars,
            )
        elif question.text is not None and question.pair is not None:
            ids, num_first = self._prompts.encode_pair(question.text, question.pair)
            return Told(question.id, token_ids=tuple(ids), num_first=num_first)
        elif question.text is None:
            ids = question.token_ids
        elif question.is_prompt:
            ids = self._prompts.encode(question.text)
        else:
            ids = tokenizer.encode(
                question.text,
                add_special=question.add_special,
                parse_special=question.parse_special,
            )
        if question.is_prompt:
            words = spellings(question.bad_words, tokenizer)
            form = self._form_of_calls(question, ids)
            return Told(question.id, token_ids=tuple(ids), bad_word_ids=words, call_form=form)
        text = tokenizer.decode(ids, skip_special=False)
        pieces = tuple(map(tokenizer.piece, ids)) if question.needs_pieces else ()
        return Told(question.id, text, tuple(ids), pieces)

    def _form_of_calls(self, question: Ask, ids: Sequence[int]) -> str:
        """The form of an answer's calls, which is read as another one is; empty: they are free."""
        if question.messages is None:
            return ""
        answer = AnswerRules(question.tools, question.calls, question.continues)
        form = self._prompts.conversations.call_form(ids, question.form_field, answer)
        return "" if form is None else self._grammars.with_marks(form)


def _within_time(reader: Reader, question: ToReader, limits: ReadingLimits) -> FromReader:
    """The answer to a question; the alarm ends this process where that takes too long."""
    assert not isinstance(question, StartReader), "a reader is started once"
    is_form = isinstance(question, ReadForm)
    seconds = limits.form_cpu_seconds if is_form else limits.text_cpu_seconds
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return reader.answer(question)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _next(source: BinaryIO) -> ToReader | None:
    """What the server says next; None at its end."""
    try:
        frame = read_frame(source, MAX_FRAME_BYTES)
    except EOFError:
        return None
    message: ToReader = msgspec.msgpack.decode(frame, type=ToReader)
    return message


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
