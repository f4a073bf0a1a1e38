"""What turns texts and conversations into the token ids that a request begins with.

Reads a tokenizer and a chat template from a model's file, and no weights. The engine's own process
has one (`llm.py`), and so has each process that reads for a server (`worker/reader.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from hypocenter.config import CONSTRAINTS, EngineConfig, SamplingParams
from hypocenter.conversation.thoughts import (
    PROMPT_END_CHARS,
    AnswerReader,
    apart,
    reads_calls_of,
    require_variables,
    variables,
)
from hypocenter.conversation.tools import Tools
from hypocenter.engine.arguments import Conversation, Prompt, token_ids_of
from hypocenter.errors import TooMuchText, UsageError
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.text.chat import load_chat_template
from hypocenter.model.text.tokenizer import load_tokenizer


class PromptReader:
    """The tokenizer and the chat template of one file, which may be closed meanwhile.

    Raises UsageError or BadModelFile for what the file, or `config` over it, has wrong.
    """

    def __init__(self, file: GGUFFile, config: EngineConfig) -> None:
        self._path = file.path
        self.tokenizer = load_tokenizer(file, config.tokenizer_pre)
        self.chat_template = load_chat_template(file, self.tokenizer, config.chat_template)
        self._template_variables = self._variables_of(config)

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

    def encode_chat(
        self,
        messages: Conversation,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Tools | None = None,
        *,
        max_chars: int | None = None,
    ) -> list[int]:
        """The token ids of a conversation, up to where the answer begins.

        Control tokens are recognised in the template's own text only, never in what the messages
        say; so nobody can end his turn by writing the token that ends it. Raises TooMuchText where
        the prompt's text has more than `max_chars`.
        """
        if self.chat_template is None:
            raise UsageError(
                f"{self._path} has no chat template, so it cannot chat; continue a text instead"
            )
        ids: list[int] = []
        told = self._template_variables
        if chat_template_kwargs is not None:
            require_variables(chat_template_kwargs)
            told = {**told, **chat_template_kwargs}
        if tools and not reads_calls_of(self.chat_template.source):
            raise UsageError("tools must be left out: calls of this model are not read")
        parts = self.chat_template.render_parts(messages, variables=told, tools=tools)
        num_chars = sum(len(text) for text, _ in parts)
        if max_chars is not None and num_chars > max_chars:
            raise TooMuchText("messages", num_chars, max_chars)
        for text, from_template in parts:
            ids += self.tokenizer.encode(text, add_special=False, parse_special=from_template)
        bos_id = self.tokenizer.bos_id
        # Most templates write the BOS themselves; it must stand there once.
        if self.tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def apart(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, offers_tools: bool = False
    ) -> AnswerReader | None:
        """What tells thoughts and calls from the answer to these token ids of a conversation."""
        if self.chat_template is None:
            return None
        end = self.tokenizer.decode(prompt_ids[-PROMPT_END_CHARS:], skip_special=False)
        has_form = any(getattr(params, name) for name in CONSTRAINTS)
        return apart(
            self.chat_template.source, end, is_held_to_a_form=has_form, offers_tools=offers_tools
        )

    def _variables_of(self, config: EngineConfig) -> dict[str, object]:
        """What the template is told in each conversation; raises UsageError for what it knows not.

        A model without a template has no use for them.
        """
        given = dict(config.chat_template_kwargs or {})
        if self.chat_template is None:
            return {}
        told = variables(self.chat_template.source, config.reasoning) | given
        self.chat_template.check_variables(told)
        return told

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
