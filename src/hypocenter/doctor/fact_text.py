"""Facts of two runs as they are compared and told: of tensors, of values, of what was computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES
from hypocenter.doctor.installed_text import module_of
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Statistics, TensorRecord, Values
from hypocenter.record.keyed_digest import are_comparable

#: Figures that are so close, in parts of the root mean square, are those of equal results: the
#: order of a sum may differ. Without a sketch they say less.
FIGURE_TOLERANCE = 1e-2
#: Sketches that are so close are those of results that rounding tells apart: f16 has 11 bits.
SKETCH_TOLERANCE = 4e-3


def tensor_facts(tensor: TensorRecord) -> dict[str, Any]:
    """What is comparable of a tensor: never its address."""
    names = ("name", "owner", "part", "dtype", "shape", "strides", "extent_bytes")
    return {name: getattr(tensor, name) for name in names}


def only_differing(good: Any, bad: Any) -> tuple[str, str]:
    """Of two mappings what is not the same, as text; either may be None."""
    if good is None or bad is None:
        return ("absent" if good is None else "there"), ("absent" if bad is None else "there")
    keys = [key for key in dict.fromkeys((*good, *bad)) if good.get(key) != bad.get(key)]
    return tuple(
        ", ".join(
            f"{key} {short_text(side.get(key))}" if key != "value" else short_text(side.get(key))
            for key in keys
        )
        for side in (good, bad)
    )  # type: ignore[return-value]


def first_element(good: Values, bad: Values) -> tuple[str, list[str]]:
    """Where two inputs differ first, and what is there."""
    kind = NUMPY_DTYPES.get(good.dtype.upper())
    count = int(np.prod(good.shape, dtype=np.int64))
    if kind is None or any(len(v.data) != count * np.dtype(kind).itemsize for v in (good, bad)):
        return "", [f"{len(v.data)} bytes" for v in (good, bad)]
    one, other = (np.frombuffer(v.data, kind).reshape(good.shape) for v in (good, bad))
    bits = one.view(f"V{one.itemsize}") != other.view(f"V{one.itemsize}")
    at = tuple(int(i) for i in np.argwhere(bits)[0])
    return f"[{', '.join(map(str, at))}]", [str(one[at]), str(other[at])]


def is_close(good: Statistics, bad: Statistics) -> bool:
    """Whether two results are the same but for rounding, as far as their figures tell."""
    if (good.num_nan, good.num_inf) != (bad.num_nan, bad.num_inf):
        return False
    rms = max(good.rms, bad.rms)
    if good.sketch and len(good.sketch) == len(bad.sketch):
        apart = sum((a - b) ** 2 for a, b in zip(good.sketch, bad.sketch, strict=True))
        return math.sqrt(apart / len(good.sketch)) <= SKETCH_TOLERANCE * rms
    return all(
        abs(getattr(good, name) - getattr(bad, name)) <= FIGURE_TOLERANCE * rms
        for name in ("low", "high", "mean", "rms")
    )


def is_equal(good: Statistics, bad: Statistics, on_one_device: bool) -> bool:
    """Whether two tensors are the same: to the bit where digests tell, or else as `is_close`."""
    if on_one_device and are_comparable(good.digest, bad.digest):
        return good.digest == bad.digest
    return is_close(good, bad)


def are_not_told(good: Statistics, bad: Statistics, on_one_device: bool) -> bool:
    """Whether nothing is known of weights but digests that cannot be compared."""
    if not bad.is_digest_alone:
        return False
    return not (on_one_device and are_comparable(good.digest, bad.digest))


def figures_text(statistics: Statistics) -> str:
    """What was seen of a tensor, in a line."""
    text = (
        f"{statistics.low:.6g}..{statistics.high:.6g}, mean {statistics.mean:.6g}, "
        f"rms {statistics.rms:.6g}"
    )
    for name in ("nan", "inf", "poisoned"):
        if count := getattr(statistics, f"num_{name}"):
            text += f", {count} {name}"
    if statistics.first_nonfinite is not None:
        text += f", first at {list(statistics.first_nonfinite)}"
    digest = statistics.digest.rpartition(":")[2]
    return f"{text}, digest {digest[:12]}"


def contents_text(figures: Statistics) -> str:
    """Of a packed weight nothing is known but its digest."""
    digest = figures.digest.rpartition(":")[2][:12]
    return f"digest {digest}" if figures.is_digest_alone else figures_text(figures)


def dims_text(shape: Sequence[int]) -> str:
    """`[3, 2]`."""
    return f"[{', '.join(map(str, shape))}]"


def short_text(value: object) -> str:
    """A value in at most 120 characters."""
    if isinstance(value, tuple):
        value = dims_text(value)
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def around(good: Bundle, bad: Bundle) -> Iterator[str]:
    """What differs beside the launches: sources, versions, variables."""
    if good.device != bad.device:
        yield f"device: {good.device} in GOOD, {bad.device} in BAD"
    texts = [
        {(module_of(source.file), source.function): source.id for source in bundle.sources}
        for bundle in (good, bad)
    ]
    for key in sorted(texts[0]):
        if texts[0][key] != texts[1].get(key, texts[0][key]):
            yield f"source of {key[1]}: {texts[0][key][:12]} in GOOD, {texts[1][key][:12]} in BAD"
    for what in ("packages", "environment"):
        one, other = getattr(good, what), getattr(bad, what)
        for name in sorted({*one, *other}):
            # Where a run is recorded changes nothing.
            if one.get(name) != other.get(name) and name != "HYPO_RUN_DIR":
                yield f"{name}: {one.get(name)} in GOOD, {other.get(name)} in BAD"
