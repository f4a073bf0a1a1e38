"""hypocenter runs GGUF language models and explains its own faults.

Importing it costs nothing: each name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from hypocenter.base.errors import HypoError
    from hypocenter.base.results import Completion, Delta, Route, Timings, TokenLogprob, TopLogprob
    from hypocenter.engine.async_llm import AsyncLLM
    from hypocenter.engine.async_stream import AsyncStream
    from hypocenter.engine.llm import LLM
    from hypocenter.settings.config import EngineConfig, SamplingParams
    from hypocenter.verify.own.reference import reference

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncStream",
    "Completion",
    "Delta",
    "EngineConfig",
    "HypoError",
    "Route",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
    "TopLogprob",
    "reference",
]

_NAME_TO_MODULE = {
    "LLM": "hypocenter.engine.llm",
    "AsyncLLM": "hypocenter.engine.async_llm",
    "AsyncStream": "hypocenter.engine.async_stream",
    "Completion": "hypocenter.base.results",
    "Delta": "hypocenter.base.results",
    "EngineConfig": "hypocenter.settings.config",
    "HypoError": "hypocenter.base.errors",
    "Route": "hypocenter.base.results",
    "SamplingParams": "hypocenter.settings.config",
    "Timings": "hypocenter.base.results",
    "TokenLogprob": "hypocenter.base.results",
    "TopLogprob": "hypocenter.base.results",
    "reference": "hypocenter.verify.own.reference",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from hypocenter.base.package import version

        return version()
    if name == "amd":  # a module: launches of AMD's machine code
        from hypocenter.check.machine import amd

        return amd
    if name not in _NAME_TO_MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAME_TO_MODULE[name]), name)


def __dir__() -> list[str]:
    # What this file itself imports is none of a caller's business.
    return sorted(
        {*__all__, "__version__", "amd", *(name for name in globals() if name.startswith("__"))}
    )
