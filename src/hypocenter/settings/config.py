"""The frozen configuration of an engine and of one request.

The command line takes names, defaults and help of its options from these fields.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Number
from typing import Any, TypedDict, TypeVar

from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.base.tensor import DType
from hypocenter.conversation.thoughts import REASONING, require_variables
from hypocenter.settings.grammar_text import (
    check_grammar,
    check_regex,
    choices,
    schema_text,
    with_text,
)
from hypocenter.settings.metadata_text import require_metadata
from hypocenter.settings.synonyms import explain_unknown
from hypocenter.settings.token_settings import (
    MAX_ALLOWED_TOKENS,
    MAX_STOP_TOKENS,
    bad_words,
    logit_biases,
    token_ids,
)

MAX_STOP_STRINGS = 16
MAX_TOP_K = 1 << 20
MAX_LOGPROBS = 20
MAX_SEED = (1 << 64) - 1
#: Fields of SamplingParams that say which text an answer may be; one of them at a time.
CONSTRAINTS = ("json_schema", "json_object", "grammar", "regex", "choice")
#: Of a file of keys.
MAX_KEY_BYTES = 1 << 16
#: The device that suits the machine and the model (`device/choice.py`).
AUTO = "auto"
DEVICE = re.compile(r"cpu|(cuda|hip)(:[0-9]{1,3})?|sim:[a-z0-9]{1,20}")
DEVICE_LIMIT = "must be auto, cpu, cuda, hip, cuda:N, hip:N or sim:NAME"
#: Is told what is being done, and how much of it is, from 0 to 1.
OnProgress = Callable[[str, float], None]

LAUNCH_MODES = ("off", "checked", "guarded", "traced")
ATTENTIONS = ("fused", "parts")
PARTS_NEED_A_GPU = (
    "parts run on GPU devices only; use fused, or a device such as cuda, hip or sim:mi300x"
)
FLOAT_PRODUCTS = ("exact", "bf16")
_BF16_NEEDS_THE_CPU = "products in bf16 run on the CPU only; use exact, or device cpu"
MAX_RANKS = 16
_RANKS_NEED_GPUS = "a CPU has all cores for one model; use 1, or a device such as cuda or hip"
KV_DTYPES = {"f16": DType.F16, "f32": DType.F32, "q8_0": DType.Q8_0, "q4_0": DType.Q4_0}
_BLOCKS_ARE_FUSED = "parts of attention read no blocks; use f16 or f32, or attention fused"
#: Settings that have one of a few values.
_CHOICES: dict[str, tuple[str, ...]] = {
    "launch_mode": LAUNCH_MODES,
    "attention": ATTENTIONS,
    "float_products": FLOAT_PRODUCTS,
    "kv_dtype": tuple(KV_DTYPES),
    "reasoning": REASONING,
}
_Settings = TypeVar("_Settings")


def _explain_unknown_fields(cls: type[_Settings]) -> type[_Settings]:
    """The dataclass, which refuses a keyword that is no field in words, by UsageError."""
    dataclass_: Any = cls
    initialise = dataclass_.__init__

    @functools.wraps(initialise)
    def check_and_initialise(self: _Settings, *values: Any, **given: Any) -> None:
        known = defaults(cls)
        for name in given:
            if name not in known:
                raise UsageError(explain_unknown(cls.__name__, name, known))
        initialise(self, *values, **given)

    dataclass_.__init__ = check_and_initialise
    return cls


@_explain_unknown_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Greedy by default, so that a first run repeats itself.

    `temperature` 0 takes the most likely token. `top_k` 0, `top_p` 1 and `min_p` 0 switch that
    filter off. `repeat_penalty` 1 and the two OpenAI penalties at 0 leave the logits alone.
    `max_tokens` None means: until the model ends its answer or the context is full. `seed` None
    takes another one for each request; the Completion says which. `stop` is a text or several;
    with `include_stop_str_in_output` the answer ends with it.
    `logprobs` N asks for the log probability of each chosen token and of the N likeliest ones of
    its place, by the raw logits; `prompt_logprobs` for those of the prompt's tokens.
    `json_schema` (kept as JSON text), `json_object`, `grammar` (Lark or GBNF), `regex` or `choice`
    (one of these texts) holds the answer to a form, one of them at a time.
    `logit_bias` (kept as pairs) is added to the logits of single tokens, from -100 to 100; False
    or -inf is never. Only `allowed_token_ids` come, where they are given. A token of
    `stop_token_ids` ends the answer as an end token does. Nothing ends an answer before it has
    `min_tokens`, unless nothing else may come. The tokens of `bad_words` do not come in a row.
    Raises UsageError when a value is of a wrong type or out of its range.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: dict[str, Any] | str | None = None
    json_object: bool = False
    grammar: str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    logit_bias: dict[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    bad_words: Sequence[str] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _unwrap_numbers(self)
        if self.max_tokens is not None:
            also = ", or None: until the model ends its answer"
            _require_whole("max_tokens", self.max_tokens, 0, 1 << 31, also)
        _within("temperature", self.temperature, 0.0, 100.0)
        _require_whole("top_k", self.top_k, 0, MAX_TOP_K, "; 0 switches it off")
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        # Divided by 1e-308 a logit would be infinite; nobody means less than a hundredth.
        _within("repeat_penalty", self.repeat_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _require_whole("seed", self.seed, 0, MAX_SEED, ", or None: another one each time")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        _require_bool("ignore_eos", self.ignore_eos)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_whole(name, getattr(self, name), 0, MAX_LOGPROBS, ", or None: none")
        _require_bool("json_object", self.json_object)
        if self.grammar is not None:
            check_grammar(self.grammar)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        if self.regex is not None:
            check_regex(self.regex)
        if self.choice is not None:
            object.__setattr__(self, "choice", choices(self.choice))
        _require_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        self._settle_tokens()
        _require_compatible(self)

    def _settle_tokens(self) -> None:
        """The settings that name tokens, as tuples that nobody can change."""
        object.__setattr__(self, "logit_bias", logit_biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
            if not allowed:
                limit = "one token at least must be allowed"
                raise BadSetting("allowed_token_ids", allowed, limit, ", or None: all are")
            object.__setattr__(self, "allowed_token_ids", allowed)
        stop_ids = token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        object.__setattr__(self, "stop_token_ids", stop_ids)
        _require_whole("min_tokens", self.min_tokens, 0, 1 << 31)
        object.__setattr__(self, "bad_words", bad_words(self.bad_words))

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The field that holds the answer to a form, and its text; None for a free answer."""
        if self.json_object:
            return "json_object", '{"type": "object"}'
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        for name in ("json_schema", "grammar", "regex"):
            if isinstance(text := getattr(self, name), str):
                return name, text
        return None


class SamplingFields(TypedDict, total=False):
    """The fields of SamplingParams as keywords."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: Sequence[str]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    json_schema: dict[str, Any] | str | None
    json_object: bool
    grammar: str | None
    regex: str | None
    choice: Sequence[str] | None
    logit_bias: dict[int, float] | Sequence[tuple[int, float]]
    allowed_token_ids: Sequence[int] | None
    stop_token_ids: Sequence[int]
    min_tokens: int
    bad_words: Sequence[str]
    include_stop_str_in_output: bool


@_explain_unknown_fields
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is built with; constructed once, never written to.

    `device` auto is the first GPU that torch can drive and that has room for the model, else the
    CPU; HYPO_DEVICE overrules that.
    `context_length` None takes the trained length, bounded by `DEFAULT_CONTEXT`.
    `num_threads` None takes every core this process may use. `max_batch_tokens`, of a step, None:
    2048 on a GPU, 512 elsewhere, as on a simulated one. `launch_mode`: `off`; `checked`
    rechecks every launch's arguments and index values; `guarded` (GPU) masks accesses off that
    leave their tensors, and names them; `traced` waits for every launch and writes down what it
    did, for `hypo doctor` and `hypo diff`. `prefix_cache`: a prompt that begins like one before is
    not computed anew up to where they part. `state_checkpoints`: of models that carry a state, how
    many states are kept for that. `kv_tokens` is how many tokens the KV cache holds of all requests
    together; None: as many as one context, and on a GPU what its memory has room for, so that
    `gpu_memory_fraction` of it is in use. `kv_dtype`: as what it holds both keys and values: f16,
    f32, or q8_0 or q4_0, which are GGUF's blocks. `attention`: `fused`, or its `parts`
    one by one (GPU).
    `override_kv` are metadata in place of what the model's file says, by key, or beside it.
    `chat_template_kwargs` are variables of the chat template; `reasoning` sets those by which most
    templates have a model think before it answers: `on`, `off`, or how much; `auto` sets none.
    `float_products`: on the CPU F16 and BF16 matrices multiply activations `exact`ly, or as `bf16`,
    both rounded to it; a GPU rounds activations to the type of the matrix.
    `tensor_parallel`: how many GPUs of this machine hold the model together, from `device` on.
    """

    device: str = AUTO
    context_length: int | None = None
    num_threads: int | None = None
    max_batch_tokens: int | None = None
    max_batch_requests: int = 32
    block_size: int = 16
    prefix_cache: bool = True
    state_checkpoints: int = 8
    kv_tokens: int | None = None
    gpu_memory_fraction: float = 0.9
    kv_dtype: str = "f16"
    tokenizer_pre: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    override_kv: dict[str, Any] | None = None
    reasoning: str = "auto"
    launch_mode: str = "off"
    attention: str = "fused"
    float_products: str = "exact"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        _unwrap_numbers(self)
        if isinstance(self.kv_dtype, str):
            object.__setattr__(self, "kv_dtype", self.kv_dtype.lower())
        for name, known in _CHOICES.items():
            _one_of(name, getattr(self, name), known)
        _require_device(self.device)
        if self.attention == "parts" and self.device == "cpu":
            raise BadSetting("attention", self.attention, PARTS_NEED_A_GPU)
        if self.float_products == "bf16" and self.device not in ("cpu", AUTO):
            raise BadSetting("float_products", self.float_products, _BF16_NEEDS_THE_CPU)
        _require_whole("tensor_parallel", self.tensor_parallel, 1, MAX_RANKS)
        if self.tensor_parallel > 1 and self.device == "cpu":
            raise BadSetting("tensor_parallel", self.tensor_parallel, _RANKS_NEED_GPUS)
        if self.context_length is not None:
            also = f", or None: the model's own, at most {DEFAULT_CONTEXT}"
            _require_whole("context_length", self.context_length, 1, 1 << 24, also)
        if self.num_threads is not None:
            also = ", or None: every core this process may use"
            _require_whole("num_threads", self.num_threads, 1, 1024, also)
        if self.max_batch_tokens is not None:
            _require_whole(
                "max_batch_tokens", self.max_batch_tokens, 1, 65536, ", or None: by the device"
            )
        _require_whole("max_batch_requests", self.max_batch_requests, 1, 4096)
        if type(self.block_size) is not int or self.block_size not in (16, 32, 64, 128):
            raise BadSetting("block_size", self.block_size, "must be 16, 32, 64 or 128")
        _require_bool("prefix_cache", self.prefix_cache)
        _require_whole("state_checkpoints", self.state_checkpoints, 0, 4096)
        if self.kv_tokens is not None:
            also = ", or None: one context, and on a GPU what it has room for"
            _require_whole("kv_tokens", self.kv_tokens, 1, 1 << 28, also)
        _within("gpu_memory_fraction", self.gpu_memory_fraction, 0.05, 1.0)
        if KV_DTYPES[self.kv_dtype].is_quantised and self.attention == "parts":
            raise BadSetting("kv_dtype", self.kv_dtype, _BLOCKS_ARE_FUSED)
        if self.chat_template_kwargs is not None:
            require_variables(self.chat_template_kwargs)
        if self.override_kv is not None:
            require_metadata("override_kv", self.override_kv)
        for name in ("tokenizer_pre", "chat_template"):
            if not isinstance(getattr(self, name), str | None):
                raise BadSetting(name, getattr(self, name), "must be a text", ", or None")

    @property
    def step_tokens(self) -> int:
        """The most tokens of a step: what `max_batch_tokens` says, or what suits the device."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        is_gpu = self.device.startswith(("cuda", "hip"))
        # Parts of attention keep scores of all tokens and keys of a step.
        return _GPU_STEP if is_gpu and self.attention == "fused" else _STEP


class EngineFields(TypedDict, total=False):
    """The fields of EngineConfig as keywords."""

    device: str
    context_length: int | None
    num_threads: int | None
    max_batch_tokens: int | None
    max_batch_requests: int
    block_size: int
    prefix_cache: bool
    state_checkpoints: int
    kv_tokens: int | None
    gpu_memory_fraction: float
    kv_dtype: str
    tokenizer_pre: str | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    override_kv: dict[str, Any] | None
    reasoning: str
    launch_mode: str
    attention: str
    float_products: str
    tensor_parallel: int


DEFAULT_CONTEXT = 4096
#: Most tokens of a step where nobody says. On an H200 a prompt of 2,048 in one step takes 8 % less
#: than in four; a token of another request waits for it as long.
_STEP, _GPU_STEP = 512, 2048


def defaults(cls: type[Any]) -> dict[str, Any]:
    """Field name to default value of one of the dataclasses above."""
    return {field.name: field.default for field in fields(cls)}


def _within(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadSetting(name, value, "must be a number")
    if not low <= value <= high:  # NaN is in no range
        raise BadSetting(name, value, f"must be from {low} to {high}")


def _require_device(name: object) -> None:
    if not isinstance(name, str) or not (name == AUTO or DEVICE.fullmatch(name)):
        raise BadSetting("device", name, DEVICE_LIMIT)


def _require_whole(name: str, value: object, low: int, high: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadSetting(name, value, "must be a whole number", also)
    if not low <= value <= high:
        raise BadSetting(name, value, f"must be from {low} to {high}", also)


def _unwrap_numbers(settings: object) -> None:
    """Numbers of numpy become Python's, which all that follows counts on."""
    for name in defaults(type(settings)):
        value = getattr(settings, name)
        if isinstance(value, Number) and hasattr(value, "item"):
            object.__setattr__(settings, name, value.item())


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadSetting(name, value, "must be True or False")


def _stop_strings(stop: object) -> tuple[str, ...]:
    """One text or several as a tuple."""
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or isinstance(texts, bytes | bytearray):
        raise BadSetting("stop", stop, "must be a text or a sequence of texts")
    if len(texts) > MAX_STOP_STRINGS:
        raise UsageError(f"stop has {len(texts)} texts, but at most {MAX_STOP_STRINGS} are allowed")
    for text in texts:
        if not isinstance(text, str):
            raise BadSetting("stop", text, "must be a text or a sequence of texts")
        if not text:
            raise BadSetting("stop", text, "an empty text would end nothing; leave it out")
    return tuple(texts)


def _require_compatible(params: SamplingParams) -> None:
    given = [name for name in CONSTRAINTS if getattr(params, name) not in (None, False)]
    if len(given) > 1:
        limit = f"{given[0]} is given as well; an answer is held to one form"
        raise with_text(given[1], getattr(params, given[1]), limit)
    if given and params.ignore_eos:
        limit = f"an answer that is held to {given[0]} ends where that ends; leave it out"
        raise BadSetting("ignore_eos", params.ignore_eos, limit)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        limit = f"max_tokens is {params.max_tokens}; take at most that, or raise it"
        raise BadSetting("min_tokens", params.min_tokens, limit)


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise BadSetting(name, value, f"must be one of {', '.join(known)}")
