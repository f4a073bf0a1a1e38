"""What a setting is: declared once, as a field of a dataclass.

Its default, its limits, its words on the command line, its names in a request's body and its help
stand in one place. The dataclass checks by it, `cli/options.py` makes options of it,
`server/fields.py` makes fields of bodies, and `docs/settings.md` is its table. Reads no input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from numbers import Number as AnyNumber
from typing import Any, TypeVar

from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.settings.synonyms import explain_unknown

_T = TypeVar("_T")
_SETTING = "setting"
#: What `declare_settings` has seen.
_DECLARED: dict[type[Any], dict[str, Setting]] = {}


class _Same:
    """What stands for the default of Python where another place has no default of its own."""


SAME = _Same()


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Which values a setting may have. `none` says what None means; without it None is refused."""

    none: str | None = None

    def settle(self, name: str, value: Any) -> Any:
        """The value as it is kept. Raises BadSetting."""
        return None if value is None and self.none is not None else self.require(name, value)

    def require(self, name: str, value: Any) -> Any:
        raise NotImplementedError

    @property
    def also(self) -> str:
        """What else Python may give, as the end of a refusal."""
        return "" if self.none is None else f", or None: {self.none}"

    @property
    def limits(self) -> str:
        """What may be given, for a table; empty where the help says it."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(ValueKind):
    low: int
    high: int
    #: The value that switches the setting off.
    off: int | None = None

    def require(self, name: str, value: Any) -> Any:
        also = self.also if self.off is None else f"; {self.off} switches it off"
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadSetting(name, value, "must be a whole number", also)
        if not self.low <= value <= self.high:
            raise BadSetting(name, value, f"must be from {self.low} to {self.high}", also)
        return value

    @property
    def limits(self) -> str:
        return f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RealNumber(ValueKind):
    low: float
    high: float

    def require(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadSetting(name, value, "must be a number")
        if not self.low <= value <= self.high:  # NaN is in no range
            raise BadSetting(name, value, f"must be from {self.low} to {self.high}")
        return value

    @property
    def limits(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Flag(ValueKind):
    def require(self, name: str, value: Any) -> Any:
        if not isinstance(value, bool):
            raise BadSetting(name, value, "must be True or False")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOf(ValueKind):
    """One of a few texts, or of a few numbers."""

    known: tuple[Any, ...]
    #: Whether capital letters are taken for small ones.
    folds_case: bool = False

    def require(self, name: str, value: Any) -> Any:
        if self.folds_case and isinstance(value, str):
            value = value.lower()
        if type(value) is not type(self.known[0]) or value not in self.known:
            raise BadSetting(name, value, f"must be {self._limit}")
        return value

    @property
    def _limit(self) -> str:
        if isinstance(self.known[0], str):
            return f"one of {', '.join(self.known)}"
        return f"{', '.join(map(str, self.known[:-1]))} or {self.known[-1]}"

    @property
    def limits(self) -> str:
        return ", ".join(map(str, self.known))


@dataclass(frozen=True, slots=True)
class OneText(ValueKind):
    def require(self, name: str, value: Any) -> Any:
        if not isinstance(value, str):
            raise BadSetting(name, value, "must be a text", ", or None" if self.none else "")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked(ValueKind):
    """What a function checks, given the value; it returns it as it is kept, or raises BadSetting.

    Command line and server read it as text where nothing else is agreed on.
    """

    check: Callable[[Any], Any]

    def require(self, name: str, value: Any) -> Any:
        return self.check(value)


@dataclass(frozen=True, slots=True)
class SeveralTexts(Checked):
    """Several texts."""


@dataclass(frozen=True, slots=True)
class TokenIds(Checked):
    """Several ids of tokens."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One declaration. `cli` are the words of its option and `api` the names of a body's field.
    `cli_of_serve` are the words of an option that only `hypo serve` has.

    `also_called` are names that others have for it in Python, beside its words elsewhere.

    `written` is the help of an option that is written otherwise than Python's value. `cli_none` is
    the number by which an option says None. `in_chat` is the default of a chat at the command line,
    and `api_default` that of a server. `tells_given`: the command line must know whether the option
    was given, even as the default. `api_is_read_apart`: the server has rules of its own for it.
    """

    name: str
    default: Any
    kind: ValueKind
    help: str
    cli: tuple[str, ...] = ()
    cli_of_serve: tuple[str, ...] = ()
    also_called: tuple[str, ...] = ()
    api: tuple[str, ...] = ()
    written: str = ""
    cli_none: int | None = None
    in_chat: Any = SAME
    tells_given: bool = False
    api_default: Any = SAME
    api_is_read_apart: bool = False

    @property
    def other_names(self) -> Iterator[str]:
        """What others call it, or what it is called elsewhere, as a name of Python."""
        yield from self.also_called
        for word in (*self.cli, *self.cli_of_serve):
            if word.startswith("--"):
                yield word[2:].replace("-", "_")
        if not self.api_is_read_apart:
            yield from self.api

    @property
    def cli_also(self) -> str:
        """What else the option takes, as the end of a refusal."""
        return "" if self.cli_none is None else f", or {self.cli_none}: {self.kind.none}"

    @property
    def cli_help(self) -> str:
        """The help of the option; with its default where cyclopts cannot know that."""
        text = self.written or self.help
        if self.cli_none is not None:
            text = f"{text.removesuffix('.')}; {self.cli_none}: {self.kind.none}."
        if self.in_chat is not SAME:
            chat = self.cli_none if self.in_chat is None else self.in_chat
            return f"{text} [default: {self.default}, in a chat {chat}]"
        return f"{text} [default: {self.default}]" if self.tells_given else text

    @property
    def cli_default(self) -> Any:
        """The default of the option; None where only its user knows it."""
        return None if self.in_chat is not SAME or self.tells_given else self.default


def setting(default: _T, kind: ValueKind, help: str, **more: Any) -> _T:
    """A field of a dataclass that is a setting; the other fields of Setting by keyword.

    Typed as its default, which is how `dataclasses.field` is typed.
    """
    make = functools.partial(Setting, default=default, kind=kind, help=help, **more)
    declared: Any = field(default=default, metadata={_SETTING: make})
    return declared  # type: ignore[no-any-return]


def settings_of(cls: type[Any]) -> dict[str, Setting]:
    """The declarations of a dataclass by the names of its fields, in their order."""
    return _DECLARED[cls]


def defaults(cls: type[Any]) -> dict[str, Any]:
    """Field name to default value of a dataclass of settings."""
    return {name: declared.default for name, declared in settings_of(cls).items()}


def settle(settings: Any) -> None:
    """Check each field of a new instance, and keep its value as its kind has it.

    Numbers of numpy become Python's. Raises BadSetting.
    """
    for name, declared in settings_of(type(settings)).items():
        value = given = getattr(settings, name)
        if isinstance(value, AnyNumber) and hasattr(value, "item"):
            value = value.item()
        value = declared.kind.settle(name, value)
        if value is not given:
            object.__setattr__(settings, name, value)


def declare_settings(cls: type[_T]) -> type[_T]:
    """The dataclass of settings, which lists them in its docstring.

    It refuses a keyword that is no field in words, by UsageError.
    """
    dataclass_: Any = cls
    known = {entry.name: entry.metadata[_SETTING](entry.name) for entry in fields(dataclass_)}
    _DECLARED[cls] = known
    ours = {other: name for name, declared in known.items() for other in declared.other_names}
    initialise = dataclass_.__init__

    @functools.wraps(initialise)
    def check_and_initialise(self: _T, *values: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise UsageError(explain_unknown(cls.__name__, name, known, ours))
        initialise(self, *values, **given)

    dataclass_.__init__ = check_and_initialise
    dataclass_.__doc__ = f"{cls.__doc__}\n{_list_of(known.values())}"
    return cls


def _list_of(declared: Iterable[Setting]) -> str:
    lines = (f"    {entry.name} (default {entry.default!r}): {entry.help}\n" for entry in declared)
    return "".join(lines)
