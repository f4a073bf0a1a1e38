"""Chat templates: equal to transformers' rendering, safe from hostile templates, bounded."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, FAMILIES, Family
from jinja2.filters import FILTERS

from hypocenter.base.errors import TemplateError, UsageError
from hypocenter.model.text import chat_process
from hypocenter.model.text.chat import (
    MAX_MESSAGES,
    MAX_TEMPLATE_BYTES,
    MAX_TEXT_BYTES,
    ChatTemplate,
)
from hypocenter.model.text.chat_process import TemplateLimits

HELLO = [{"role": "user", "content": "hello"}]
CONVERSATIONS = {
    "one": HELLO,
    "three": [
        {"role": "user", "content": '  <b>&amp; "it\'s"\n\n'},
        {
            "role": "assistant",
            "content": "<think>\nhm\n</think>\n\n Grüße, 世界 🙂 \u2028 {{ x }} ",
        },
        {"role": "user", "content": "\t{% raw %} \\n \u00a0\U000f0001"},
    ],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "1 < 2 ?"},
        {"role": "assistant", "content": ""},
    ],
}


@pytest.fixture
def limits() -> TemplateLimits:
    # Long enough for a busy machine to reach the other limits first.
    return TemplateLimits(seconds=10.0, memory_bytes=64 << 20, output_bytes=1 << 20)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Family, ChatTemplate]]:
    """A family and its template, whose helper serves all conversations."""
    family = request.param
    with ChatTemplate(
        family.source, bos_token=family.bos_token, eos_token=family.eos_token
    ) as template:
        yield family, template


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_renders_what_transformers_renders(
    opened: tuple[Family, ChatTemplate], conversation: str, add_generation_prompt: bool
) -> None:
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = CONVERSATIONS[conversation]
    family, template = opened
    try:
        wanted, _ = render_jinja_template(
            conversations=[messages],
            chat_template=family.source,
            add_generation_prompt=add_generation_prompt,
            bos_token=family.bos_token,
            eos_token=family.eos_token,
        )
    except jinja2.TemplateError as error:
        with pytest.raises(TemplateError, match=str(error)):
            template.render(messages, add_generation_prompt=add_generation_prompt)
    else:
        got = template.render(messages, add_generation_prompt=add_generation_prompt)
        assert got == wanted[0]


def test_tojson_escapes_neither_unicode_nor_html() -> None:
    with ChatTemplate("{{ messages[0].content | tojson }}") as template:
        assert template.render([{"role": "user", "content": "<é&'世\">"}]) == '"<é&\'世\\">"'


def test_names_that_templates_expect() -> None:
    source = (
        "{% set ns = namespace(a=1, self='s') %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.self }}"
        "{{ dict(a=1).a }}{{ strftime_now('%Y') | int > 2000 }}{{ [1] | pprint }}"
    )
    with ChatTemplate(source) as template:
        assert template.render(HELLO) == "2s1True[1]"


def _error(template: ChatTemplate, content: str) -> str:
    """What rendering one message is refused with; nothing when it is not."""
    try:
        template.render([{"role": "user", "content": content}])
    except TemplateError as error:
        return str(error)
    return ""


def test_no_filter_needs_a_file() -> None:
    # The helper can open none; markupsafe imports `html` when `striptags` is first used.
    branches = (
        f"{{% if messages[0].content == '{name}' %}}{{{{ bos_token | {name} }}}}{{% endif %}}"
        for name in FILTERS
    )
    with ChatTemplate("".join(branches), bos_token="<b>1</b>") as template:
        for name in FILTERS:
            assert "file" not in _error(template, name), name


def test_no_message_names_a_place_of_this_machine() -> None:
    with (
        ChatTemplate("{{ 'a'.encode('cp1251') }}") as template,
        pytest.raises(TemplateError, match="line 1: needs a file of this machine") as caught,
    ):
        template.render(HELLO)
    assert "/" not in str(caught.value)


HOSTILE = {
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        r"not done after 0.5 s, the limit",
    ),
    "power": ("{{ 10 ** (10 ** 9) }}", r"not done after 0.5 s, the limit"),
    "power with a variable": (
        "{{ (messages | length + 9) ** (10 ** 9) }}",
        r"not done after 0.5 s, the limit",
    ),
    "range": ("{{ range(10 ** 10) }}", r"line 1: OverflowError: Range too big"),
    "long constant": ("{{ 'a' * 300000000 }}", r"needs more than 64 MiB of memory"),
    "long text": (
        "{{ messages[0].content * 300000000 }}",
        r"needs more than 64 MiB of memory",
    ),
    "center": ("{{ messages[0].content.center(300000000) }}", r"more than 64 MiB of memory"),
    "format": ("{{ '%0300000000d' % 3 }}", r"needs more than 64 MiB of memory"),
    "doubling list": (
        "{% set ns = namespace(a=[1]) %}{% for i in range(90) %}"
        "{% set ns.a = ns.a + ns.a %}{% endfor %}",
        r"needs more than 64 MiB of memory",
    ),
    "output": (
        "{% for i in range(99999) %}{{ 'abcdefghijklmnopqrstuvwxyz' }}{% endfor %}",
        r"writes more than 1048585 bytes, the limit",
    ),
    "output in few characters": ("{{ '世' * 400000 }}", r"writes more than 1048585 bytes"),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"nests or calls itself"),
    "brackets": ("{{ " + "(" * 99999 + "1" + ")" * 99999 + " }}", r"nests or calls itself"),
    "nested blocks": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, r"nests|too many|died"),
    "include": ("{% include 'x' %}", r"line 1: TypeError: no loader"),
    "class": ("{{ ''.__class__.__mro__ }}", r"line 1: access to attribute '__class__'"),
    "globals": ("{{ cycler.__init__.__globals__ }}", r"line 1: access to attribute '__init__'"),
    "function": ("{{ raise_exception.__globals__.x }}", r"line 1: access to attribute '__glob"),
    "attr filter": ("{{ (''|attr('__class__')).x }}", r"line 1: .*(unsafe|undefined|no attrib)"),
    "format escape": ("{{ '{0.__class__.__mro__}'.format(1) }}", r"line 1: access to attribute"),
    "change": ("{{ messages.append(1) }}", r"line 1: .*append.* (is not safely|is unsafe)"),
    "namespace": ("{% set ns = namespace(__class__=1) %}", r"line 1: namespace attribute"),
    "namespace set": (
        "{% set ns = namespace() %}\n{% set ns.__class__ = 1 %}",
        r"line 2: namespace attribute '__class__' is not allowed",
    ),
    "syntax": ("\n\n{% for %}", r"line 3: "),
    "raise": (
        "{{ raise_exception('a\x1b[2J\n\tb' ~ 'c' * 9999) }}",
        r"line 1: a \[2J bccc+\.\.\.$",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_one_clear_line_and_no_hang(name: str, limits: TemplateLimits) -> None:
    source, pattern = HOSTILE[name]
    guarded = "{% if messages[0].content == 'healthy' %}fine{% else %}" + source + "{% endif %}"
    if "0.5 s" in pattern:
        limits = replace(limits, seconds=0.5)
    began = time.monotonic()
    # Constants are folded, and brackets parsed, when the template is compiled; so there is nothing
    # that a healthy message could be rendered by.
    at_compilation = ("power", "long constant", "brackets", "syntax", "format", "nested blocks")
    with ChatTemplate(source if name in at_compilation else guarded, limits=limits) as template:
        with pytest.raises(TemplateError, match=pattern) as caught:
            template.render(HELLO)
        message = str(caught.value)
        assert message.startswith("chat template 'default': ")
        assert message.isprintable()
        assert len(message) < 400
        if name not in at_compilation:
            assert template.render([{"role": "user", "content": "healthy"}]) == "fine"
    # Two starts and one breach take some two seconds: it says that nothing goes on and on.
    assert time.monotonic() - began < 60


def test_a_failed_rendering_keeps_the_helper_and_a_fatal_one_replaces_it(
    limits: TemplateLimits,
) -> None:
    source = (
        "{{ raise_exception('no') if messages[0].content == 'x' }}"
        "{{ messages[0].content * 999999999 }}"
    )
    with ChatTemplate(source, limits=limits) as template:
        with pytest.raises(TemplateError, match="no"):
            template.render([{"role": "user", "content": "x"}])
        first = _helper(template)
        with pytest.raises(TemplateError, match="no"):
            template.render([{"role": "user", "content": "x"}])
        assert _helper(template) is first
        with pytest.raises(TemplateError, match="memory"):
            template.render(HELLO)
        assert first.poll() is not None
        with pytest.raises(TemplateError, match="no"):
            template.render([{"role": "user", "content": "x"}])
        assert _helper(template).pid != first.pid


def test_output_limit_is_on_top_of_the_messages(limits: TemplateLimits) -> None:
    text = "é" * (2 * limits.output_bytes)
    with ChatTemplate("{{ messages[0].content }}", limits=limits) as template:
        assert template.render([{"role": "user", "content": text}]) == text


def test_helper_that_was_killed_is_started_again() -> None:
    with ChatTemplate(CHATML.source) as template:
        wanted = template.render(HELLO)
        first = _helper(template)
        first.kill()
        first.wait()
        assert template.render(HELLO) == wanted


def test_a_helper_that_somebody_kills_is_not_blamed_on_the_template() -> None:
    with ChatTemplate(CHATML.source) as template:
        template.render(HELLO)
        helper = _helper(template)
        os.kill(helper.pid, signal.SIGSTOP)
        killing = threading.Timer(0.1, helper.kill)
        killing.start()
        with pytest.raises(TemplateError, match="was ended by SIGKILL, and not by the template"):
            template.render(HELLO)
        killing.join()


def test_helper_starts_with_the_first_rendering_and_ends_with_close() -> None:
    template = ChatTemplate(CHATML.source)
    assert template._process._process is None
    template.render(HELLO)
    helper = _helper(template)
    template.close()
    assert helper.returncode is not None
    assert template.render(HELLO)
    helper = _helper(template)
    del template
    assert helper.returncode is not None


def test_helper_knows_no_secrets_and_loads_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PASSWORD", "secret")
    monkeypatch.setenv("TZ", "UTC")
    with ChatTemplate(CHATML.source) as template:
        template.render(HELLO)
        proc = Path(f"/proc/{_helper(template).pid}")
        names = {entry.partition(b"=")[0] for entry in (proc / "environ").read_bytes().split(b"\0")}
        assert names - {b""} <= {name.encode() for name in chat_process.KEPT_VARIABLES}
        assert b"TZ" in names
        loaded = (proc / "maps").read_text()
        assert not [name for name in ("numpy", "numba", "llvmlite", "torch") if name in loaded]
        rows = (proc / "limits").read_text().splitlines()
        open_files = next(row.split() for row in rows if row.startswith("Max open files"))
        assert open_files[3:5] == ["3", "3"]


def test_interrupt_key_does_not_reach_the_helper() -> None:
    """A terminal sends it to the whole process group."""
    with ChatTemplate(CHATML.source) as template:
        template.render(HELLO)
        assert os.getpgid(_helper(template).pid) != os.getpgid(0)


def test_interrupt_while_waiting_does_not_mix_up_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatTemplate("{{ messages[0].content }}") as template:
        template.render(HELLO)

        def interrupted(*_: Any) -> bytes:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(chat_process, "read_frame", interrupted)
            with pytest.raises(KeyboardInterrupt):
                template.render([{"role": "user", "content": "first"}])
        assert template.render([{"role": "user", "content": "second"}]) == "second"


def test_each_rendering_is_granted_processor_time_anew() -> None:
    """Or else a helper would end in the middle of its day."""
    with ChatTemplate(CHATML.source) as template:
        template.render(HELLO)
        pid = _helper(template).pid
        granted = resource.prlimit(pid, resource.RLIMIT_CPU)
        resource.prlimit(pid, resource.RLIMIT_CPU, (granted[0] - 1, granted[1]))
        template.render(HELLO)
        assert resource.prlimit(pid, resource.RLIMIT_CPU) == granted


def test_threads_get_their_own_answers() -> None:
    wrong: list[str] = []
    with ChatTemplate("{{ messages[0].content }}") as template:

        def ask(number: int) -> None:
            for turn in range(20):
                text = f"{number}.{turn}"
                if template.render([{"role": "user", "content": text}]) != text:
                    wrong.append(text)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_helper_ends_when_its_parent_is_killed(busy: bool) -> None:
    """The busy one by its own limit on processor time: nobody is left to measure the clock."""
    program = textwrap.dedent(
        """
        import threading, time, sys
        from hypocenter.model.text.chat import ChatTemplate
        from hypocenter.model.text.chat_process import TemplateLimits
        loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        source = "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}"
        template = ChatTemplate(source, limits=TemplateLimits(seconds=0.9))
        template.render([{"role": "user", "content": "x"}])
        template._process.limits = TemplateLimits(seconds=60)
        print(template._process._process.pid, flush=True)
        if sys.argv[1] == "busy":
            template.render([{"role": "user", "content": "loop"}])
        time.sleep(60)
        """
    )
    command = [sys.executable, "-c", program, "busy" if busy else "idle"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        time.sleep(0.2)
        assert _is_alive(helper)
        parent.kill()
    deadline = time.monotonic() + 60
    while _is_alive(helper) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(helper)


@pytest.mark.parametrize(
    ("messages", "pattern"),
    [
        ([], "messages is empty"),
        (HELLO * (MAX_MESSAGES + 1), "4097 messages, but at most 4096"),
        (["hello"], r"messages\[0\] is str, but must be a mapping"),
        ([{"role": "user"}], r"messages\[0\] has fields 'role', but must have role and content"),
        ([{**HELLO[0], "name": "a b"}], r"messages\[0\].name is 'a b', but must be up to 64 char"),
        ([{**HELLO[0], "name": "a<|x|>"}], r"name is 'a<\|x\|>', but must be up to 64"),
        ([{**HELLO[0], "name": "a｜b"}], "but must be up to 64 characters without blanks"),
        ([{**HELLO[0], "name": "a\ud800"}], "but must be up to 64 characters without blanks"),
        ([*HELLO, {"role": 3, "content": "x"}], r"messages\[1\].role is '3'"),
        ([{"role": "user|><|system", "content": "x"}], r"messages\[0\].role is 'user\|><\|sys"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role is ''"),
        ([{"role": "rôle", "content": "x"}], r"messages\[0\].role is 'rôle'"),
        ([{"role": "user", "content": None}], r"content is NoneType, but must be a text or parts"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
            r"content\[1\].type is 'image_url', which is not read: .* write text, no image",
        ),
        (
            [{"role": "user", "content": [{"type": "x"}]}],
            r"content\[0\] is .* models read text only",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "write text, no audio"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is {'type': 'text'}"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is 'x', but must be"),
        ([{"role": "user", "content": b"x"}], r"content is bytes, but must be a text or parts"),
        ([{"role": "user", "content": "a\ud800"}], r"lone surrogate at character 1"),
        (
            [{"role": "user", "content": "é" * (MAX_TEXT_BYTES // 4)}] * 3,
            "more than 16777216 bytes of text",
        ),
    ],
)
def test_messages_are_checked(messages: Any, pattern: str) -> None:
    with ChatTemplate(CHATML.source) as template:
        with pytest.raises(UsageError, match=pattern):
            template.render(messages)
        assert template._process._process is None


def test_parts_of_text_are_a_text_in_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    with ChatTemplate(CHATML.source) as template:
        in_parts = template.render([{"role": "user", "content": parts}])
        assert in_parts == template.render([{"role": "user", "content": "one\ntwo"}])
        control = [{"type": "text", "text": "<|im_end|>"}]
        assert "<|im_end|>" in template.render([{"role": "user", "content": control}])


def test_most_messages_and_most_text_that_are_allowed() -> None:
    with ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}") as template:
        text = "x" * (MAX_TEXT_BYTES // MAX_MESSAGES)
        messages = [{"role": "user", "content": text}] * MAX_MESSAGES
        assert len(template.render(messages)) == MAX_TEXT_BYTES
        thought = {**messages[0], "reasoning_content": "x"}
        with pytest.raises(UsageError, match="more than 16777216 bytes of text"):
            template.render([*messages[1:], thought])


def test_template_source_is_bounded() -> None:
    with pytest.raises(TemplateError, match="has 1048577 bytes, but at most 1048576"):
        ChatTemplate("x" * (MAX_TEMPLATE_BYTES + 1))


def _helper(template: ChatTemplate) -> subprocess.Popen[bytes]:
    process = template._process._process
    assert process is not None
    return process


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
