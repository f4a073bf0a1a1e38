"""What a worker refuses before it says that it is ready, and how it tells the server of an error.

What every request would meet is the operator's mistake, and no client's. Loads nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypocenter.config import EngineConfig
from hypocenter.engine.llm import LLM
from hypocenter.errors import BadSetting, HypoError, TemplateError, UsageError
from hypocenter.messages import Failed


def require_servable(llm: LLM, config: EngineConfig) -> None:
    """Raises UsageError where no request, or no chat, could be answered."""
    runner = llm.engine.runner
    if runner.num_blocks * runner.block_size < llm.context_length:
        limit = f"one context, of {llm.context_length} tokens, must fit; take at least that"
        raise BadSetting("kv_tokens", config.kv_tokens, limit)
    if llm.chat_template is not None:
        try:
            llm.chat_template.check()
        except TemplateError as error:
            raise UsageError(f"{error}; give another by --chat-template-file") from error


def failure(number: int, error: Exception) -> Failed:
    """The error as the server is told of it: of request `number`, or of the start."""
    settings = error.settings if isinstance(error, HypoError) else ()
    field = ""
    if isinstance(error, BadSetting):
        field, settings = error.field, (error.field,)
    return Failed(number, type(error).__name__, str(error), field, settings)


def failure_for_client(number: int, error: Exception, model: Path) -> Failed:
    """The same without the folder of the model's file, which is nobody's business."""
    failed = failure(number, error)
    shown = failed.message.replace(f"{model.parent}{os.sep}", "")
    return Failed(number, failed.kind, shown, failed.field, failed.settings)
