"""The parent's end of the helper process that renders chat templates: start, ask, time out, end.

What runs in the helper is in `chat_worker.py`; what a message is, in `chat_messages.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from hypocenter.base.errors import TemplateError
from hypocenter.base.wording import FROM_OUTSIDE, signal_name
from hypocenter.model.text.chat_frames import Render, Reply, Setup
from hypocenter.wire.frames import read_frame, write_frame

START_SECONDS = 20.0
PROGRAM = (
    "import sys; sys.path.extend(sys.argv[1:]); "
    "from hypocenter.model.text.chat_worker import main; main()"
)
#: Kept in the helper's otherwise empty environment: where libraries lie, and the time zone.
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may take.

    `seconds` of wall clock, measured from outside; `memory_bytes` on top of what the idle helper
    has; `output_bytes` on top of the bytes of the messages and tools.
    """

    seconds: float = 2.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 4 << 20


class RenderProcess:
    """One helper for one template; started at the first rendering, again after one that failed.

    Safe to use from several threads, which then wait for each other.
    """

    def __init__(
        self, label: str, template: str, variables: dict[str, str], limits: TemplateLimits
    ) -> None:
        self.label = label
        self.limits = limits
        # Rounded up, and never above the wall clock's limit by much.
        cpu_seconds = int(limits.seconds) + 1
        self._setup = Setup(template, variables, cpu_seconds, limits.memory_bytes)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., RenderProcess] | None = None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Raises TemplateError when the template fails or exceeds a limit."""
        num_bytes = sum(_num_bytes(value) for message in messages for value in message.values())
        num_bytes += _num_bytes(tools or "")
        max_output_bytes = num_bytes + self.limits.output_bytes
        request = Render(messages, add_generation_prompt, max_output_bytes, variables, tools)
        with self._lock:
            self._start_if_gone()
            return self._ask(lambda pipe: write_frame(pipe, request), max_output_bytes)

    def start(self) -> None:
        """Start the helper, if it is not there. Raises TemplateError for what cannot be parsed."""
        with self._lock:
            self._start_if_gone()

    def close(self) -> None:
        """End the helper; a later rendering starts another one."""
        with self._lock:
            self._stop()

    def _start_if_gone(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._start()

    def _start(self) -> None:
        if not sys.executable:
            raise TemplateError(
                f"{self.label}: sys.executable is empty, but the helper process needs a Python "
                "interpreter; set sys.executable in the embedding program"
            )
        # Isolated and without site-packages of its own: the folders to import from are ours.
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, *import_folders()]
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                # Ctrl-C in a terminal is for the parent; the helper must not die of it.
                process_group=0 if os.name == "posix" else None,
            )
        except OSError as error:
            raise TemplateError(f"{self.label}: cannot start {command[0]}: {error}") from error
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        self._ask(lambda pipe: write_frame(pipe, self._setup), 0, seconds=START_SECONDS)
        self._ask(None, 0)

    def _ask(
        self,
        send: Callable[[IO[bytes]], None] | None,
        max_text_bytes: int,
        *,
        seconds: float | None = None,
    ) -> str:
        """Send, wait for the reply, return its text; whatever goes wrong ends the helper."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None  # noqa: PT018
        allowed = self.limits.seconds if seconds is None else seconds
        timer = threading.Timer(allowed, process.kill)
        timer.daemon = True
        began = time.monotonic()
        timer.start()
        intact = False
        try:
            if send is not None:
                send(process.stdin)
            body = read_frame(process.stdout, max_text_bytes + 4096)
            reply = msgspec.msgpack.decode(body, type=Reply)
            intact = not reply.fatal
        except (EOFError, OSError, ValueError, msgspec.MsgspecError) as error:
            raise self._failure(process, error, time.monotonic() - began, allowed) from error
        finally:
            timer.cancel()
            # Also on KeyboardInterrupt: an answer still to come would be taken for the next one.
            if not intact:
                self._stop()
        if reply.error:
            raise TemplateError(f"{self.label}: {reply.error}")
        return reply.text

    def _failure(
        self, process: subprocess.Popen[bytes], error: Exception, elapsed: float, allowed: float
    ) -> TemplateError:
        if not isinstance(error, EOFError | OSError):
            return TemplateError(f"{self.label}: the helper process answered nonsense: {error}")
        _end(process)
        # SIGXCPU: the system was faster than our own clock.
        if elapsed >= allowed or process.returncode == -24:
            return TemplateError(f"{self.label}: not done after {allowed:g} s, the limit")
        status = process.returncode
        if -status in FROM_OUTSIDE:
            return TemplateError(
                f"{self.label}: the helper process was ended by {signal_name(-status)}, and not by "
                "the template; ask again"
            )
        how = signal_name(-status) if status < 0 else f"exit status {status}"
        return TemplateError(
            f"{self.label}: the helper process died ({how}); the template crashed it or took too "
            "much memory"
        )

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _num_bytes(value: str | list[dict[str, Any]]) -> int:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return len(text.encode())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # Unsent bytes for a process that is gone are of no use to anyone.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def import_folders() -> list[str]:
    """The folders of the packages that the helper imports, wherever this process has them from."""
    folders = []
    for name in ("hypocenter", "jinja2", "markupsafe", "msgspec"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise TemplateError(f"package {name} is missing; install hypocenter's requirements")
        folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))
