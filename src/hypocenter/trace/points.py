"""What a trace holds: its points by their names, the figures of each, the steps; as msgspec types.

The format is JSON Lines, described in `docs/traces.md`. Neither computes nor reads files.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # these names stand in the command line's help, which loads no numpy
    from hypocenter.base.dtypes import Float32s

FORMAT, VERSION = "hypocenter trace", 3

#: Points of a whole step that come before those of layers, and behind them.
BEFORE_LAYERS = ("embedding",)
AFTER_LAYERS = ("result_norm", "logits")
#: Points of a layer, in the order in which a step reaches them.
OF_LAYERS = (
    "attn_norm",
    "q",
    "k",
    "v",
    "q_rope",
    "k_cache",
    "v_cache",
    "attention",
    "attn_residual",
    "ffn_norm",
    "layer_out",
)
POINTS = (*BEFORE_LAYERS, *OF_LAYERS, *AFTER_LAYERS)
#: Points whose figures are of the step's logit rows; those of the others are of all its tokens.
OF_LOGIT_ROWS = AFTER_LAYERS

#: Layers, steps and figures that a trace may have at most: more are no trace of ours.
MAX_LAYERS, MAX_STEPS = 1 << 12, 1 << 20
#: Numbers in the sketch of a point.
NUM_SKETCHES = 8

#: The name of a point, and its layer or (None) the whole step.
PointPlace = tuple[str, int | None]


@dataclass(frozen=True)
class Selection:
    """Which points, layers and steps a trace holds; None: all of them."""

    points: frozenset[str] | None = None
    layers: Collection[int] | None = None
    steps: Collection[int] | None = None

    def takes(self, point: str, layer: int | None) -> bool:
        """Whether this point is kept, of this layer or (None) of the whole step."""
        if self.points is not None and point not in self.points:
            return False
        return layer is None or self.layers is None or layer in self.layers

    def takes_step(self, step: int) -> bool:
        return self.steps is None or step in self.steps


class PointGroup(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Points of one shape, as they lie in a file: each list has an entry for each of them.

    `low` to `rms` are of the finite elements, and the others are counted. `digests` has 16 hex
    digits for each, which stand for the bits of all elements in order. `sketches` f32 [num_points,
    NUM_SKETCHES]: each number is the sum of every eighth of the finite elements, with signs, over
    the root of how many these are, so that the root mean square of the differences of two sketches
    tells about that of the tensors' differences. `data` f32 [num_points, *shape] has the elements
    themselves, where they were asked for.
    """

    names: tuple[str, ...]
    layers: tuple[int | None, ...]
    shape: tuple[int, ...]
    dtype: str
    digests: str
    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    rms: tuple[float, ...]
    num_nan: tuple[int, ...]
    num_inf: tuple[int, ...]
    sketches: bytes
    data: bytes | None = None


class StepLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a file: one step, its tokens with the position and the sequence of each."""

    step: int
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    sequences: tuple[int, ...]
    logit_rows: tuple[int, ...]
    groups: tuple[PointGroup, ...]


class TracedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter beside the model: a digest in hex that stands for all that it computes, and what
    it counted where a request did not say otherwise."""

    name: str
    digest: str
    scale: float


class TraceHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was run: the first line of a trace. `route` are the forms that ops were run in, as
    `hypo run --route` names them."""

    format: str
    version: int
    program: str
    model: str
    model_bytes: int
    architecture: str
    num_layers: int
    device: str
    kv_dtype: str
    route: dict[str, str]
    adapters: tuple[TracedAdapter, ...]
    #: Keys of the metadata that were run with another value than the file's, as texts.
    override_kv: dict[str, str]
    #: Elements are kept up to so many bytes in all; 0: none are.
    max_data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """What is told of one tensor; each as `PointGroup` says."""

    name: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    digest: str
    low: float
    high: float
    mean: float
    rms: float
    num_nan: int
    num_inf: int
    sketch: Float32s
    #: The elements f32 in their shape, where they were kept.
    values: Float32s | None

    @property
    def place(self) -> PointPlace:
        return self.name, self.layer

    @property
    def text(self) -> str:
        """The name in reports."""
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


@dataclass(frozen=True)
class TracedStep:
    """One step: what it was given, and its points by name and layer, as a step reaches them."""

    step: int
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    sequences: tuple[int, ...]
    logit_rows: tuple[int, ...]
    points: dict[PointPlace, Point]


@dataclass(frozen=True)
class ModelTrace:
    """A trace that was read; `is_whole`: its last line is complete."""

    header: TraceHeader
    steps: tuple[TracedStep, ...]
    is_whole: bool = True


def order_of(place: PointPlace) -> tuple[int, int, int]:
    """Where a point comes in its step."""
    name, layer = place
    is_last = name in AFTER_LAYERS
    return int(is_last), -1 if layer is None else layer, POINTS.index(name)
