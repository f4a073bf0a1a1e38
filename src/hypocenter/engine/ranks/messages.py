"""What the first rank says to the others, and they to it; `frames.py` has how it travels."""

from __future__ import annotations

import msgspec
import numpy as np

from hypocenter.engine.batch import Batch
from hypocenter.record.events import RequestRecord
from hypocenter.settings.config import EngineConfig
from hypocenter.wire.messages import KeptWeights

#: Of one frame: the tokens and block tables of the largest step.
MAX_FRAME_BYTES = 64 << 20


class Join(msgspec.Struct, frozen=True, tag=True):
    """Load part `rank` of a model, and meet the others in the file `meeting_place`."""

    path: str
    config: EngineConfig
    rank: int
    num_ranks: int
    meeting_place: str
    #: What a keeper has of that part on the rank's device.
    kept: KeptWeights | None = None


class Word(msgspec.Struct, frozen=True, tag=True):
    """The process is there, then its part is loaded; `problem`: what it ends by.

    From then on each says how many forms of kernels it has compiled since, whenever that is more.
    """

    problem: str = ""
    num_compiled: int = 0


class Capture(msgspec.Struct, frozen=True, tag=True):
    """Capture the steps in which requests get their next tokens (`Runner.capture`)."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """A batch to run; `arrays` as their bytes, i32, `num_sequences` rows of block tables, and
    `scales` f32 of their adapters, as many rows; empty: none has any."""

    arrays: dict[str, bytes]
    num_sequences: int
    requests: tuple[RequestRecord, ...]
    ids_on_device: bool
    is_long: bool
    scales: bytes = b""

    @classmethod
    def of(cls, batch: Batch) -> Step:
        arrays = {name: np.ascontiguousarray(getattr(batch, name)).tobytes() for name in _ARRAYS}
        scales = batch.adapter_scales
        return cls(
            arrays,
            len(batch.block_tables),
            batch.requests,
            batch.ids_on_device,
            batch.is_long,
            b"" if scales is None else np.ascontiguousarray(scales, np.float32).tobytes(),
        )

    def batch(self) -> Batch:
        token_ids, positions, slots, sequence_rows, block_tables, logit_rows = (
            np.frombuffer(self.arrays[name], np.int32) for name in _ARRAYS
        )
        return Batch(
            token_ids,
            positions,
            slots,
            sequence_rows,
            block_tables.reshape(self.num_sequences, -1),
            logit_rows,
            requests=self.requests,
            ids_on_device=self.ids_on_device,
            is_long=self.is_long,
            adapter_scales=(
                np.frombuffer(self.scales, np.float32).reshape(self.num_sequences, -1)
                if self.scales
                else None
            ),
        )


_ARRAYS = ("token_ids", "positions", "slots", "sequence_rows", "block_tables", "logit_rows")
