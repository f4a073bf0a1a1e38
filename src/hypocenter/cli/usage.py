"""What the command line says of words that it does not understand."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

from cyclopts import CycloptsError
from cyclopts.exceptions import UnusedCliTokensError


def usage_message(error: CycloptsError) -> str:
    """One sentence that ends with where help is."""
    if isinstance(error, UnusedCliTokensError):
        return _unexpected_argument(" ".join(error.unused_tokens or ()), error.command_chain or ())
    text = " ".join(str(error).split())
    verb = " ".join(["hypo", *(error.command_chain or ())])
    return f"{text[:1].lower()}{text[1:]} See {verb} --help"


#: Options of the doctor that the word behind them belongs to.
_WITH_VALUE = frozenset({"--good", "--out", "-o", "--deadline"})


def forgotten_dashes(tokens: Sequence[str], verbs: Sequence[str]) -> str | None:
    """What to say of `hypo doctor run -p x`, whose command should stand behind `--`."""
    if tokens[:1] != ["doctor"] or "--" in tokens:
        return None
    at = 1
    while at < len(tokens) and tokens[at].startswith("-"):
        at += 2 if tokens[at] in _WITH_VALUE else 1
    if at >= len(tokens) or os.path.lexists(tokens[at]):
        return None
    word = tokens[at]
    is_command = word in verbs or (len(tokens) > at + 1 and shutil.which(word) is not None)
    if not is_command:
        return None
    options = shlex.join(["hypo", *tokens[:at]])
    return f"put the command behind --: {options} -- {shlex.join(tokens[at:])}"


def _unexpected_argument(extra: str, verbs: Sequence[str]) -> str:
    ways_out = {
        "run": "a prompt is given by -p and stands in quotes",
        "inspect": "it takes one MODEL",
        "bench": "it takes one MODEL",
    }
    verb = " ".join(["hypo", *verbs])
    way_out = ways_out.get(verbs[-1] if verbs else "", "it takes none")
    return f"unexpected argument {extra!r} of {verb}; {way_out}; see {verb} --help"
