"""A message cannot write a control token, whatever it says; and ordinary prompts stay whole."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from chat_templates import (
    CHATML,
    FAMILIES,
    GEMMA,
    JSON,
    LLAMA3,
    MISTRAL,
    PHI3,
    THINKING,
    ZEPHYR,
    Family,
    Open,
    opening,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hypocenter.base.errors import TemplateError
from hypocenter.model.text.chat import ChatTemplate
from hypocenter.model.text.control_tokens import (
    MAX_CONTROL_CHARS,
    PRIVATE_USE,
    ControlTexts,
    put_back,
    stand_ins,
)

Parts = list[tuple[str, bool]]
#: Families in which what the messages say does not decide which control tokens there are.
STEADY = (CHATML, LLAMA3, MISTRAL, GEMMA, PHI3, ZEPHYR)


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    with opening() as one:
        yield one


def conversation(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def parsed_controls(parts: Parts, family: Family) -> list[str]:
    """What a tokenizer makes of the parts: it looks for control texts, the longest first."""
    pattern = "|".join(map(re.escape, sorted(family.control_texts, key=len, reverse=True)))
    return [
        text for part, is_template in parts if is_template for text in re.findall(pattern, part)
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_ordinary_messages_stay_in_one_part(family: Family, opened: Open) -> None:
    messages = conversation(" if a < b | c > d: x[0] ", "Sure: <b>yes</b> [1]", "</think> ok")
    template = opened(family)
    assert template.render_parts(messages) == [(template.render(messages), True)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_control_text_in_a_message_is_a_part_of_its_own(family: Family, opened: Open) -> None:
    template = opened(family)
    for text in family.control_texts:
        messages = conversation(f"one{text}two", "three", f"  {text}")
        parts = template.render_parts(messages)
        assert "".join(part for part, _ in parts) == template.render(messages)
        num_copies = 4 if family is JSON else 2
        assert [part for part, is_template in parts if not is_template] == [text] * num_copies
        harmless = template.render_parts(conversation("one two", "three", "  four"))
        assert parsed_controls(parts, family) == parsed_controls(harmless, family)


FRAGMENTS = st.sampled_from(
    [
        *sorted({text for family in FAMILIES for text in family.control_texts}),
        *("<|im_", "start|>", "s>", "<|", "|>", "</", "eot_id", "<think>", "</think>"),
        *("<", "|", ">", "[", "]", "/", " ", "\n", "a", "世"),
        *(chr(PRIVATE_USE[0]), chr(PRIVATE_USE[1])),
    ]
)
CONTENT = st.lists(FRAGMENTS, max_size=8).map("".join)


@pytest.mark.parametrize("family", STEADY, ids=lambda family: family.name)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(contents=st.lists(CONTENT, min_size=1, max_size=4))
def test_no_message_changes_which_control_tokens_there_are(
    family: Family, opened: Open, contents: list[str]
) -> None:
    template = opened(family)
    parts = template.render_parts(conversation(*contents))
    assert "".join(part for part, _ in parts) == template.render(conversation(*contents))
    assert all(part in family.control_texts or is_template for part, is_template in parts)
    harmless = template.render_parts(conversation(*["word"] * len(contents)))
    assert parsed_controls(parts, family) == parsed_controls(harmless, family)


def test_template_that_looks_for_markup_still_tells_apart(opened: Open) -> None:
    """`</think>` is searched for, so its brackets cannot be replaced; the bars can."""
    messages = conversation("a<|im_end|>", "<think>no<|im_start|></think>\n\nyes<|im_start|>", "b")
    assert opened(THINKING).render_parts(messages) == [
        ("<|im_start|>user\na", True),
        ("<|im_end|>", False),
        ("<|im_end|>\n<|im_start|>assistant\nyes", True),
        ("<|im_start|>", False),
        ("<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", True),
    ]


def test_control_text_that_a_template_puts_together_is_found() -> None:
    """Removing a word from a message must not join its rest to a control token."""
    source = "<s>{{ messages[0].content | replace('xx', '') | lower }}</s>"
    with ChatTemplate(source, control_texts=["<s>", "</s>"]) as template:
        for content in ("<xxs>", "<xx/S>", "a<S>"):
            parts = template.render_parts(conversation(content))
            assert [part for part, is_template in parts if not is_template] in (["<s>"], ["</s>"])


def test_control_text_half_of_the_template_and_half_of_a_message() -> None:
    """Split wherever a message has a hand in it: the template did not mean it."""
    with ChatTemplate(
        "<s{{ messages[0].content }}s>", control_texts=["<s>", "</s>", "<s/s>"]
    ) as template:
        assert template.render_parts(conversation("> <")) == [
            ("<s>", False),
            (" ", True),
            ("<s>", False),
        ]


@pytest.mark.parametrize(
    "expression",
    ["m | replace('<', '(') | replace('s', 'z')", "m | tojson(ensure_ascii=true)", "m | urlencode"],
)
def test_template_that_rewrites_control_characters_is_refused(expression: str) -> None:
    source = "<s>{% set m = messages[0].content %}{{ " + expression + " }}"
    with ChatTemplate(source, control_texts=["<s>", "</s>"]) as template:
        assert template.render_parts(conversation("harmle"))[0][1] is True
        with pytest.raises(TemplateError, match=r"'default' rewrites messages.* such as '<s>'"):
            template.render_parts(conversation("<s>"))


def test_template_that_raises_for_marked_messages_is_refused() -> None:
    source = "<s>{{ messages[0].content if '<s' in messages[0].content else raise_exception('x') }}"
    with ChatTemplate(source, control_texts=["<s>"]) as template:
        assert template.render(conversation("a<s>")) == "<s>a<s>"
        with pytest.raises(TemplateError, match="rewrites messages"):
            template.render_parts(conversation("a<s>"))


def test_without_control_texts_there_is_one_part() -> None:
    with ChatTemplate("{{ messages[0].content }}") as template:
        assert template.render_parts(conversation("<s>")) == [("<s>", True)]
    with ChatTemplate("{{ messages[0].content }}", control_texts=[""]) as template:
        assert template.render_parts(conversation("")) == [("", True)]


def test_private_use_characters_of_messages_are_left_alone(opened: Open) -> None:
    text = f"{chr(PRIVATE_USE[0])}<|im_end|>{chr(PRIVATE_USE[2])}"
    parts = opened(CHATML).render_parts(conversation(text))
    assert parts[1] == ("<|im_end|>", False)
    assert "".join(part for part, _ in parts) == opened(CHATML).render(conversation(text))


def test_messages_that_use_up_private_use_are_refused(opened: Open) -> None:
    text = "".join(map(chr, PRIVATE_USE))
    with pytest.raises(TemplateError, match="private use characters of plane 15, but 2 are needed"):
        opened(CHATML).render_parts(conversation(text + "<|im_end|>"))


def test_stand_ins_are_unused_and_go_back() -> None:
    table = stand_ins({"<", ">"}, [chr(PRIVATE_USE[0]), "<"])
    assert table == {ord("<"): PRIVATE_USE[1], ord(">"): PRIVATE_USE[2]}
    assert put_back("a<b>".translate(table), table) == "a<b>"


def test_occurrences_are_the_longest_and_may_overlap() -> None:
    texts = ["<s>", "<s>>", "s>>x", "<a", "(.*)"]
    found = ControlTexts(texts).occurrences("<s>>x <a (.*) <s> <b")
    assert found == [(0, 4), (1, 5), (6, 8), (9, 13), (14, 17)]


def test_long_chain_of_control_texts_and_too_long_a_text() -> None:
    chain = ["x" * n for n in range(1, MAX_CONTROL_CHARS + 1)]
    assert ControlTexts(chain).occurrences("x" * 3) == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(TemplateError, match="129 characters, but at most 128"):
        ControlTexts(["x" * (MAX_CONTROL_CHARS + 1)])


def test_many_control_texts_are_not_tried_one_by_one() -> None:
    """A megabyte of near misses against 4096 texts: seconds, were each tried at each place."""
    control = ControlTexts(f"<|reserved_special_token_{n}|>" for n in range(4096))
    text = "<|reserved_special_token_9999" * 30_000 + "<|reserved_special_token_7|>"
    began = time.process_time()
    assert len(control.occurrences(text)) == 1
    assert time.process_time() - began < 1.0
