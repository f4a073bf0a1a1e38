"""What turns texts and conversations into prompts, and what is read out of the answers.

Needs a model's tokenizer and its chat template, and no weights. The engine's own process has one
(`llm.py`), and so has each process that reads for a server (`worker/reader.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hypocenter.base.errors import TooMuchText, UsageError
from hypocenter.conversation import continuing
from hypocenter.conversation.call_formats import NO_TYPES, TextParameters
from hypocenter.conversation.call_forms import FREE, CallRules, call_form
from hypocenter.conversation.thoughts import (
    FORMATS_READ,
    PROMPT_END_CHARS,
    AnswerReader,
    make_answer_reader,
    opens_thought,
    reads_calls_of,
    require_variables,
    variables,
)
from hypocenter.conversation.tools import Tools
from hypocenter.engine.arguments import Conversation, Prompt, token_ids_of
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.text.chat import ChatTemplate, load_chat_template
from hypocenter.model.text.tokenizer import Tokenizer, load_tokenizer
from hypocenter.record.recorder import current
from hypocenter.settings.config import EngineConfig, SamplingParams

#: Where a template of pairs takes them in; llama.cpp's converter writes it so.
_PLACES = re.compile(r"(\{query\}|\{document\})")


@dataclass(frozen=True)
class AnswerRules:
    """What an answer may be: it may call `tools` as `calls` says.

    `continues` is the part of the last message that it goes on with.
    """

    tools: Tools | None = None
    calls: CallRules = FREE
    continues: continuing.MessagePart = ""


def in_thought(continues: continuing.MessagePart) -> bool | None:
    """Whether an answer that goes on with this begins within a thought; None: its prompt says."""
    return continues == "thought" if continues else None


def field_of(params: SamplingParams) -> str:
    """The setting that holds a whole answer to a form; empty where none does."""
    return params.constraint[0] if params.constraint is not None else ""


#: It calls nothing, and is a message of its own.
ANY_ANSWER = AnswerRules()


class Conversations:
    """What turns messages into a prompt, and tells what the answer to one is.

    `turn_ids` are the tokens that open another's turn, and so end an answer.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        config: EngineConfig,
    ) -> None:
        """Raises UsageError for variables that the template does not read."""
        self._path, self._tokenizer, self._template = path, tokenizer, chat_template
        self._source = "" if chat_template is None else chat_template.source
        self._variables = self._variables_of(config)
        self.turn_ids = tokenizer.turn_ids

    def encode(
        self,
        messages: Conversation,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_chars: int | None = None,
    ) -> list[int]:
        """Does what `LLM.encode_chat` does.

        Raises TooMuchText where the prompt's text has more than `max_chars`.
        """
        if self._template is None:
            raise UsageError(
                f"{self._path} has no chat template, so it cannot chat; continue a text instead"
            )
        ids: list[int] = []
        current().record_asked(messages, chat_template_kwargs, tools)
        template_variables = self._variables
        if chat_template_kwargs is not None:
            require_variables(chat_template_kwargs)
            template_variables = {**template_variables, **chat_template_kwargs}
        if tools and not reads_calls_of(self._source):
            raise UsageError(f"tools must be left out: {FORMATS_READ}")
        if continue_final_message:
            self.continued_part(messages)  # or a template would be asked in vain
        parts = self._template.render_parts(
            messages,
            variables=template_variables,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        num_chars = sum(len(text) for text, _ in parts)
        if max_chars is not None and num_chars > max_chars:
            raise TooMuchText("messages", num_chars, max_chars)
        for text, from_template in parts:
            ids += self._tokenizer.encode(text, add_special=False, parse_special=from_template)
        bos_id = self._tokenizer.bos_id
        # Most templates write the BOS themselves; it must stand there once.
        if self._tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def continued_part(self, messages: Conversation) -> continuing.MessagePart:
        """The part of the last message that its answer goes on with. Raises UsageError."""
        return continuing.continued_part(self._source, messages)

    def reader(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        offers_tools: bool,
        in_thought: bool | None,
        types: TextParameters = NO_TYPES,
        must_call: bool = False,
    ) -> AnswerReader | None:
        """What tells thoughts and calls from the answer to these token ids of a conversation."""
        if self._template is None:
            return None
        return make_answer_reader(
            self._source,
            self._end_of(prompt_ids),
            is_constrained=params.constraint is not None,
            offers_tools=offers_tools,
            in_thought=in_thought,
            types=types,
            must_call=must_call,
        )

    def call_form(
        self, prompt_ids: Sequence[int], form_field: str, answer: AnswerRules
    ) -> str | None:
        """The form that calls are held to; None where they are free, or the whole answer has one.

        `form_field` is the setting that holds the whole answer to a form; empty: none does.

        Raises UsageError for schemas that are too long, and where both are asked for.
        """
        if form_field:
            if answer.calls.must_call:
                raise UsageError(
                    f"{form_field} holds the answer to a form, so it cannot be the call "
                    "that tool_choice asks for; give one of them"
                )
            return None
        begins = in_thought(answer.continues)
        if begins is None:
            begins = opens_thought(self._source, self._end_of(prompt_ids))
        return call_form(self._source, answer.tools, answer.calls, begins_in_thought=begins)

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt_ids[-PROMPT_END_CHARS:], skip_special=False)

    def _variables_of(self, config: EngineConfig) -> dict[str, object]:
        """The template's variables in each conversation. Raises UsageError for unknown ones.

        A model without a template has no use for them.
        """
        given = dict(config.chat_template_kwargs or {})
        if self._template is None:
            return {}
        template_variables = variables(self._source, config.reasoning) | given
        self._template.check_variables(template_variables)
        return template_variables


class PromptReader:
    """The tokenizer and the chat template of one file, which may be closed meanwhile.

    Raises UsageError or BadModelFile for what the file, or `config` over it, has wrong.
    """

    def __init__(self, file: GGUFFile, config: EngineConfig) -> None:
        #: Of the file that was read.
        self.stamps = file.stamps
        self.tokenizer = load_tokenizer(file, config.tokenizer_pre)
        #: How a query and a document become one text, in files of models that need it.
        self._rerank_template = file.text("tokenizer.chat_template.rerank", "")
        self.chat_template = load_chat_template(file, self.tokenizer, config.chat_template)
        self.conversations = Conversations(file.path, self.tokenizer, self.chat_template, config)

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """The token ids of a prompt: of a text with the model's BOS, ids as they are.

        Raises UsageError for a text that has no tokens.
        """
        if not isinstance(prompt, str):
            return token_ids_of(prompt)
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise UsageError(
                "the prompt is empty, and this model begins without a BOS token; give it some text"
            )
        return ids

    def encode_pair(self, query: str, document: str) -> tuple[Sequence[int], int | None]:
        """The token ids of a query with a document that it may find, and how many of them are the
        query's; None where one text is made of both, as the file's template says.

        Raises UsageError where the file does not say how they are read together.
        """
        template = self._rerank_template
        if not template:
            return self.tokenizer.encode_pair(query, document)
        parts, texts = _PLACES.split(template), {"{query}": query, "{document}": document}
        said = [texts.get(part, part) for part in parts]
        marks = self.tokenizer.control_texts
        if not any(mark in text for text in (query, document) for mark in marks):
            # One text, for tokens may span what is put in and what stands around it.
            return self.tokenizer.encode("".join(said), parse_special=True), None
        ids: list[int] = []
        for part, text in zip(parts, said, strict=True):
            is_own = part not in texts
            ids += self.tokenizer.encode(text, add_special=False, parse_special=is_own)
        return ids, None

    def close(self) -> None:
        """End the process that renders the template."""
        if self.chat_template is not None:
            self.chat_template.close()

    def __enter__(self) -> PromptReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
