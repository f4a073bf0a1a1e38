"""A GPU's KV cache outlives its worker: blocks are taken over where sums prove them whole."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("triton")
from pretended.sharing_sim import NAME, SharingSim

from faults.model import model_path
from hypocenter import LLM
from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices
from hypocenter.device.block_sums import BlockSums, has_whole_words
from hypocenter.device.lending import LentRoom, lend_room
from hypocenter.device.limits import TABLE
from hypocenter.device.memory import PackedArray
from hypocenter.engine.block_archive import NUM_DOUBTED_STEPS
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.resident_blocks import ResidentBlocks
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.facts.part import Part
from hypocenter.model.facts.split import part_of
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors.part_of_file import PartOfFile
from hypocenter.model.tensors.table import Weights
from hypocenter.model.tensors.weights import load_weights
from hypocenter.settings.config import EngineConfig
from hypocenter.wire.messages import KeptWeights, Start, WeightsWhole
from hypocenter.worker import keeper

PRINT = bytes(range(32))
SIZES = ((6, 2, 8, 4), (6, 2, 4, 8), (6, 3, 4, 4))


@pytest.fixture
def sharing() -> Iterator[None]:
    devices.use_backend(SharingSim(NAME, TABLE["sm_90"]))
    yield
    devices._backends.pop(NAME)


@pytest.fixture
def path() -> Iterator[str]:
    file = os.memfd_create("blocks")
    yield f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_a_block_that_changed_in_one_word_is_not_whole(sharing: None) -> None:
    made = np.random.default_rng(0)
    room = LentRoom(NAME, lend_room(NAME, 1 << 16, "room"))
    pages = [room.take(f"page {n}", "kv_cache", DType.F16, size) for n, size in enumerate(SIZES)]
    assert has_whole_words(pages, 6)
    values = [made.normal(size=size).astype(np.float16) for size in SIZES]
    for page, value in zip(pages, values, strict=True):
        copies.to_device(page, value.view(np.uint16))
    sums = BlockSums(pages, 6, room)
    assert sums.holds([0, 5]) == [False, False], "nobody has summed them"
    sums.note([1, 2])
    sums.note([5])
    assert sums.holds([5, 1, 2, 3]) == [True, True, True, False]
    for page, value in zip(pages, values, strict=True):
        for at in ((2, 0, 0, 0), (2, -1, -1, -1)):
            changed = value.copy().view(np.uint16)
            changed[at] ^= 1
            copies.to_device(page, changed)
            assert sums.holds([1, 2, 5]) == [True, False, True]
        copies.to_device(page, value.view(np.uint16))
    turned = values[0].copy()
    words = turned.reshape(6, -1).view(np.uint64)
    words[2] = words[2, ::-1]
    copies.to_device(pages[0], turned.view(np.uint16))
    assert sums.holds([1, 2]) == [True, False], "the same words in another order"
    swapped = [value.copy() for value in values]
    swapped[0][[1, 2]] = swapped[0][[2, 1]]
    copies.to_device(pages[0], swapped[0].view(np.uint16))
    assert sums.holds([1, 2]) == [False, False]


class Sums:
    """Has summed what it was told of; `damaged` do not hold."""

    def __init__(self, known: set[int] | None = None) -> None:
        self.known = set[int]() if known is None else known
        self.damaged: set[int] = set()

    def note(self, block_ids: Sequence[int]) -> None:
        self.known |= set(block_ids)

    def holds(self, block_ids: Sequence[int]) -> list[bool]:
        return [block in self.known - self.damaged for block in block_ids]


def resident(path: str, sums: Sums, fingerprint: bytes = PRINT) -> ResidentBlocks:
    return ResidentBlocks(path, cast(Any, sums), 8, fingerprint, "settings")


def left(path: str, sums: Sums, steps_after: int = NUM_DOUBTED_STEPS) -> ResidentBlocks:
    first = resident(path, sums)
    for block in (3, 1, 6):
        first.put(block, digest(block))
        first.note_step()
    for _ in range(steps_after):
        first.note_step()
    return first


def test_what_a_process_left_is_found_in_the_order_in_which_it_was_kept(path: str) -> None:
    assert left(path, sums := Sums()).found == {}
    assert list(resident(path, sums).found.items()) == [(digest(n), n) for n in (3, 1, 6)]


def test_what_was_kept_in_the_last_steps_is_in_doubt(path: str) -> None:
    left(path, sums := Sums(), NUM_DOUBTED_STEPS - 2)
    assert list(resident(path, sums).found) == [digest(3), digest(1)]


def test_a_block_that_is_not_whole_is_left_out_for_good(path: str) -> None:
    left(path, sums := Sums())
    sums.damaged = {1}
    assert list(resident(path, sums).found) == [digest(3), digest(6)]
    sums.damaged = set()
    assert list(resident(path, sums).found) == [digest(3), digest(6)]


def test_a_block_that_died_before_its_sum_was_made_is_left_out(path: str) -> None:
    first = left(path, sums := Sums())
    first.put(7, digest(7))
    for _ in range(9):
        first._header["step"] += 1
    assert digest(7) not in resident(path, sums).found


def test_a_block_that_was_to_be_written_again_is_left_out(path: str) -> None:
    left(path, sums := Sums()).forget(1)
    assert list(resident(path, sums).found) == [digest(3), digest(6)]


def test_what_another_model_left_is_forgotten(path: str) -> None:
    left(path, sums := Sums())
    assert resident(path, sums, PRINT[::-1]).found == {}
    assert resident(path, sums).found == {}


def test_blocks_that_are_inherited_are_kept_and_may_be_given_up(path: str) -> None:
    left(path, sums := Sums())
    cache = KVCache(8, 4)
    cache.inherit(resident(path, sums))
    cache.check_integrity()
    assert (cache.num_free_blocks, cache.num_kept_blocks) == (8, 3)
    assert cache.find([digest(3), digest(1), digest(2)]) == [3, 1]
    cache.adopt(1, [3])
    cache.append(2, 7 * 4)  # everything but what is read
    cache.check_integrity()
    assert cache.num_kept_blocks == 1
    for _ in range(NUM_DOUBTED_STEPS):
        cache.end_step()
    assert list(resident(path, sums).found) == [digest(3)]


def test_blocks_of_a_request_that_failed_are_not_left(path: str) -> None:
    """As one whose logits are no numbers: what it wrote is in doubt."""
    cache = KVCache(8, 4)
    cache.inherit(resident(path, sums := Sums()))
    for request, number in ((1, 1), (2, 2)):
        cache.append(request, 4)
        cache.keep(request, [digest(number)])
        cache.end_step()
    cache.remove(1, forget=True)
    cache.remove(2)
    for _ in range(NUM_DOUBTED_STEPS):
        cache.end_step()
    assert list(resident(path, sums).found) == [digest(2)]


def kept_by_keeper(path: Path, config: EngineConfig) -> KeptWeights:
    said = keeper.load(Start(str(path), config, has_spare=True), lambda what, share: None)
    kept, whole = said
    assert isinstance(kept, KeptWeights)
    assert isinstance(whole, WeightsWhole)
    return kept


@pytest.mark.tier("sim")
def test_the_next_worker_reads_what_the_one_before_computed(sharing: None, path: str) -> None:
    model = model_path("q8_0")
    config = EngineConfig(device=NAME, context_length=64, max_batch_tokens=64)
    kept = kept_by_keeper(model, config)
    assert kept.kv_tokens == 64
    prompt = [72, 105, *range(300, 332)]
    answers, cached = [], []
    damaged = [False, False, True]
    for is_damaged in damaged:
        with LLM(model, config, shared=kept) as llm:
            llm.engine.runner.prepare_blocks()
            if is_damaged:  # one byte of the second block of the prompt, which it has since
                page = llm.engine.runner._pages.values[0]
                [at] = [n for n, one in enumerate(entries(path)) if one[0]][1:2]
                held = devices.backend_of(NAME).bytes_at(page.address, page.allocation.num_bytes)
                held[at * (len(held) // page.shape[0])] ^= 1
            llm.engine.inherit_blocks(path)
            request = llm.request(prompt, max_tokens=NUM_DOUBTED_STEPS + 2, ignore_eos=True)
            [done] = llm.engine.complete([request])
            answers.append(done.token_ids)
            cached.append(request.num_cached)
    assert answers[1:] == answers[:1] * 2
    assert cached == [0, 32, 16]


def entries(path: str) -> list[tuple[bool, int]]:
    """Of each block: whether it is told of, and since which step."""
    from hypocenter.engine.resident_blocks import _ENTRY

    data = Path(path).read_bytes()[4096:]
    return [(bool(one["is_full"]), int(one["step"])) for one in np.frombuffer(data, _ENTRY)]


def test_each_rank_has_its_part_of_weights_and_cache(sharing: None) -> None:
    config = EngineConfig(device=NAME, context_length=32, tensor_parallel=2)
    kept = kept_by_keeper(model_path(), config)
    whole = kept_by_keeper(model_path(), dataclasses.replace(config, tensor_parallel=1))
    [other] = kept.of_ranks
    assert whole.of_ranks == ()
    assert kept.pages is not None
    assert other.pages is not None
    assert whole.pages is not None
    assert kept.pages.handle != other.pages.handle
    assert kept.pages.num_bytes == other.pages.num_bytes < whole.pages.num_bytes
    assert kept.weights.keys() == other.weights.keys()
    assert kept.kv_tokens == other.kv_tokens == whole.kv_tokens


def bytes_of(weights: Weights) -> dict[str, bytes]:
    """The packed arrays of each layer's last matrix, by layer and place."""
    gpu, found = devices.backend_of(NAME), {}
    for number, layer in enumerate(weights.layers):
        for place, part in enumerate(layer.down.data.parts):
            if isinstance(part, PackedArray):
                held = gpu.bytes_at(part.address, part.num_bytes)
                found[f"{number} {place}"] = held.tobytes()
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_maps_is_what_it_would_pack(sharing: None, rank: int) -> None:
    config = EngineConfig(device=NAME, context_length=32, tensor_parallel=2)
    kept = kept_by_keeper(model_path(), config)
    own = [kept, *kept.of_ranks][rank]
    with open_gguf(model_path()) as whole:
        arch, part = read_architecture(whole), Part(rank, 2)
        file, of_part = PartOfFile(whole, arch, part), part_of(arch, part)
        packed = load_weights(file, of_part, 32, device=NAME)
        mapped = load_weights(file, of_part, 32, device=NAME, shared=own)
    assert bytes_of(mapped) == bytes_of(packed) != {}
