"""Prompts that end within the last message, so that the answer goes on with it."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, PHI3, ZEPHYR, Family, Open, opening

from hypocenter.base.errors import TemplateError, UsageError
from hypocenter.conversation.continuing import continued_part
from hypocenter.model.text.chat import ChatTemplate

HELLO = {"role": "user", "content": "Hi"}
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content | trim }}\n</think>\n\n{% endif %}{{ m.content | trim }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.fixture(scope="module")
def opened() -> Any:
    with opening() as one:
        yield one


@pytest.mark.parametrize("family", [CHATML, LLAMA3, MISTRAL, GEMMA, PHI3, ZEPHYR])
def test_a_prompt_ends_where_the_last_message_does(opened: Open, family: Family) -> None:
    """Its end is what was written, blanks too; and what stands before is what always does.

    Templates may trim what a message begins with.
    """
    template = opened(family)
    for said in ("def f(", "Once ", "a\n", " <|im_end|></s>", ""):
        told = [HELLO, assistant(said)]
        parts = template.render_parts(told, continue_final_message=True)
        text = "".join(part for part, _ in parts)
        whole = template.render(told, add_generation_prompt=False)
        said = said.lstrip()
        assert text.endswith(said)
        begun = text.removesuffix(said)
        assert whole.startswith(begun.rstrip())
        assert len(whole) > len(text.rstrip()), "the turn was not closed"
        written = "".join(part for part, is_template in parts if is_template)
        for mark in family.control_texts:
            assert written.count(mark) == begun.count(mark), "nobody forges a mark"


def test_thoughts_and_what_cannot_go_on() -> None:
    with ChatTemplate(THINKS) as template:

        def prompt(*messages: dict[str, Any]) -> str:
            parts = template.render_parts([HELLO, *messages], continue_final_message=True)
            return "".join(text for text, _ in parts)

        assert prompt(assistant("So ")) == "[user]Hi</s>[assistant]So "
        thought = assistant("", reasoning_content="I th ")
        assert prompt(thought) == "[user]Hi</s>[assistant]<think>\nI th "
        both = assistant("So", reasoning="Hm")
        assert prompt(both) == "[user]Hi</s>[assistant]<think>\nHm\n</think>\n\nSo"
        with pytest.raises(UsageError, match=r"has the character U\+10F5A7"):
            prompt(assistant("\U0010f5a7"))
    for source, num in (("{{ messages[0].content }}", 0), ("{{ messages[1].content }}" * 2, 2)):
        with (
            ChatTemplate(source) as template,
            pytest.raises(TemplateError, match=f"shows the last message {num} times"),
        ):
            template.render_parts([HELLO, assistant("x")], continue_final_message=True)


def test_which_part_goes_on() -> None:
    for last, part in (
        (assistant("x"), "answer"),
        (assistant(""), "answer"),
        (assistant(None, reasoning="x"), "thought"),
        (assistant("<think>I"), "thought"),
        (assistant([{"type": "text", "text": "<think>I</think>So"}]), "answer"),
        (assistant("So", reasoning_content="I"), "answer"),
    ):
        assert continued_part(THINKS, [HELLO, last]) == part, last
    assert continued_part("", [assistant("<think>I")]) == "answer"
    wrong: list[tuple[Any, str]] = [
        (HELLO, "the last message is not the assistant's"),
        (assistant("x", tool_calls=[{}]), "calls tools and is finished"),
        (3, "not the assistant's"),
    ]
    for last, said in wrong:
        with pytest.raises(UsageError, match=said):
            continued_part(THINKS, [last])
