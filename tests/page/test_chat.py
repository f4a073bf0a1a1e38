"""The chat at /, as a person meets it: each test begins with a browser that has kept nothing."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from outside.served import Served, free_port, serving, started

from page.conftest import Window

#: What a model says that is held to it: `{}` stands for the text as a grammar has it.
WHOLE = "The answer is whole."


def says(text: str, **more: object) -> dict[str, object]:
    """Fields that make any model say this."""
    return {"grammar": f"root ::= {json.dumps(text)}\n", **more}


@pytest.fixture
def chat(window: Window, served: Served) -> Window:
    window.open_anew(served)
    window.ready()
    return window


def test_an_answer_comes_in_pieces_and_has_its_figures(chat: Window) -> None:
    chat.settings(max_tokens="64", seed="7")
    chat.say("def count_words(text):")
    chat.wait_status(WHOLE)
    [answer] = chat.answers()
    assert answer.strip()
    figures = chat.page.value("document.querySelector('.figures').innerText")
    assert figures.startswith("64 tokens · ")
    assert "tokens/s" in figures
    assert "cut off at its limit" in figures
    asked = [url for url in chat.page.asked if url.endswith("/v1/chat/completions")]
    assert len(asked) == 1
    chat.click("Go on")
    chat.wait_status(WHOLE)
    assert len(chat.kept()[1]["ids"]) == 128
    assert chat.answers()[0].startswith(answer[:20])


def test_markdown_is_shown_and_html_is_text(chat: Window) -> None:
    text = (
        "# Title\n\nSome **bold**, *soft* and `code` <b>not bold</b>.\n\n"
        "<script>document.title='owned'</script>\n"
        "<img src=x onerror=\"document.title='owned'\">\n\n"
        "- one\n- two\n  - deep\n\n1. first\n2. second\n\n> said\n\n"
        "| a | b |\n|---|---|\n| 1 | <i>2</i> |\n\n---\n\n```python\nprint('<b>')\n```\n\n"
        "[good](https://example.com/x) [bad](javascript:alert(1)) [file](file:///etc/passwd) "
        "https://example.com/y."
    )
    chat.settings(more=says(text))
    chat.say("Show me")
    chat.wait_status(WHOLE)
    inside = "document.querySelector('.assistant .content')"
    tags = chat.page.value(f"[...{inside}.querySelectorAll('*')].map(e => e.localName)")
    assert {
        "h3",
        "strong",
        "em",
        "code",
        "ul",
        "ol",
        "li",
        "blockquote",
        "table",
        "hr",
        "pre",
    } <= set(tags)
    assert {"script", "img", "b", "i"} & set(tags) == set()
    assert chat.page.value("document.title") == "hypocenter"
    links = chat.page.value(f"[...{inside}.querySelectorAll('a')].map(e => [e.href, e.rel])")
    rel = "noopener noreferrer nofollow"
    assert links == [["https://example.com/x", rel], ["https://example.com/y", rel]]
    shown = chat.answers()[0]
    assert "<b>not bold</b>" in shown
    assert "javascript:alert(1)" in shown
    assert "print('<b>')" in shown
    chat.picture("markdown-light")


def test_a_script_cannot_make_html_of_a_text(chat: Window) -> None:
    made = chat.page.value(
        "(() => { try { document.createElement('div').innerHTML = '<b>'; return 'made'; }"
        " catch (error) { return error.name; } })()"
    )
    assert made == "TypeError"
    inline = (
        "document.body.appendChild(Object.assign(document.createElement('style'), {textContent:"
    )
    chat.page.value(f"{inline} 'body {{ color: rgb(1, 2, 3) }}'}}))")
    assert chat.page.value("getComputedStyle(document.body).color") != "rgb(1, 2, 3)"
    chat.page.said.clear()  # the browser tells of both


def test_edit_and_again_make_branches(chat: Window) -> None:
    chat.settings(max_tokens="8")
    chat.say("first")
    chat.wait_status(WHOLE)
    chat.click("Again")
    chat.wait_status("The model answers.")
    chat.wait_status(WHOLE)
    assert chat.page.value("document.querySelector('.branches span').innerText") == "2/2"
    chat.click("Edit")
    chat.page.wait("document.activeElement.getAttribute('aria-label') === 'Edit: You'")
    chat.page.value("document.activeElement.select()")
    chat.page.type("second")
    chat.click("Save as a branch")
    chat.wait_status(WHOLE)
    roles = [(one["role"], one["parent"]) for one in chat.kept()]
    assert roles == [
        ("user", -1),
        ("assistant", 0),
        ("assistant", 0),
        ("user", -1),
        ("assistant", 3),
    ]
    assert "second" in chat.text()
    chat.click("Previous branch")
    chat.page.wait("document.querySelector('.user .content').innerText === 'first'")
    chat.click("Previous branch", -1)
    shown = chat.kept()[1]["content"].strip()
    chat.page.wait(f"document.querySelector('.assistant').innerText.includes({shown[:8]!r})")
    chat.picture("branches-light")


def test_escape_stops_an_answer_and_it_goes_on(chat: Window, served: Served) -> None:
    chat.settings(max_tokens="3000", more={"ignore_eos": True})
    chat.say("def f(")
    chat.page.wait("document.querySelector('.assistant .content')?.textContent.length > 100")
    chat.page.press("Escape")
    chat.wait_status("Stopped.")
    before = chat.kept()[1]
    assert before["state"] == "stopped"
    assert 0 < len(before["ids"]) < 3000
    stop = time.monotonic() + 20
    while any(slot["is_processing"] for slot in served.get("/slots").json):
        assert time.monotonic() < stop
    chat.click("Go on")
    chat.wait_status(WHOLE, 120)
    after = chat.kept()[1]
    assert after["ids"][: len(before["ids"])] == before["ids"]
    assert len(after["ids"]) == 3000
    assert after["content"].startswith(before["content"])


def test_a_reload_in_mid_answer_keeps_what_came(chat: Window, served: Served) -> None:
    chat.settings(max_tokens="2000", more={"ignore_eos": True})
    chat.say("def f(")
    chat.page.wait("document.querySelector('.assistant .content')?.textContent.length > 100")
    chat.open(served)
    chat.page.wait("document.querySelector('.assistant .content')?.textContent.length > 50")
    chat.ready()
    before = chat.kept()[1]
    assert before["ids"]
    chat.click("Go on")
    chat.wait_status(WHOLE, 120)
    after = chat.kept()[1]
    whole = served.post("/v1/chat/completions", {**after["body"], "stream": False})
    assert whole.json["choices"][0]["token_ids"] == after["ids"]
    assert len(after["ids"]) == 2000


def test_a_worker_that_dies_is_a_pause(chat: Window, served: Served) -> None:
    chat.settings(max_tokens="3000", more={"ignore_eos": True}, seed="5")
    chat.say("import os")
    chat.page.wait("document.querySelector('.assistant .content')?.textContent.length > 100")
    served.kill_worker(signal.SIGSEGV)
    chat.wait_status(WHOLE, 120)
    one = chat.kept()[1]
    assert len(one["ids"]) == 3000
    assert "outlived 1 worker" in chat.text()
    whole = served.post("/v1/chat/completions", {**one["body"], "stream": False}, timeout=300)
    assert whole.json["choices"][0]["message"]["content"] == one["content"]


def test_thoughts_and_calls_are_folded(window: Window, tmp_path: Path) -> None:
    from gguf import GGUFValueType
    from models.demo_variants import demo_with

    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{# <tool_call> </think> #}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
        '<tool_call>{"name": "{{ c.function.name }}"}</tool_call>{% endfor %}\n{% endfor %}'
    )
    path = demo_with(
        tmp_path / "m.gguf", {"tokenizer.chat_template": (template, GGUFValueType.STRING)}
    )
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    said = (
        "<think>Look first.</think>\n\nI look.\n"
        '<tool_call>\n{"name": "find", "arguments": {"q": "<b>x</b>"}}\n</tool_call>\n'
    )
    with serving(tmp_path, str(path), "-np", "2") as served:
        window.open(served)
        window.ready()
        window.settings(more=says(said, tools=[tool]))
        window.say("Find it")
        window.wait_status(WHOLE)
        folds = "[...document.querySelectorAll('.assistant details')]"
        assert window.page.value(f"{folds}.map(e => e.open)") == [False, False]
        summaries = window.page.value(f"{folds}.map(e => e.querySelector('summary').innerText)")
        assert summaries == ["Thoughts", "Call of find"]
        assert window.answers() == ["I look."]
        window.click("Call of find")
        shown = window.page.value("document.querySelector('.call pre').innerText")
        assert json.loads(shown) == {"q": "<b>x</b>"}
        window.picture("tools-light")
        window.settings(more={"tools": [tool], "max_tokens": 4})
        window.page.value("document.querySelector('.call').open = true")
        window.page.value("document.querySelector('.call textarea').focus()")
        window.page.type("nothing found")
        window.click("Give to the model")
        window.wait_status("The model answers.")
        window.wait_status(WHOLE)
        nodes = window.kept()
        assert [one["role"] for one in nodes] == ["user", "assistant", "tool", "assistant"]
        sent = nodes[3]["body"]["messages"]
        assert sent[2] == {
            "role": "tool", "content": "nothing found", "tool_call_id": nodes[1]["calls"][0]["id"],
        }  # fmt: skip
        assert sent[1]["reasoning_content"] == "Look first."


def test_a_server_that_starts_again_is_waited_for(
    window: Window, model: Path, tmp_path: Path
) -> None:
    words = (str(model), "-np", "2", "-c", "8192", "--port", str(free_port()))
    with serving(tmp_path, *words) as served:
        window.open(served)
        window.ready()
        window.settings(max_tokens="4000", more={"ignore_eos": True})
        window.say("class A:")
        window.page.wait("document.querySelector('.assistant .content')?.textContent.length > 100")
        served.process.kill()
        served.process.wait()
    window.wait_status("No server answers. Trying again.")
    window.picture("server-gone-light")
    num_before = len(window.kept()[1]["ids"])
    with started(tmp_path, *words) as served:
        window.wait_status(WHOLE, 120)
        one = window.kept()[1]
        assert 0 < num_before < len(one["ids"]) == 4000
        whole = served.post("/v1/chat/completions", {**one["body"], "stream": False}, timeout=300)
        assert whole.json["choices"][0]["message"]["content"] == one["content"]


def test_a_key_is_asked_for_and_forgotten_with_the_tab(
    window: Window, model: Path, tmp_path: Path
) -> None:
    words = (str(model), "--api-key", "sesame", "-np", "1", "--max-queued", "0", "-c", "8192")
    with serving(tmp_path, *words) as served:
        window.open(served)
        window.page.wait("document.activeElement?.id === 'key'")
        window.picture("key-light")
        window.page.type("wrong")
        window.page.press("Enter")
        window.page.wait("document.body.innerText.includes('does not know that key')")
        window.page.wait("document.activeElement?.id === 'key'")
        window.page.value("document.activeElement.select()")
        window.page.type("sesame")
        window.page.press("Enter")
        window.ready()
        assert "sesame" not in window.page.value("JSON.stringify(localStorage)")
        assert "sesame" in window.page.value("JSON.stringify(sessionStorage)")
        # Its queue is full while another client's answer comes: the page waits its turn.
        auth = {"Authorization": "Bearer sesame"}
        body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True}
        window.settings(max_tokens="4")
        with served.stream("/v1/completions", body, auth) as stream:
            next(stream)
            window.say("hi")
            window.wait_status("1 answers are being made")
            window.picture("busy-light")
        window.wait_status(WHOLE)


def test_a_model_without_a_template_goes_on_with_texts(window: Window, tmp_path: Path) -> None:
    with serving(tmp_path, "-np", "1") as served:
        window.open(served)
        window.ready()
        assert "no chat template" in window.text()
        window.settings(max_tokens="8", more={"temperature": 0})
        window.page.value("document.querySelector('#set-tokens').click()")
        window.say("import os")
        window.wait_status(WHOLE)
        asked = served.post(
            "/v1/completions", {"prompt": "import os", "max_tokens": 8, "temperature": 0}
        )
        [_, node] = window.kept()
        assert node["content"] == asked.json["choices"][0]["text"]
        window.click("Tokens")
        assert window.page.value("document.querySelectorAll('.token').length") == 8


def test_a_very_long_answer_is_drawn_in_time(chat: Window, served: Served) -> None:
    part = "## Part\n\nSome *text* with `code` and a [link](https://example.com).\n\n"
    part += "```\nx = 1\n```\n\n"
    long = part * 12_000
    nodes = [
        {"id": 0, "parent": -1, "role": "user", "content": "long"},
        {"id": 1, "parent": 0, "role": "assistant", "content": long, "state": "done", "ids": []},
        {"id": 2, "parent": 1, "role": "user", "content": "*" * 200_000 + "[" * 200_000},
        {"id": 3, "parent": 2, "role": "assistant", "content": "*_`[(" * 60_000, "state": "done"},
    ]
    talk = json.dumps({"id": "1-1", "nodes": nodes, "chosen": {}})
    chat.page.value(
        f"localStorage.setItem('hypo-talk 1-1', {json.dumps(talk)});"
        "localStorage.setItem('hypo-talks', JSON.stringify([{id: '1-1', title: 'long'}]))"
    )
    chat.page.call("Performance.enable", timeDomain="threadTicks")
    chat.open(served)
    chat.page.wait("document.querySelectorAll('.message').length === 4", 300)
    figures = chat.page.call("Performance.getMetrics")["metrics"]
    seconds = {one["name"]: one["value"] for one in figures}["ScriptDuration"]
    chat.page.call("Performance.disable")
    assert chat.page.value("document.querySelectorAll('.assistant pre').length") == 12_000
    assert 0 < seconds < 20  # of the processor; a way that looks at all pairs takes minutes
    chat.ready()
    chat.say("And now?")
    chat.wait_status("The answer failed.")
    problem = chat.page.value("[...document.querySelectorAll('.problem')].at(-2).textContent")
    assert "can fit; shorten it" in problem
    assert [url for url in chat.page.asked if "/v1/chat" in url]


def test_a_conversation_that_another_tab_goes_on_with_parts(chat: Window) -> None:
    chat.settings(max_tokens="4")
    chat.say("first")
    chat.wait_status(WHOLE)
    kept = chat.page.value("JSON.parse(localStorage['hypo-talks']).map(one => one.id)")
    name = f"hypo-talk {kept[0]}"
    chat.page.value(
        f"dispatchEvent(new StorageEvent('storage', {{key: {json.dumps(name)}, newValue: 'x'}}))"
    )
    theirs = chat.page.value(f"localStorage.getItem({json.dumps(name)})")
    chat.say("second")
    chat.wait_status("The model answers.")
    chat.wait_status(WHOLE)
    both = chat.page.value("JSON.parse(localStorage['hypo-talks']).map(one => one.id)")
    assert both[1:] == kept
    assert chat.page.value(f"localStorage.getItem({json.dumps(name)})") == theirs
    assert len(chat.kept()) == 4
