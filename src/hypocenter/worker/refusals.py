"""What a worker refuses before it says that it is ready.

What every request would meet is the operator's mistake, and no client's. Loads nothing.
"""

from __future__ import annotations

from hypocenter.config import EngineConfig
from hypocenter.engine.llm import LLM
from hypocenter.errors import BadSetting, TemplateError, UsageError


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
