"""What the server is told of an error."""

from __future__ import annotations

from hypocenter.errors import BadSetting, GrammarError, TooMuchText
from hypocenter.messages import Failed


def failure_of(number: int, error: Exception) -> Failed:
    """The error of the request or question with that number, and the field that it names."""
    field = error.field if isinstance(error, BadSetting | TooMuchText | GrammarError) else ""
    return Failed(number, type(error).__name__, str(error), field)
