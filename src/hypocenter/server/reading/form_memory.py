"""What became of forms that clients sent: one that was read, or refused, is not read again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from hypocenter.wire.messages import Failed, FormRead, ReadForm

#: Forms that are remembered, read or refused, and the bytes of all of them.
_MAX_FORMS, _MAX_FORM_BYTES = 512, 8 << 20


class FormMemory:
    """What became of forms that were read lately; the one that was used last longest ago goes."""

    def __init__(self, max_forms: int = _MAX_FORMS, max_bytes: int = _MAX_FORM_BYTES) -> None:
        self._max_forms, self._max_bytes = max_forms, max_bytes
        self._known: OrderedDict[bytes, FormRead | Failed] = OrderedDict()
        self._num_bytes = 0

    def get(self, question: ReadForm) -> FormRead | Failed | None:
        """What a reader said of it, under the id that it had then."""
        digest = _digest(question)
        if digest in self._known:
            self._known.move_to_end(digest)
        return self._known.get(digest)

    def put(self, question: ReadForm, told: FormRead | Failed) -> None:
        digest = _digest(question)
        if digest in self._known:
            self._num_bytes -= _num_bytes(self._known.pop(digest))
        self._known[digest] = told
        self._num_bytes += _num_bytes(told)
        while len(self._known) > self._max_forms or self._num_bytes > self._max_bytes:
            self._num_bytes -= _num_bytes(self._known.popitem(last=False)[1])


def _digest(question: ReadForm) -> bytes:
    text = f"{question.field}\0{question.text}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _num_bytes(told: FormRead | Failed) -> int:
    return len(told.compiled if isinstance(told, FormRead) else told.message)
