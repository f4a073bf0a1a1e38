"""Has a request read before the worker is told of it: its text, its words to avoid, its form."""

from __future__ import annotations

from collections.abc import Callable

from hypocenter.base.errors import ContextOverflow, TooMuchText
from hypocenter.server.generation import AskedAnswer, Generation, QueryAndDocument
from hypocenter.server.reading.readers import Readers
from hypocenter.wire.messages import Ask, Failed, FormRead, ReadForm, ServedModel, Told


class RequestReading:
    """Reads generations by `readers`; `next_id` gives a question its id."""

    def __init__(self, readers: Readers, next_id: Callable[[], int]) -> None:
        self._readers, self._next_id = readers, next_id

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
        if generation.constraint is not None and not generation.form:
            return await self._read_form(generation, *generation.constraint)
        return None

    async def _read_text(self, generation: Generation, facts: ServedModel) -> Failed | None:
        most = facts.context_length * facts.longest_token_bytes
        prompt, pair = generation.prompt, ""
        num_chars = len(prompt) if isinstance(prompt, str) else 0
        if is_pair := isinstance(prompt, QueryAndDocument):
            num_chars = sum(map(len, prompt))
            prompt, pair = prompt
        if num_chars > most:
            error = TooMuchText("prompt", num_chars, most)
            return Failed(generation.id, type(error).__name__, str(error), error.field)
        asked = generation.asked or AskedAnswer()
        field = generation.params.constraint[0] if generation.params.constraint else ""
        told = await self._readers.ask(
            Ask(
                self._next_id(),
                text=prompt if isinstance(prompt, str) else None,
                pair=pair if is_pair else None,
                messages=generation.messages,
                token_ids=() if isinstance(prompt, str) else prompt,
                template_variables=asked.template_variables,
                tools=asked.tools,
                add_generation_prompt=asked.adds_prompt,
                continues=asked.continues,
                calls=asked.calls,
                form_field=field,
                is_prompt=True,
                bad_words=tuple(generation.params.bad_words),
                max_chars=most,
            ),
            generation.client,
        )
        if isinstance(told, Failed):
            return Failed(generation.id, told.kind, told.message, told.field)
        assert isinstance(told, Told), "it was asked for tokens"
        generation.num_first = told.num_first
        generation.note_read(told.token_ids, told.bad_word_ids, told.call_form)
        return None

    async def _read_form(self, generation: Generation, field: str, text: str) -> Failed | None:
        told = await self._readers.ask(ReadForm(self._next_id(), field, text), generation.client)
        if isinstance(told, Failed):
            return Failed(generation.id, told.kind, told.message, told.field)
        assert isinstance(told, FormRead), "it was asked for a form"
        generation.form = told.compiled
        return None
