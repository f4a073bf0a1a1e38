"""What goes through the pipes between the engine and the helper that renders chat templates.

The parent sends one `Setup`, then one `Render` at a time. The helper says once that it is ready,
then whether the template compiles, then answers each `Render`; each of these is a `Reply`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Setup(msgspec.Struct):
    """What stays the same for the life of a helper."""

    template: str
    variables: dict[str, str]
    cpu_seconds: int
    memory_bytes: int


class Render(msgspec.Struct):
    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    max_output_bytes: int
    #: Beside those of the setup.
    variables: dict[str, Any] = {}
    #: Definitions as in OpenAI's API.
    tools: list[dict[str, Any]] | None = None


class Reply(msgspec.Struct):
    """`error` is one printable line or empty; after a `fatal` one the helper must be replaced."""

    text: str = ""
    error: str = ""
    fatal: bool = False
