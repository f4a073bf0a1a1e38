"""The options of the command line as dataclasses whose defaults are those of `settings/config.py`.

Holds spellings and help texts. A value's range is checked in `settings/config.py`, where it lives.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter, Token

from hypocenter.base.errors import BadSetting, HypoError, UsageError
from hypocenter.cli.serve_options import ServeOptions
from hypocenter.settings.config import EngineConfig, SamplingParams, defaults
from hypocenter.settings.grammar_text import MAX_GRAMMAR_BYTES, with_text
from hypocenter.settings.metadata_text import parse_metadata

#: `-n -1` is llama.cpp's spelling of "until the model ends its answer or the context is full".
UNTIL_END = -1
#: What a chat samples with unless it is told otherwise, as llama.cpp does: small models that always
#: take the most likely token repeat themselves without end.
_IN_CHAT = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
OTHER_SEED = -1
_MAX_TEMPLATE_CHARS = 1 << 20


def whole_number(_: object, tokens: Sequence[Token]) -> int:
    """A whole number as it stands; cyclopts by itself would round 1.5 to 2."""
    return as_whole(tokens[0].value)


def as_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("it must be a whole number.") from None


_SAMPLING = defaults(SamplingParams)
_ENGINE = defaults(EngineConfig)
_PROMPT_GROUP = Group("Prompt", sort_key=1)
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
        raise UsageError(f"{error.text_for(spelled)}{_ALSO.get(error.field, '')}") from error


def message_of(error: HypoError) -> str:
    """The message, with options in place of the settings that it names."""
    text = str(error)
    hints = get_type_hints(EngineOptions, include_extras=True)
    hints |= get_type_hints(ServeOptions, include_extras=True)
    for name in error.settings:
        if (hint := hints.get(name)) is not None:
            text = text.replace(name, "/".join(hint.__metadata__[0].name[:2]), 1)
    return text


#: What the command line adds to the refusal of a field's value.
_ALSO = {
    "max_tokens": f", or {UNTIL_END}: until the model ends its answer",
    "seed": f", or {OTHER_SEED}: another one each time",
}


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


def _defaults(name: str) -> str:
    return f"[default: {_SAMPLING[name]}, in a chat {_IN_CHAT[name]}]"


@Parameter(name="*", group=_SAMPLING_GROUP)
@dataclass(frozen=True)
class SamplingOptions:
    """The fields of SamplingParams under the names that llama.cpp has for them."""

    max_tokens: Annotated[
        int | None,
        Parameter(
            name=("-n", "--predict", "--n-predict", "--max-tokens"),
            converter=whole_number,
            help="Most tokens to generate; -1: until the model ends or the context is full. "
            f"[default: {_SAMPLING['max_tokens']}, in a chat {UNTIL_END}]",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Parameter(
            name=("-s", "--seed"),
            converter=whole_number,
            help=f"Seed of the random stream; {OTHER_SEED}, as without it: another one each time.",
        ),
    ] = _SAMPLING["seed"]
    temperature: Annotated[
        float | None,
        Parameter(
            name=("--temp", "--temperature"),
            help=f"0 takes the most likely token. {_defaults('temperature')}",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Parameter(
            name="--top-k",
            converter=whole_number,
            help=f"Keep the k most likely tokens; 0 is off. {_defaults('top_k')}",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(
            name="--top-p",
            help="Keep the most likely tokens up to this total probability; 1 is off. "
            f"{_defaults('top_p')}",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Parameter(
            name="--min-p",
            help="Keep tokens above this share of the most likely one; 0 is off. "
            f"{_defaults('min_p')}",
        ),
    ] = None
    repeat_penalty: Annotated[
        float, Parameter(name="--repeat-penalty", help="Divides logits of seen tokens; 1 is off.")
    ] = _SAMPLING["repeat_penalty"]
    presence_penalty: Annotated[
        float, Parameter(name="--presence-penalty", help="Subtracted once a token was generated.")
    ] = _SAMPLING["presence_penalty"]
    frequency_penalty: Annotated[
        float,
        Parameter(
            name="--frequency-penalty", help="Subtracted for each earlier occurrence of a token."
        ),
    ] = _SAMPLING["frequency_penalty"]
    stop: Annotated[
        tuple[str, ...],
        Parameter(
            name="--stop",
            help="Text that ends the answer; may be given again.",
            allow_leading_hyphen=True,
            negative="",
            show_default=False,
        ),
    ] = _SAMPLING["stop"]
    ignore_eos: Annotated[
        bool,
        Parameter(
            name="--ignore-eos", negative="", show_default=False, help="Go on after an end token."
        ),
    ] = _SAMPLING["ignore_eos"]
    logit_bias: Annotated[
        tuple[str, ...],
        Parameter(
            name=("-l", "--logit-bias"),
            help="TOKEN_ID+BIAS or TOKEN_ID-BIAS, added to that token's logit, such as 42-1.5; "
            "42-inf: never. May be given again.",
            negative="",
            show_default=False,
        ),
    ] = ()
    json_schema: Annotated[
        str | None,
        Parameter(
            name="--json-schema", help="File with a JSON schema; the answer is JSON that it allows."
        ),
    ] = None
    json_object: Annotated[
        bool, Parameter(name="--json-object", help="The answer is a JSON object.", **SWITCH)
    ] = _SAMPLING["json_object"]
    grammar: Annotated[
        str | None,
        Parameter(
            name="--grammar", help="File with a grammar, Lark or GBNF, that the answer follows."
        ),
    ] = None

    def params(self, *, in_chat: bool = False) -> SamplingParams:
        """The checked parameters; raises UsageError. An answer in a chat ends where it ends."""
        values: dict[str, Any] = asdict(self)
        for name in _IN_CHAT:
            if values[name] is None:
                values[name] = (_IN_CHAT if in_chat else _SAMPLING)[name]
        if self.max_tokens == UNTIL_END or (in_chat and self.max_tokens is None):
            values["max_tokens"] = None
        elif self.max_tokens is None:
            del values["max_tokens"]
        if self.seed == OTHER_SEED:
            values["seed"] = None
        if self.json_schema is not None and self.grammar is not None:
            raise UsageError("both --json-schema and --grammar; give one")
        for name, what in (("json_schema", "a JSON schema"), ("grammar", "a grammar")):
            if values[name] is not None:
                values[name] = _text_of(values[name], what, MAX_GRAMMAR_BYTES)
        with naming_options(type(self)):
            values["logit_bias"] = [_bias_of(text) for text in self.logit_bias]
            return SamplingParams(**values)


def _bias_of(text: str) -> tuple[int, float]:
    """The token and the bias that an option names, as llama.cpp writes them."""
    found = re.fullmatch(r"([0-9]{1,10})([+-](?:[0-9]{1,9}(?:\.[0-9]{0,9})?|inf))", text, re.ASCII)
    if found is None:
        limit = "must be TOKEN_ID+BIAS or TOKEN_ID-BIAS, such as 42-1.5"
        raise with_text("logit_bias", text, limit)
    return int(found[1]), float(found[2])


@Parameter(name="*", group=_ENGINE_GROUP)
@dataclass(frozen=True)
class EngineOptions:
    """The fields of EngineConfig that a person at a command line sets."""

    context_length: Annotated[
        int | None,
        Parameter(
            name=("-c", "--ctx-size", "--max-model-len"),
            converter=whole_number,
            help="Context length in tokens; by default the trained one, within bounds.",
        ),
    ] = _ENGINE["context_length"]
    num_threads: Annotated[
        int | None,
        Parameter(
            name=("-t", "--threads"), converter=whole_number, help="CPU threads; by default all."
        ),
    ] = _ENGINE["num_threads"]
    max_batch_tokens: Annotated[
        int | None,
        Parameter(
            name=("-b", "--batch-size", "--max-num-batched-tokens"),
            converter=whole_number,
            help="Most tokens of a step; by default 2048 on a GPU, 512 elsewhere.",
        ),
    ] = _ENGINE["max_batch_tokens"]
    gpu_memory_fraction: Annotated[
        float,
        Parameter(
            name=("--gpu-memory-fraction", "--gpu-memory-utilization"),
            help="Share of a GPU's memory that may be in use once the KV cache has its part.",
        ),
    ] = _ENGINE["gpu_memory_fraction"]
    kv_dtype: Annotated[
        str | None,
        Parameter(
            name="--kv-dtype",
            help="KV cache, keys and values alike: f16, f32, q8_0 or q4_0. "
            f"[default: {_ENGINE['kv_dtype']}]",
        ),
    ] = None
    cache_type_k: Annotated[
        str | None,
        Parameter(name=("-ctk", "--cache-type-k"), help="The same, where -ctv agrees."),
    ] = None
    cache_type_v: Annotated[
        str | None,
        Parameter(name=("-ctv", "--cache-type-v"), help="The same, where -ctk agrees."),
    ] = None
    prefix_cache: Annotated[
        bool,
        Parameter(
            name="--prefix-cache",
            help="Do not compute again how a prompt begins, when one before began so.",
        ),
    ] = _ENGINE["prefix_cache"]
    state_checkpoints: Annotated[
        int,
        Parameter(
            name="--state-checkpoints",
            converter=whole_number,
            help="How many states are kept for that, where layers of a model carry one.",
        ),
    ] = _ENGINE["state_checkpoints"]
    tokenizer_pre: Annotated[
        str | None,
        Parameter(name="--tokenizer-pre", help="Pre-tokenizer, where the file names none."),
    ] = _ENGINE["tokenizer_pre"]
    chat_template: Annotated[
        str | None,
        Parameter(
            name="--chat-template",
            help="One of the file's by its name, chatml, or the text of a template.",
        ),
    ] = _ENGINE["chat_template"]
    chat_template_file: Annotated[
        str | None, Parameter(name="--chat-template-file", help="File that holds a template.")
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        Parameter(
            name="--chat-template-kwargs",
            help="Variables of the chat template, as JSON: '{\"enable_thinking\": false}'.",
        ),
    ] = None
    override_kv: Annotated[
        tuple[str, ...],
        Parameter(
            name="--override-kv",
            negative="",
            show_default=False,
            help="Metadata in place of the file's: KEY=TYPE:VALUE, several with commas. TYPE is "
            "int, float, bool or str.",
        ),
    ] = ()
    reasoning: Annotated[
        str,
        Parameter(
            name="--reasoning",
            help="Whether the model thinks before it answers: auto, on, off, or how much: minimal, "
            "low, medium, high, xhigh. Some models have no choice.",
        ),
    ] = _ENGINE["reasoning"]
    device: Annotated[
        str,
        Parameter(
            name="--device",
            help="auto, the GPU that has room, else the CPU; cpu, cuda, hip, or a simulated GPU "
            "such as sim:mi300x.",
        ),
    ] = _ENGINE["device"]
    launch_mode: Annotated[
        str,
        Parameter(
            name="--launch-mode", help="off, checked, guarded (GPU kernels only), or traced."
        ),
    ] = _ENGINE["launch_mode"]
    attention: Annotated[
        str,
        Parameter(name="--attention", help="fused, or its parts one by one (GPU kernels only)."),
    ] = _ENGINE["attention"]
    float_products: Annotated[
        str,
        Parameter(
            name="--float-products",
            help="Of F16 and BF16 matrices on the CPU: exact, or bf16, which rounds them and what "
            "they multiply (made for Zen 4 and 5).",
        ),
    ] = _ENGINE["float_products"]
    tensor_parallel: Annotated[
        int,
        Parameter(
            name=("--tensor-parallel", "--tensor-parallel-size", "-tp"),
            converter=whole_number,
            help="GPUs of this machine that hold the model together.",
        ),
    ] = _ENGINE["tensor_parallel"]

    def config(self) -> EngineConfig:
        """The checked configuration; raises UsageError."""
        fields = asdict(self)
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
        both = _ENGINE["kv_dtype"] if self.kv_dtype is None else self.kv_dtype
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
