"""What Ollama's routes answer, field by field; durations are in nanoseconds.

https://docs.ollama.com/api. A field that is UNSET is left out.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class OllamaError(msgspec.Struct):
    error: str


class OllamaCall(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class ToolCalled(msgspec.Struct):
    function: OllamaCall


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCalled] | UnsetType = UNSET


class OllamaFigures(msgspec.Struct, kw_only=True):
    """What the last part of an answer tells besides."""

    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatAnswer(OllamaFigures, kw_only=True):
    model: str
    created_at: str
    message: OllamaMessage


class OllamaText(OllamaFigures, kw_only=True):
    model: str
    created_at: str
    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    embedding: list[float]


class ModelDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str = "gguf"
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    """`digest` is empty: the file is not read for that."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str = ""
    details: ModelDetails


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class RunningModel(msgspec.Struct, kw_only=True):
    """It is loaded for as long as the server runs."""

    name: str
    model: str
    size: int
    digest: str = ""
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(msgspec.Struct):
    models: list[RunningModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    version: str
