"""The options of the command line, made of the settings that `settings/config.py` declares.

What options have beyond that stands here, and how a setting is read that is no single value.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from cyclopts import Group, Parameter, Token

from hypocenter.base.errors import BadSetting, HypoError, UsageError
from hypocenter.cli.serve_options import ServeOptions
from hypocenter.settings.config import EngineConfig, SamplingParams
from hypocenter.settings.grammar_text import MAX_GRAMMAR_BYTES, with_text
from hypocenter.settings.metadata_text import parse_metadata
from hypocenter.settings.setting import (
    SAME,
    Flag,
    RealNumber,
    Setting,
    SeveralTexts,
    Whole,
    settings_of,
)

_T = TypeVar("_T")
_MAX_TEMPLATE_CHARS = 1 << 20


def whole_number(_: object, tokens: Sequence[Token]) -> int:
    """A whole number as it stands; cyclopts by itself would round 1.5 to 2."""
    return as_whole(tokens[0].value)


def as_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("it must be a whole number.") from None


_SAMPLING = settings_of(SamplingParams)
_ENGINE = settings_of(EngineConfig)
_PROMPT_GROUP = Group("Prompt", sort_key=1)
_TEXTS_GROUP = Group("Texts", sort_key=1)
_SAMPLING_GROUP = Group("Sampling", sort_key=2)
_ENGINE_GROUP = Group("Engine", sort_key=3)
OUTPUT_GROUP = Group("Output", sort_key=9)

#: Of an option that takes no value and is off.
SWITCH: dict[str, Any] = {"negative": "", "show_default": False}

AsJson = Annotated[
    bool,
    Parameter(
        name="--json",
        negative="",
        help="One JSON object on stdout.",
        show_default=False,
        group=OUTPUT_GROUP,
    ),
]


Quiet = Annotated[
    bool,
    Parameter(
        name=("-q", "--quiet"),
        negative="",
        help="No progress and no figures on stderr; errors and warnings stay.",
        show_default=False,
        group=OUTPUT_GROUP,
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class OutputOptions:
    """What a command says, and how."""

    json: AsJson = False
    quiet: Quiet = False


RunSources = Annotated[
    bool,
    Parameter(
        # The shorter name is what it was called before.
        name=("--run-sources", "--yes"),
        help="Replay kernels from the bundle's own source, which runs that source, where what is "
        "installed differs from it.",
        **SWITCH,
    ),
]
ContextSize = Annotated[
    int | None,
    Parameter(
        name=("-c", "--ctx-size"),
        converter=whole_number,
        help="Context length to count the memory for.",
    ),
]


def _option(setting: Setting) -> tuple[Any, Any]:
    """Type and default of the option for a setting, as a dataclass and cyclopts want them."""
    more: dict[str, Any] = {}
    value: Any = str
    default = setting.cli_default
    match setting.kind:
        case Whole():
            value, more = int, {"converter": whole_number}
        case RealNumber():
            value = float
        case Flag():
            value, more = bool, SWITCH if default is False else {}
    is_texts = isinstance(setting.kind, SeveralTexts)
    if is_texts or setting.name in _REPEATED:
        value, default = tuple[str, ...], ()
        more = {"negative": "", "show_default": False, "allow_leading_hyphen": is_texts}
    if default is None:
        value |= None
    return Annotated[value, Parameter(name=setting.cli, help=setting.cli_help, **more)], default


#: Settings whose option may be given again, beside those that are texts.
_REPEATED = ("logit_bias", "override_kv")


def _options(declared: Mapping[str, Setting]) -> Callable[[type[_T]], type[_T]]:
    """Makes a frozen dataclass of a class: an option for each setting, and then its own fields."""

    def make(cls: type[_T]) -> type[_T]:
        own = dict(cls.__annotations__)
        annotations: dict[str, Any] = {}
        for setting in declared.values():
            if setting.cli:
                annotations[setting.name], default = _option(setting)
                setattr(cls, setting.name, default)
        cls.__annotations__ = annotations | own
        return dataclass(frozen=True)(cls)

    return make


@contextlib.contextmanager
def naming_options(options: type[Any]) -> Iterator[None]:
    """A refusal of a field's value names the field's option instead."""
    try:
        yield
    except BadSetting as error:
        hint = get_type_hints(options, include_extras=True).get(error.field)
        if hint is None:
            raise
        spelled = "/".join(hint.__metadata__[0].name[:2])
        setting = (_SAMPLING | _ENGINE).get(error.field)
        also = "" if setting is None else setting.cli_also
        raise UsageError(f"{error.text_for(spelled)}{also}") from error


def message_of(error: HypoError) -> str:
    """The message, with options in place of the settings that it names."""
    text = str(error)
    hints = get_type_hints(EngineOptions, include_extras=True)
    hints |= get_type_hints(ServeOptions, include_extras=True)
    for name in error.settings:
        if (hint := hints.get(name)) is not None:
            text = text.replace(name, "/".join(hint.__metadata__[0].name[:2]), 1)
    return text


@Parameter(name="*", group=_PROMPT_GROUP)
@dataclass(frozen=True)
class PromptOptions:
    """Which model, and what it is asked."""

    prompt: Annotated[
        str | None,
        Parameter(
            name=("-p", "--prompt"),
            allow_leading_hyphen=True,
            help=r"Prompt, used verbatim (no escapes such as \n).",
        ),
    ] = None
    file: Annotated[
        str | None,
        Parameter(
            name=("-f", "--file"),
            allow_leading_hyphen=True,
            help="File that holds the prompt; - reads stdin.",
        ),
    ] = None
    system: Annotated[
        str | None,
        Parameter(
            name=("-sys", "--system-prompt"),
            allow_leading_hyphen=True,
            help="System message that a chat or a QUESTION begins with.",
        ),
    ] = None


@Parameter(name="*", group=_SAMPLING_GROUP)
@_options(_SAMPLING)
class SamplingOptions:
    """The settings of SamplingParams under the names that llama.cpp has for them."""

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None: ...

    def params(self, *, in_chat: bool = False) -> SamplingParams:
        """The checked parameters; raises UsageError."""
        values = dict(vars(self))
        if values["json_schema"] is not None and values["grammar"] is not None:
            raise UsageError("both --json-schema and --grammar; give one")
        for name, value in values.items():
            setting = _SAMPLING[name]
            if value is None and setting.in_chat is not SAME:
                values[name] = setting.in_chat if in_chat else setting.default
            elif value is not None and value == setting.cli_none:
                values[name] = None
        for name, what in (("json_schema", "a JSON schema"), ("grammar", "a grammar")):
            if values[name] is not None:
                values[name] = _text_of(values[name], what, MAX_GRAMMAR_BYTES)
        with naming_options(type(self)):
            values["logit_bias"] = [_bias_of(text) for text in values["logit_bias"]]
            return SamplingParams(**values)


def _bias_of(text: str) -> tuple[int, float]:
    """The token and the bias that an option names, as llama.cpp writes them."""
    found = re.fullmatch(r"([0-9]{1,10})([+-](?:[0-9]{1,9}(?:\.[0-9]{0,9})?|inf))", text, re.ASCII)
    if found is None:
        limit = "must be TOKEN_ID+BIAS or TOKEN_ID-BIAS, such as 42-1.5"
        raise with_text("logit_bias", text, limit)
    return int(found[1]), float(found[2])


@Parameter(name="*", group=_ENGINE_GROUP)
@_options(_ENGINE)
class EngineOptions:
    """The settings of EngineConfig that a person at a command line has."""

    cache_type_k: Annotated[
        str | None,
        Parameter(name=("-ctk", "--cache-type-k"), help="As --kv-dtype, where -ctv agrees."),
    ] = None
    cache_type_v: Annotated[
        str | None,
        Parameter(name=("-ctv", "--cache-type-v"), help="As --kv-dtype, where -ctk agrees."),
    ] = None
    chat_template_file: Annotated[
        str | None, Parameter(name="--chat-template-file", help="File that holds a template.")
    ] = None

    if TYPE_CHECKING:
        device: str
        chat_template: str | None
        chat_template_kwargs: str | None
        kv_dtype: str | None
        override_kv: tuple[str, ...]

        def __init__(self, **options: Any) -> None: ...

    def config(self) -> EngineConfig:
        """The checked configuration; raises UsageError."""
        fields = dict(vars(self))
        if file := fields.pop("chat_template_file"):
            if self.chat_template is not None:
                raise UsageError("both --chat-template and --chat-template-file; give one")
            fields["chat_template"] = _template_of(file)
        elif (named := self.chat_template or "").endswith(".jinja") and "{" not in named:
            hint = f"--chat-template-file {named} reads a file"
            raise UsageError(f"--chat-template takes a name or a text; {hint}")
        if (written := self.chat_template_kwargs) is not None:
            fields["chat_template_kwargs"] = _variables_of(written)
        del fields["cache_type_k"], fields["cache_type_v"]
        fields["kv_dtype"] = self._cache_type()
        with naming_options(type(self)):
            fields["override_kv"] = parse_metadata("override_kv", self.override_kv) or None
            return EngineConfig(**fields)

    def _cache_type(self) -> str:
        """The one type of keys and values, which llama.cpp asks for by an option for each."""
        both = _ENGINE["kv_dtype"].default if self.kv_dtype is None else self.kv_dtype
        # Whoever gives one of them gets keys unlike values from llama.cpp, and is told.
        keys = both if self.cache_type_k is None else self.cache_type_k
        values = both if self.cache_type_v is None else self.cache_type_v
        is_asked = self.kv_dtype is not None
        if len({name.lower() for name in (keys, values, both if is_asked else keys)}) == 1:
            return keys
        also = f"--kv-dtype {self.kv_dtype}, " if is_asked else ""
        raise UsageError(
            f"{also}-ctk/--cache-type-k {keys} and -ctv/--cache-type-v {values} differ, but keys "
            "and values have one type: give both, and the same"
        )


def _variables_of(written: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--chat-template-kwargs {shlex.quote(written[:100])} is no JSON: {error}"
        ) from None


def _template_of(path: str) -> str:
    text = _text_of(path, "a chat template", _MAX_TEMPLATE_CHARS)
    if "{" not in text:
        raise UsageError(
            f"{path} is no chat template: Jinja of up to {_MAX_TEMPLATE_CHARS} characters"
        )
    return text


def _text_of(path: str, what: str, max_chars: int) -> str:
    """The text of a file; raises UsageError for one that is empty, too long or not UTF-8."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(max_chars + 1)
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8, but {what} must be") from None
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(f"{path}, where {what} should be: {error.strerror}") from None
    if not 0 < len(text) <= max_chars:
        raise UsageError(f"{path} is no {what.removeprefix('a ')}: up to {max_chars} characters")
    return text


@Parameter(name="*", group=_TEXTS_GROUP)
@dataclass(frozen=True)
class TextOptions:
    """What `hypo embed` reads beside the texts of its line, and what it makes of them."""

    file: Annotated[
        str | None,
        Parameter(name=("-f", "--file"), help="A file with a text on each line; - is stdin."),
    ] = None
    query: Annotated[
        str | None,
        Parameter(name="--query", help="Rank the texts by how well they answer this."),
    ] = None
    dimensions: Annotated[
        int | None,
        Parameter(
            name="--dimensions",
            converter=whole_number,
            help="Keep so many numbers of a vector, its first ones.",
        ),
    ] = None
    raw: Annotated[
        bool,
        Parameter(name="--raw", help="Do not divide vectors by their lengths.", **SWITCH),
    ] = False
