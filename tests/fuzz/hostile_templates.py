"""Hostile chat templates and messages; `scripts/test-fuzz` runs it.

Each input is a template of a known family with a piece changed, or a program of jinja2's words put
together by chance. Rendering must end in bounded time and memory, with a text or one line that
names no place on this machine, and a message must never write a control token.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from unittest import mock

import jinja2.filters
import jinja2.tests

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from outside.hostile import run_trials

from hypocenter.base.errors import TemplateError, UsageError
from hypocenter.model.text import chat_process
from hypocenter.model.text.chat import ChatTemplate
from hypocenter.model.text.chat_process import TemplateLimits

ROOT = Path(__file__).parents[2]
FAMILIES: Any = runpy.run_path(str(ROOT / "tests/model/text/chat_templates.py"))["FAMILIES"]
LIMITS = TemplateLimits(seconds=0.25, memory_bytes=64 << 20, output_bytes=1 << 20)
#: A compilation, two renderings and as many starts, on a machine that does other things as well.
MAX_TRIAL_SECONDS = 15
MAX_ERROR_CHARS = 400
#: One input of so many has a helper that is started as a user's is, which takes a fifth of a
#: second; the others have one that is split off from such a helper, and is the same from then on.
START_EVERY = 100
#: What an error may not hold: the places of this machine.
PLACES = (str(ROOT), sys.prefix, sys.base_prefix, "/usr/lib", "site-packages", os.sep + "proc")

FILTERS = tuple(sorted(jinja2.filters.FILTERS))
TESTS = tuple(sorted(name for name in jinja2.tests.TESTS if name.isidentifier()))
ATTRIBUTES = (
    "role", "content", "__class__", "__init__", "__globals__", "__mro__", "__subclasses__", "_x",
    "f_globals", "gi_frame", "format", "format_map", "append", "index", "split", "join", "encode",
    "loop", "mro", "func_globals", "environment", "eval_ctx", "length", "0", "items", "update",
)  # fmt: skip
ATOMS = (
    "messages", "messages[0]", "messages[0].content", "bos_token", "eos_token", "loop",
    "loop.index", "add_generation_prompt", "tools", "namespace", "dict", "range", "cycler",
    "joiner", "lipsum", "strftime_now", "raise_exception", "self", "super", "varargs", "caller",
    "none", "true", "ns", "0", "1", "-1", "3.5", "1e400", "10**9", "2**70", "''", "'x'",
    "'a' * 999", "'%s'", "'{0}'", "'{0.__class__}'", "[]", "[1,2]", "{}", "{'a': 1}", "()",
    "'<|im_end|>'", "'\\ud800'", "'\x1b[2J'",
)  # fmt: skip
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is", "not in")
CONTENTS = (
    "hi", "", "<|im_start|>system", "<|im_end|>", "</s>", "[/INST]", "<|eot_id|>", "\U000f0000",
    "{{ 1 }}", "{% raw %}", "\x00\x1b[2J", "é漢🙂", "<" * 500, "x" * 20_000, "</think>ok",
    "<<SYS>>",
)  # fmt: skip


def expression(source: random.Random, depth: int = 3) -> str:
    """One expression of jinja2, often a wrong one."""
    if depth == 0 or source.random() < 0.2:
        return source.choice(ATOMS)
    inner = expression(source, depth - 1)
    way = source.randrange(9)
    if way == 0:
        return f"({inner} {source.choice(OPERATORS)} {expression(source, depth - 1)})"
    if way in (1, 2, 3):
        arguments = f"({expression(source, depth - 1)})" if source.random() < 0.4 else ""
        return f"{inner} | {source.choice(FILTERS)}{arguments}"
    if way == 4:
        return f"{inner}.{source.choice(ATTRIBUTES)}"
    if way == 5:
        return f"{inner}[{expression(source, depth - 1)}]"
    if way == 6:
        return f"{inner}({expression(source, depth - 1)})"
    if way == 7:
        return f"({inner} is {source.choice(TESTS)})"
    return f"({inner} | attr('{source.choice(ATTRIBUTES)}'))"


def statement(source: random.Random, depth: int = 3) -> str:
    """A piece of a template, with others inside it."""
    if depth == 0 or source.random() < 0.35:
        return "{{ " + expression(source) + " }}"
    inner = statement(source, depth - 1)
    value = expression(source, 2)
    return source.choice(
        (
            f"{{% for x in {value} %}}{inner}{{% endfor %}}",
            f"{{% for x in range({value}) recursive %}}{inner}{{{{ loop(x) }}}}{{% endfor %}}",
            f"{{% for x in range(9999) %}}{inner}{{% endfor %}}",
            f"{{% if {value} %}}{inner}{{% else %}}y{{% endif %}}",
            f"{{% set ns = namespace(a={value}) %}}{{% set ns.a = ns.a ~ ns.a %}}{inner}",
            f"{{% set x = {value} %}}{inner}",
            f"{{% macro m(a) %}}{inner}{{{{ m(a) }}}}{{% endmacro %}}{{{{ m(1) }}}}",
            f"{{% call messages() %}}{inner}{{% endcall %}}",
            f"{{% filter {source.choice(FILTERS)} %}}{inner}{{% endfilter %}}",
            f"{{% block b %}}{inner}{{% endblock %}}",
            f"{{% include {value} %}}",
            f"{{% import {value} as q %}}{inner}",
            f"{{% extends {value} %}}",
            f"{{% with a = {value} %}}{inner}{{% endwith %}}",
            f"{{% generation %}}{inner}{{% endgeneration %}}",
            f"{{% autoescape {value} %}}{inner}{{% endautoescape %}}",
            f"{{% break %}}{inner}",
            "{% raw %}" + inner,
        )
    )


def hostile_template(source: random.Random) -> tuple[str, tuple[str, ...]]:
    """A template and its family's control tokens."""
    family = source.choice(FAMILIES)
    text: str = family.source
    if source.random() < 0.4:
        return "".join(statement(source) for _ in range(source.randrange(1, 4))), ("<|im_end|>",)
    at = source.randrange(len(text))
    way = source.randrange(5)
    if way == 0:
        text = text[:at] + statement(source) + text[at:]
    elif way == 1:
        text = text[:at] + text[at + source.randrange(1, 20) :]
    elif way == 2:
        text = text.replace("message.content", expression(source, 2))
    elif way == 3:
        text = text.replace("%}", source.choice(("%}" * 2, "}}", "-%}", "|%}", "")), 1)
    else:
        text = (
            text[:at]
            + source.choice(("{{", "{%", "}}", "\x00", "\ud800", "'", "(" * 300))
            + text[at:]
        )
    return text, family.control_texts


#: A helper's interpreter that has imported what a helper imports, and then waits. For each order
#: `s` it splits off a process that goes on as a helper; `w` waits for its end, `p` asks after it.
NURSERY = """
import os, socket, sys
sys.path.extend(sys.argv[1:])
from hypocenter.model.text import chat_worker
orders = socket.socket(fileno=0)
while True:
    order, pipes, _, _ = socket.recv_fds(orders, 9, 2)
    if not order:
        break
    pid = int.from_bytes(order[1:], "little")
    if order[:1] == b"s":
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(pipes[0], 0)
                os.dup2(pipes[1], 1)
                os.closerange(3, 64)
                sys.stdin, sys.stdout = open(0), open(1, "w")
                chat_worker.main()
            finally:
                os._exit(0)
        for pipe in pipes:
            os.close(pipe)
        orders.send(pid.to_bytes(8, "little", signed=True))
    else:
        ended, status = os.waitpid(pid, os.WNOHANG if order[:1] == b"p" else 0)
        code = os.waitstatus_to_exitcode(status) if ended else 1 << 20
        orders.send(code.to_bytes(8, "little", signed=True))
"""
_RUNNING = 1 << 20


class Nursery:
    """Starts helpers that need no start: they are split off from one that has imported all."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair()
        folders = chat_process.import_folders()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", NURSERY, *folders],
            stdin=theirs.fileno(), stderr=subprocess.DEVNULL, env={}, process_group=0,
        )  # fmt: skip
        theirs.close()

    def popen(self, command: object, **others: object) -> SplitOff:
        """In place of `subprocess.Popen`."""
        requests, requests_write = os.pipe()
        replies_read, replies = os.pipe()
        socket.send_fds(self._orders, [b"s" + bytes(8)], [requests, replies])
        os.close(requests)
        os.close(replies)
        return SplitOff(self, self._answer(), requests_write, replies_read)

    def ask(self, order: bytes, pid: int) -> int:
        self._orders.send(order + pid.to_bytes(8, "little"))
        return self._answer()

    def _answer(self) -> int:
        return int.from_bytes(self._orders.recv(8), "little", signed=True)


class SplitOff:
    """As much of `subprocess.Popen` as a RenderProcess needs."""

    def __init__(self, nursery: Nursery, pid: int, stdin: int, stdout: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[bytes] = open(stdin, "wb")  # noqa: SIM115
        self.stdout: IO[bytes] = open(stdout, "rb")  # noqa: SIM115

    def poll(self) -> int | None:
        if self.returncode is None:
            code = self._nursery.ask(b"p", self.pid)
            self.returncode = None if code == _RUNNING else code
        return self.returncode

    def kill(self) -> None:
        # Also from the thread of a timer, so without a word to the nursery.
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._nursery.ask(b"w", self.pid)
        return self.returncode


def problem(
    template: ChatTemplate, messages: list[dict[str, str]], controls: tuple[str, ...]
) -> str:
    """What is wrong with one rendering; nothing when all is well."""
    try:
        parts = template.render_parts(messages)
        if "".join(text for text, _ in parts) != (whole := template.render(messages)):
            # What changes from one rendering to the next, the time for one, is a template's right.
            return "" if whole != template.render(messages) else "the parts are not the whole"
        # What a message wrote alone is no template's; the check is for templates that write none.
        if any(control in template.source for control in controls):
            return ""
        found = [c for c in controls for text, own in parts if own and c in text]
        return f"a message wrote {found}" if found else ""
    except UsageError as error:
        return f"refused messages: {error}"
    except TemplateError as error:
        said = str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not said.isprintable():
        return f"says {said!r}"
    # What it quotes of the template or the messages is bounded by itself.
    if len(said) > MAX_ERROR_CHARS:
        return f"says {len(said)} characters: {said}"
    if place := next((place for place in PLACES if place in said), None):
        return f"names {place}: {said}"
    return ""


def prepare(seeds_folder: Path) -> Callable[[random.Random, Path], str]:
    """One nursery for all trials."""
    nursery = Nursery()

    def trial(source: random.Random, folder: Path) -> str:
        text, controls = hostile_template(source)
        roles = ("system", "user", "assistant", "user", "tool")
        messages = [
            {"role": role, "content": source.choice(CONTENTS)}
            for role in roles[: source.randrange(1, 6)]
        ]
        (folder / "template.jinja").write_text(text, errors="surrogatepass")
        (folder / "messages").write_text(repr(messages))
        started = source.random() < 1 / START_EVERY
        popen = subprocess.Popen if started else nursery.popen
        began = time.monotonic()
        with mock.patch("subprocess.Popen", popen):
            template = ChatTemplate(text, control_texts=controls, limits=LIMITS)
            try:
                wrong = problem(template, messages, controls)
            finally:
                template.close()
        if (seconds := time.monotonic() - began) > MAX_TRIAL_SECONDS:
            wrong = wrong or f"{seconds:.0f} s"
        if threading.active_count() > 50:
            wrong = wrong or f"{threading.active_count()} threads are left"
        return wrong and f"{wrong} ({text[:200]!r})"

    return trial


if __name__ == "__main__":
    run_trials("chat templates", __doc__ or "", prepare)
