"""The options of `hypo bench`, `hypo doctor` and `hypo quantize`.

Holds spellings and help texts, as `options.py` does for what runs a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter, Token

from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.cli.options import (
    OUTPUT_GROUP,
    SWITCH,
    RunSources,
    as_whole,
    naming_options,
    whole_number,
)
from hypocenter.doctor.examining.time_limit import EXAMINE_SECONDS

_BENCH_GROUP = Group("Tests", sort_key=1)
_DOCTOR_GROUP = Group("Examination", sort_key=1)
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
