"""An answer as OpenAI's clients read a response: items, whole or as named events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from hypocenter.server.answers import AnswerTimings, LogprobEntry
from hypocenter.server.api_error import ApiError
from hypocenter.server.dialects import responses_answers as said
from hypocenter.server.dialects.blocks import BlockChange, BlockKind, SpokenBlock, SpokenBlocks
from hypocenter.server.dialects.responses_body import (
    ENCRYPTED,
    ResponsesBody,
    custom_names,
    seal,
    text_given,
)
from hypocenter.server.dialects.turns import TurnList
from hypocenter.server.forms import AnswerForm, logprob_entries
from hypocenter.server.inquiry import Choice, Inquiry, new_name
from hypocenter.wire.messages import Piece

_PREFIXES = {BlockKind.THOUGHT: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_DONE, _OPEN = "completed", "in_progress"


@dataclass(frozen=True)
class ResponseTerms:
    """What a response repeats of its request, and the conversation that it answers."""

    body: ResponsesBody
    model: str
    messages: list[dict[str, Any]]
    #: How the answer is sampled.
    temperature: float
    top_p: float

    @property
    def is_kept(self) -> bool:
        return self.body.store is not False

    @property
    def seals_thoughts(self) -> bool:
        return ENCRYPTED in (self.body.include or ())


#: Takes the response as JSON, the conversation to its end, its items by their ids, and how many of
#: the conversation's messages were asked with.
Keep = Callable[[bytes, list[dict[str, Any]], dict[str, bytes], int], None]


class ResponseForm(AnswerForm):
    """`keep` is told of the response once it has ended."""

    keeps_logprobs = True

    def __init__(self, inquiry: Inquiry, request: ResponseTerms, keep: Keep) -> None:
        self._inquiry, self._request, self._keep = inquiry, request, keep
        self._blocks = SpokenBlocks()
        self._ids: list[str] = []
        self._custom = custom_names(request.body)
        self._num_thought_tokens = 0
        #: Of each text, by the place of its block, and of the piece that came last.
        self._logprobs: dict[int, bytearray] = {}
        self._newest = b""
        self._num_events = 0

    # -- AnswerForm --------------------------------------------------------------------------------

    def note(self, choice: Choice, piece: Piece) -> None:
        self._take(choice, piece)

    def encode_whole(self, timings: AnswerTimings) -> bytes:
        return self._finish()

    def begin(self) -> list[bytes]:
        now = self.response(_OPEN)
        names = ("response.created", "response.in_progress")
        return [self._line(name, response=now) for name in names]

    def piece(self, choice: Choice, piece: Piece, *, is_first: bool) -> list[bytes]:
        lines: list[bytes] = []
        for change, block, text in self._take(choice, piece):
            match change:
                case BlockChange.BEGINS:
                    lines += self._begins(block)
                case BlockChange.GROWS:
                    if not self._takes_text(block):  # that comes whole
                        lines.append(self._grows(block, text))
                case BlockChange.ENDS:
                    lines += self._ends(block)
        return lines

    def end(self, timings: AnswerTimings, *, wants_usage: bool) -> list[bytes]:
        response = msgspec.Raw(self._finish())
        status = self._status()
        name = "response.completed" if status == _DONE else "response.incomplete"
        return [self._line(name, response=response)]

    def failure(self, error: ApiError) -> bytes:
        failed = self.response("failed")
        failed.error = said.ResponseFailure(error.code or "server_error", error.message)
        return self._line("response.failed", response=failed)

    # ----------------------------------------------------------------------------------------------

    def response(self, status: str) -> said.ResponseObject:
        """The response as it is now."""
        request, body = self._request, self._request.body
        has_ended = all(choice.ending is not None for choice in self._inquiry.choices)
        return said.ResponseObject(
            id=self._inquiry.name,
            created_at=self._inquiry.created,
            status=status,
            incomplete_details=(
                said.Incomplete("max_output_tokens") if status == "incomplete" else None
            ),
            model=request.model,
            output=[self._item(block) for block in self._blocks.all],
            usage=self._usage() if has_ended else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning or {},
            store=request.is_kept,
            temperature=request.temperature,
            text=body.text or {"format": {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=request.top_p,
        )

    def _take(self, choice: Choice, piece: Piece) -> list[tuple[BlockChange, SpokenBlock, str]]:
        if piece.reasoning and not (piece.text or piece.calls):
            self._num_thought_tokens += len(piece.token_ids)
        news = self._blocks.take(choice, piece)
        for block in self._blocks.all[len(self._ids) :]:
            self._ids.append(new_name(_PREFIXES[block.kind]))
        self._newest = b""
        texts = [block for _, block, text in news if text and block.kind is BlockKind.TEXT]
        if texts and piece.logprobs:
            self._newest = piece.logprobs
            self._logprobs.setdefault(texts[-1].index, bytearray()).extend(self._newest)
        return news

    def _finish(self) -> bytes:
        """The response as JSON, which is kept."""
        response = self.response(self._status())
        encoded = msgspec.json.encode(response)
        if self._request.is_kept:
            items = {item.id: msgspec.json.encode(item) for item in response.output}
            num_asked = len(self._request.messages)
            self._keep(encoded, self._conversation(), items, num_asked)
        return encoded

    def _status(self) -> str:
        [choice] = self._inquiry.choices
        assert choice.ending is not None, "it has ended"
        named = {"length": "incomplete", "cancelled": "cancelled"}
        return named.get(choice.ending.reason, _DONE)

    def _status_of(self, block: SpokenBlock) -> str:
        """Of a block that has ended: the last one may have been cut off."""
        [choice] = self._inquiry.choices
        is_cut = choice.ending is not None and self._status() != _DONE
        return "incomplete" if is_cut and block is self._blocks.all[-1] else _DONE

    def _conversation(self) -> list[dict[str, Any]]:
        turns = TurnList()
        turns.messages = list(self._request.messages)
        for block in self._blocks.all:
            match block.kind:
                case BlockKind.THOUGHT:
                    turns.think(block.text)
                case BlockKind.TEXT:
                    turns.say("assistant", [block.text])
                case BlockKind.CALL:
                    turns.call(block.call_id, block.name, block.text)
        return turns.messages

    def _item(self, block: SpokenBlock, *, has_begun: bool = False) -> said.OutputItem:
        """A block as an item; one that has only begun says nothing."""
        name, text = self._ids[block.index], "" if has_begun else block.text
        status = _OPEN if has_begun else self._status_of(block)
        if self._takes_text(block):
            given = text_given(text)
            return said.CustomToolCall(name, block.call_id, block.name, given, status)
        if block.kind is BlockKind.CALL:
            return said.FunctionCall(name, block.call_id, block.name, text, status)
        if block.kind is BlockKind.TEXT:
            told = self._entries(block)
            content = [] if has_begun else [said.OutputText(text, logprobs=told)]
            return said.OutputMessage(name, status, content)
        thought = said.ReasoningItem(name, status, [] if has_begun else [said.ReasoningText(text)])
        if self._request.seals_thoughts and not has_begun:
            thought.encrypted_content = seal(text)
        return thought

    def _entries(self, block: SpokenBlock) -> list[LogprobEntry]:
        return logprob_entries(self._logprobs.get(block.index, b""))

    def _takes_text(self, block: SpokenBlock) -> bool:
        """Whether it calls a tool that takes free text."""
        return block.kind is BlockKind.CALL and block.name in self._custom

    def _begins(self, block: SpokenBlock) -> list[bytes]:
        item = self._item(block, has_begun=True)
        added = self._line("response.output_item.added", output_index=block.index, item=item)
        if block.kind is BlockKind.CALL:
            return [added]
        begun = self._of_part("response.content_part.added", block, part=_part(block, ""))
        return [added, begun]

    def _grows(self, block: SpokenBlock, text: str) -> bytes:
        if block.kind is BlockKind.CALL:
            return self._of_item("response.function_call_arguments.delta", block, delta=text)
        if block.kind is BlockKind.THOUGHT:
            return self._of_part("response.reasoning_text.delta", block, delta=text)
        told = logprob_entries(self._newest)
        return self._of_part("response.output_text.delta", block, delta=text, logprobs=told)

    def _ends(self, block: SpokenBlock) -> list[bytes]:
        text = block.text
        if self._takes_text(block):
            named, given = "response.custom_tool_call_input", text_given(text)
            lines = [
                self._of_item(f"{named}.delta", block, delta=given),
                self._of_item(f"{named}.done", block, input=given),
            ]
        elif block.kind is BlockKind.CALL:
            called = "response.function_call_arguments.done"
            lines = [self._of_item(called, block, name=block.name, arguments=text)]
        elif block.kind is BlockKind.THOUGHT:
            lines = [self._of_part("response.reasoning_text.done", block, text=text)]
        else:
            told = self._entries(block)
            lines = [self._of_part("response.output_text.done", block, text=text, logprobs=told)]
        if block.kind is not BlockKind.CALL:
            part = _part(block, text)
            if isinstance(part, said.OutputText):
                part.logprobs = self._entries(block)
            lines.append(self._of_part("response.content_part.done", block, part=part))
        item = self._item(block)
        done = self._line("response.output_item.done", output_index=block.index, item=item)
        return [*lines, done]

    def _of_part(self, kind: str, block: SpokenBlock, **fields: Any) -> bytes:
        return self._of_item(kind, block, content_index=0, **fields)

    def _of_item(self, kind: str, block: SpokenBlock, **fields: Any) -> bytes:
        item_id = self._ids[block.index]
        return self._line(kind, item_id=item_id, output_index=block.index, **fields)

    def _line(self, kind: str, **fields: Any) -> bytes:
        event = said.ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"

    def _usage(self) -> said.ResponseUsage:
        usage = self._inquiry.usage()
        return said.ResponseUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            said.InputDetails(usage.prompt_tokens_details.cached_tokens),
            said.OutputDetails(self._num_thought_tokens),
        )


def _part(block: SpokenBlock, text: str) -> said.OutputText | said.ReasoningText:
    is_thought = block.kind is BlockKind.THOUGHT
    return said.ReasoningText(text) if is_thought else said.OutputText(text)
