"""Values that a person gives in place of a file's own: `--override-kv`, as llama.cpp has it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from hypocenter.base.errors import UsageError
from hypocenter.model.gguf.values import NUMPY_TYPES, Entry, Metadata, MetadataValue, ValueType

Override: TypeAlias = bool | int | float | str


class OverriddenMetadata(Metadata):
    """`base` with `values` in their places, or beside them; notes which of those were asked for."""

    __slots__ = ("_base", "_over", "_unread")

    def __init__(self, base: Metadata, values: Mapping[str, Override]) -> None:
        self._base, self._over = base, _metadata_of(values)
        self._unread = dict.fromkeys(values)

    def require_read(self) -> None:
        """Raises UsageError for a value that nobody has asked for: it changes nothing."""
        for key in self._unread:
            near = difflib.get_close_matches(key, self._base, n=1)
            hint = f"; did you mean {near[0]!r}?" if near and near[0] != key else ""
            raise UsageError(f"override_kv gives {key!r}, which nothing of this model reads{hint}")

    def __getitem__(self, key: str) -> MetadataValue:
        return self._side(key)[key]

    def __contains__(self, key: object) -> bool:
        return key in self._side(key)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._base, *self._over]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def entry(self, key: str) -> Entry:
        return self._side(key).entry(key)

    def kind(self, key: str) -> str:
        side = self._side(key)
        return f"{side.kind(key)} (by override_kv)" if side is self._over else side.kind(key)

    def raw_text(self, key: str) -> bytes:
        return self._side(key).raw_text(key)

    def _side(self, key: object) -> Metadata:
        if key not in self._over:
            return self._base
        self._unread.pop(str(key), None)
        return self._over


def _metadata_of(values: Mapping[str, Override]) -> Metadata:
    """Values as a file would hold them."""
    data, entries = bytearray(), {}
    for key, value in values.items():
        kind = _TYPES[type(value)]
        held = value.encode() if isinstance(value, str) else NUMPY_TYPES[kind].type(value).tobytes()
        size = len(held) if isinstance(value, str) else 1
        entries[key] = Entry(kind, False, len(data), size)
        data += held
    return Metadata(bytes(data), entries)


_TYPES: dict[type, ValueType] = {
    bool: ValueType.BOOL,
    int: ValueType.I64,
    float: ValueType.F64,
    str: ValueType.STRING,
}
