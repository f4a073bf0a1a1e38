"""What turns texts and conversations into the token ids that a request begins with.

Reads a tokenizer and a chat template from a model's file, and no weights. The engine's own process
has one (`llm.py`), and so has each process that reads for a server (`worker/reader.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from hypocenter.config import EngineConfig
from hypocenter.engine.arguments import Prompt, token_ids_of
from hypocenter.engine.conversations import Conversations
from hypocenter.errors import UsageError
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.text.chat import load_chat_template
from hypocenter.model.text.tokenizer import load_tokenizer


class PromptReader:
    """The tokenizer and the chat template of one file, which may be closed meanwhile.

    Raises UsageError or BadModelFile for what the file, or `config` over it, has wrong.
    """

    def __init__(self, file: GGUFFile, config: EngineConfig) -> None:
        self.tokenizer = load_tokenizer(file, config.tokenizer_pre)
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
