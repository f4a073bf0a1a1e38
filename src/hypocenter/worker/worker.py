"""The worker's program: loads a model, runs the server's requests, and ends with its server.

It is told token ids and forms that others have read (`reader.py`). One thread listens and does no
more, so that whatever is cancelled is heard of at once.

An error that is no request's own ends the process: nothing that it computed since can be trusted,
and on a GPU nothing can be computed any more. The server then asks another worker to go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

from hypocenter.base.errors import (
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
from hypocenter.base.results import TokenLogprob
from hypocenter.device import devices
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.conversations import PromptReader, in_thought
from hypocenter.engine.driver import Driver
from hypocenter.engine.engine import Engine
from hypocenter.engine.llm import LLM, read_prompts
from hypocenter.engine.request import Request
from hypocenter.engine.runner import load_forms
from hypocenter.record.recorder import open_recorder
from hypocenter.settings.config import EngineConfig
from hypocenter.wire.frames import as_frame, read_frame
from hypocenter.wire.logprobs import pack_logprobs
from hypocenter.wire.messages import (
    MAX_FRAME_BYTES,
    NO_REQUEST,
    Accepted,
    Cancel,
    Dropped,
    EngineState,
    Loading,
    MovePrompt,
    Piece,
    Prepare,
    PromptMoved,
    Ready,
    StandingBy,
    Start,
    Submit,
    TakeOver,
    ToWorker,
)
from hypocenter.worker.arrivals import Arrivals
from hypocenter.worker.description import ending_of, facts_of
from hypocenter.worker.outbox import Outbox, failure_for_client, failure_of
from hypocenter.worker.prepared import words_of

#: From the server's end on, what a worker may take for its own.
_LEAVE_SECONDS = 2.0
PromptLogprobs = tuple[TokenLogprob | None, ...] | None
#: Errors that concern one request alone; the worker goes on.
OWN_ERRORS = (
    UsageError, TokenizerError, TemplateError, BadLogits, OutOfBlocks, GrammarError,
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Serve the server whose socket is named; returns the exit code."""
    words = words_of(words)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which tells us
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(words[0])
        with connection.makefile("rb") as reader:
            try:
                worker = _start(connection, reader)
            except HypoError as error:  # the server tells of it
                connection.sendall(as_frame(failure_of(NO_REQUEST, error)))
                return error.exit_code
            if worker is None:
                return EXIT_OK
            with contextlib.closing(worker):
                while worker.handle(_next(reader)):
                    pass
    return EXIT_OK


def _start(connection: socket.socket, reader: BinaryIO) -> ModelWorker | None:
    """A worker with its model, once it is asked for; None: it was never needed."""
    preparing: Future[PromptReader | None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="prepare") as pool:
        while (message := _next(reader)) is not None:
            match message:
                case Prepare(device, forms, _, config):
                    devices.open_device(device)
                    if forms and config is not None:  # while a keeper reads the weights
                        preparing = pool.submit(_prepare, message, config)
                case Start(_, config, kept):
                    if kept is not None and kept.pages is not None:
                        device = devices.open_device(config.device)
                        devices.call_device(device, "begin_map", kept.pages.handle)
                    prompts = preparing.result() if preparing is not None else None
                    return ModelWorker(connection, message, prompts)
    return None


def _prepare(message: Prepare, config: EngineConfig) -> PromptReader | None:
    """Do what needs no weights; what the file says besides them, if that can be told by now."""
    load_forms(message.device, message.forms)
    open_recorder()  # which takes a tenth of a second
    if config.override_kv:  # what is given over the file's metadata is read with the model
        return None
    try:
        return read_prompts(Path(message.model), config)
    except HypoError:  # it is told of when the model is loaded
        return None


class ModelWorker:
    """One model and its open requests, by the server's ids."""

    def __init__(
        self, connection: socket.socket, start: Start, prompts: PromptReader | None = None
    ) -> None:
        began = time.monotonic()
        self._model = Path(start.model)
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
            prompts=prompts,
        )
        if start.is_first:
            _require_servable(self._llm, start.config)
        runner = self._llm.engine.runner
        if start.is_first or start.waits:  # others are to take over at once
            self._report("capturing steps", 0.0)
            self._llm.engine.capture()
        runner.prepare_blocks()
        self._engine = self._llm.engine
        self._driver = Driver(self._engine)
        self._arrivals = Arrivals(self._admit, die)
        self._facts = facts_of(self._llm, self._model, start.config)
        if start.waits:
            self._outbox.put(StandingBy(time.monotonic() - began))
        else:
            self._take_over(start.block_memory, began)

    def _take_over(self, block_memory: str, began: float) -> None:
        self._llm.engine.inherit_blocks(block_memory)
        self._outbox.put(Ready(self._facts, time.monotonic() - began))

    def handle(self, message: ToWorker | None) -> bool:
        """Do what the server asks; False at its end. Returns at once: others make ready."""
        match message:
            case TakeOver(block_memory):
                self._take_over(block_memory, time.monotonic())
            case Submit():
                self._arrivals.put(message)
            case Cancel(number):
                self._arrivals.cancel(number)
                request = self._requests.get(number)
                if request is not None:
                    self._driver.cancel(request)
            case MovePrompt():
                moving = threading.Thread(target=self._move, args=[message], name="saved prompts")
                moving.start()
        return message is not None

    def _move(self, message: MovePrompt) -> None:
        """Save, restore or erase a prompt, and say so; in a thread of its own, as it may take a
        second."""
        number, engine = message.id, self._llm.engine
        of = message.cache_salt, message.lora
        try:
            match message.action:
                case "save":
                    path = Path(message.path)
                    told = engine.save_prompt(path, message.token_ids, *of)
                    self._outbox.put(PromptMoved(number, *told))
                case "restore":
                    ids, num_kept, num_bytes = engine.restore_prompt(Path(message.path), *of)
                    self._outbox.put(PromptMoved(number, num_kept, num_bytes, ids))
                case "erase":
                    num_kept = engine.erase_prompt(message.token_ids, *of)
                    self._outbox.put(PromptMoved(number, num_kept))
        except OWN_ERRORS as error:
            self._outbox.put(failure_for_client(number, error, self._model))
        except BaseException as error:
            die(error)

    def close(self) -> None:
        """End what is still open, and say so. A step that takes longer is not waited for: its
        server has gone, and nobody wants what it brings. The process ends then."""
        leaving = threading.Timer(_LEAVE_SECONDS, os._exit, [EXIT_OK])
        leaving.daemon = True
        leaving.start()
        self._arrivals.close()
        self._llm.close()
        self._driver.join()
        self._outbox.close()

    def _admit(self, message: Submit, is_wanted: Callable[[], bool]) -> None:
        """Have a request run, unless nobody wants it any more."""
        try:
            request = self._request_of(message) if is_wanted() else None
        except OWN_ERRORS as error:
            self._outbox.put(failure_for_client(message.id, error, self._model))
            return
        if request is None:
            self._outbox.put(Dropped(message.id))
            return
        piece = self._llm.tokenizer.shown_piece
        pieces: tuple[bytes, ...] = ()
        if message.params.prompt_logprobs is not None:
            self._wants_prompt.add(message.id)
            pieces = tuple(map(piece, request.prompt_ids))
        self._outbox.put(Accepted(message.id, pieces))
        self._requests[message.id] = request
        if not is_wanted():  # since it was made ready; whoever cancels now finds it
            self._driver.cancel(request)
        self._driver.submit(request, lambda: self._note(message.id, request))

    def _request_of(self, message: Submit) -> Request:
        reader, turn_ids = None, frozenset[int]()
        if message.is_chat:
            conversations = self._llm.conversations
            reader = conversations.reader(
                message.prompt_ids,
                message.params,
                offers_tools=message.offers_tools,
                in_thought=in_thought(message.continues),
                types=message.text_parameters,
                must_call=message.must_call,
            )
            turn_ids = conversations.turn_ids
        terms = RequestTerms(
            cache_salt=message.cache_salt,
            output_ids=message.output_ids,
            reader=reader,
            turn_ids=turn_ids,
            form=message.form,
            bad_word_ids=message.bad_word_ids,
            embeds=message.embeds,
            num_first=message.num_first,
        )
        return self._llm.engine.request(message.prompt_ids, message.params, terms)

    def _note(self, number: int, request: Request) -> None:
        """In the thread that steps: a request that is preempted later reads its prompt again."""
        if number in self._wants_prompt:
            self._wants_prompt.discard(number)
            self._prompt_logprobs[number] = request.all_prompt_logprobs
        self._outbox.note(number)

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
            self._engine.runner.num_compiled_since,
            0 if cache.disk is None else cache.disk.num_read,
            0 if cache.disk is None else cache.disk.num_written,
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
                    pack_logprobs(delta.logprobs),
                    pack_logprobs(self._prompt_logprobs.pop(number, None)),
                    ending_of(request) if delta.finish_reason is not None else None,
                    delta.reasoning,
                    delta.calls,
                    _vector_of(request) if delta.finish_reason is not None else b"",
                )
            )
        if done:
            del self._requests[number]
            if request.error is not None:
                if not isinstance(request.error, OWN_ERRORS):
                    die(request.error)
                pieces.append(failure_for_client(number, request.error, self._model))
        return pieces


def _vector_of(request: Request) -> bytes:
    """The vector that came of a request, or its score; nothing of one for an answer."""
    return b"" if request.vector is None else request.vector.astype("<f4").tobytes()


def _require_servable(llm: LLM, config: EngineConfig) -> None:
    """Raises UsageError where no request, or no chat, could be answered."""
    runner = llm.engine.runner
    if runner.num_blocks * runner.block_size < llm.context_length:
        limit = f"one context, of {llm.context_length} tokens, must fit; take at least that"
        raise BadSetting("kv_tokens", config.kv_tokens, limit)
    if llm.chat_template is not None:
        try:
            llm.chat_template.check()
        except TemplateError as error:
            raise UsageError(f"{error}; give another by --chat-template-file") from error


def die(error: BaseException) -> None:
    """End at once, so that no more is asked of an engine or device that is broken.

    What was recorded lies in memory that is shared, and outlives us.
    """
    traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, HypoError):
        print(f"hypo: {error}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


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
