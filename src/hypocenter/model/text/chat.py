"""Chat templates of a GGUF file: messages to prompt text, rendered in a helper process.

Holds no jinja2 (that is in `chat_worker.py`) and no token ids: the tokenizer encodes the result.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from hypocenter.errors import BadSetting, TemplateError, UsageError
from hypocenter.model.text.chat_process import RenderProcess, TemplateLimits
from hypocenter.model.text.control_tokens import ControlTexts, put_back, split, stand_ins
from hypocenter.thoughts import names, require_variables

if TYPE_CHECKING:
    from hypocenter.model.gguf.file import GGUFFile

MAX_TEMPLATE_BYTES = 1 << 20
MAX_MESSAGES = 4096
MAX_TEXT_BYTES = 16 << 20
KEY = "tokenizer.chat_template"
#: What CHATML asks for, which many models know that bring no template: https://github.com/openai/
#: openai-python/blob/release-v0.28.0/chatml.md describes it.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: A "role" and a "content"; what may stand in them is checked, and not left to type checkers.
Message = Mapping[str, object]
#: Roles may end up inside a control token (`<|user|>`), so they cannot be any text.
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}", re.ASCII)

#: Of an assistant's message: what it thought. Some templates show a model what it thought before.
_THOUGHT = "reasoning_content"
_FIELDS = frozenset({"role", "content", _THOUGHT})
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
#: Roles that templates know; what is nearly one of them is a slip, others are a template's own.
_ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython")


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
    ) -> str:
        """The prompt text; each message has a `role` and a `content`, as `check_messages` says.

        `variables` are others that the template reads, such as `enable_thinking`.

        Control tokens that a user typed look like the template's own in this text; encode
        `render_parts` instead where messages are not trusted.
        Raises UsageError for messages that are none and variables that the template does not read,
        TemplateError when the template fails.
        """
        return self._process.render(
            check_messages(messages),
            add_generation_prompt=add_generation_prompt,
            variables=self.check_variables({} if variables is None else variables),
        )

    def render_parts(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[tuple[str, bool]]:
        """The text of `render` in parts (text, is_template).

        Encode each part with `parse_special=is_template` and join the ids: then no message and no
        variable can write a control token. Unless the text of one is among what they make, there is
        a single part.
        User-defined tokens, such as `<think>`, are read in any text and not told apart.
        How it is told apart is in `control_tokens.py`. Raises as `render` does, and TemplateError
        when the template rewrites messages so that it cannot be told apart.
        """
        checked = check_messages(messages)
        known = self.check_variables({} if variables is None else variables)
        render = functools.partial(
            self._process.render, add_generation_prompt=add_generation_prompt
        )
        plain = render(checked, variables=known)
        occurrences = self._control.occurrences(plain)
        if not occurrences:
            return [(plain, True)]
        for characters in self._control.choices:
            texts = [text for message in checked for text in message.values()]
            texts.append(json.dumps(known, ensure_ascii=False))
            table = stand_ins(characters, [plain, self.source, *texts])
            # A role is no text: templates tell messages apart by it.
            changed = [
                {
                    name: text if name == "role" else text.translate(table)
                    for name, text in message.items()
                }
                for message in checked
            ]
            told = {name: _translate(value, table) for name, value in known.items()}
            if (changed, told) == (checked, known):
                return [(plain, True)]
            try:
                marked = render(changed, variables=told)
            except TemplateError:
                continue  # it renders the real messages, so it reacts to these characters
            if put_back(marked, table) == plain:
                return split(plain, marked, occurrences)
        raise TemplateError(
            f"chat template {self.name!r} rewrites messages, so that control tokens in them cannot "
            "be told from its own; remove texts such as "
            f"{plain[slice(*occurrences[0])]!r} and markup from the messages"
        )

    def check_variables(self, variables: Mapping[str, object]) -> dict[str, Any]:
        """Plain copies; raises UsageError for a name that the template does not read, or a value
        that is no JSON or too long."""
        require_variables(variables)
        if unknown := sorted(set(variables) - self._names):
            known = ", ".join(sorted(self._names & _KNOWN_VARIABLES)) or "none of the usual ones"
            raise UsageError(
                f"chat_template_kwargs has {unknown[0]!r}, but chat template {self.name!r} does "
                f"not read it; it reads {known}"
            )
        return dict(json.loads(json.dumps(variables)))

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
    names = ["default"] if KEY in file.metadata else []
    named = [key.removeprefix(f"{KEY}.") for key in file.metadata if key.startswith(f"{KEY}.")]
    names += sorted(set(named) - set(names))
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


def check_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Plain copies of the messages, each with a text for its content.

    A content is a text, or parts {"type": "text", "text": ...} as in OpenAI's API, which are joined
    by line breaks. Raises UsageError that names the first wrong field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UsageError(
            f"messages is {reprlib.repr(messages)}, but must be a list of messages, each with "
            '"role" and "content"'
        )
    if not messages:
        raise UsageError("messages is empty, but at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise UsageError(f"{len(messages)} messages, but at most {MAX_MESSAGES} are allowed")
    checked = []
    num_bytes = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise UsageError(f"{where} is {type(message).__name__}, but must be a mapping")
        # Clients send back what they were given, with fields that hold nothing.
        fields = {name for name in message if message[name] is not None and message[name] != []}
        if not {"role", "content"} <= set(message) or fields - _FIELDS:
            found = ", ".join(sorted(map(str, message)))[:80]
            raise UsageError(
                f"{where} has fields {found!r}, but must have role and content, and may have "
                f"{_THOUGHT}"
            )
        role, content = message["role"], _content_text(message["content"], where)
        if not isinstance(role, str) or not ROLE.fullmatch(role):
            raise UsageError(
                f"{where}.role is {str(role)[:40]!r}, but must be up to 32 letters, digits, "
                "'-' and '_', a letter first"
            )
        near = difflib.get_close_matches(role, _ROLES, n=1, cutoff=0.75)
        if near and role not in _ROLES:
            raise UsageError(f"{where}.role is {role!r}; did you mean {near[0]!r}?")
        checked.append({"role": role, "content": content})
        if message.get(_THOUGHT) is not None:
            checked[-1][_THOUGHT] = _content_text(message[_THOUGHT], where, _THOUGHT)
        for name in checked[-1].keys() - {"role"}:
            num_bytes += _num_bytes(checked[-1][name], f"{where}.{name}")
        if num_bytes > MAX_TEXT_BYTES:
            raise UsageError(f"messages have more than {MAX_TEXT_BYTES} bytes of text, the limit")
    return checked


def _num_bytes(text: str, where: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where} has a lone surrogate at character {error.start}, but must be valid Unicode"
        ) from error


def _content_text(content: object, where: str, name: str = "content") -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        found = type(content).__name__
        raise UsageError(f"{where}.{name} is {found}, but must be a text or parts of text")
    texts = []
    for index, part in enumerate(content):
        text = None
        if isinstance(part, Mapping) and part.get("type") == "text":
            text = part.get("text")
        if not isinstance(text, str):
            raise UsageError(
                f"{where}.{name}[{index}] is {reprlib.repr(part)}, but must be "
                '{"type": "text", "text": ...}, for models read text only'
            )
        texts.append(text)
    return "\n".join(texts)


def _translate(value: Any, table: dict[int, int]) -> Any:
    """JSON with other characters in all of its texts."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, list):
        return [_translate(item, table) for item in value]
    if isinstance(value, dict):
        return {_translate(name, table): _translate(item, table) for name, item in value.items()}
    return value


def _text(tokenizer: ChatVocabulary, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.piece(token_id).decode("utf-8", "replace")
