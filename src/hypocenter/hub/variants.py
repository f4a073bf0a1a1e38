"""The models that a repository's GGUF files are: one of each quantisation, in one file or several.

Names of files are a convention, not a format: `...-Q4_K_M.gguf`, `...-00002-of-00003.gguf`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hypocenter.base.errors import ModelNotFound
from hypocenter.base.tensor import DType
from hypocenter.base.wording import bytes_text
from hypocenter.hub.names import HubName, is_file_within

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_LABEL = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE
)
#: Beside a model lie parts of others: what sees pictures, and what quantising was measured with.
_NO_MODEL = re.compile(r"(^|[-._/])(mmproj|imatrix)", re.IGNORECASE)
#: What is taken when nothing is asked for, as llama.cpp does: these first, then the next of more
#: bits, then of fewer.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_K_XL", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "Q4_K")
_USUAL_BITS = 4
#: Files of several types are called these, beside those that are called after one.
_MIXES = {"IQ3_M", "IQ3_XS", "IQ2_M"}
#: How many times the bytes of a file its weights take in memory, where that is far from one.
_WIDENED = {"IQ4": 2.0, "IQ3": 1.4, "IQ2": 1.6, "IQ1": 2.1}
_MAX_NAMED = 12
#: Of the end of a name, where its label is looked for.
_MAX_LABEL_CHARS = 64


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository; `sha256` is empty where the hub does not say it."""

    path: str
    num_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Variant:
    """One model: all its files, the first of which names the others. `label` as people write it."""

    label: str
    files: tuple[RemoteFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def path(self) -> str:
        """The path of the file to open."""
        return self.files[0].path

    @property
    def is_of_known_type(self) -> bool:
        """Whether this package multiplies by weights of that type, as far as its label tells."""
        label = _plain(self.label)
        words = label.split("_")
        type_names = {"_".join(words[:2]), label, words[0]}
        types = {dtype.name for dtype in DType} | {"FP16", "FP32"} | _MIXES
        return not self.label or bool(type_names & types)

    def __str__(self) -> str:
        return f"{self.label or self.path[:200]} ({bytes_text(self.num_bytes)})"


def variants_of(files: Iterable[RemoteFile]) -> list[Variant]:
    """The models among `files`, the smallest first. One that lacks a part is none."""
    parts: dict[str, dict[int, RemoteFile]] = defaultdict(dict)
    num_parts: dict[str, int] = {}
    for file in files:
        if not is_file_within(file.path) or _NO_MODEL.search(file.path):
            continue
        stem = file.path.removesuffix(".gguf")
        part = _PART.search(stem)
        stem = stem[: part.start()] if part else stem
        parts[stem][int(part[1]) if part else 1] = file
        num_parts[stem] = int(part[2]) if part else 1
    whole = [
        Variant(_label(stem), tuple(found[number] for number in sorted(found)))
        for stem, found in parts.items()
        if len(found) == num_parts[stem] and (min(found), max(found)) == (1, len(found))
    ]
    return sorted(whole, key=lambda variant: (variant.num_bytes, variant.path))


def choose(name: HubName, variants: Sequence[Variant], *, room_bytes: int | None = None) -> Variant:
    """The model that `name` means among `variants`.

    Without a tag it is one that fits into `room_bytes` of memory. Raises ModelNotFound, which says
    what there is.
    """
    if not variants:
        raise ModelNotFound(
            f"{name.repository} has no GGUF file", "look for one that ends in -GGUF"
        )
    if name.file:
        return _require_one(name, name.file, [v for v in variants if v.path == name.file], variants)
    if name.tag:
        chosen = _require_one(name, name.tag, _of_tag(name.tag, variants), variants)
        if not chosen.is_of_known_type:
            known = [variant for variant in variants if variant.is_of_known_type]
            raise ModelNotFound(
                f"{name} is of a type that hypocenter does not run yet",
                f"take one of {_list_text(known)}" if known else "",
            )
        return chosen
    known = [variant for variant in variants if variant.is_of_known_type]
    fitting = [v for v in known if room_bytes is None or fits(v, room_bytes)]
    if not fitting:
        reason = "" if room_bytes is None else f"; {bytes_text(room_bytes)} of memory are free"
        raise ModelNotFound(
            f"{name.repository} has {_list_text(variants)}{reason}", "none of them runs here"
        )
    for label in _PREFERRED:
        for variant in reversed(fitting):  # of two the larger has had more care
            if _plain(variant.label) == label:
                return variant
    with_more_bits = [variant for variant in fitting if _num_bits(variant.label) > _USUAL_BITS]
    return with_more_bits[0] if with_more_bits else fitting[-1]


def fits(variant: Variant, room_bytes: int) -> bool:
    """Whether its weights, and a cache and buffers of modest size, have room."""
    widened = _WIDENED.get(_plain(variant.label).partition("_")[0], 1.0)
    return variant.num_bytes * widened * 1.1 + (256 << 20) <= room_bytes


def _of_tag(tag: str, variants: Sequence[Variant]) -> list[Variant]:
    wanted = tag.upper()
    exact = [variant for variant in variants if variant.label.upper() == wanted]
    return exact or [variant for variant in variants if _plain(variant.label) == _plain(wanted)]


def _require_one(
    name: HubName, wanted: str, found: Sequence[Variant], variants: Sequence[Variant]
) -> Variant:
    if not found:
        raise ModelNotFound(f"{name.repository} has no {wanted}", f"it has {_list_text(variants)}")
    return found[0]


def _num_bits(label: str) -> int:
    """The bits of a weight, about; a file that does not say is taken for one of the larger ones."""
    found = re.search(r"\d+", label)
    return int(found[0]) if found else 16


def _list_text(variants: Collection[Variant]) -> str:
    shown = [str(variant) for variant in list(variants)[:_MAX_NAMED]]
    more = len(variants) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _label(stem: str) -> str:
    """The quantisation at the end of a file's name, or of its folder's."""
    for text in (stem, stem.rpartition("/")[0]):
        if found := _LABEL.search(text[-_MAX_LABEL_CHARS:]):
            return found[1].upper()
    return ""


def _plain(label: str) -> str:
    return label.upper().removeprefix("UD-")
