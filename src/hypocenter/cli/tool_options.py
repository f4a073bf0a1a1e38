"""The options of `hypo bench`, `hypo doctor`, `hypo eval` and `hypo quantize`.

Holds spellings and help texts, as `options.py` does for what runs a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.cli.options import (
    OUTPUT_GROUP,
    SWITCH,
    AsJson,  # noqa: F401  # a field of OutputOptions, which is looked up here
    OutputOptions,
    Quiet,  # noqa: F401
    RunSources,
    as_whole,
    naming_options,
    whole_number,
)
from hypocenter.doctor.examining.time_limit import EXAMINE_SECONDS
from hypocenter.settings.config import EngineConfig
from hypocenter.settings.routes import OF_CONFIG, read_routes
from hypocenter.trace.points import MAX_STEPS, POINTS, Selection

_BENCH_GROUP = Group("Tests", sort_key=1)
_DOCTOR_GROUP = Group("Examination", sort_key=1)
#: Steps of `hypo diff --against` whose tensors are kept.
_MAX_TOKENS_BEHIND = 256
#: Examples before each question of `hypo eval`, and samples of each task.
MAX_FEWSHOT, MAX_SAMPLES = 1000, 1 << 24
_EVAL_GROUP = Group("Tasks", sort_key=1)
#: Of `hypo replay`.
ExportFile = Annotated[
    str | None,
    Parameter(
        name="--export",
        help="Instead write the launch at fault to this new Python file, which makes it again with "
        "Triton and torch alone.",
    ),
]


def _read_wholes(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Whole numbers, each given by its own option or several between commas."""
    return tuple(as_whole(part) for token in tokens for part in token.value.split(","))


@Parameter(name="*", group=_BENCH_GROUP)
@dataclass(frozen=True)
class BenchOptions:
    """What `hypo bench` measures; names and defaults are those of llama-bench."""

    num_prompt: Annotated[
        tuple[int, ...],
        Parameter(
            name=("-p", "--n-prompt"),
            converter=_read_wholes,
            negative="",
            show_default=False,
            help="Tokens of each prompt test, 512 when left out; 0: none.",
        ),
    ] = (512,)
    num_generate: Annotated[
        int,
        Parameter(
            name=("-n", "--n-gen"),
            converter=whole_number,
            help="Tokens of the generation test; 0: none.",
        ),
    ] = 128
    depth: Annotated[
        tuple[int, ...],
        Parameter(
            name=("-d", "--n-depth"),
            converter=_read_wholes,
            negative="",
            show_default=False,
            help="Tokens in the cache beforehand; 0 when left out.",
        ),
    ] = (0,)
    num_sequences: Annotated[
        tuple[int, ...],
        Parameter(
            name=("-np", "--n-parallel"),
            converter=_read_wholes,
            negative="",
            show_default=False,
            help="Sequences that generate at once, 1 when left out; tokens are counted together.",
        ),
    ] = (1,)
    repetitions: Annotated[
        int,
        Parameter(name=("-r", "--repetitions"), converter=whole_number, help="Runs of each test."),
    ] = 5

    def __post_init__(self) -> None:
        limits = {"num_generate": 1 << 24, "repetitions": 1000}
        with naming_options(type(self)):
            for name, high in limits.items():
                low, value = int(name == "repetitions"), getattr(self, name)
                if not low <= value <= high:
                    raise BadSetting(name, value, f"must be from {low} to {high}")
            for num in self.num_sequences:
                if not 1 <= num <= 4096:
                    raise BadSetting("num_sequences", num, "must be from 1 to 4096")
            for name in ("num_prompt", "depth"):
                for num in getattr(self, name):
                    if not 0 <= num <= 1 << 24:
                        raise BadSetting(name, num, f"must be from 0 to {1 << 24}")
        if not any(self.num_prompt) and not self.num_generate:
            raise UsageError("nothing to measure: -p and -n are both 0")


@Parameter(name="*", group=_DOCTOR_GROUP)
@dataclass(frozen=True)
class DoctorOptions:
    """What `hypo doctor` examines, and how."""

    last: Annotated[
        bool, Parameter(name="--last", help="Examine the last run that died.", **SWITCH)
    ] = False
    self_test: Annotated[
        bool,
        Parameter(
            name="--self-test",
            help="Plant a fault on this machine, and say which sources of evidence work here.",
            **SWITCH,
        ),
    ] = False
    suspect: Annotated[
        bool,
        Parameter(
            name="--suspect",
            help="Trace the command, and examine it even if nothing faults. The bundle then holds "
            "numbers of layers, from which text can be read.",
            **SWITCH,
        ),
    ] = False
    nan: Annotated[
        bool,
        Parameter(
            name="--nan",
            help="Find the first operation of a torch program that made NaN or infinity of finite "
            "numbers. The bundle then holds a few numbers of that operation.",
            **SWITCH,
        ),
    ] = False
    again: Annotated[
        bool,
        Parameter(
            name="--again",
            help="Run the command again until a cause is proven: as with --nan, guarded, with "
            "blocking launches and the driver watched, below compute-sanitizer. It must do no harm "
            "when it runs up to six times.",
            **SWITCH,
        ),
    ] = False
    good: Annotated[
        str | None,
        Parameter(name="--good", help="Bundle of a run without the fault, to compare with."),
    ] = None
    out: Annotated[
        str | None,
        Parameter(name=("-o", "--out"), help="Folder of the new bundle. [default: hypo-bundle]"),
    ] = None
    deadline: Annotated[
        float | None,
        Parameter(
            name="--deadline",
            help="Seconds without progress after which the command is ended: a step takes longer, "
            "or none begins; of other programs a Triton launch, or torch.cuda.synchronize. "
            "Until the first of these begins the command has 60 seconds at least. "
            "[default: of a step 120, and 600 for the first, which compiles; of other programs "
            "none, but 600 for a launch in Triton's interpreter]",
        ),
    ] = None
    examine_for: Annotated[
        float,
        Parameter(
            name="--examine-for",
            help="Seconds that an examination may take. Then it reports what is known, and "
            "what was left out.",
        ),
    ] = EXAMINE_SECONDS
    with_prompts: Annotated[
        bool,
        Parameter(
            name="--with-prompts",
            help="Keep prompts and token ids in the new bundle; without, they are taken out.",
            **SWITCH,
        ),
    ] = False
    run_sources: RunSources = False
    all: Annotated[
        bool,
        Parameter(
            name="--all",
            help="Tell of each cause that is refuted or was not tested, not only how many.",
            group=OUTPUT_GROUP,
            **SWITCH,
        ),
    ] = False
    markdown: Annotated[
        bool,
        Parameter(name="--markdown", help="The report as Markdown.", group=OUTPUT_GROUP, **SWITCH),
    ] = False
    html: Annotated[
        str | None,
        Parameter(
            name="--html",
            help="Also write the report to this new file, as a page with source, memory and "
            "timeline. It holds no script and loads nothing.",
            group=OUTPUT_GROUP,
        ),
    ] = None
    perfetto: Annotated[
        str | None,
        Parameter(
            name="--perfetto",
            help="Also write the timeline to this new file, as JSON for ui.perfetto.dev.",
            group=OUTPUT_GROUP,
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class QuantizeOptions:
    """How `hypo quantize` goes about it; names are those of llama-quantize."""

    imatrix: Annotated[
        str | None,
        Parameter(
            name="--imatrix",
            help="Importance matrix of the model, as llama-imatrix writes it (GGUF or .dat).",
        ),
    ] = None
    pure: Annotated[
        bool,
        Parameter(name="--pure", help="Give all matrices one type, without the mix.", **SWITCH),
    ] = False
    allow_requantize: Annotated[
        bool,
        Parameter(
            name="--allow-requantize",
            help="Also of tensors that are quantised already, which loses more.",
            **SWITCH,
        ),
    ] = False


_TRACE_GROUP = Group("Trace", sort_key=7)
#: Bytes of a mebibyte, and the most of them that elements may take.
_MIB, _MAX_DATA_MIB = 1 << 20, 4096


def _read_ranges(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Whole numbers between commas, and ranges of them: 0-3,7."""
    found: list[int] = []
    for part in ",".join(token.value for token in tokens).split(","):
        first, dash, last = part.strip().partition("-")
        low = as_whole(first)
        high = as_whole(last) if dash else low
        if not 0 <= low <= high < MAX_STEPS:
            raise UsageError(f"{part!r} is no range of numbers from 0 to {MAX_STEPS - 1}")
        found += range(low, high + 1)
    return tuple(dict.fromkeys(found))


def _read_points(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    names = [part.strip() for token in tokens for part in token.value.split(",")]
    for name in names:
        if name not in POINTS:
            raise UsageError(f"there is no point {name!r}; there are {', '.join(POINTS)}")
    return tuple(dict.fromkeys(names))


def _read_routes(_: object, tokens: Sequence[Token]) -> dict[str, str]:
    return read_routes(token.value for token in tokens)


#: Of `hypo run` and `hypo bisect`.
Routes = Annotated[
    dict[str, str] | None,
    Parameter(
        name="--route",
        converter=_read_routes,
        n_tokens=1,
        accepts_keys=False,
        negative="",
        help="Run ops in other forms, OP=FORM between commas: norm, gate, rope and attention are "
        "fused or in parts, float_products exact or bf16.",
    ),
]


@Parameter(name="*", group=_TRACE_GROUP)
@dataclass(frozen=True)
class TraceOptions(OutputOptions):
    """What `hypo run` says, and what it writes down of the tensors of its steps."""

    file: Annotated[
        str | None,
        Parameter(
            name="--trace",
            help="Write what tensors held at named points of each step to this new file; see "
            "docs/traces.md.",
        ),
    ] = None
    points: Annotated[
        tuple[str, ...] | None,
        Parameter(
            name="--trace-points",
            converter=_read_points,
            negative="",
            help="Only these points, between commas: q,k,v,attention,logits, say.",
        ),
    ] = None
    layers: Annotated[
        tuple[int, ...] | None,
        Parameter(
            name="--trace-layers",
            converter=_read_ranges,
            negative="",
            help="Only these layers: 0-3,7, say.",
        ),
    ] = None
    steps: Annotated[
        tuple[int, ...] | None,
        Parameter(
            name="--trace-steps",
            converter=_read_ranges,
            negative="",
            help="Only these steps: 0 is the first one.",
        ),
    ] = None
    data_mib: Annotated[
        int,
        Parameter(
            name="--trace-data",
            converter=whole_number,
            help="Keep the elements of tensors too, up to so many MiB in all; 0: none.",
        ),
    ] = 0

    routes: Routes = None

    def __post_init__(self) -> None:
        with naming_options(type(self)):
            if not 0 <= self.data_mib <= _MAX_DATA_MIB:
                raise BadSetting("data_mib", self.data_mib, f"must be from 0 to {_MAX_DATA_MIB}")
        given = self.points or self.layers or self.steps or self.data_mib
        if self.file is None and given:
            raise UsageError("what is traced was named, but not where to; give --trace FILE")

    def config(self, config: EngineConfig) -> EngineConfig:
        """The configuration with the routes that are of it; raises UsageError."""
        asked: dict[str, Any] = {
            op: form for op, form in (self.routes or {}).items() if op in OF_CONFIG
        }
        return replace(config, **asked) if asked else config

    @property
    def selection(self) -> Selection:
        points = None if self.points is None else frozenset(self.points)
        return Selection(points, self.layers, self.steps)

    @property
    def max_data_bytes(self) -> int:
        return self.data_mib * _MIB


@Parameter(name="*")
@dataclass(frozen=True)
class PerplexityOptions(OutputOptions):
    """What `hypo perplexity` reads, compares with and says."""

    file: Annotated[
        str | None, Parameter(name=("-f", "--file"), help="The text; - reads stdin.")
    ] = None
    chunks: Annotated[
        int | None,
        Parameter(name="--chunks", converter=whole_number, help="At most so many chunks."),
    ] = None
    base: Annotated[
        str | None,
        Parameter(
            name=("--kl-divergence-base", "--save-all-logits"),
            help="Write the logits to this new file, or with --kl-divergence read them from it.",
        ),
    ] = None
    is_compared: Annotated[
        bool,
        Parameter(
            name="--kl-divergence",
            negative="",
            show_default=False,
            help="Say how far the model is from the one that wrote the base; the text is there.",
        ),
    ] = False

    def __post_init__(self) -> None:
        with naming_options(type(self)):
            if self.chunks is not None and self.chunks < 1:
                raise BadSetting("chunks", self.chunks, "must be at least 1")


@Parameter(name="*")
@dataclass(frozen=True)
class BisectOptions(OutputOptions):
    """What `hypo bisect` runs, and for how long."""

    model: Annotated[
        str | None,
        Parameter(name=("-m", "--model"), help="The model that trees and routes are run with."),
    ] = None
    prompt: Annotated[
        str, Parameter(name=("-p", "--prompt"), help="The text that is continued.")
    ] = "def read_lines(path):"
    num_tokens: Annotated[
        int,
        Parameter(name=("-n", "--n-predict"), converter=whole_number, help="Tokens behind it."),
    ] = 4
    device: Annotated[str, Parameter(name="--device", help="As of hypo run.")] = "cpu"
    budget: Annotated[
        float, Parameter(name="--budget", help="Seconds after which no further run begins.")
    ] = 60.0


@Parameter(name="*")
@dataclass(frozen=True)
class AgainstOptions(OutputOptions):
    """The other engine that `hypo diff MODEL` is held against, and what both are given."""

    against: Annotated[
        Literal["transformers", "llama.cpp"] | None,
        Parameter(name="--against", help="Run MODEL here and in this other engine."),
    ] = None
    peer_model: Annotated[
        str | None,
        Parameter(
            name="--peer-model",
            help="What the other engine is given: another GGUF file, or the folder that MODEL was "
            "made of, for transformers. [default: MODEL]",
        ),
    ] = None
    peer_python: Annotated[
        str | None,
        Parameter(
            name="--peer-python",
            help="The Python that has the other engine. [default: the one that runs hypo]",
        ),
    ] = None
    prompt: Annotated[
        str, Parameter(name=("-p", "--prompt"), help="The text that is continued.")
    ] = "def read_lines(path):"
    num_tokens: Annotated[
        int,
        Parameter(name=("-n", "--n-predict"), converter=whole_number, help="Tokens behind it."),
    ] = 4
    device: Annotated[str, Parameter(name="--device", help="As of hypo run.")] = "cpu"

    def __post_init__(self) -> None:
        with naming_options(type(self)):
            if not 1 <= self.num_tokens <= _MAX_TOKENS_BEHIND:
                limit = f"must be from 1 to {_MAX_TOKENS_BEHIND}"
                raise BadSetting("num_tokens", self.num_tokens, limit)
        given = [self.peer_model, self.peer_python]
        if self.against is None and any(each is not None for each in given):
            raise UsageError("--peer-model and --peer-python are of --against ENGINE; name one")


@Parameter(name="*", group=_EVAL_GROUP)
@dataclass(frozen=True)
class EvalOptions:
    """Which tasks, and how much of them."""

    tasks: Annotated[
        str | None,
        Parameter(name="--tasks", help="Names of tasks or groups of lm-eval, between commas."),
    ] = None
    include: Annotated[
        str | None,
        Parameter(
            name="--include",
            help="A folder with files of tasks of your own. lm-eval executes code that they name.",
        ),
    ] = None
    num_fewshot: Annotated[
        int | None,
        Parameter(
            name="--num-fewshot",
            converter=whole_number,
            help="Examples before each question, in place of the task's own number.",
        ),
    ] = None
    limit: Annotated[
        int | None,
        Parameter(
            name="--limit", converter=whole_number, help="So many samples of each task, to try it."
        ),
    ] = None

    def __post_init__(self) -> None:
        limits = {"num_fewshot": (0, MAX_FEWSHOT), "limit": (1, MAX_SAMPLES)}
        with naming_options(type(self)):
            for name, (low, high) in limits.items():
                value = getattr(self, name)
                if value is not None and not low <= value <= high:
                    raise BadSetting(name, value, f"must be from {low} to {high}")
        if self.include is not None and not Path(self.include).is_dir():
            raise UsageError(f"--include is {self.include}, but there is no such folder")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tasks; raises UsageError for none."""
        found = tuple(name for part in (self.tasks or "").split(",") if (name := part.strip()))
        if not found:
            raise UsageError("no task; name some of lm-eval's, such as --tasks hellaswag,gsm8k")
        return found
