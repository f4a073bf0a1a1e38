"""The routes beside the answers: models, tokens, state, health, metrics, and single requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hypocenter.base.package import version
from hypocenter.server import answers
from hypocenter.server.api_error import ApiError, json_response, unavailable
from hypocenter.server.bodies.chat_fields import (
    checked_tools,
    checked_variables,
    messages_of,
    part_to_continue,
)
from hypocenter.server.fields import TokenId
from hypocenter.server.intake.json_bounds import decode_body, fields_of
from hypocenter.server.routes import (
    STEP_SECONDS,
    Service,
    ask_reader,
    body_of,
    build_info,
    describe,
    service_by_query,
    service_of,
)

#: That are turned into a text at once, and the other way round.
MAX_TOKENS = 1 << 18
MAX_CHARS = 1 << 20


class TokenizeBody(msgspec.Struct):
    """`content` is llama-server's name, `prompt` vLLM's; each comes with that server's default."""

    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool = False
    model: str = ""


class DetokenizeBody(msgspec.Struct):
    tokens: list[TokenId]
    model: str = ""


class TemplateBody(msgspec.Struct):
    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    model: str = ""


async def health(request: Request) -> Response:
    """Whether a worker is there and its last step came back; needs no key."""
    service = service_of(request)
    supervisor = service.supervisor
    if not supervisor.is_ready:
        what = "no worker can be started" if supervisor.has_given_up else supervisor.loading.what
        return unavailable("Loading model" if supervisor.facts is None else f"no worker: {what}")
    seconds = supervisor.seconds_in_step()
    if seconds is not None and seconds > STEP_SECONDS:
        return unavailable(f"a step has been running for {seconds:.0f} seconds")
    said = None
    if service.canary is not None:
        state = service.canary.state
        said = answers.CanaryAnswer(state.said, state.at, state.num_asked, state.problem)
    return json_response(answers.Health("ok", said, _replicas(service)))


def _replicas(service: Service) -> list[answers.ReplicaStatus]:
    """What each one is at; empty where there is only one."""
    replicas = service.supervisor.replicas
    if len(replicas) == 1:
        return []
    return [
        answers.ReplicaStatus(r.number, r.device, r.condition, r.num_restarts, r.state.num_running)
        for r in replicas
    ]


async def readiness(request: Request) -> Response:
    """Whether a new request would be taken and run now; needs no key, as probes have none."""
    service = service_of(request)
    if service.is_draining:
        return unavailable("the server is shutting down")
    if not service.supervisor.is_ready:
        return unavailable("no worker is ready")
    if service.num_open >= service.max_open:
        return unavailable("the queue is full")
    return json_response(answers.Status("ok"))


async def tokenize(request: Request) -> Response:
    body = await _read(request, TokenizeBody)
    service = service_of(request)
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(400, "give one of content, prompt and messages", param="content")
    is_vllms = body.prompt is not None
    wanted = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    text = body.content if body.prompt is None else body.prompt
    if text is not None and len(text) > MAX_CHARS:
        raise ApiError(
            400,
            f"{given[0]} has {len(text)} characters, but at most {MAX_CHARS} are read at once; "
            "split it",
            param=given[0],
        )
    told = await ask_reader(
        request,
        text=text,
        messages=None if body.messages is None else messages_of(body.messages),
        tools=checked_tools(body.tools),
        add_special=is_vllms if wanted is None else wanted,
        parse_special=is_vllms if body.parse_special is None else body.parse_special,
        max_chars=MAX_CHARS,
        needs_pieces=body.with_pieces,
    )
    tokens: list[int | answers.TokenPiece] = list(told.token_ids)
    if body.with_pieces:
        tokens = [
            answers.TokenPiece(token_id, _piece(piece))
            for token_id, piece in zip(told.token_ids, told.pieces, strict=True)
        ]
    return json_response(answers.Tokens(tokens, len(tokens), service.facts.context_length))


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request) -> Response:
    body = await _read(request, DetokenizeBody)
    told = await ask_reader(request, token_ids=tuple(body.tokens))
    return json_response(answers.Text(told.text, told.text))


async def tokenizer_info(request: Request) -> Response:
    facts = service_by_query(request).facts
    return json_response(
        answers.TokenizerInfo(
            bos_token=facts.bos_text,
            eos_token=facts.eos_text,
            pad_token=None,
            chat_template=facts.chat_template,
        )
    )


async def apply_template(request: Request) -> Response:
    body = await _read(request, TemplateBody)
    service = service_of(request)
    adds_prompt = body.add_generation_prompt
    part = part_to_continue(
        body.messages,
        service.facts.chat_template,
        wanted=body.continue_final_message,
        adds_prompt=adds_prompt,
    )
    told = await ask_reader(
        request,
        messages=messages_of(body.messages),
        template_variables=checked_variables(body.chat_template_kwargs),
        tools=checked_tools(body.tools),
        max_chars=MAX_CHARS,
        add_generation_prompt=adds_prompt is not False,
        continues=part,
    )
    return json_response(answers.FilledTemplate(told.text, told.token_ids))


async def props(request: Request) -> Response:
    """llama-server's description of itself; where keys are set, only the admin's sees folders."""
    service = service_by_query(request)
    facts, path = service.facts, service.model_path
    return json_response(
        answers.Props(
            default_generation_settings=answers.Defaults(facts.context_length),
            total_slots=facts.max_requests,
            model_alias=service.names[0],
            model_path=path if request.state.may_see_all else Path(path).name,
            chat_template=facts.chat_template,
            bos_token=facts.bos_text,
            eos_token=facts.eos_text,
            build_info=build_info(),
            modalities=answers.Modalities(),
            device=facts.device,
            instruction_set=facts.instruction_set,
        )
    )


async def version_of(request: Request) -> Response:
    return json_response(answers.Version(version()))


async def slots(request: Request) -> Response:
    """A slot for each request that may run at once; of others' requests only that they run."""
    service = service_by_query(request)
    facts, open_ones = service.facts, service.supervisor.of_clients
    slots_now = []
    for number in range(facts.max_requests):
        one = open_ones[number] if number < len(open_ones) else None
        is_processing = one is not None
        if one is not None and not service.is_own(request, one.name):
            one = None
        slots_now.append(
            answers.Slot(
                id=number,
                id_task=one.id if one else -1,
                n_ctx=facts.context_length,
                is_processing=is_processing,
                n_prompt_tokens=len(one.prompt_ids or ()) if one else 0,
                n_decoded=len(one.output_ids) if one else 0,
            )
        )
    if request.query_params.get("fail_on_no_slot") and len(open_ones) >= facts.max_requests:
        return unavailable("no slot is free")
    return json_response(slots_now)


async def metrics(request: Request) -> Response:
    text = service_of(request).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4")


async def one_request(request: Request) -> Response:
    service, name = service_of(request), request.path_params["name"]
    _require_own(service, request, name)
    if (inquiry := service.open.get(name)) is not None:
        return json_response(describe(inquiry, "in_progress"))
    return json_response(service.ended[name])


async def cancel_request(request: Request) -> Response:
    """End a request with what it has so far: its client gets the end of it."""
    service, name = service_of(request), request.path_params["name"]
    _require_own(service, request, name)
    inquiry = service.open.get(name)
    if inquiry is None:
        return json_response(service.ended[name])
    inquiry.end_early()
    return json_response(describe(inquiry, "cancelling"))


def _require_own(service: Service, request: Request, name: str) -> None:
    """Raises ApiError for a request that is unknown, or another client's; it says the same."""
    is_there = name in service.open or name in service.ended
    if not (is_there and service.is_own(request, name)):
        raise ApiError(404, f"there is no request {name!r}", code="request_not_found")


async def debug_requests(request: Request) -> Response:
    service = service_by_query(request)
    state = msgspec.to_builtins(service.supervisor.state)
    processes = [
        answers.ReplicaProcesses(
            replica.number,
            replica.device,
            replica.life.pid if replica.life else None,
            replica.line.spare_pid,
            replica.line.keeper_pid,
            replica.num_restarts,
        )
        for replica in service.supervisor.replicas
    ]
    return json_response(
        answers.OpenRequests(
            engine=state,
            num_blocks=service.facts.num_blocks,
            worker_pid=processes[0].worker_pid,
            spare_pid=processes[0].spare_pid,
            spare_state=service.supervisor.replicas[0].line.spare_state,
            keeper_pid=processes[0].keeper_pid,
            restarts=service.supervisor.num_restarts,
            replicas=processes,
            open=[describe(inquiry, "in_progress") for inquiry in service.open.values()],
        )
    )


async def debug_faults(request: Request) -> Response:
    """The bundles that are there, the newest first."""
    service = service_of(request)
    return json_response(answers.Faults(service.faults.list_all(service.links.link)))


_Body = TypeVar("_Body", TokenizeBody, DetokenizeBody, TemplateBody)


async def _read(request: Request, kind: type[_Body]) -> _Body:
    data = await body_of(request)
    async with service_of(request).bodies.decoding(len(data)):
        body = await decode_body(data, fields_of(data, kind), kind)
    service_of(request).require_model(body.model)
    return body
