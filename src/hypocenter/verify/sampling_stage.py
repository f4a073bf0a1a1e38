"""Stage three: the choice of tokens, in every form that it has, against its plain reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import BadLogits
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.kernels.sampling.draw import TokenChoice, num_mask_words
from hypocenter.kernels.sampling.sampling import HostSampler, sample_later, sample_reference
from hypocenter.settings.config import SamplingParams
from hypocenter.verify.outcome import Mistake, PlantedError, Stage, Uncovered, verdict_of

if TYPE_CHECKING:
    from hypocenter.kernels.sampling.sampling_plan import DeviceSampler

NAME = "sampling"
ASKS = "are the tokens those that the plain reference chooses from the same logits?"
_MOST_ROWS = 3


class SamplingStage:
    """Draws from logits of a model's vocabulary on a device; ids must be equal."""

    def __init__(self, device: str, vocab_size: int, max_rows: int) -> None:
        self._device, self._vocab_size = device, vocab_size
        self._num_rows = min(max_rows, _MOST_ROWS)

    def run(self, is_over: Callable[[], bool]) -> Stage:
        """Each kind of draw for one row and for several, until the time `is_over`."""
        started = time.perf_counter()
        shape = (self._num_rows, self._vocab_size)
        logits = memory.allocate("logits", "verify", DType.F32, shape, device=self._device)
        rng = np.random.default_rng(13)
        values = (3 * rng.standard_normal(shape)).astype(np.float32)
        copies.to_device(logits, values)
        sampler = self._sampler()
        findings, left = [], []
        kinds = list(kinds_of_draws(self._vocab_size))
        num_done = num_checks = 0
        for name, draw in kinds:
            if is_over():
                left.append(Uncovered(name, "the time was over"))
                continue
            for num_rows in dict.fromkeys((1, self._num_rows)):
                if num_rows > 1 and is_over():
                    left.append(Uncovered(f"{name}, {num_rows} rows", "the time was over"))
                    break
                draws = [replace(draw, position=draw.position + row) for row in range(num_rows)]
                rows = memory.rows(logits, 0, num_rows)
                found = sample_later(rows, draws, sampler)()
                findings += list(
                    _wrong_tokens(name, found, sample_reference(values[:num_rows], draws))
                )
                num_checks += num_rows
            num_done += 1
        canary = PlantedError("nothing", 0, 0)
        if num_done:
            canary = self._plant(logits, values, sampler)
        if not isinstance(sampler, HostSampler):
            sampler.free()  # its graphs write to the logits
            memory.free(logits)
        return Stage(
            name=NAME,
            asks=ASKS,
            verdict=verdict_of(findings, canary, num_done),
            things="kinds of draws",
            num_covered=num_done,
            num_all=len(kinds),
            num_checks=num_checks,
            canary=canary,
            findings=tuple(findings),
            uncovered=tuple(left),
            seconds=time.perf_counter() - started,
        )

    def _sampler(self) -> HostSampler | DeviceSampler:
        if self._device == "cpu":
            return HostSampler()
        from hypocenter.kernels.sampling.sampling_plan import DeviceSampler  # needs Triton

        return DeviceSampler(self._device, self._vocab_size, self._num_rows)

    def _plant(
        self, logits: Tensor, values: Array, sampler: HostSampler | DeviceSampler
    ) -> PlantedError:
        """Lift one logit of the first row on the device by a unit of rounding above the largest."""
        greedy = [TokenChoice(SamplingParams(temperature=0), 0)]
        changed = values.copy()
        token = (int(values[0].argmax()) + 1) % self._vocab_size
        changed[0, token] = np.nextafter(values[0].max(), np.float32(np.inf))
        copies.to_device(logits, changed)
        found = sample_later(memory.rows(logits, 0, 1), greedy, sampler)()
        seen = any(
            True for _ in _wrong_tokens("planted", found, sample_reference(values[:1], greedy))
        )
        return PlantedError("a logit one unit of rounding above the largest", 1, int(seen))


def kinds_of_draws(vocab_size: int) -> list[tuple[str, TokenChoice]]:
    """Names and draws that together take every kernel of sampling, the longest ones last."""
    rng = np.random.default_rng(17)
    some = np.sort(rng.choice(vocab_size, min(20, vocab_size), replace=False)).astype(np.int32)
    counts = rng.integers(1, 5, some.size).astype(np.int32)
    words = rng.integers(-(2**31), 2**31, num_mask_words(vocab_size)).astype(np.int32)
    filters = SamplingParams(
        temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, repeat_penalty=1.1, seed=59
    )
    drawn = TokenChoice(filters, 7, some, counts)
    greedy = TokenChoice(SamplingParams(temperature=0), 0)
    plain = TokenChoice(SamplingParams(temperature=1.0, seed=60), 11)
    biased = replace(plain, bias_ids=some, biases=rng.uniform(-4, 4, some.size))
    return [
        ("greedy", greedy),
        ("greedy, masked", replace(greedy, mask=words)),
        ("by temperature", plain),
        ("biased", biased),
        ("by every filter", drawn),
        ("by every filter, masked", replace(drawn, mask=words)),
    ]


def _wrong_tokens(
    name: str, found: Sequence[int | BadLogits], right: Sequence[int | BadLogits]
) -> list[Mistake]:
    wrong = []
    for row, (item, other) in enumerate(zip(found, right, strict=True)):
        if isinstance(item, BadLogits) != isinstance(other, BadLogits) or (
            not isinstance(item, BadLogits) and item != other
        ):
            details = {"row": row, "chosen": str(item), "right": str(other)}
            wrong.append(Mistake(f"row {row} chose {item}, and {other} is right", name, details))
    return wrong
