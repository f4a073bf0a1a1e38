"""Chat templates of a GGUF file: messages to prompt text, rendered in a helper process.

Holds no jinja2 (that is in `chat_worker.py`) and no token ids: the tokenizer encodes the result.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from hypocenter.base.errors import BadSetting, TemplateError, UsageError
from hypocenter.conversation.thoughts import names, require_variables, without_needless
from hypocenter.conversation.tools import check_tools, without_strict
from hypocenter.model.text.chat_messages import (
    MAX_MESSAGES,
    MAX_TEXT_BYTES,
    CheckedMessage,
    Message,
    check_messages,
    require_depth,
    texts_of,
)
from hypocenter.model.text.chat_prefill import up_to_end_mark, with_end_mark
from hypocenter.model.text.chat_process import RenderProcess, TemplateLimits
from hypocenter.model.text.control_tokens import ControlTexts, put_back, split, stand_ins

if TYPE_CHECKING:
    from hypocenter.model.gguf.file import GGUFFile

__all__ = [
    "CHATML",
    "KEY",
    "MAX_MESSAGES",
    "MAX_TEMPLATE_BYTES",
    "MAX_TEXT_BYTES",
    "ChatTemplate",
    "ChatVocabulary",
    "Message",
    "check_messages",
    "load_chat_template",
    "template_names",
]

MAX_TEMPLATE_BYTES = 1 << 20
KEY = "tokenizer.chat_template"
#: What CHATML asks for, which many models know that bring no template: https://github.com/openai/
#: openai-python/blob/release-v0.28.0/chatml.md describes it.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: What templates of known models read: named where another one is asked for.
_KNOWN_VARIABLES = {
    "clear_thinking",
    "custom_instructions",
    "date_string",
    "enable_thinking",
    "model_identity",
    "preserve_thinking",
    "reasoning_effort",
    "thinking",
    "thinking_budget",
}


class ChatVocabulary(Protocol):
    """What a template needs to know of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def control_texts(self) -> Sequence[str]: ...

    def piece(self, token_id: int, /) -> bytes: ...


class ChatTemplate:
    """A chat template and the helper process that renders it.

    The template comes from a model file and is not trusted: it runs in jinja2's sandbox in a
    process of its own, which is ended when it exceeds `limits`. Safe to use from several threads.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "default",
        bos_token: str = "",
        eos_token: str = "",
        control_texts: Iterable[str] = (),
        limits: TemplateLimits | None = None,
    ) -> None:
        """`control_texts`: what the tokenizer turns into control tokens, for `render_parts`."""
        num_bytes = len(source.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_TEMPLATE_BYTES:
            raise TemplateError(
                f"chat template {name!r} has {num_bytes} bytes, "
                f"but at most {MAX_TEMPLATE_BYTES} are allowed"
            )
        self.source = source
        self.name = name
        self._control = ControlTexts(control_texts)
        self._names = names(source)
        self._process = RenderProcess(
            f"chat template {name!r}",
            source,
            {"bos_token": bos_token, "eos_token": eos_token},
            limits or TemplateLimits(),
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text; each message has a `role` and a `content`, as `check_messages` says.

        `variables` are others that the template reads, such as `enable_thinking`. `tools` are
        definitions as in OpenAI's API, checked by the caller.

        Control tokens that a user typed look like the template's own in this text; encode
        `render_parts` instead where messages are not trusted.
        Raises UsageError for messages that are none, for variables that the template does not read,
        and for tools that it knows nothing of; TemplateError when the template fails.
        """
        return self._process.render(
            self._check_conversation(messages),
            add_generation_prompt=add_generation_prompt,
            variables=self.check_variables({} if variables is None else variables),
            tools=self._check_tools(tools),
        )

    def render_parts(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> list[tuple[str, bool]]:
        """The text of `render` in parts (text, is_template).

        With `continue_final_message` it ends where the last message's own text does.

        Encode each part with `parse_special=is_template` and join the ids: then no message and no
        variable can write a control token. Unless the text of one is among what they make, there is
        a single part.
        User-defined tokens, such as `<think>`, are read in any text, whoever wrote it.
        Tools, keys of arguments, names and ids may not have such a text at all.
        How the two are distinguished is in `control_tokens.py`. Raises as `render` does, and
        TemplateError when the template rewrites messages so that the two cannot be distinguished.
        """
        checked = self._check_conversation(messages)
        known = self.check_variables({} if variables is None else variables)
        tools_given = self._check_tools(tools)
        if continue_final_message:
            add_generation_prompt = False
            checked = [*checked[:-1], with_end_mark(checked)]
        render = functools.partial(
            self._process.render, add_generation_prompt=add_generation_prompt, tools=tools_given
        )
        parts = self._render_marked(checked, known, tools_given, render)
        return up_to_end_mark(parts, self.name) if continue_final_message else parts

    def _render_marked(
        self,
        checked: list[CheckedMessage],
        known: dict[str, Any],
        tools_given: list[dict[str, Any]] | None,
        render: Callable[..., str],
    ) -> list[tuple[str, bool]]:
        plain = render(checked, variables=known)
        occurrences = self._control.occurrences(plain)
        if not occurrences:
            return [(plain, True)]
        given = json.dumps([checked, known, tools_given], ensure_ascii=False)
        for characters in self._control.choices:
            table = stand_ins(characters, [plain, self.source, given])
            changed = [_translate_message(message, table) for message in checked]
            translated = {name: _translate(value, table) for name, value in known.items()}
            if (changed, translated) == (checked, known):
                return [(plain, True)]
            try:
                marked = render(changed, variables=translated)
            except TemplateError:
                continue  # it renders the real messages, so it reacts to these characters
            if put_back(marked, table) == plain:
                return split(plain, marked, occurrences)
        raise TemplateError(
            f"chat template {self.name!r} rewrites messages, so that control tokens in them cannot "
            "be distinguished from its own; remove texts such as "
            f"{plain[slice(*occurrences[0])]!r} and markup from the messages"
        )

    def check_variables(self, variables: Mapping[str, object]) -> dict[str, Any]:
        """Plain copies; raises UsageError for a name that the template does not read, or a value
        that is no JSON or too long."""
        require_variables(variables)
        variables = without_needless(self.source, variables)
        if unknown := sorted(set(variables) - self._names):
            known = ", ".join(sorted(self._names & _KNOWN_VARIABLES)) or "none of the usual ones"
            raise UsageError(
                f"chat_template_kwargs has {unknown[0]!r}, but chat template {self.name!r} does "
                f"not read it; it reads {known}"
            )
        return dict(json.loads(json.dumps(variables)))

    def _check_conversation(self, messages: Sequence[Message]) -> list[CheckedMessage]:
        checked = check_messages(messages)
        for index, message in enumerate(checked):
            where = f"messages[{index}]"
            for name in ("tool_call_id", "name"):
                self._refuse_control(message.get(name, ""), f"{where}.{name}")
            for place, call in enumerate(message.get("tool_calls", ())):
                at = f"{where}.tool_calls[{place}]"
                function = call["function"]
                self._refuse_control(call.get("id", ""), f"{at}.id")
                self._refuse_control(function["name"], f"{at}.function.name")
                keys = {text for text, is_key in texts_of(function["arguments"]) if is_key}
                for key in sorted(keys):
                    self._refuse_control(key, f"a key in {at}.function.arguments", is_key=True)
        return checked

    def _check_tools(
        self, tools: Sequence[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]] | None:
        """Plain copies, None where there are none.

        Raises UsageError for any that the template does not read, for what `check_tools` refuses,
        and for the text of a control token: it could not be told from the template's own.
        """
        if not tools:
            return None
        if "tools" not in self._names:
            raise UsageError(
                "tools must be left out, or the model be another: its chat template knows no tools"
            )
        require_depth(tools, "tools")
        copies = without_strict(check_tools(tools) or [])
        self._refuse_control(json.dumps(copies, ensure_ascii=False), "tools")
        # JSON escapes quotes and line breaks; a template may write a text without.
        for item, is_key in texts_of(copies):
            self._refuse_control(item, "tools", is_key=is_key)
        return copies

    def _refuse_control(self, text: str, where: str, *, is_key: bool = False) -> None:
        """Raises UsageError for a text in which there is the text of a control token."""
        shown = [text]
        if is_key and not text.isidentifier():
            # Templates put keys between brackets: `|end|` would become `<|end|>`.
            shown += [f"<{text}>", f"</{text}>", f"[{text}]"]
        for candidate in shown:
            if found := self._control.occurrences(candidate):
                raise UsageError(
                    f"{where} has {candidate[slice(*found[0])]!r}, a control token of the model, "
                    "which cannot be distinguished from the template's own; write it otherwise"
                )

    def check(self) -> None:
        """Raises TemplateError where the template cannot be parsed; the helper is ready then."""
        self._process.start()

    def close(self) -> None:
        """End the helper process."""
        self._process.close()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def template_names(file: GGUFFile) -> list[str]:
    """What the file's chat templates are called, the default first; none where it has none."""
    names = ["default"] if KEY in file.metadata else []
    named = [key.removeprefix(f"{KEY}.") for key in file.metadata if key.startswith(f"{KEY}.")]
    return names + sorted(set(named) - set(names))


def load_chat_template(
    file: GGUFFile,
    tokenizer: ChatVocabulary,
    name: str | None = None,
    *,
    limits: TemplateLimits | None = None,
) -> ChatTemplate | None:
    """The file's chat template, or None when it has none.

    `tokenizer.chat_template` is the one called "default", `tokenizer.chat_template.NAME` others.
    Without `name` the default is taken, or the only one there is. `name` may also be "chatml", or
    the text of a template. Raises UsageError when it is none of these or must be given,
    BadModelFile when the template is no text or too long.
    """

    def template(source: str, called: str) -> ChatTemplate:
        return ChatTemplate(
            source,
            name=called,
            bos_token=_text(tokenizer, tokenizer.bos_id),
            eos_token=_text(tokenizer, tokenizer.eos_id),
            control_texts=tokenizer.control_texts,
            limits=limits,
        )

    if name is not None and "{" in name:
        if len(name.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise UsageError(f"chat_template is longer than {MAX_TEMPLATE_BYTES} bytes")
        return template(name, "given")
    names = template_names(file)
    if name == "chatml" and name not in names:
        return template(CHATML, name)
    if not names:
        if name is not None:
            raise BadSetting("chat_template", name, f"{file.path} has no chat template")
        return None
    if name is None:
        name = names[0] if len(names) == 1 else "default"
    if name not in names:
        raise BadSetting("chat_template", name, f"{file.path} has {', '.join(names)}")
    key = KEY if name == "default" and KEY in file.metadata else f"{KEY}.{name}"
    return template(file.text(key, max_bytes=MAX_TEMPLATE_BYTES), name)


def _translate_message(message: CheckedMessage, table: dict[int, int]) -> CheckedMessage:
    """The message with other characters in what was said, by anyone.

    Templates tell messages and calls apart by roles, names and ids; these stay.
    """
    changed = dict(message)
    for name in ("content", "reasoning_content"):
        if name in message:
            changed[name] = message[name].translate(table)
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": _translate(
                        call["function"]["arguments"], table, translates_keys=False
                    ),
                },
            }
            for call in message["tool_calls"]
        ]
    return changed


def _translate(value: Any, table: dict[int, int], *, translates_keys: bool = True) -> Any:
    """JSON with other characters in all of its texts."""
    if isinstance(value, str):
        return value.translate(table)
    go = functools.partial(_translate, table=table, translates_keys=translates_keys)
    if isinstance(value, list):
        return [go(item) for item in value]
    if isinstance(value, dict):
        return {go(key) if translates_keys else key: go(item) for key, item in value.items()}
    return value


def _text(tokenizer: ChatVocabulary, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.piece(token_id).decode("utf-8", "replace")
