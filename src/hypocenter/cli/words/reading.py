"""A command line of `run`, `serve` or `bench`, put into our words before cyclopts reads it.

Options of llama.cpp and vLLM are renamed, taken or refused as the tables say, all at once. What
nobody knows is refused here too, because cyclopts reads `-cb` as `-c b`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cyclopts import App
from cyclopts.argument import ArgumentCollection

from hypocenter.base.errors import UsageError
from hypocenter.cli.words.table import VERBS, PeerOption, words_of

MAX_OPTIONS = 200
#: Characters of a word that is worth a guess; comparing takes the square of them.
_MAX_GUESSED = 60
#: What cyclopts itself answers.
_OF_ALL = ("--help", "-h", "--version", "-V")
_NUMBER = re.compile(r"-[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|-\.[0-9]+|-inf")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The name among `known` that was probably meant, or None where none is near.

    Near is one slip, or one in four letters: `prot` and `port` are, `uds` and `bundles` are not. A
    beginning of three letters will do.
    """
    bare = word.lstrip("-").replace("_", "-").lower()
    if not 3 <= len(bare) <= _MAX_GUESSED:
        return None
    found = {name: name.lstrip("-").replace("_", "-") for name in known}
    begun = sorted((name for name in found if found[name].startswith(bare)), key=len)
    most = max(1, len(bare) // 4)
    slips = {
        name: _num_slips(bare, plain)
        for name, plain in found.items()
        if abs(len(plain) - len(bare)) <= most  # a difference of length is as many slips
    }
    near = sorted((name for name in slips if slips[name] <= most), key=slips.__getitem__)
    first_words = [name for name in begun if found[name].startswith(f"{bare}-")]
    return next(iter([*first_words, *near, *begun]), None)


def _num_slips(left: str, right: str) -> int:
    """Letters left out, added, changed or swapped with the next (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, ours in enumerate(left, 1):
        earlier, before, row = before, row, [i]
        for j, theirs in enumerate(right, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (ours != theirs)))
            if i > 1 and j > 1 and (ours, theirs) == (right[j - 2], left[i - 2]):
                row[j] = min(row[j], earlier[j - 2] + 1)
    return row[-1]


@dataclass(slots=True)
class LineRead:
    """What a command line says: our words, and what is to be told of the others."""

    tokens: list[str] = field(default_factory=list)
    renamed: list[list[str]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)  # what to do, to the names
    unknown: list[str] = field(default_factory=list)

    def words(self) -> list[str]:
        """What cyclopts is given; an option that was renamed to one that is there stands once."""
        there = [self.tokens[at : at + 2] for at in range(len(self.tokens))]
        new = [words for words in self.renamed if words not in there]
        return [*(word for words in new for word in words), *self.tokens]

    @property
    def remark(self) -> str | None:
        """One line on all options that change nothing."""
        return f"{', '.join(dict.fromkeys(self.taken))}: not needed here" if self.taken else None


def in_our_words(tokens: Sequence[str], app: App) -> tuple[list[str], str | None]:
    """The command line as cyclopts reads it, and a remark on what was taken out of it.

    Raises UsageError, which names every option that is not here.
    """
    if not tokens or tokens[0] not in VERBS or set(_OF_ALL) & set(tokens):
        return list(tokens), None
    verb = tokens[0]
    # Cyclopts takes the square of their number.
    if (num_options := sum(token.startswith("-") for token in tokens)) > MAX_OPTIONS:
        raise UsageError(f"{num_options} options, but hypo {verb} takes at most {MAX_OPTIONS}")
    options = Options(app[verb].assemble_argument_collection())
    reading = read(verb, tokens[1:], options)
    if reading.refused or reading.unknown:
        raise UsageError(refusal(verb, reading, options))
    return [verb, *reading.words()], reading.remark


class Options:
    """The options of a verb, by name: whether a value follows, and whether it may begin with -."""

    def __init__(self, arguments: ArgumentCollection) -> None:
        self._takes: dict[str, bool] = {}
        self._verbatim: set[str] = set()
        for argument in arguments:
            for name in argument.names:
                if name.startswith("-"):
                    self._takes[name] = argument.token_count()[0] > 0
                    if argument.parameter.allow_leading_hyphen:
                        self._verbatim.add(name)

    @property
    def names(self) -> list[str]:
        return list(self._takes)

    def find(self, word: str) -> str | None:
        """The option that a word names, as it is spelled here."""
        spelled = word.replace("_", "-") if word.startswith("--") else word
        return spelled if spelled in self._takes else None

    def num_values(self, name: str, following: Sequence[str]) -> int:
        """How many of the words behind an option are its own: none or one."""
        if not self._takes[name] or not following:
            return 0
        return int(name in self._verbatim or not is_option(following[0]))

    def is_glued(self, word: str) -> bool:
        """Whether it is a short option and a number behind it, such as -c4096."""
        is_short = self._takes.get(word[:2], False)
        return is_short and re.fullmatch("-?[0-9.]+", word[2:], re.ASCII) is not None


def is_option(word: str) -> bool:
    """Whether a word begins with - and is no number; a lone - is stdin."""
    return word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word)


def read(verb: str, tokens: Sequence[str], options: Options) -> LineRead:
    """Go through the words behind the verb, one after the other."""
    reading, at = LineRead(), 0
    while at < len(tokens):
        token, following = tokens[at], tokens[at + 1 :]
        if token == "--":
            reading.tokens += tokens[at:]
            break
        at += 1
        name, has_value, value = token.partition("=")
        if not is_option(token) or options.is_glued(token):
            reading.tokens.append(token)
        elif own := options.find(name):
            num = 0 if has_value else options.num_values(own, following)
            reading.tokens += [token, *following[:num]]
            at += num
        elif words := _words_for(verb, name):
            values = [value] if has_value else _operands(words[0].operand, following)
            at += 0 if has_value else len(values)
            _settle(reading, name, values, words)
        else:
            reading.unknown.append(name)
    return reading


def _words_for(verb: str, name: str) -> list[PeerOption]:
    """The entries of an option, however its program lets one spell it."""
    known = words_of(verb)
    plain = name.replace("_", "-") if name.startswith("--") else name
    # vLLM: --speculative-config.method says one field of what is JSON otherwise.
    for spelled in (plain, plain.partition(".")[0]):
        if spelled in known:
            return known[spelled]
    # A switch of vLLM's that is turned off asks for what is so, wherever no entry says otherwise.
    positive = known.get("--" + plain.removeprefix("--no-"), ())
    return [
        PeerOption("taken", word.operand, None, (), "") for word in positive if not word.operand
    ]


def _operands(operand: str, following: Sequence[str]) -> list[str]:
    """Returns those of the following words that belong to an option."""
    if operand.startswith("["):
        is_one = bool(following) and following[0] in operand[1:-1].split("|")
        return list(following[:is_one])
    if operand.endswith("..."):
        count = next((at for at, word in enumerate(following) if is_option(word)), len(following))
    else:
        count = len(operand.split())
    values = list(following[:count])
    return values[: next((at for at, word in enumerate(values) if is_option(word)), count)]


def _settle(reading: LineRead, name: str, values: list[str], words: list[PeerOption]) -> None:
    """Do what the first entry says that fits the value."""
    value = " ".join(values)
    word = next((word for word in words if word.fits(value)), words[-1])
    if word.fate == "taken":
        reading.taken.append(name)
    elif word.fate == "refused":
        reading.refused.setdefault(word.instead, []).append(name)
    else:
        reading.renamed.append([value if part == "{}" else part for part in word.to])


def refusal(verb: str, reading: LineRead, options: Options) -> str:
    """One line on every option that is not here."""
    parts = [
        f"{name} (did you mean {near}?)" if (near := nearest(name, options.names)) else name
        for name in dict.fromkeys(reading.unknown)
    ]
    for instead, names in reading.refused.items():
        parts.append(f"{', '.join(dict.fromkeys(names))} ({instead})")
    return f"hypo {verb} has no {', '.join(parts)}; see hypo {verb} --help"
