"""The frozen configuration of an engine and of one request: each setting, declared once.

A setting's kind is what it may be; `setting.py` says what else a declaration holds. The TypedDicts
repeat names and types for type checkers, who derive neither from a dataclass; a test compares them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.base.tensor import DType
from hypocenter.conversation.thoughts import REASONING, require_variables
from hypocenter.settings.adapters import adapter_files, adapter_scales
from hypocenter.settings.grammar_text import (
    check_grammar,
    check_regex,
    choices,
    schema_text,
    with_text,
)
from hypocenter.settings.metadata_text import require_metadata
from hypocenter.settings.setting import (
    Checked,
    Flag,
    OneOf,
    OneText,
    RealNumber,
    SeveralTexts,
    TokenIds,
    Whole,
    declare_settings,
    setting,
    settle,
)
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
DEVICE = re.compile(r"cpu|(cuda|hip)(:[0-9]{1,3})?|(sim|emu):[a-z0-9]{1,20}")
DEVICE_LIMIT = "must be auto, cpu, cuda, hip, cuda:N, hip:N, sim:NAME or emu:NAME"


def is_simulated(device: str) -> bool:
    """Whether a device is no GPU, but what `device/sim/` or `device/amd/` stand for one with."""
    return device.startswith(("sim:", "emu:"))


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
_RANKS_HAVE_NO_DRAFTS = "a draft model runs beside a model on one GPU; use 1, or no draft_model"
_RANKS_HAVE_NO_HEADS = "a head drafts for a model on one GPU; use 1, or another spec"
_ONE_DRAFTS = "a draft model says what is tried; use off, or no draft_model"
_RANKS_NEED_GPUS = "a CPU has all cores for one model; use 1, or a device such as cuda or hip"
#: What a KV cache holds, by its name. Of those in HADAMARD_KV_DTYPES heads go through a Hadamard
#: matrix before they are rounded.
KV_DTYPES = {
    "f16": DType.F16,
    "f32": DType.F32,
    "q8_0": DType.Q8_0,
    "q4_0": DType.Q4_0,
    "q4_0_hadamard": DType.Q4_0,
}
HADAMARD_KV_DTYPES = frozenset({"q4_0_hadamard"})
_BLOCKS_ARE_FUSED = "parts of attention read no blocks; use f16 or f32, or attention fused"
#: More than any model has.
_MOST_LAYERS = 1 << 16
#: How a text becomes one vector: not at all, the mean of its tokens, its first or last one, or a
#: score. The order is that of the GGUF format.
POOLINGS = ("none", "mean", "cls", "last", "rank")
MAX_TOKENS = 1 << 31
#: Where tokens come from that a step tries before they are chosen.
SPECS = ("off", "ngram", "mtp")
#: Up to 16 rows a GPU reads its weights once.
MAX_DRAFTS = 15
DEFAULT_CONTEXT = 4096
#: Most tokens of a step where nobody says. On an H200 a prompt of 2,048 in one step takes 8 % less
#: than in four; a token of another request waits for it as long.
_STEP, _GPU_STEP = 512, 2048


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


def _allowed_tokens(given: object) -> tuple[int, ...]:
    allowed = token_ids("allowed_token_ids", given, MAX_ALLOWED_TOKENS)
    if not allowed:
        limit = "one token at least must be allowed"
        raise BadSetting("allowed_token_ids", allowed, limit, ", or None: all are")
    return allowed


def _stop_tokens(given: object) -> tuple[int, ...]:
    return token_ids("stop_token_ids", given, MAX_STOP_TOKENS)


def _device(name: object) -> str:
    if not isinstance(name, str) or not (name == AUTO or DEVICE.fullmatch(name)):
        raise BadSetting("device", name, DEVICE_LIMIT)
    return name


def _variables(given: Any) -> Any:
    require_variables(given)
    return given


def _metadata(given: Any) -> Any:
    require_metadata("override_kv", given)
    return given


@declare_settings
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Greedy by default, so that a first run repeats itself.

    `json_schema` is kept as text, `logit_bias` as pairs, and lists are kept as tuples. At most one
    of `json_schema`, `json_object`, `grammar`, `regex` and `choice` may be given.
    Raises UsageError when a value is of a wrong type or out of its range.
    """

    max_tokens: int | None = setting(
        128,
        Whole(low=0, high=MAX_TOKENS, none="until the model ends its answer"),
        "Most tokens to generate.",
        cli=("-n", "--predict", "--n-predict", "--max-tokens"),
        cli_none=-1,
        in_chat=None,
        also_called=("max_completion_tokens", "max_new_tokens", "num_predict"),
        api=("max_tokens", "max_completion_tokens", "n_predict"),
        api_is_read_apart=True,
    )
    # What a chat samples with unless it is told otherwise is what llama.cpp has there: small models
    # that always take the most likely token repeat themselves without end.
    temperature: float = setting(
        0.0,
        RealNumber(low=0.0, high=100.0),
        "0 takes the most likely token.",
        cli=("--temp", "--temperature"),
        in_chat=0.8,
        api=("temperature",),
        api_default=1.0,
    )
    top_k: int = setting(
        0,
        Whole(low=0, high=MAX_TOP_K, off=0),
        "Keep the k most likely tokens; 0 is off.",
        cli=("--top-k",),
        in_chat=40,
        api=("top_k",),
    )
    top_p: float = setting(
        1.0,
        RealNumber(low=0.0, high=1.0),
        "Keep the most likely tokens up to this total probability; 1 is off.",
        cli=("--top-p",),
        in_chat=0.95,
        api=("top_p",),
    )
    min_p: float = setting(
        0.0,
        RealNumber(low=0.0, high=1.0),
        "Keep tokens above this share of the most likely one; 0 is off.",
        cli=("--min-p",),
        in_chat=0.05,
        api=("min_p",),
    )
    repeat_penalty: float = setting(
        1.0,
        # Divided by 1e-308 a logit would be infinite; nobody means less than a hundredth.
        RealNumber(low=0.01, high=100.0),
        "Divides logits of seen tokens; 1 is off.",
        cli=("--repeat-penalty",),
        api=("repetition_penalty", "repeat_penalty"),
    )
    presence_penalty: float = setting(
        0.0,
        RealNumber(low=-2.0, high=2.0),
        "Subtracted once a token was generated.",
        cli=("--presence-penalty",),
        api=("presence_penalty",),
    )
    frequency_penalty: float = setting(
        0.0,
        RealNumber(low=-2.0, high=2.0),
        "Subtracted for each earlier occurrence of a token.",
        cli=("--frequency-penalty",),
        api=("frequency_penalty",),
    )
    seed: int | None = setting(
        None,
        Whole(low=0, high=MAX_SEED, none="another one each time"),
        "Seed of the random stream.",
        cli=("-s", "--seed"),
        cli_none=-1,
        api=("seed",),
    )
    stop: Sequence[str] = setting(
        (),
        SeveralTexts(check=_stop_strings),
        "Text or texts that end the answer.",
        cli=("--stop",),
        written="Text that ends the answer; may be given again.",
        also_called=("stop_sequences", "stop_strings"),
        api=("stop",),
    )
    ignore_eos: bool = setting(
        False, Flag(), "Go on after an end token.", cli=("--ignore-eos",), api=("ignore_eos",)
    )
    logprobs: int | None = setting(
        None,
        Whole(low=0, high=MAX_LOGPROBS, none="none"),
        "The log probability of each chosen token, and of so many of the likeliest of its place, "
        "by the raw logits.",
        also_called=("top_logprobs",),
        api=("logprobs", "top_logprobs"),
        api_is_read_apart=True,
    )
    prompt_logprobs: int | None = setting(
        None,
        Whole(low=0, high=MAX_LOGPROBS, none="none"),
        "The same for the tokens of the prompt.",
        api=("echo",),
        api_is_read_apart=True,
    )
    json_schema: dict[str, Any] | str | None = setting(
        None,
        Checked("any answer", check=schema_text),
        "A JSON schema; the answer is JSON that it allows.",
        cli=("--json-schema",),
        written="File with a JSON schema; the answer is JSON that it allows.",
        also_called=("guided_json",),
        api=("json_schema", "response_format", "structured_outputs", "guided_json"),
        api_is_read_apart=True,
    )
    json_object: bool = setting(
        False,
        Flag(),
        "The answer is a JSON object.",
        cli=("--json-object",),
        api=("response_format", "structured_outputs"),
        api_is_read_apart=True,
    )
    grammar: str | None = setting(
        None,
        Checked("any answer", check=check_grammar),
        "A grammar, Lark or GBNF, that the answer follows.",
        cli=("--grammar",),
        written="File with a grammar, Lark or GBNF, that the answer follows.",
        also_called=("guided_grammar",),
        api=("grammar", "structured_outputs", "guided_grammar"),
        api_is_read_apart=True,
    )
    regex: str | None = setting(
        None,
        Checked("any answer", check=check_regex),
        "A regular expression that the whole answer matches.",
        also_called=("guided_regex",),
        api=("structured_outputs", "guided_regex"),
        api_is_read_apart=True,
    )
    choice: Sequence[str] | None = setting(
        None,
        SeveralTexts("any answer", check=choices),
        "SeveralTexts, of which the answer is one.",
        also_called=("guided_choice",),
        api=("structured_outputs", "guided_choice"),
        api_is_read_apart=True,
    )
    logit_bias: dict[int, float] | Sequence[tuple[int, float]] = setting(
        (),
        Checked(check=logit_biases),
        "Added to the logits of single tokens, from -100 to 100; False or -inf is never.",
        cli=("-l", "--logit-bias"),
        written="TOKEN_ID+BIAS or TOKEN_ID-BIAS, added to that token's logit, such as 42-1.5; "
        "42-inf: never. May be given again.",
        api=("logit_bias",),
    )
    allowed_token_ids: Sequence[int] | None = setting(
        None,
        TokenIds("all are", check=_allowed_tokens),
        "Only these tokens come.",
        api=("allowed_token_ids",),
    )
    stop_token_ids: Sequence[int] = setting(
        (),
        TokenIds(check=_stop_tokens),
        "Tokens that end the answer as an end token does.",
        api=("stop_token_ids",),
    )
    min_tokens: int = setting(
        0,
        Whole(low=0, high=MAX_TOKENS),
        "Nothing ends an answer before it has so many tokens, unless nothing else may come.",
        api=("min_tokens",),
    )
    bad_words: Sequence[str] = setting(
        (), SeveralTexts(check=bad_words), "Their tokens do not come in a row.", api=("bad_words",)
    )
    include_stop_str_in_output: bool = setting(
        False,
        Flag(),
        "The answer ends with the stop string.",
        api=("include_stop_str_in_output",),
    )
    drafts: bool = setting(
        True,
        Flag(),
        "Try several tokens a step, where the model was opened with spec; the answer is the same.",
        api=("drafts",),
    )
    lora: str | dict[str, float] | Sequence[str | tuple[str, float]] | None = setting(
        None,
        Checked("as the engine was given them", check=adapter_scales),
        "Adapters by name, alone or with what each counts; those not named count nothing.",
        api=("lora",),
        api_is_read_apart=True,
    )

    def __post_init__(self) -> None:
        settle(self)
        _require_compatible(self)

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
    drafts: bool
    lora: str | dict[str, float] | Sequence[str | tuple[str, float]] | None


@declare_settings
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is built with; constructed once, never written to.

    Raises UsageError when a value is of a wrong type or out of its range.
    """

    device: str = setting(
        AUTO,
        Checked(check=_device),
        "auto, the GPU that has room, else the CPU; cpu, cuda, hip, a simulated GPU such as "
        "sim:mi300x, or emu:mi300x, which executes AMD's machine code on the CPU.",
        cli=("--device",),
    )
    context_length: int | None = setting(
        None,
        Whole(low=1, high=1 << 24, none=f"the model's own, at most {DEFAULT_CONTEXT}"),
        "Context length in tokens; by default the trained one, within bounds.",
        cli=("-c", "--ctx-size", "--max-model-len"),
        also_called=("max_seq_len", "n_ctx", "num_ctx"),
    )
    num_threads: int | None = setting(
        None,
        Whole(low=1, high=1024, none="every core this process may use"),
        "CPU threads; by default all.",
        cli=("-t", "--threads"),
        also_called=("n_threads", "num_thread"),
    )
    max_batch_tokens: int | None = setting(
        None,
        Whole(low=1, high=65536, none="by the device"),
        f"Most tokens of a step; by default {_GPU_STEP} on a GPU, {_STEP} elsewhere.",
        cli=("-b", "--batch-size", "--max-num-batched-tokens"),
        also_called=("n_batch",),
    )
    max_batch_requests: int = setting(
        32,
        Whole(low=1, high=4096),
        "Requests that run at once; others wait.",
        cli_of_serve=("-np", "--parallel", "--max-num-seqs"),
    )
    block_size: int = setting(
        16, OneOf(known=(16, 32, 64, 128)), "Tokens of a block of the KV cache."
    )
    prefix_cache: bool = setting(
        True,
        Flag(),
        "Do not compute again how a prompt begins, when one before began so.",
        cli=("--prefix-cache",),
        also_called=("cache_prompt", "enable_prefix_caching"),
    )
    disk_cache: str | None = setting(
        None,
        OneText("none"),
        "Folder where such beginnings are kept, to be found again by a server or program that is "
        "started later; on the CPU.",
        cli=("--disk-cache",),
    )
    disk_cache_mib: int = setting(
        10240,
        Whole(low=1, high=1 << 30),
        "MiB that this folder may take.",
        cli=("--disk-cache-mib",),
    )
    state_checkpoints: int = setting(
        8,
        Whole(low=0, high=4096),
        "How many states are kept for that, where layers of a model carry one.",
        cli=("--state-checkpoints",),
    )
    kv_tokens: int | None = setting(
        None,
        Whole(low=1, high=1 << 28, none="what there is room for, on a CPU a quarter of it"),
        "Tokens that the KV cache holds, of all requests together.",
        cli_of_serve=("--kv-tokens",),
    )
    itl_target: float | None = setting(
        None,
        RealNumber(low=1.0, high=60000.0, none="told by what steps take, on a GPU"),
        "Milliseconds between two tokens of an answer, by which prompts of others are cut; by "
        "default, on a GPU, 20 or 2.9 times a step without prompts, or what reads all that wait in "
        "four steps.",
        cli=("--itl-target",),
    )
    gpu_memory_fraction: float = setting(
        0.9,
        RealNumber(low=0.05, high=1.0),
        "Share of a GPU's memory that the model may take, KV cache included, if others leave it.",
        cli=("--gpu-memory-fraction", "--gpu-memory-utilization"),
    )
    cpu_memory_fraction: float = setting(
        0.25,
        RealNumber(low=0.001, high=0.9),
        "Share of the memory that a CPU has left, beside the weights, that the KV cache may take; "
        "replicas divide it.",
        cli=("--cpu-memory-fraction",),
    )
    kv_dtype: str = setting(
        "f16",
        OneOf(known=tuple(KV_DTYPES), folds_case=True),
        "KV cache, keys and values alike: f16, f32, q8_0, q4_0 or q4_0_hadamard.",
        cli=("--kv-dtype",),
        tells_given=True,
        also_called=("cache_type_k", "cache_type_v", "kv_cache_dtype"),
    )
    tokenizer_pre: str | None = setting(
        None,
        OneText("what the file names"),
        "Pre-tokenizer, where the file names none.",
        cli=("--tokenizer-pre",),
    )
    chat_template: str | None = setting(
        None,
        OneText("the file's own"),
        "One of the file's by its name, chatml, or the text of a template.",
        cli=("--chat-template",),
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        None,
        Checked("none", check=_variables),
        "Variables of the chat template.",
        cli=("--chat-template-kwargs",),
        written="Variables of the chat template, as JSON: '{\"enable_thinking\": false}'.",
    )
    override_kv: dict[str, Any] | None = setting(
        None,
        Checked("none", check=_metadata),
        "Metadata in place of what the model's file says, by key, or beside it.",
        cli=("--override-kv",),
        written="Metadata in place of the file's: KEY=TYPE:VALUE, several with commas. TYPE is "
        "int, float, bool or str.",
    )
    reasoning: str = setting(
        "auto",
        OneOf(known=REASONING),
        "Whether the model thinks before it answers: auto, on, off, or how much: minimal, low, "
        "medium, high, xhigh. Some models have no choice.",
        cli=("--reasoning",),
    )
    pooling: str | None = setting(
        None,
        OneOf("as the model's file says", known=POOLINGS),
        "Give vectors of texts and write none: none, a vector for each token; mean, of all; cls, "
        "of the first; last; or rank, a score. By default as the file of such a model says.",
        cli=("--pooling",),
        also_called=("pooling_type",),
    )
    launch_mode: str = setting(
        "off",
        OneOf(known=LAUNCH_MODES),
        "off; checked rechecks every launch's arguments and index values; guarded (GPU) masks "
        "accesses off that leave their tensors, and names them; traced waits for every launch and "
        "writes down what it did, for hypo doctor and hypo diff.",
        cli=("--launch-mode",),
        written="off, checked, guarded (GPU kernels only), or traced.",
    )
    attention: str = setting(
        "fused",
        OneOf(known=ATTENTIONS),
        "fused, or its parts one by one (GPU kernels only).",
        cli=("--attention",),
    )
    float_products: str = setting(
        "exact",
        OneOf(known=FLOAT_PRODUCTS),
        "Of F16 and BF16 matrices on the CPU: exact, or bf16, which rounds them and what they "
        "multiply (made for Zen 4 and 5).",
        cli=("--float-products",),
    )
    cpu_moe: bool = setting(
        False,
        Flag(),
        "Experts stay in the host's memory, where the CPU computes them; a GPU has the rest.",
        cli=("--cpu-moe", "-cmoe"),
    )
    n_cpu_moe: int = setting(
        0,
        Whole(low=0, high=_MOST_LAYERS),
        "Those of so many layers, from the first on.",
        cli=("--n-cpu-moe", "-ncmoe"),
    )
    tensor_parallel: int = setting(
        1,
        Whole(low=1, high=MAX_RANKS),
        "GPUs of this machine that hold the model together.",
        cli=("--tensor-parallel", "--tensor-parallel-size", "-tp"),
    )
    spec: str = setting(
        "off",
        OneOf(known=SPECS),
        "Several tokens a step: off; ngram, which tries what followed the same tokens before in "
        "prompt and answer; or mtp, which tries what a head in the model's file proposes. Answers "
        "stay the same.",
        cli=("--spec",),
    )
    draft_max: int = setting(
        7,
        Whole(low=1, high=MAX_DRAFTS),
        "Most tokens that a step tries for an answer, with spec or a draft model.",
        cli=("--draft-max", "--draft", "--draft-n", "--num-speculative-tokens"),
        also_called=("num_speculative_tokens",),
    )
    draft_model: str | None = setting(
        None,
        OneText("none drafts"),
        "GGUF file of a smaller model of the same vocabulary, whose tokens are tried several a "
        "step. Answers stay the same.",
        cli=("--model-draft", "-md", "--spec-draft-model"),
        also_called=("speculative_model", "model_draft"),
    )
    lora: str | Sequence[str] = setting(
        (),
        SeveralTexts(check=adapter_files),
        "LoRA adapters in GGUF beside the model, each FILE, FILE:SCALE or NAME=FILE:SCALE.",
        cli=("--lora", "--lora-scaled"),
        written="LoRA adapter in GGUF: FILE, FILE:SCALE or NAME=FILE:SCALE; may be given again.",
        also_called=("lora_path", "lora_adapters"),
    )

    def __post_init__(self) -> None:
        settle(self)
        if self.attention == "parts" and self.device == "cpu":
            raise BadSetting("attention", self.attention, PARTS_NEED_A_GPU)
        if self.float_products == "bf16" and self.device not in ("cpu", AUTO):
            raise BadSetting("float_products", self.float_products, _BF16_NEEDS_THE_CPU)
        if self.tensor_parallel > 1 and self.device == "cpu":
            raise BadSetting("tensor_parallel", self.tensor_parallel, _RANKS_NEED_GPUS)
        if self.spec == "mtp" and self.tensor_parallel > 1:
            raise BadSetting("tensor_parallel", self.tensor_parallel, _RANKS_HAVE_NO_HEADS)
        if self.draft_model is not None and self.tensor_parallel > 1:
            raise BadSetting("tensor_parallel", self.tensor_parallel, _RANKS_HAVE_NO_DRAFTS)
        if self.draft_model is not None and self.spec != "off":
            raise BadSetting("spec", self.spec, _ONE_DRAFTS)
        if KV_DTYPES[self.kv_dtype].is_quantised and self.attention == "parts":
            raise BadSetting("kv_dtype", self.kv_dtype, _BLOCKS_ARE_FUSED)

        self._require_what_goes_with_host_layers()

    def _require_what_goes_with_host_layers(self) -> None:
        if not self.num_host_layers:
            return
        if self.cpu_moe and self.n_cpu_moe:
            twice = "cpu_moe is given as well, which has the experts of all layers; give one"
            raise BadSetting("n_cpu_moe", self.n_cpu_moe, twice)
        name, value = ("cpu_moe", True) if self.cpu_moe else ("n_cpu_moe", self.n_cpu_moe)
        limits = {
            self.device == "cpu": "a CPU has all of the model; leave it out, or name a GPU",
            self.tensor_parallel > 1: "parts of a model have their experts themselves; use one GPU",
            bool(self.lora): "adapters are applied by one device; leave out lora",
            self.launch_mode != "off": f"launches are not {self.launch_mode} there; use off",
        }
        if limit := limits.get(True):
            raise BadSetting(name, value, limit)

    @property
    def num_host_layers(self) -> int:
        """Layers, from the first on, whose experts are the host's: more than there are for all."""
        return _MOST_LAYERS if self.cpu_moe else self.n_cpu_moe

    @property
    def tries_tokens(self) -> bool:
        """Whether steps try tokens before they are chosen."""
        return self.spec != "off" or self.draft_model is not None

    @property
    def drawn_rows(self) -> int:
        """The most tokens that a step chooses: one of each request, or all that one may try."""
        most = self.max_batch_requests
        if self.tries_tokens:
            most = max(most, 1 + self.draft_max)
        return min(most, self.step_tokens)

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
    disk_cache: str | None
    disk_cache_mib: int
    state_checkpoints: int
    kv_tokens: int | None
    itl_target: float | None
    gpu_memory_fraction: float
    cpu_memory_fraction: float
    kv_dtype: str
    tokenizer_pre: str | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    override_kv: dict[str, Any] | None
    reasoning: str
    pooling: str | None
    launch_mode: str
    attention: str
    float_products: str
    cpu_moe: bool
    n_cpu_moe: int
    tensor_parallel: int
    spec: str
    draft_max: int
    draft_model: str | None
    lora: str | Sequence[str]


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
