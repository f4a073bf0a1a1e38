"""Names of kernels as their source has them, from those of a C++ compiler (the Itanium ABI).

Gives the qualified name; of template arguments the names alone that tell what the kernel does, such
as a functor's. What it does not know stays as it is.
"""

from __future__ import annotations

import re

MAX_SYMBOL_CHARS = 4096
_MAX_ARGUMENTS = 3
_MAX_ARGUMENT_CHARS = 60
#: Names of template arguments that say nothing of what is done.
_PLAIN = re.compile(
    r"std|c10|at|native|cuda|detail|impl|array|integral_constant|tuple|TrivialOffsetCalculator|"
    r"OffsetCalculator|TensorIteratorBase|memory|LoadWithoutCast|StoreWithoutCast|_GLOBAL__N_.*|"
    r"operator.*|Array|BFloat16|Half|complex"
)
_ANONYMOUS = "(anonymous namespace)"


class _Unknown(Exception):
    """A form that is not read here."""


def source_name(symbol: str) -> str:
    """`at::native::index_kernel<...>` for `_ZN2at6native...`; else the symbol itself."""
    if not symbol.startswith("_Z") or len(symbol) > MAX_SYMBOL_CHARS:
        return symbol
    try:
        return _Symbol(symbol, 2).name() or symbol
    except (_Unknown, IndexError, ValueError):
        return symbol


class _Symbol:
    """A mangled symbol, read from left to right; IndexError where it ends too early."""

    def __init__(self, text: str, at: int) -> None:
        self._text, self._at = text, at

    def name(self) -> str:
        if self._text[self._at] == "N":
            self._at += 1
            while self._text[self._at] in "rVK":
                self._at += 1
            parts: list[str] = []
            while self._text[self._at] != "E":
                self._part(parts)
            return "::".join(parts)
        parts = []
        self._part(parts)
        if self._at < len(self._text) and self._text[self._at] == "I":
            self._part(parts)
        return "::".join(parts)

    def _part(self, parts: list[str]) -> None:
        """One name of a qualified one, or the arguments of the template that stands before."""
        letter = self._text[self._at]
        if letter.isdigit():
            parts.append(self._identifier())
        elif letter == "L":  # of internal linkage
            self._at += 1
        elif letter == "S" and self._text[self._at + 1] == "t":
            self._at += 2
            parts.append("std")
        elif letter == "I" and parts:
            names = dict.fromkeys(n for n in self._arguments() if not _PLAIN.fullmatch(n))
            shown = [name[:_MAX_ARGUMENT_CHARS] for name in [*names][:_MAX_ARGUMENTS]]
            parts[-1] += f"<{', '.join(shown) or '...'}>"
        else:
            raise _Unknown

    def _identifier(self) -> str:
        digits = re.compile(r"\d{1,4}").match(self._text, self._at)
        if digits is None:
            raise _Unknown
        self._at = digits.end() + int(digits[0])
        if self._at > len(self._text):
            raise _Unknown
        name = self._text[digits.end() : self._at]
        return _ANONYMOUS if name.startswith("_GLOBAL__N_") else name

    def _arguments(self) -> list[str]:
        """The names in `I...E`, which is passed over; nothing in there is taken apart further."""
        found: list[str] = []
        opened: list[str] = []
        while True:
            letter = self._text[self._at]
            if letter.isdigit():
                found.append(self._identifier())
                continue
            self._at += 1
            if letter == "E" and opened:
                closed = opened.pop()
                if not opened:
                    return found
                if closed in "UZ":  # a lambda, or what stands in a function, may have a number
                    self._pass(r"\d*_|")
            elif letter in "INXJFZ":
                opened.append(letter)
            elif letter == "L":
                opened += self._literal(found)
            elif letter in "UD":
                if self._text[self._at] in {"U": "l", "D": "tT"}[letter]:
                    opened.append(letter)
                self._at += 1
            elif letter in "ST":
                self._pass(r"[0-9A-Z]*_|[a-z]")
            elif letter == "E":
                raise _Unknown

    def _literal(self, found: list[str]) -> list[str]:
        """Behind `L`: what it opens, where what is named goes on to an `E` of its own."""
        if self._text.startswith("_Z", self._at):
            self._at += 2
            return ["L"]
        letter = self._text[self._at]
        if letter.isdigit():
            found.append(self._identifier())
        elif letter in "ST":
            self._at += 1
            self._pass(r"[0-9A-Z]*_|[a-z]")
        elif letter == "N":
            self._at += 1
            while self._text[self._at] != "E":
                if self._text[self._at] == "S":
                    self._pass(r"S(?:[0-9A-Z]*_|[a-z])")
                else:
                    found.append(self._identifier())
            self._at += 1
        else:
            self._at += 1
        self._pass(r"n?[0-9a-f]*E")
        return []

    def _pass(self, pattern: str) -> None:
        found = re.compile(pattern).match(self._text, self._at)
        if found is None:
            raise _Unknown
        self._at = found.end()
