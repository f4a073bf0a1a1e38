"""`POST /slots/N?action=save|restore|erase`, as llama-server has it."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hypocenter.server import answers
from hypocenter.server.api_error import ApiError, error_of, json_response
from hypocenter.server.fleet.slot_memory import HeldPrompt, SlotMemory
from hypocenter.server.intake.json_bounds import decode_body, fields_of
from hypocenter.server.routes import Service, client_of, raw_body_of, service_by_query
from hypocenter.wire.messages import Failed, MovePrompt, PromptMoved

ACTIONS = "save", "restore", "erase"


class SlotBody(msgspec.Struct):
    filename: str = ""


async def move(request: Request) -> Response:
    """Save the prompt of a client's slot to a file, restore one into it, or erase it."""
    service = service_by_query(request)
    if (slots := service.slots) is None:
        raise ApiError(
            400,
            "prompts are not saved here; start the server with --slot-save-path",
            code="not_supported",
        )
    number = _number_of(request, slots)
    action = request.query_params.get("action", "")
    data = await raw_body_of(request)
    async with service.bodies.decoding(len(data)):
        body = await decode_body(data, fields_of(data, SlotBody), SlotBody) if data else SlotBody()
    mover = _Mover(request, service, slots, number)
    match action:
        case "save":
            return json_response(await mover.save(body.filename))
        case "restore":
            return json_response(await mover.restore(body.filename))
        case "erase":
            return json_response(await mover.erase())
        case _:
            told = f"action is {action[:100]!r}, but must be one of: {', '.join(ACTIONS)}"
            raise ApiError(400, told, param="action")


def _number_of(request: Request, slots: SlotMemory) -> int:
    given = request.path_params["number"]
    if not given.isdecimal() or len(given) > 9 or int(given) >= slots.num_slots:
        most = slots.num_slots - 1
        raise ApiError(400, f"the slot is {given[:100]!r}, but must be from 0 to {most}")
    return int(given)


class _Mover:
    """One slot of the client who asks."""

    def __init__(self, request: Request, service: Service, slots: SlotMemory, number: int) -> None:
        self._service, self._slots, self._number = service, slots, number
        self._client = client_of(request)

    async def save(self, name: str) -> answers.SlotMoved:
        began, slot = time.monotonic(), self._slot()
        moved = await self._move(slot, "save", self._file(name))
        return answers.SlotMoved(
            self._number,
            name,
            n_saved=moved.num_tokens,
            n_written=moved.num_bytes,
            timings=answers.SlotTimings(save_ms=1e3 * (time.monotonic() - began)),
        )

    async def restore(self, name: str) -> answers.SlotMoved:
        began = time.monotonic()
        salt = f"{self._client}:" if self._service.api_keys else ""
        adapters = self._service.adapters
        lora = tuple(zip(adapters.names, adapters.scales, strict=True)) or None
        moved = await self._move(HeldPrompt((), salt, 0, lora), "restore", self._file(name))
        held = HeldPrompt(moved.token_ids, salt, 0, lora)
        self._slots.put(self._client, held, self._number)
        return answers.SlotMoved(
            self._number,
            name,
            n_restored=moved.num_tokens,
            n_read=moved.num_bytes,
            timings=answers.SlotTimings(restore_ms=1e3 * (time.monotonic() - began)),
        )

    async def erase(self) -> answers.SlotMoved:
        moved = await self._move(self._slot(), "erase")
        self._slots.remove(self._client, self._number)
        return answers.SlotMoved(self._number, n_erased=moved.num_tokens)

    def _slot(self) -> HeldPrompt:
        slot = self._slots.get(self._client, self._number)
        if slot is None:
            raise ApiError(
                400,
                f"slot {self._number} has nothing: your last answer is in slot 0, the one before "
                "in slot 1",
                code="slot_empty",
            )
        return slot

    def _file(self, name: str) -> str:
        try:
            own = bool(self._service.api_keys)
            path = self._slots.file(self._client, name, is_own=own)
        except OSError as error:
            raise ApiError(500, f"--slot-save-path: {error.strerror}") from error
        if path is None:
            raise ApiError(
                400,
                f"filename is {name[:100]!r}, but must be up to 100 letters, digits and ._- and "
                "not begin with a dot",
                param="filename",
            )
        return str(path)

    async def _move(
        self, slot: HeldPrompt, action: Literal["save", "restore", "erase"], path: str = ""
    ) -> PromptMoved:
        supervisor = self._service.supervisor
        message = MovePrompt(
            supervisor.next_id(), action, path, slot.token_ids, slot.cache_salt, slot.lora
        )
        told = await supervisor.move(supervisor.replicas[slot.replica], message)
        if isinstance(told, Failed):
            raise error_of(told)
        return told
