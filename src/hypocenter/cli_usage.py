"""What the command line says of words that it does not understand."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import CycloptsError
from cyclopts.exceptions import UnusedCliTokensError


def usage_message(error: CycloptsError) -> str:
    """One sentence that ends with where help is."""
    if isinstance(error, UnusedCliTokensError):
        return _unexpected(" ".join(error.unused_tokens or ()), error.command_chain or ())
    text = " ".join(str(error).split())
    verb = " ".join(["hypo", *(error.command_chain or ())])
    return f"{text[:1].lower()}{text[1:]} See {verb} --help"


def _unexpected(extra: str, verbs: Sequence[str]) -> str:
    ways_out = {
        "run": "a prompt is given by -p and stands in quotes",
        "inspect": "it takes one MODEL",
        "bench": "it takes one MODEL",
    }
    verb = " ".join(["hypo", *verbs])
    way_out = ways_out.get(verbs[-1] if verbs else "", "it takes none")
    return f"unexpected argument {extra!r} of {verb}; {way_out}; see {verb} --help"
