"""Plain records of what happened: routes, timings, completions; nothing but derived figures."""

from __future__ import annotations

import msgspec


class Route(msgspec.Struct, frozen=True):
    """What the engine executed, read from inside it and never from what was asked for."""

    device: str
    instruction_set: str
    #: Of the largest matrices, and what they multiply activations as: I8 is codes of 8 bits.
    weight_dtype: str
    activation_dtype: str
    kv_dtype: str
    num_threads: int
    kernels: tuple[str, ...]
    #: Plans (one per shape of a step) that were captured and are replayed as a graph.
    num_graphs: int = 0


class Timings(msgspec.Struct, frozen=True):
    """Wall-clock figures of one request; `num_prompt_tokens` counts tokens that really ran."""

    num_prompt_tokens: int
    prompt_seconds: float
    num_generated_tokens: int
    generation_seconds: float

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.num_prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generated_tokens_per_second(self) -> float:
        # The first token comes out of the prompt pass; its time is not generation time.
        later = max(self.num_generated_tokens - 1, 0)
        return later / self.generation_seconds if self.generation_seconds else 0.0


class Completion(msgspec.Struct, frozen=True):
    """A finished request. `finish_reason`: stop (end token or stop string), length, cancelled."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    timings: Timings
    route: Route


class Delta(msgspec.Struct, frozen=True):
    """One piece of a streamed answer; `finish_reason` is None until the last piece."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class CompiledKernel(msgspec.Struct, frozen=True):
    """A kernel compiled for one architecture with no GPU, held against that GPU's limits.

    `ok` says that it would launch; else `problems` says why not, and where it did not compile the
    figures from `registers` on are None. Registers, `spills` (32-bit registers) and `scratch_bytes`
    are per thread, shared memory is per block; `loads` and `stores` map bits per thread to the
    number of such instructions on global memory.
    """

    kernel: str
    label: str
    arch: str
    guarded: bool
    ok: bool
    problems: tuple[str, ...]
    threads: int
    shared_limit: int
    registers: int | None = None
    scalar_registers: int | None = None
    accumulators: int | None = None
    spills: int | None = None
    scratch_bytes: int | None = None
    shared_bytes: int | None = None
    #: Resident waves over the most there can be, 0 to 1, and what keeps it below 1.
    occupancy: float | None = None
    waves_per_simd: float | None = None
    max_waves_per_simd: int | None = None
    limited_by: str | None = None
    loads: dict[int, int] = {}
    stores: dict[int, int] = {}
    num_instructions: int | None = None


class Site(msgspec.Struct, frozen=True):
    """A place in a source file; `expression` is the text that was being evaluated there."""

    file: str
    line: int
    function: str
    expression: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a kernel launch, with one lane of one program as its example.

    `sites` is the call chain inside the kernel, innermost first. `element` is the index in the
    tensor's own coordinates, None where the address lies outside of it; `number` counts elements
    from the tensor's first, and is negative before it. `values` are the names in the faulty
    expression at that lane. `threshold` is the first program, along `axis`, at which
    an int32 overflows.
    """

    kind: str
    kernel: str
    operation: str
    detail: str
    argument: str | None = None
    element: tuple[int, ...] | None = None
    number: int | None = None
    program: tuple[int, int, int] | None = None
    lane: tuple[int, ...] | None = None
    num_lanes: int = 0
    num_programs: int = 0
    sites: tuple[Site, ...] = ()
    origin: Site | None = None
    values: dict[str, bool | int | float | str] = {}
    axis: int | None = None
    threshold: int | None = None
    configuration: str | None = None
    launched_at: Site | None = None

    @property
    def file(self) -> str | None:
        return self.sites[0].file if self.sites else None

    @property
    def line(self) -> int | None:
        return self.sites[0].line if self.sites else None


class Headroom(msgspec.Struct, frozen=True):
    """How far a kernel's int32 offsets reach: the first program along `axis` that overflows.

    No fault of the launch that was seen, which had `num_programs` along that axis. `gave_up` says
    why the search along the axis had no end; `threshold` and `origin` are None then.
    """

    kernel: str
    axis: int
    threshold: int | None
    num_programs: int
    origin: Site | None = None
    values: dict[str, bool | int | float | str] = {}
    gave_up: str | None = None


class Coverage(msgspec.Struct, frozen=True):
    """How much of a launch was run: programs, and element accesses of them."""

    num_run: int
    num_launched: int
    num_lanes: int
    seconds: float

    @property
    def is_complete(self) -> bool:
        return self.num_run == self.num_launched


class ReplayReport(msgspec.Struct, frozen=True):
    """What the replay of one launch found."""

    findings: tuple[Finding, ...]
    headroom: tuple[Headroom, ...]
    coverage: Coverage


class SourceLine(msgspec.Struct, frozen=True):
    """A line of somebody's source, and the function that it belongs to."""

    file: str
    line: int
    function: str


class GuardSite(msgspec.Struct, frozen=True):
    """One guarded access: `expression` at `calls[0]`, reached through `calls[1:]` outwards.

    It may go through each of `parameters` (one or two) of the kernel; the words of a launch's slots
    from `slot` on belong to it, one per parameter.
    """

    slot: int
    operation: str
    parameters: tuple[str, ...]
    expression: str
    calls: tuple[SourceLine, ...]


class AccessFault(msgspec.Struct, frozen=True):
    """An access that a guarded launch masked off because it lay outside its parameter's tensor.

    `byte_offset` counts from the tensor's first element; of the lanes and programs at fault at this
    site it is one. `program` is None when the grid is too large for the record to tell. `launch` is
    the number of the launch within its step, from 0.
    """

    kernel: str
    site: GuardSite
    parameter: str
    null: bool
    byte_offset: int
    program: tuple[int, int, int] | None
    launch: int = 0


class CheckedLaunch(msgspec.Struct, frozen=True):
    """A launch that a checked program made: which kernel, from where, and how much was run."""

    kernel: str
    grid: tuple[int, int, int]
    coverage: Coverage
    launched_at: Site | None
    configuration: str | None = None
    #: Why this configuration does not compile (a static_assert); nothing was run then.
    skipped: str | None = None


class CheckReport(msgspec.Struct, frozen=True):
    """What a checked program did; `error` says why it ended early, if it did."""

    path: str
    arch: str
    findings: tuple[Finding, ...]
    headroom: tuple[Headroom, ...]
    launches: tuple[CheckedLaunch, ...]
    error: str | None
