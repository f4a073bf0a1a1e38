"""The worker's program: loads a model, runs the server's requests, and ends with its server.

An error that is no request's own ends the process: nothing that it computed since can be trusted,
and on a GPU nothing can be computed any more. The server then asks another worker to go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from hypocenter.device import devices
from hypocenter.engine.conversations import Answer
from hypocenter.engine.driver import Driver
from hypocenter.engine.engine import Engine
from hypocenter.engine.llm import LLM
from hypocenter.engine.request import Request
from hypocenter.errors import (
    EXIT_FAULT,
    EXIT_OK,
    BadLogits,
    BadSetting,
    GrammarError,
    HypoError,
    OutOfBlocks,
    TemplateError,
    TokenizerError,
    UsageError,
)
from hypocenter.frames import as_frame, read_frame
from hypocenter.messages import (
    MAX_FRAME_BYTES,
    NO_REQUEST,
    Accepted,
    Ask,
    Cancel,
    EngineState,
    Failed,
    Loading,
    Piece,
    Prepare,
    Ready,
    Start,
    Submit,
    Told,
    ToWorker,
)
from hypocenter.results import TokenLogprob
from hypocenter.worker.description import ending_of, facts_of
from hypocenter.worker.outbox import Outbox

PromptLogprobs = tuple[TokenLogprob | None, ...] | None
#: Errors that concern one request alone; the worker goes on.
OWN_ERRORS = (
    UsageError, TokenizerError, TemplateError, BadLogits, OutOfBlocks, GrammarError,
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Serve the server whose socket is named; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which tells us
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(words[0])
        with connection.makefile("rb") as reader:
            try:
                worker = _start(connection, reader)
            except HypoError as error:  # the server tells of it
                connection.sendall(as_frame(_failure(NO_REQUEST, error)))
                return error.exit_code
            if worker is None:
                return EXIT_OK
            with contextlib.closing(worker):
                while worker.handle(_next(reader)):
                    pass
    return EXIT_OK


def _start(connection: socket.socket, reader: BinaryIO) -> ModelWorker | None:
    """A worker with its model, once it is asked for; None: it was never needed."""
    while (message := _next(reader)) is not None:
        match message:
            case Prepare(device):
                devices.open_device(device)
            case Start():
                return ModelWorker(connection, message)
    return None


class ModelWorker:
    """One model and its open requests, by the server's ids."""

    def __init__(self, connection: socket.socket, start: Start) -> None:
        began = time.monotonic()
        self._requests: dict[int, Request] = {}
        #: Requests that want logprobs of their prompts: at their first news they are known.
        self._wants_prompt: set[int] = set()
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._engine: Engine | None = None
        self._outbox = Outbox(connection, self._pieces_of, self._state, die)
        self._llm = LLM(
            start.model,
            start.config,
            progress=self._report,
            shared=start.kept,
            block_memory=start.block_memory,
        )
        self._engine = self._llm.engine
        self._driver = Driver(self._engine)
        facts = facts_of(self._llm, Path(start.model), start.config)
        self._outbox.put(Ready(facts, time.monotonic() - began))

    def handle(self, message: ToWorker | None) -> bool:
        """Do what the server asks; False at its end."""
        match message:
            case Submit():
                self._submit(message)
            case Ask():
                self._answer(message)
            case Cancel(number):
                request = self._requests.get(number)
                if request is not None:
                    self._driver.cancel(request)
        return message is not None

    def close(self) -> None:
        """End what is still open, and say so."""
        self._llm.close()
        self._driver.join()
        self._outbox.close()

    def _submit(self, message: Submit) -> None:
        try:
            prompt_ids = (
                self._llm.encode(message.prompt)
                if message.messages is None
                else self._llm.encode_chat(
                    message.messages,
                    message.template_variables,
                    message.tools,
                    add_generation_prompt=message.add_generation_prompt,
                    continue_final_message=bool(message.continues),
                )
            )
            request = self._request(message, prompt_ids)
        except OWN_ERRORS as error:
            self._outbox.put(_failure(message.id, error))
            return
        piece = self._llm.tokenizer.shown_piece
        pieces: tuple[bytes, ...] = ()
        if message.params.prompt_logprobs is not None:
            self._wants_prompt.add(message.id)
            pieces = tuple(map(piece, request.prompt_ids))
        self._outbox.put(Accepted(message.id, request.prompt_ids, pieces))
        self._requests[message.id] = request
        self._driver.submit(request, lambda: self._note(message.id, request))

    def _request(self, message: Submit, prompt_ids: Sequence[int]) -> Request:
        if not message.is_chat:
            return self._llm.engine.request(
                prompt_ids,
                message.params,
                cache_salt=message.cache_salt,
                output_ids=message.output_ids,
            )
        return self._llm.answer_request(
            prompt_ids,
            message.params,
            Answer(message.tools, message.calls, message.continues),
            cache_salt=message.cache_salt,
            output_ids=message.output_ids,
        )

    def _note(self, number: int, request: Request) -> None:
        """In the thread that steps: a request that is preempted later reads its prompt again."""
        if number in self._wants_prompt:
            self._wants_prompt.discard(number)
            self._prompt_logprobs[number] = request.all_prompt_logprobs
        self._outbox.note(number)

    def _answer(self, message: Ask) -> None:
        tokenizer = self._llm.tokenizer
        try:
            if message.messages is not None:
                ids = self._llm.encode_chat(
                    message.messages,
                    message.template_variables,
                    message.tools,
                    add_generation_prompt=message.add_generation_prompt,
                    continue_final_message=message.continue_final_message,
                )
            elif message.text is not None:
                ids = tokenizer.encode(
                    message.text,
                    add_special=message.add_special,
                    parse_special=message.parse_special,
                )
            else:
                ids = list(message.token_ids)
            text = tokenizer.decode(ids, skip_special=False)
            pieces = tuple(map(tokenizer.piece, ids))
        except OWN_ERRORS as error:
            self._outbox.put(_failure(message.id, error))
            return
        self._outbox.put(Told(message.id, text, tuple(ids), pieces))

    def _report(self, what: str, share: float) -> None:
        self._outbox.put(Loading(what, share))

    def _state(self) -> EngineState:
        if self._engine is None:  # it is being loaded
            return EngineState()
        scheduler, cache = self._engine.scheduler, self._engine.cache
        return EngineState(
            len(scheduler.running),
            len(scheduler.waiting),
            cache.num_free_blocks,
            cache.num_kept_blocks,
            self._engine.num_steps,
        )

    def _pieces_of(self, number: int) -> list[Piece | msgspec.Struct]:
        """What a request yielded since; its end is told once, and then it is forgotten."""
        request = self._requests.get(number)
        if request is None:
            return []
        done = request.done  # read first: what came before it lies in `deltas` by now
        pieces: list[Piece | msgspec.Struct] = []
        while request.deltas:
            delta = request.deltas.popleft()
            pieces.append(
                Piece(
                    number,
                    delta.text,
                    delta.token_ids,
                    delta.logprobs,
                    self._prompt_logprobs.pop(number, None),
                    ending_of(request) if delta.finish_reason is not None else None,
                    delta.reasoning,
                    delta.calls,
                )
            )
        if done:
            del self._requests[number]
            if request.error is not None:
                if not isinstance(request.error, OWN_ERRORS):
                    die(request.error)
                pieces.append(_failure(number, request.error))
        return pieces


def die(error: BaseException) -> None:
    """End at once, so that no more is asked of an engine or device that is broken.

    What was recorded lies in memory that is shared, and outlives us.
    """
    traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, HypoError):
        print(f"hypo: {error}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def _failure(number: int, error: Exception) -> Failed:
    field = error.field if isinstance(error, BadSetting) else ""
    return Failed(number, type(error).__name__, str(error), field)


def _next(reader: BinaryIO) -> ToWorker | None:
    """What the server says next; None at its end."""
    try:
        frame = read_frame(reader, MAX_FRAME_BYTES)
    except (EOFError, ConnectionError):
        return None
    message: ToWorker = msgspec.msgpack.decode(frame, type=ToWorker)
    return message


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
