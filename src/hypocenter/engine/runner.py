"""Runs batches on a device: fills the plan's static inputs and walks the plan.

Checks every index before it reaches a kernel; scheduling and sampling are elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hypocenter.base import package
from hypocenter.base.dtypes import Array, Float32s
from hypocenter.base.errors import BadSetting, LaunchRejected
from hypocenter.base.results import Route
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.block_sums import BlockSums, has_whole_words
from hypocenter.device.choice import with_device
from hypocenter.device.cpu.sources import source_hash
from hypocenter.device.cpu.target import instruction_set
from hypocenter.device.cpu.threads import max_num_threads, set_num_threads
from hypocenter.device.forms import distinct
from hypocenter.device.group import Group
from hypocenter.device.helper_processes import never
from hypocenter.device.launch import Launch, compile_all, run, start_threads
from hypocenter.device.lending import LentRoom
from hypocenter.device.page_watch import PageWatch
from hypocenter.device.plan import Plan, bucket
from hypocenter.engine.batch import Batch, BatchLimits, check_batch
from hypocenter.engine.block_archive import DIGEST_BYTES, BlockArchive
from hypocenter.engine.disk_blocks import DiskBlocks
from hypocenter.engine.host_growth import HostGrowth
from hypocenter.engine.pace import StepPace
from hypocenter.engine.page_bytes import PageBytes
from hypocenter.engine.ranks.ranks import Ranks
from hypocenter.engine.resident_blocks import ResidentBlocks
from hypocenter.engine.sampler import launches_on_device, launches_on_host
from hypocenter.engine.state_ledger import StateLedger, sequence_starts, spans_of
from hypocenter.engine.step_trace import StepTrace
from hypocenter.engine.text_head import TextHead
from hypocenter.kernels.collective.collectives import broadcast
from hypocenter.kernels.collective.peer_sum import open_peer_sum
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.facts.nextn import head_of
from hypocenter.model.facts.part import WHOLE, Part
from hypocenter.model.facts.split import part_of
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.file_types import quantisation_of
from hypocenter.model.layers import decoder
from hypocenter.model.layers.decoder import Decoder
from hypocenter.model.layers.points import KeptPoints
from hypocenter.model.layers.step_buffers import (
    Cache,
    HiddenStates,
    KVPages,
    StatePages,
    StepInputs,
)
from hypocenter.model.placement import (
    context_length_of,
    kv_room,
    kv_tokens_in,
    require_gpu_room,
    with_host_cache,
    with_whole_texts,
)
from hypocenter.model.tensors import footprint
from hypocenter.model.tensors.adapters import (
    AdapterSet,
    num_bytes_of,
    open_adapters,
    part_of_adapters,
    with_adapters,
)
from hypocenter.model.tensors.packed_weights import Packing
from hypocenter.model.tensors.part_of_file import PartOfFile
from hypocenter.model.tensors.table import Weights
from hypocenter.model.tensors.weights import load_weights
from hypocenter.record.prefixes import settings_digest
from hypocenter.record.recorder import current, open_recorder
from hypocenter.settings.config import HADAMARD_KV_DTYPES, KV_DTYPES, EngineConfig, OnProgress
from hypocenter.settings.routes import OF_CONFIG, ROUTES
from hypocenter.trace.points import FORMAT, VERSION, Selection, TracedAdapter, TraceHeader
from hypocenter.trace.writing import TraceFile
from hypocenter.wire.messages import KeptWeights

_log = logging.getLogger("hypocenter.engine")

#: Of the memory that is left, what copies of the KV cache's blocks may take.
_ARCHIVE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Seat:
    """Which part of a model this process holds, where several hold it together.

    `group` are all of these processes, and `ranks` those that follow this one. `kept` is what
    another process has of that part on the device.
    """

    part: Part = WHOLE
    group: Group | None = None
    ranks: Ranks | None = None
    kept: KeptWeights | None = None
    #: Adapters that requests may have, where there are any.
    adapters: AdapterSet | None = None
    #: It writes ahead of another model.
    is_draft: bool = False
    #: What the model leaves of its tokens, for a head that drafts.
    hidden: HiddenStates | None = None


ALONE = Seat()


def load_runner(
    file: GGUFFile,
    config: EngineConfig,
    progress: OnProgress | None = None,
    *,
    block_memory: str = "",
    seat: Seat = ALONE,
    compiles: bool = True,
) -> Runner:
    """Load a model's weights, or map those that another process has, and compile its kernels,
    unless the caller does.

    `block_memory`: the path of memory in which blocks of the KV cache outlive this process (CPU).
    Raises UsageError when the context asked for exceeds the trained
    one, bf16 is asked for where nothing would be multiplied in it, or the KV cache in blocks where
    heads are no whole ones, BadModelFile or UnsupportedModel for a file that cannot be run,
    OutOfMemory for one that does not fit.
    """
    part, group, kept = seat.part, seat.group, seat.kept
    config = _on_a_device(file, config)
    arch = read_architecture(file, config.pooling)
    config = with_whole_texts(arch, config)
    if kept is not None and kept.stamps != repr(file.stamps):
        kept = None  # of a file that is another one now
    adapters = open_adapters(config.lora, file, arch)
    _tell_of_heads(adapters, arch, config)
    file, arch, adapters = _cut_to_part(file, arch, adapters, part)
    if kept is not None and kept.pages is not None:
        config = replace(config, kv_tokens=kept.kv_tokens)
    context_length = context_length_of(arch, config)
    in_bf16 = config.float_products == "bf16"
    if in_bf16:
        _require_bf16_products(file, arch)
    _require_fitting(file, arch, config)
    device = devices.open_device(config.device)
    if not seat.is_draft:
        current().record_model(file.path.name, arch.name, quantisation_of(file))
    if device == "cpu":
        config = with_host_cache(file, arch, config)
        footprint.require_room(file, arch, config, context_length, num_bytes_of(adapters))
    elif (
        kept is None
        and part.num_parts == 1
        and not seat.is_draft  # what it takes was left by the model
        and (room := devices.room_of(device)) is not None
    ):
        require_gpu_room(device, file, arch, config, room)
    if group is not None:
        open_peer_sum(group, device)
    set_num_threads(_num_threads(config))  # they pack the weights, too
    weights = load_weights(
        file,
        arch,
        context_length,
        progress,
        device=device,
        held=Packing(
            in_bf16,
            adapters is None or not adapters.reads_feed_forwards,
            config.num_host_layers,
        ),
        shared=kept,
    )
    weights = with_adapters(weights, adapters, file, arch, device)
    if config.kv_tokens is None and (room := devices.room_of(device)) is not None:
        config = _with_cache(config, arch, kv_room(file, arch, config, room), group)
    seat = replace(seat, kept=kept, adapters=adapters and adapters.without_numbers())
    runner = Runner(arch, weights, config, context_length, seat)
    runner.model_stamps = repr(file.stamps)
    runner.open_outside_blocks(block_memory)
    _log_cache(runner, device)
    if compiles:
        runner.compile(progress)
    return runner


def _tell_of_heads(adapters: AdapterSet | None, arch: Architecture, config: EngineConfig) -> None:
    """Say what is passed over of adapters that were made for layers that only draft, too."""
    head = f"blk.{arch.num_layers}." if config.spec == "mtp" else "none"
    for adapter in adapters.files if adapters is not None else ():
        if num := sum(not name.startswith(head) for name in adapter.of_heads):
            text = (
                "%s: %d pairs stand beside layers that propose tokens (MTP) and do not run here; "
            )
            _log.warning(text + "--spec mtp runs the first such layer", adapter.path, num)


def _cut_to_part(
    file: GGUFFile, arch: Architecture, adapters: AdapterSet | None, part: Part
) -> tuple[GGUFFile, Architecture, AdapterSet | None]:
    """What one part has of a model and of its adapters. Raises as `part_of` and `PartOfFile`."""
    if part.num_parts == 1:
        return file, arch, adapters
    own_arch = part_of(arch, part)
    own_file = PartOfFile(file, arch, part)
    return own_file, own_arch, part_of_adapters(adapters, (file, arch), (own_file, own_arch))


def _log_cache(runner: Runner, device: str) -> None:
    num_tokens = runner.num_blocks * runner.block_size
    contexts = num_tokens / runner.context_length
    _log.info("%s: KV cache of %d tokens: %.3g full contexts", device, num_tokens, contexts)


def _require_bf16_products(file: GGUFFile, arch: Architecture) -> None:
    """Raises BadSetting where nothing would be multiplied in bf16."""
    if DType.BF16 not in footprint.held_dtypes(file, arch, in_bf16=True):
        limit = f"{file.path} has no matrix of F16 or BF16 of an even number of columns; use exact"
        raise BadSetting("float_products", "bf16", limit)


def _require_fitting(file: GGUFFile, arch: Architecture, config: EngineConfig) -> None:
    """Raises UsageError for a setting that this model cannot have."""
    footprint.require_kv_dtype(arch, config.kv_dtype)
    if config.spec == "mtp":
        head_of(file, arch)
    _require_experts(file, arch, config)


def _require_experts(file: GGUFFile, arch: Architecture, config: EngineConfig) -> None:
    """Raises BadSetting where experts are asked to be on the host that are not there, or not by
    themselves, and ModelTooLarge where it has no room for them."""
    if not config.num_host_layers:
        return
    name, value = ("cpu_moe", True) if config.cpu_moe else ("n_cpu_moe", config.n_cpu_moe)
    if config.device == "cpu":
        raise BadSetting(name, value, "a CPU has all of the model; leave it out, or name a GPU")
    if arch.experts is None:
        raise BadSetting(name, value, f"a {arch.name} model has no experts; leave it out")
    if any(arch.is_mixture(layer) and arch.is_dense(layer) for layer in range(arch.num_layers)):
        limit = f"experts of {arch.name} models stand beside a dense feed-forward; leave it out"
        raise BadSetting(name, value, limit)
    footprint.require_host_room(file, arch, config)


@contextlib.contextmanager
def loaded_runner(
    file: GGUFFile,
    config: EngineConfig,
    progress: OnProgress | None = None,
    shared: KeptWeights | None = None,
    block_memory: str = "",
) -> Iterator[Runner]:
    """The runner of a model, and for the time of the block the processes of its other parts.

    Raises as `load_runner`, UsageError where such a process cannot load its part, and RankLost.
    """
    config = _on_a_device(file, config)
    if config.tensor_parallel == 1:
        seat = Seat(kept=shared)
        yield load_runner(file, config, progress, block_memory=block_memory, seat=seat)
        return
    arch = read_architecture(file, config.pooling)
    part_of(arch, Part(0, config.tensor_parallel))  # refuses before all else
    of_others = shared.of_ranks if shared is not None else ()
    with contextlib.closing(Ranks(file.path, config, of_others)) as ranks:
        group = ranks.join(devices.open_device(config.device))
        part = Part(0, config.tensor_parallel)
        runner = load_runner(file, config, progress, seat=Seat(part, group, ranks, shared))
        try:
            ranks.wait()
            yield runner
        finally:
            runner.release()  # the library does not let a group go while graphs have its calls


#: Of a plan: its buckets of tokens and logit rows, its sequences, whether texts are long, and
#: whether some have adapters.
_Key = tuple[int, int, int | None, bool, bool]


class Runner:
    """One model on one device, with its cache pages. Not safe from two threads: engine.py locks."""

    #: Called behind each step that was launched, with its plan and its batch.
    after_step: Callable[[Plan, Batch], None] | None = None

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        config: EngineConfig,
        context_length: int,
        seat: Seat = ALONE,
    ) -> None:
        open_recorder()
        group, kept, self._is_draft = seat.group, seat.kept, seat.is_draft
        #: Adapters that requests may have, if there are any.
        self.adapters = seat.adapters
        #: The processes that hold the other parts of the model, if it has any.
        self.ranks = seat.ranks
        self.arch, self.weights, self.config = arch, weights, config
        self.vocab_size = arch.vocab_size
        #: What makes vectors of texts, in models that do.
        self.text_head = TextHead(arch, weights.head)
        self.context_length = context_length
        self.block_size = config.block_size
        self.num_blocks = footprint.num_kv_blocks(config, context_length)
        self.max_batch_tokens = config.step_tokens
        self.max_batch_requests = config.max_batch_requests
        #: The most tokens that a step chooses.
        self.drawn_rows = config.drawn_rows
        #: For requests and for checkpoints; 0 where no layer carries a state.
        self.num_state_slots, self.num_checkpoints = footprint.num_state_slots(config, arch)
        self._ledger = StateLedger(self.num_state_slots, self.num_checkpoints)
        #: What is left of tokens for a head that drafts.
        self.hidden = seat.hidden or self._hidden_states()
        num_slots = self.num_state_slots + self.num_checkpoints
        self._limits = BatchLimits(
            max_batch_tokens=config.step_tokens,
            vocab_size=arch.vocab_size,
            context_length=context_length,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            num_state_slots=num_slots,
            num_hidden_rows=self.hidden.table.shape[0] if self.hidden and arch.is_head else 0,
        )
        self.num_threads = _num_threads(config)
        self._inputs = StepInputs.allocate(
            config.step_tokens,
            config.max_batch_requests,
            min(self.num_blocks, -(-context_length // config.block_size)),
            device=config.device,
            has_states=self.num_state_slots > 0,
            arch=arch,
            num_adapters=len(seat.adapters.files) if seat.adapters is not None else 0,
        )
        self._room: LentRoom | None = None
        if kept is not None and kept.pages is not None:
            self._room = LentRoom(config.device, kept.pages)
        pages = KVPages.allocate(
            arch,
            self.num_blocks,
            config.block_size,
            KV_DTYPES[config.kv_dtype],
            device=config.device,
            room=self._room,
            uses_hadamard=config.kv_dtype in HADAMARD_KV_DTYPES,
        )
        self._pages = pages
        #: The bytes of the model's file, as `GGUFFile.stamps` has them; empty where it has no file.
        self.model_stamps = ""
        self._decoder = Decoder(
            arch,
            weights,
            self._inputs,
            Cache(pages, StatePages.allocate(arch, num_slots, device=config.device), self.hidden),
            config.step_tokens,
            config.attention,
            group,
        )
        #: By which the ranks get ids that the first one's sampler has left on its device.
        self._share_ids: Callable[[int], None] | None = None
        if group is not None:
            self._share_ids = functools.partial(self._broadcast_ids, group)
        #: Where the cache's blocks outlive this process, if they do.
        self.archive: BlockArchive | None = None
        #: Where they outlive the server, if they do.
        self.disk: DiskBlocks | None = None
        #: How far the cache may grow, where it takes its memory as it is written.
        self.growth = self._growth_of(pages)
        #: What looks at blocks of the cache after each step, where launches are traced.
        self.page_watch = PageWatch(pages.each) if config.launch_mode == "traced" else None
        #: What writes down what each step leaves at points of the model, where that was asked for.
        self.trace: StepTrace | None = None
        #: Whether a step may be launched while the one before runs.
        self.runs_ahead = (
            config.device != "cpu"
            and config.launch_mode == "off"
            # What the host does in a step waits for the one before.
            and not config.num_host_layers
            and devices.backend_of(config.device).runs_ahead
        )
        #: By which steps are cut that read prompts while others answer; None: they are not.
        self.pace = self._pace_of(arch)
        self._group, self._num_compiled = group, 0
        self._plans: dict[_Key, Plan] = {}
        self._ran: dict[Plan, None] = {}

    def _hidden_states(self) -> HiddenStates | None:
        if self.config.spec != "mtp":
            return None
        num_slots, num_own = self.num_blocks * self.block_size, self.config.step_tokens
        return HiddenStates.allocate(self.arch, num_slots, num_own, device=self.config.device)

    def _pace_of(self, arch: Architecture) -> StepPace | None:
        target, device = self.config.itl_target, self.config.device.partition(":")[0]
        if arch.family.sees_all or (target is None and device not in ("cuda", "hip")):
            return None  # where a text is seen whole, none is cut, and none has an answer
        return StepPace(None if target is None else target / 1000, self.config.step_tokens)

    def _growth_of(self, pages: KVPages) -> HostGrowth | None:
        if self.config.device != "cpu" or self.config.launch_mode != "off":
            return None
        num_bytes = sum(page.allocation.num_bytes for page in pages.each)
        return HostGrowth(num_bytes // self.num_blocks)

    @functools.cached_property
    def _origin(self) -> tuple[bytes, str]:
        """What stands for all that blocks depend on besides tokens: a fingerprint, and settings.

        The settings are made of the values themselves: where both disagree, one is wrong.
        """
        first, device, model = self._pages.each[0], self.config.device, self.model_stamps
        on = instruction_set() if device == "cpu" else device
        code = source_hash(Path(decoder.__file__))  # of all that is computed, kernels included
        # What may be tried in a step changes no number.
        config = replace(
            self.config,
            disk_cache=None,
            disk_cache_mib=1,
            spec="off",
            draft_max=1,
            draft_model=None,
        )
        depends_on = (code, model, config, on, first.shape, first.dtype)
        fingerprint = hashlib.blake2b(repr(depends_on).encode(), digest_size=DIGEST_BYTES).digest()
        return fingerprint, settings_digest(model, self.arch, self.config.kv_dtype, self.block_size)

    @functools.cached_property
    def _sums(self) -> BlockSums | None:
        """What proves blocks whole that another process left in lent memory; None: nothing does.

        With other parts of a model each process would have to say so. Blocks are of no use without
        the states of layers that carry some, or without what a head that drafts reads.
        """
        pages = self._pages.each
        if self._room is None or self._group is not None or self._keeps_more_than_pages:
            return None
        if not has_whole_words(pages, self.num_blocks):
            return None
        return BlockSums(pages, self.num_blocks, self._room)

    def prepare_blocks(self) -> None:
        """Have ready what `resident_blocks` needs, which then takes no time."""
        if self._sums is not None:
            _ = self._origin
            self._sums.holds([0])  # what the GPU runs for that is loaded with the first call

    def resident_blocks(self, path: str) -> ResidentBlocks | None:
        """What the process before left in the KV cache, as the file at `path` has it, and what
        tells the next one; None where the cache ends with this process."""
        if self._sums is None or not path:
            return None
        try:
            return ResidentBlocks(path, self._sums, self.num_blocks, *self._origin)
        except OSError as error:
            _log.warning("blocks of the KV cache do not outlive this process: %s", error)
            return None

    def open_archive(self, path: str) -> None:
        """Have what the cache keeps outlive this process; without that it runs all the same.

        Blocks are of no use without the states of layers that carry some.
        """
        if self._keeps_more_than_pages:
            return
        pages = [tensor.data for tensor in self._pages.each]
        fingerprint, settings = self._origin
        num_bytes = max_bytes = sum(page.nbytes for page in pages)
        if (room := footprint.host_room()) is not None:
            # The pages themselves will be touched first: what they take counts as available still.
            num_left = max(room.available_bytes - num_bytes, 0)
            max_bytes = min(num_bytes, int(num_left * _ARCHIVE_SHARE))
        try:
            self.archive = BlockArchive(path, pages, fingerprint, max_bytes, settings)
        except OSError as error:
            _log.warning("blocks of the KV cache do not outlive this process: %s", error)

    def open_outside_blocks(self, block_memory: str) -> None:
        """Have what the cache keeps outlive this process, and the server, where that is asked for.

        Raises as `open_disk_cache`.
        """
        if block_memory and self.config.device == "cpu":
            self.open_archive(block_memory)
        if self.config.disk_cache is not None and self.config.prefix_cache:
            self.open_disk_cache(self.config.disk_cache)

    def open_disk_cache(self, folder: str) -> None:
        """Have what the cache keeps lie on disk, too. Raises UsageError for a folder that others
        could change, BadSetting on a GPU.

        Blocks are of no use without the states of layers that carry some.
        """
        if self.config.device != "cpu":
            limit = "blocks of the CPU alone are written to disk; leave it out"
            raise BadSetting("disk_cache", folder, limit)
        if self._keeps_more_than_pages:
            why = "layers of this model carry states" if self.num_state_slots else "spec is mtp"
            _log.warning("there is no disk cache: %s", why)
            return
        fingerprint, settings = self._origin
        max_bytes, size = self.config.disk_cache_mib << 20, self.block_size
        pages = self.page_bytes
        self.disk = DiskBlocks(Path(folder), pages, size, fingerprint, max_bytes, settings)

    @functools.cached_property
    def page_bytes(self) -> PageBytes:
        """The blocks of a CPU's cache as bytes."""
        assert self.config.device == "cpu", "they are in host memory"
        return PageBytes([tensor.data for tensor in self._pages.each])

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that stand for all that blocks depend on besides tokens and salt."""
        return self._origin[0]

    @property
    def has_blocks_to_save(self) -> bool:
        """Whether a prompt's blocks can be written, and are of use when they are read back."""
        return self.config.device == "cpu" and not self._keeps_more_than_pages

    @property
    def _keeps_more_than_pages(self) -> bool:
        """Whether a block alone does not say all that is kept of its tokens."""
        return self.num_state_slots > 0 or self.hidden is not None

    def run(self, batch: Batch) -> Tensor:
        """Logits f32 [num_logit_rows, vocab_size] of the batch's logit rows, or what a model
        without logits says of these, f32 [num_logit_rows, width padded to 64].

        They are valid until the next run. A batch without logit rows gives an empty tensor, one
        with `ids_on_device` takes the ids that lie in `token_ids`. Raises LaunchRejected when an
        index of the batch lies outside what it indexes.
        """
        if batch.states is not None:
            self._ledger.name(batch.states.named)
        self._check_and_record(batch)
        if self.ranks is not None:
            self.ranks.run(batch)
        num_tokens, num_logit_rows = len(batch.token_ids), len(batch.logit_rows)
        is_one = self.config.device != "cpu" and (
            num_tokens == 1 or len(np.unique(batch.sequence_rows)) == 1
        )
        set_num_threads(self.num_threads)
        inputs, scales = self._inputs, self._scales_of(batch)
        plan = self._plan(
            num_tokens,
            num_logit_rows,
            is_one,
            is_long=batch.is_long,
            is_adapted=scales is not None,
        )
        filled: list[tuple[Tensor, Array]] = [
            (inputs.token_ids, batch.token_ids),
            (inputs.positions, batch.positions),
            (inputs.slots, batch.slots),
            (inputs.sequence_rows, batch.sequence_rows),
            (inputs.block_tables, batch.block_tables),
            (inputs.logit_rows, batch.logit_rows),
            (inputs.counts, np.array([num_tokens, num_logit_rows], np.int32)),
        ]
        if scales is not None:
            filled += self._adapter_inputs(batch, scales)
        spans = []
        if inputs.state_slots is not None and batch.states is not None:
            sequences, states = inputs.sequences, batch.states
            starts = sequence_starts(batch.sequence_rows, sequences.max_sequences)
            spans = spans_of(states, starts, batch.positions)
            filled += [
                (sequences.state_slots, states.slots),
                (sequences.state_sources, states.sources),
                (sequences.checkpoint_slots, states.checkpoint_slots),
                (sequences.checkpoint_stops, states.checkpoint_stops),
                (sequences.sequence_starts, starts),
            ]
        if inputs.hidden_rows is not None:
            filled.append((inputs.hidden_rows, batch.hidden_rows))
        if inputs.last_seen is not None and inputs.text_kinds is not None:
            filled += [(inputs.last_seen, batch.last_seen), (inputs.text_kinds, batch.text_kinds)]
        self._fill(plan, batch, filled)
        self._ledger.note(spans, is_whole=False)
        if batch.ids_on_device and self._share_ids is not None:
            self._share_ids(num_tokens)
        plan.run()
        self._ledger.note(spans, is_whole=True)
        if self.page_watch is not None:
            self.page_watch.look()
        if self.trace is not None:
            self.trace.after(plan, batch, inputs.token_ids)
        if self.after_step is not None:
            self.after_step(plan, batch)
        if plan not in self._ran:
            self._ran[plan] = None
        return memory.rows(plan.result, 0, num_logit_rows)

    def _fill(self, plan: Plan, batch: Batch, filled: list[tuple[Tensor, Array]]) -> None:
        """Put what is `filled`, the token ids first, into the inputs of `plan`, and record it."""
        shared, by_device = self._inputs.shared, None
        if batch.put_drafts is not None:
            # Before the record of the step, of which the launch that does it is no part.
            shared.put(filled, is_recorded=True)
            batch.put_drafts()
        if batch.put_drafts is not None or batch.ids_on_device:
            by_device = filled.pop(0)[0]
        current().record_step(plan, filled, batch.requests, filled_by_device=by_device)
        if batch.put_drafts is None:
            shared.put(filled, is_recorded=True)

    def _adapter_inputs(self, batch: Batch, scales: Float32s) -> list[tuple[Tensor, Array]]:
        """Inputs of a step with adapters: what each counts, and the sequence of each logit row."""
        inputs = self._inputs
        assert inputs.adapter_scales is not None
        assert inputs.logit_sequences is not None
        of_rows = batch.sequence_rows[batch.logit_rows]
        return [(inputs.adapter_scales, scales), (inputs.logit_sequences, of_rows)]

    def take_routes(self, routes: Mapping[str, str]) -> None:
        """Run ops in these forms from now on; those of the configuration are as that has them."""
        self._forget_plans()
        ops = frozenset(op for op, form in routes.items() if form == "parts")
        self._decoder.take_apart(ops.difference(OF_CONFIG))

    def ops_of_two_forms(self) -> frozenset[str]:
        """The ops of steps so far that `take_routes` changes on this device."""
        return self._decoder.ops_of_two_forms()

    def _forget_plans(self) -> None:
        self.release()
        self._plans.clear()

    def trace_header(self, path: Path, max_data_bytes: int) -> TraceHeader:
        """What the first line of a trace says of this runner and its model, a file."""
        config = self.config
        return TraceHeader(
            format=FORMAT,
            version=VERSION,
            program=f"{package.NAME} {package.version()}",
            model=str(path),
            model_bytes=path.stat().st_size,
            architecture=self.arch.name,
            num_layers=self.arch.num_layers,
            device=config.device,
            kv_dtype=config.kv_dtype,
            route={
                **{op: forms[0] for op, forms in ROUTES.items()},
                **dict.fromkeys(self._decoder.in_parts, "parts"),
                **{op: getattr(config, op) for op in OF_CONFIG},
            },
            adapters=tuple(
                TracedAdapter(file.name, file.digest.hex(), file.scale)
                for file in (self.adapters.files if self.adapters is not None else ())
            ),
            override_kv={
                key: str(value)[:200] for key, value in (config.override_kv or {}).items()
            },
            max_data_bytes=max_data_bytes,
        )

    def begin_trace(self, file: TraceFile, selection: Selection, max_data_bytes: int) -> StepTrace:
        """Write what steps leave from now on; until then plans are made that keep nothing.

        Raises UsageError where several processes hold the model: none sees whole tensors.
        """
        if self._group is not None:
            raise BadSetting("tensor_parallel", self.config.tensor_parallel, "a trace is of one")
        self._forget_plans()
        self._decoder.points = KeptPoints(
            self.arch, selection, self._inputs, keeps_data=max_data_bytes > 0
        )
        self.trace = StepTrace(file, selection, self._decoder.points, max_data_bytes)
        return self.trace

    def _broadcast_ids(self, group: Group, num_tokens: int) -> None:
        ids = memory.rows(self._inputs.token_ids, 0, num_tokens)
        run([broadcast(group, ids, self.config.device)])

    def require_ranks(self) -> None:
        """Raises RankLost where a process that holds a part of the model has ended."""
        if self.ranks is not None:
            self.ranks.require_alive()

    @property
    def longrope_threshold(self) -> int | None:
        """Texts of more tokens are rotated by other factors (longrope); None: there are none."""
        return self.arch.rope.original_context if self.weights.ropes.long is not None else None

    def wait(self) -> None:
        """Wait until everything that was launched has run; on the CPU it has."""
        if self.config.device != "cpu":
            devices.synchronise(self.config.device)

    def release(self) -> None:
        """Give up the graphs of all plans."""
        for plan in self._plans.values():
            plan.release()

    def end_of_step(self) -> Callable[[], object]:
        """What waits for all that was launched until now, and raises what went wrong there."""
        return copies.to_host_later(self._inputs.counts)

    @property
    def inputs(self) -> StepInputs:
        """What steps read, for who fills it on the device."""
        return self._inputs

    @property
    def token_ids(self) -> Tensor:
        """The input i32 [max_batch_tokens] that a step takes its token ids from."""
        return self._inputs.token_ids

    def compile(
        self, progress: OnProgress | None = None, is_over: Callable[[], bool] = never
    ) -> bool:
        """Compile what steps and sampling launch: on a GPU all that they ever will. What is left
        when the time `is_over` is compiled when it is needed; whether nothing is."""
        set_num_threads(self.num_threads)
        is_gpu = self.config.device != "cpu"
        keys = [
            self._key(num_tokens, 1, is_gpu, is_adapted=is_adapted)
            for num_tokens in (1, self.max_batch_tokens)
            for is_adapted in self._kinds_of_steps
        ]
        plans = {key: self._new_plan(*key) for key in keys}
        # All together: several processes compile what there is to be compiled.
        launches = [launch for plan in plans.values() for launch in plan.every_launch]
        if not is_gpu:
            launches += launches_on_host(self.vocab_size, self.drawn_rows)
        else:
            backend = devices.backend_of(self.config.device)
            is_indexed = backend.compiles and backend.has_all_forms
            if backend.compiles and not is_indexed:
                launches += self._launches_of_all_forms()
        is_whole = compile_all(launches, progress, is_over)
        if not is_gpu or self.config.num_host_layers:
            start_threads()
        if is_gpu and is_indexed and not backend.has_all_forms:  # it is another Triton's, say
            launches += self._launches_of_all_forms()
            is_whole = compile_all(launches, progress, is_over)
        for key, plan in plans.items() if is_whole else ():
            plan.compile(progress)
            self._plans[key] = plan
        self._num_compiled = self._num_compiled_so_far()
        return is_whole

    @property
    def num_forms(self) -> int:
        """How many forms of kernels a GPU had been given when `compile` was through."""
        return self._num_compiled

    @property
    def kernel_folder(self) -> str:
        """Where these are kept on disk; empty for a CPU."""
        device = self.config.device
        return "" if device == "cpu" else devices.backend_of(device).kernel_folder

    @property
    def num_compiled_since(self) -> int:
        """How many forms of kernels a GPU had to be given since `compile`: each was waited for.

        Those of all ranks, where there are others.
        """
        num_of_others = self.ranks.num_compiled_since if self.ranks is not None else 0
        return self._num_compiled_so_far() - self._num_compiled + num_of_others

    def _num_compiled_so_far(self) -> int:
        is_gpu = self.config.device != "cpu"
        return devices.backend_of(self.config.device).num_compiled if is_gpu else 0

    def count_compiled(self) -> None:
        """What was compiled until now, for other models of the process, was no wait of this one."""
        self._num_compiled = self._num_compiled_so_far()

    def capture(self) -> None:
        """Capture the steps in which requests get their next tokens, where the device captures:
        before the first request, or each is captured when it is met for the second time.

        What holds other parts of the model captures the same: collectives are in each step.
        """
        if not devices.backend_captures(self.config.device):
            return
        if self.ranks is not None:
            self.ranks.capture()
        for key in dict.fromkeys(self._keys_of_answers()):
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = self._new_plan(*key)
            plan.capture()  # all inputs are zero, also the number of rows: no cache is written
            current().end_step()
        self.wait()

    def _keys_of_answers(self) -> Iterator[_Key]:
        """The keys of steps in which each request gets its next token: a token, a logit row."""
        most = self.drawn_rows
        for is_adapted in self._kinds_of_steps:
            for num_tokens in _powers(most):
                yield self._key(num_tokens, num_tokens, num_tokens == 1, is_adapted=is_adapted)
                if self.config.tries_tokens and num_tokens > 1:  # all tried for one request
                    yield self._key(num_tokens, num_tokens, True, is_adapted=is_adapted)
                if self._is_draft or self._reads_again:  # before the first of them
                    is_one = num_tokens == 1
                    yield self._key(2 * num_tokens, num_tokens, is_one, is_adapted=is_adapted)
            if self.max_batch_requests == 1:
                continue
            for num_tokens in _powers(self.max_batch_tokens):  # in which some read a prompt
                if num_tokens > most:
                    yield self._key(num_tokens, most, False, is_adapted=is_adapted)

    @property
    def _reads_again(self) -> bool:
        """Whether tokens run again behind drafts that were wrong."""
        return self.config.tries_tokens and self.num_state_slots > 0

    @property
    def _kinds_of_steps(self) -> tuple[bool, ...]:
        """Whether some of their requests have adapters."""
        if self.adapters is None:
            return (False,)
        return (False, True) if self.config.device == "cpu" else (True,)

    def _scales_of(self, batch: Batch) -> Float32s | None:
        """What adapters count in a step; None for a step of which nobody has any.

        On a GPU all steps are as those with adapters are: attention rounds its result to f16 by
        itself where no product reads more of it, and that may differ from the other way in bits.
        """
        if batch.adapter_scales is None and False not in self._kinds_of_steps:
            assert self.adapters is not None
            return np.zeros((len(batch.block_tables), len(self.adapters.files)), np.float32)
        return batch.adapter_scales

    def _every_step(self) -> Iterator[tuple[int, int, bool, bool, bool]]:
        """Tokens, logit rows, whether of one sequence, of long texts and with adapters: steps that
        together hold each form of a launch.

        Attention depends on the tokens, and on whether all of them want logits; what makes logits
        depends on their rows alone.
        """
        most = self.max_batch_tokens
        lengths = (False,) if self.longrope_threshold is None else (False, True)
        for num_tokens in _powers(most):
            each = _powers(num_tokens) if num_tokens == most else (1, num_tokens)
            for num_rows in dict.fromkeys((0, *each)):
                for is_one in (True, False) if num_tokens > 1 else (True,):
                    for is_long, is_adapted in itertools.product(lengths, self._kinds_of_steps):
                        yield num_tokens, num_rows, is_one, is_long, is_adapted

    def plans_of_all_forms(self) -> Iterator[Plan]:
        """Plans that together hold a launch in each form that steps ask for. None is to be run as
        a whole: layers that are launched like others are left out."""
        layers = self._decoder.unlike_layers
        for num_tokens, num_rows, is_one, *kind in self._every_step():
            rows, _, num_sequences, is_long, is_adapted = self._key(
                num_tokens, num_rows, is_one, *kind
            )
            # Of any number of rows, so that what is compiled here serves any number of requests.
            some = bucket(num_rows, rows) if num_rows else 0
            yield self._decoder.plan(
                rows, some, num_sequences, is_long=is_long, is_adapted=is_adapted, layers=layers
            )

    def _launches_of_all_forms(self) -> list[Launch]:
        """The launches that together have each form that steps and sampling ever ask for."""
        found: list[Launch] = []
        for plan in self.plans_of_all_forms():
            found = distinct([*found, *plan.every_launch])
        if self._group is None or self.ranks is not None:
            device, size, most = self.config.device, self.vocab_size, self.drawn_rows
            found += launches_on_device(device, size, most, self.token_ids)
        return found

    def route(self) -> Route:
        """What this runner has executed so far; another thread may be at a step."""
        ran = tuple(self._ran)
        largest = max((layer.down for layer in self.weights.layers), key=lambda w: w.num_elements)
        return Route(
            device=largest.device,
            instruction_set=instruction_set() if largest.device == "cpu" else largest.device,
            weight_dtype=largest.dtype.name,
            activation_dtype=self._decoder.multiplied_as(largest).name,
            kv_dtype=self.config.kv_dtype,
            num_threads=self.num_threads,
            kernels=tuple(dict.fromkeys(itertools.chain(*(plan.kernels for plan in ran)))),
            num_graphs=sum(plan.is_captured for plan in ran),
        )

    def plan_of_answers(self, num_requests: int) -> Plan:
        """The plan of a step in which each of so many requests gets its next token."""
        is_adapted = False not in self._kinds_of_steps
        return self._plan(
            num_requests, num_requests, num_requests == 1, is_long=False, is_adapted=is_adapted
        )

    def _plan(
        self,
        num_tokens: int,
        num_logit_rows: int,
        is_one_sequence: bool,
        *,
        is_long: bool,
        is_adapted: bool,
    ) -> Plan:
        key = self._key(num_tokens, num_logit_rows, is_one_sequence, is_long, is_adapted)
        if key not in self._plans:
            plan = self._new_plan(*key)
            plan.compile()
            self._plans[key] = plan
        return self._plans[key]

    def _key(
        self,
        num_tokens: int,
        num_logit_rows: int,
        is_one_sequence: bool,
        is_long: bool = False,
        is_adapted: bool = False,
    ) -> _Key:
        """The key of the plan for a step of so many rows: their buckets, how many sequences,
        whether of long texts, and whether some have adapters.

        Logit rows are none, one, as many as requests can have, or half or all of the tokens: a few
        more cost less than more plans, each of which is made when it is first met.
        """
        rows = bucket(num_tokens, self.max_batch_tokens)
        # All rows are told apart: attention asks whether each token is of a sequence of its own.
        half = max(rows // 2, 1)
        few = min(bucket(self.drawn_rows, self.max_batch_tokens), half)
        if num_logit_rows > 1:
            exact = bucket(num_logit_rows, rows)
            num_logit_rows = few if exact <= few else half if exact <= half else rows
        return rows, num_logit_rows, 1 if is_one_sequence else None, is_long, is_adapted

    def _new_plan(
        self,
        num_tokens: int,
        num_logit_rows: int,
        num_sequences: int | None,
        is_long: bool,
        is_adapted: bool,
    ) -> Plan:
        plan = self._decoder.plan(
            num_tokens, num_logit_rows, num_sequences, is_long=is_long, is_adapted=is_adapted
        )
        what = ", long texts" if is_long else ""
        what += ", adapters" if is_adapted else ""
        plan.name = f"decoder, {num_tokens} tokens, {num_logit_rows} logit rows{what}"
        plan.set_mode(self.config.launch_mode)
        return plan

    def _check_and_record(self, batch: Batch) -> None:
        current().record_check("step indices")
        try:
            self._check(batch)
        except LaunchRejected as error:
            current().record_failure(error)
            raise

    def _check(self, batch: Batch) -> None:
        check_batch(batch, self._limits)
        if self.num_state_slots and batch.states is not None:
            self._ledger.check(batch.states, batch.sequence_rows, batch.positions)


def _powers(most: int) -> Iterator[int]:
    """Powers of two up to `most`, and `most`: one number of each bucket."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most


def _num_threads(config: EngineConfig) -> int:
    return min(config.num_threads or len(os.sched_getaffinity(0)), max_num_threads())


def load_forms(device: str, settings: str) -> None:
    """Load the kernels that a runner of the same `settings` needed before, as far as they lie on
    disk: what stands for settings and model stands for them as long as our code is the same."""
    if device != "cpu":
        code = source_hash(package.FOLDER / "engine" / "runner.py")
        name = f"{settings}-{code}"
        devices.backend_of(device).load_forms(name)


def _on_a_device(file: GGUFFile, config: EngineConfig) -> EngineConfig:
    """The configuration with the device that `auto` is."""
    config, choice = with_device(file.path, config)
    if choice is not None:
        is_unused = choice.has_gpu and config.device == "cpu"
        _log.log(logging.WARNING if is_unused else logging.INFO, "%s", choice)
    return config


def _with_cache(
    config: EngineConfig, arch: Architecture, num_bytes: int, group: Group | None
) -> EngineConfig:
    """The configuration with as large a KV cache as there is room for, on every rank."""
    if group is not None:
        words = group.swap(num_bytes.to_bytes(8, "little"))
        num_bytes = min(int.from_bytes(word, "little") for word in words)
    return replace(config, kv_tokens=kv_tokens_in(num_bytes, arch, config))
