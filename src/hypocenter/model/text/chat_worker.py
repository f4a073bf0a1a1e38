"""The program of the helper process that renders chat templates: jinja2's sandbox under limits.

`chat_process.py` starts it and is the other end of its pipes; nobody else imports it. It imports
little, so that it starts in a tenth of a second.

It ends when its input ends, so it outlives its parent by no more than the processor time of one
rendering. (PR_SET_PDEATHSIG is no help: it follows the thread that started the helper, and in a
server such threads come and go.)
"""

from __future__ import annotations

import html  # noqa: F401, see _warm_up
import json
import pprint  # noqa: F401, see _warm_up
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import msgspec

from hypocenter.model.text.chat_frames import Render, Reply, Setup
from hypocenter.wire.frames import read_frame, write_frame

MAX_ERROR_CHARS = 300
#: What the parent sends is bounded there; this only keeps a broken length from being believed.
MAX_REQUEST_BYTES = 1 << 30


class OutputTooLong(Exception):
    """A rendering that grew beyond its limit."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks what the model said, for training. The text stays as it is."""

    tags = {"generation"}  # noqa: RUF012, name and type are jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


class Namespace(jinja2.utils.Namespace):
    """`namespace(...)` without Python's own attributes, which jinja2 would trust."""

    def __init__(*args: Any, **attributes: Any) -> None:  # `self` may be an attribute's name
        self, *rest = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*rest, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


def compile_template(source: str) -> jinja2.Template:
    """The template in a sandbox with the names that chat templates expect.

    The surroundings are those of transformers' `apply_chat_template`: block tags take their line
    break with them, `break` and `continue` exist, `tojson` escapes neither HTML nor Unicode.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda pattern: datetime.now().strftime(pattern),
        namespace=Namespace,
        # A function, so that templates cannot reach the type's own attributes.
        dict=lambda *args, **pairs: dict(*args, **pairs),
    )
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict[str, str], request: Render) -> str:
    """Raises OutputTooLong as soon as the text is longer than the request allows."""
    limit = request.max_output_bytes
    pieces = []
    num_chars = 0
    for piece in template.generate(
        messages=request.messages,
        tools=request.tools,
        documents=None,
        add_generation_prompt=request.add_generation_prompt,
        **variables,
        **request.variables,
    ):
        num_chars += len(piece)
        if num_chars > limit:
            break
        pieces.append(piece)
    text = "".join(pieces)
    if num_chars > limit or len(text.encode()) > limit:
        raise OutputTooLong(f"writes more than {limit} bytes, the limit")
    return text


def attempt(work: Callable[[], str], memory_bytes: int) -> Reply:
    """Run one compilation or rendering and turn every way to fail into a reply."""
    try:
        try:
            return Reply(text=work())
        except RecursionError:
            return Reply(error="nests or calls itself too deeply")
        except OutputTooLong as error:
            return Reply(error=str(error))
        except MemoryError:
            raise
        except Exception as error:
            return Reply(error=_one_line(error))
    except MemoryError:
        return Reply(error=f"needs more than {memory_bytes >> 20} MiB of memory", fatal=True)


def lock_down(memory_bytes: int) -> None:
    """Bound what this process may take: memory on top of today's, no new files, no children.

    The sandbox should not let a template ask for any of them; this is the second wall. Windows has
    no such limits, macOS ignores the one on memory; the parent's time limit holds everywhere.
    """
    if sys.platform == "win32":
        return
    import resource

    try:
        with open("/proc/self/statm") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        used_bytes = 1 << 30
    for kind, limit in (
        (resource.RLIMIT_AS, used_bytes + memory_bytes),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))


def grant_cpu(seconds: int) -> None:
    """Let this process use `seconds` more of processor time before the system ends it.

    The parent measures the wall clock; this is for the case that the parent is gone.
    """
    if sys.platform == "win32":
        return
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + seconds + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def main() -> None:
    """Answer what comes in on standard input until it ends."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = msgspec.msgpack.decode(read_frame(requests, MAX_REQUEST_BYTES), type=Setup)
    _warm_up()
    lock_down(setup.memory_bytes)
    write_frame(replies, Reply())
    templates: list[jinja2.Template] = []

    def compile_it() -> str:
        templates.append(compile_template(setup.template))
        return ""

    grant_cpu(setup.cpu_seconds)
    write_frame(replies, attempt(compile_it, setup.memory_bytes))
    while True:
        try:
            body = read_frame(requests, MAX_REQUEST_BYTES)
        except EOFError:
            return
        grant_cpu(setup.cpu_seconds)
        write_frame(replies, attempt(lambda: _answer(templates, setup, body), setup.memory_bytes))  # noqa: B023, called at once


def _answer(templates: list[jinja2.Template], setup: Setup, body: bytes) -> str:
    request = msgspec.msgpack.decode(body, type=Render)
    return render(templates[0], setup.variables, request)


def _warm_up() -> None:
    # Everything that would open a file later, when none can be opened any more: the time zone, and
    # the modules above that jinja2 and markupsafe import only at need.
    time.localtime()
    compile_template("{{ strftime_now('%Z') }}{{ [1]|tojson|pprint }}").render()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _one_line(error: Exception) -> str:
    """Says where in the template it is and what, bounded: a template may raise anything."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    text = str(error)[: 4 * MAX_ERROR_CHARS]
    if isinstance(error, OSError | ImportError):
        # Its own text would name a place on this machine. A codec of `encode` comes from a file.
        text = "needs a file of this machine, and templates get none"
    elif not isinstance(error, jinja2.TemplateError):
        text = f"{type(error).__name__}: {text}"
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[: MAX_ERROR_CHARS - 3]}..."
    return f"line {line}: {text}" if line else text
