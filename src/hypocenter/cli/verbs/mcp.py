"""`hypo mcp`: what hypocenter finds, for agents that speak the Model Context Protocol over stdio.

https://modelcontextprotocol.io. Each tool runs a verb of `hypo` in a process of its own, with a
bound on its seconds and on its output. Files are only read, and a program's own source never runs,
unless a person has named a folder for it on the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from hypocenter.base import package
from hypocenter.base.errors import EXIT_FAULT, EXIT_GATE, EXIT_OK, HypoError, UsageError
from hypocenter.cli.explanation import explain

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

_Params = ParamSpec("_Params")
MAX_SECONDS = 600.0
_DEFAULT_SECONDS = 60.0
#: A process may take longer than the examination in it: it starts, and writes its report.
_MARGIN_SECONDS = 60.0
#: For what was killed to be gone.
_END_SECONDS = 5.0
#: What is read of a report, and what of it is told.
_MAX_OUTPUT_BYTES = 16 << 20
_MAX_ANSWER_CHARS = 100_000
_MAX_ARGUMENTS, _MAX_ARGUMENT_CHARS = 100, 10_000
#: Verbs that run at once; an agent may ask for many.
_MAX_RUNNING = 2

_INSTRUCTIONS = (
    "Explains crashes and wrong results of GPU programs (Triton, PyTorch) and of the engine "
    "hypocenter. A bundle is a folder that `hypo doctor -- COMMAND` leaves when a command dies. "
    "Say that something is proven only where the report says so."
)


class ToolFailed(Exception):
    """A tool gave no result; the text says why, and what to do."""


def serve(run_below: str | None) -> None:
    """Answer the client at stdin and stdout until it leaves.

    `run_below` is the folder whose files may be run, None: no file is. Raises UsageError.
    """
    folder = None if run_below is None else Path(run_below).resolve()
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--run-below {run_below}: no such folder")
    try:
        made = make_server(folder)
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"hypo mcp needs {missing.name}, which is not installed: pip install 'hypocenter[mcp]'"
        ) from missing
    made.run("stdio")


class ServedTools:
    """What agents may call; `run_below` is the folder whose files may be run, if there is one."""

    def __init__(self, run_below: Path | None) -> None:
        self._run_below = run_below
        self._running = asyncio.Semaphore(_MAX_RUNNING)

    async def examine_bundle(self, bundle: str, seconds: float = _DEFAULT_SECONDS) -> str:
        """Examine a bundle, the folder that a crashed run left: the report as Markdown.

        It says the cause with its proof and its fix, or what is open. The bundle's own source is
        not run. `seconds` is how long the examination may take.
        """
        _require_seconds(seconds)
        if not os.path.isdir(bundle):
            raise ToolFailed(f"{bundle}: no such folder; `hypo doctor -- COMMAND` makes a bundle")
        # As a whole path it is no option, whatever it is called.
        path = os.path.abspath(bundle)
        words = ["doctor", "--markdown", "--examine-for", str(seconds), path]
        async with self._running:
            return await run_verb(words, seconds, (EXIT_OK, EXIT_FAULT))

    async def explain_report(self, report: str) -> str:
        """Explain a report that `hypo doctor --json` or `hypo check --json` wrote to a file.

        It says what is proven, what was tried, what was not tested and why, and what to do next.
        """
        try:
            return cut(await asyncio.to_thread(explain, Path(report)))
        except HypoError as error:
            raise ToolFailed(str(error)) from error

    async def check_file(
        self, file: str, arguments: list[str] | None = None, seconds: float = _DEFAULT_SECONDS
    ) -> str:
        """Run a Python file and report each wrong access of its Triton launches. Needs no GPU.

        This executes the file, on the CPU and as this user. It must lie below the folder that
        `hypo mcp --run-below` names. `arguments` are the file's own.
        """
        assert self._run_below is not None, "without a folder it is no tool"
        _require_seconds(seconds)
        path = file_below(self._run_below, file)
        given = arguments or []
        if len(given) > _MAX_ARGUMENTS or any(
            len(argument) > _MAX_ARGUMENT_CHARS for argument in given
        ):
            raise ToolFailed(
                f"at most {_MAX_ARGUMENTS} arguments of {_MAX_ARGUMENT_CHARS} characters are taken"
            )
        words = ["check", "--budget", str(seconds), str(path), "--", *given]
        async with self._running:
            return await run_verb(words, seconds, (EXIT_OK, EXIT_GATE))


def make_server(run_below: Path | None) -> MCPServer:
    """The server with its tools. Raises ModuleNotFoundError where the package mcp is not there."""
    from mcp.server.mcpserver import MCPServer
    from mcp_types import ToolAnnotations

    server = MCPServer(
        package.NAME, version=package.version(), instructions=_INSTRUCTIONS, log_level="WARNING"
    )
    tools = ServedTools(run_below)
    reads = ToolAnnotations(
        read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    )
    server.add_tool(_telling(tools.examine_bundle), annotations=reads)
    server.add_tool(_telling(tools.explain_report), annotations=reads)
    if run_below is not None:
        runs = ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        )
        server.add_tool(_telling(tools.check_file), annotations=runs)
    return server


def _telling(
    tool: Callable[_Params, Awaitable[str]],
) -> Callable[_Params, Awaitable[str]]:
    """The tool, whose client is told why it failed; of other errors it hears nothing."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(tool)
    async def call(*args: _Params.args, **kwargs: _Params.kwargs) -> str:
        try:
            return await tool(*args, **kwargs)
        except ToolFailed as error:
            raise ToolError(str(error)) from error

    return call


def file_below(folder: Path, file: str) -> Path:
    """The file, where it lies in `folder` once all links are followed. Raises ToolFailed."""
    path = (folder / file).resolve()
    if not path.is_relative_to(folder):
        raise ToolFailed(f"{file} does not lie below {folder}, and no other file is run")
    if not path.is_file():
        raise ToolFailed(f"{file}: no such file")
    return path


def _require_seconds(seconds: float) -> None:
    if not 0 < seconds <= MAX_SECONDS:
        raise ToolFailed(f"seconds is {seconds}, but must be above 0 and at most {MAX_SECONDS:g}")


async def run_verb(words: Sequence[str], seconds: float, codes: Sequence[int]) -> str:
    """What a verb of `hypo` prints, which must end with one of these exit codes.

    Raises ToolFailed. All that the verb has started ends with it.
    """
    process = await asyncio.create_subprocess_exec(
        *package.module_command(package.NAME),
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(seconds + _MARGIN_SECONDS):
            said, told = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            code = await process.wait()
    except TimeoutError:
        raise ToolFailed(
            f"hypo {words[0]} took longer than {seconds + _MARGIN_SECONDS:g} seconds; give it more"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # who left the group may hold the pipes
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.gather(_read(process.stdout), _read(process.stderr), process.wait())
    if code not in codes:
        lines = told.strip().splitlines() or [f"hypo {words[0]} ended with exit code {code}"]
        raise ToolFailed(cut(lines[-1]))
    return cut(said)


async def _read(stream: asyncio.StreamReader) -> str:
    """What comes until the end of a stream; behind a bound it is read and dropped."""
    kept, num_bytes = [], 0
    while part := await stream.read(1 << 16):
        if num_bytes < _MAX_OUTPUT_BYTES:
            kept.append(part)
        num_bytes += len(part)
    return b"".join(kept).decode(errors="replace")


def cut(text: str) -> str:
    """The text, or its beginning and a line that says how much is missing."""
    if len(text) <= _MAX_ANSWER_CHARS:
        return text
    left = len(text) - _MAX_ANSWER_CHARS
    return f"{text[:_MAX_ANSWER_CHARS]}\n[cut off here: {left} more characters]"
