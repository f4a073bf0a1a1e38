"""Has a request read before the worker is told of it: its text, its words to avoid, its form."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from hypocenter.errors import ContextOverflow, TooMuchText
from hypocenter.messages import Ask, Failed, FormRead, ReadForm, ServedModel, Told
from hypocenter.server.generation import Generation
from hypocenter.server.readers import NO_READER, Readers

#: Forms that are remembered, read or refused, and the bytes of all of them.
_MAX_FORMS, _MAX_FORM_BYTES = 512, 8 << 20


class Forms:
    """What became of forms that were read lately; the one that was used last longest ago goes."""

    def __init__(self, max_forms: int = _MAX_FORMS, max_bytes: int = _MAX_FORM_BYTES) -> None:
        self._max_forms, self._max_bytes = max_forms, max_bytes
        self._known: OrderedDict[bytes, FormRead | Failed] = OrderedDict()
        self._num_bytes = 0

    def get(self, field: str, text: str) -> FormRead | Failed | None:
        """What a reader said of it."""
        digest = _digest(field, text)
        if digest in self._known:
            self._known.move_to_end(digest)
        return self._known.get(digest)

    def put(self, field: str, text: str, told: FormRead | Failed) -> None:
        digest = _digest(field, text)
        if digest in self._known:
            self._num_bytes -= _num_bytes(self._known.pop(digest))
        self._known[digest] = told
        self._num_bytes += _num_bytes(told)
        while len(self._known) > self._max_forms or self._num_bytes > self._max_bytes:
            self._num_bytes -= _num_bytes(self._known.popitem(last=False)[1])


class Reading:
    """Reads generations by `readers`; `next_id` gives a question its id."""

    def __init__(self, readers: Readers, next_id: Callable[[], int]) -> None:
        self._readers, self._next_id = readers, next_id
        self._forms = Forms()

    async def read(self, generation: Generation, facts: ServedModel) -> Failed | None:
        """Have it read all that it lacks; what is against it, if anything is.

        A text is refused unread that is longer than the context's tokens can be.
        """
        failed = None if generation.is_text_read else await self._read_text(generation, facts)
        if failed is not None:
            return failed
        num_tokens = len(generation.prompt_ids or ())
        if num_tokens > facts.context_length:
            error = ContextOverflow(num_tokens, facts.context_length, facts.trained_length)
            return Failed(generation.id, type(error).__name__, str(error))
        if generation.params.constraint is not None and not generation.form:
            return await self._read_form(generation, *generation.params.constraint)
        return None

    async def _read_text(self, generation: Generation, facts: ServedModel) -> Failed | None:
        most = facts.context_length * facts.longest_token_bytes
        prompt = generation.prompt
        if isinstance(prompt, str) and len(prompt) > most:
            error = TooMuchText("prompt", len(prompt), most)
            return Failed(generation.id, type(error).__name__, str(error), error.field)
        told = await self._readers.ask(
            Ask(
                self._next_id(),
                text=prompt if isinstance(prompt, str) else None,
                messages=generation.messages,
                token_ids=() if isinstance(prompt, str) else prompt,
                template_variables=generation.template_variables,
                tools=generation.tools,
                is_prompt=True,
                bad_words=tuple(generation.params.bad_words),
                max_chars=most,
            ),
            generation.client,
        )
        if isinstance(told, Failed):
            return Failed(generation.id, told.kind, told.message, told.field)
        assert isinstance(told, Told), "it was asked for tokens"
        generation.note_read(told.token_ids, told.bad_word_ids)
        return None

    async def _read_form(self, generation: Generation, field: str, text: str) -> Failed | None:
        told = self._forms.get(field, text)
        if told is None:
            found = await self._readers.ask(
                ReadForm(self._next_id(), field, text),
                generation.client,
                lambda: self._forms.get(field, text),
            )
            assert not isinstance(found, Told), "it was asked for a form"
            told = found
            if not (isinstance(told, Failed) and told.kind == NO_READER):
                self._forms.put(field, text, told)
        if isinstance(told, Failed):
            return Failed(generation.id, told.kind, told.message, told.field)
        generation.form = told.compiled
        return None


def _digest(field: str, text: str) -> bytes:
    return hashlib.sha256(f"{field}\0{text}".encode("utf-8", "surrogatepass")).digest()


def _num_bytes(told: FormRead | Failed) -> int:
    return len(told.compiled if isinstance(told, FormRead) else told.message)
