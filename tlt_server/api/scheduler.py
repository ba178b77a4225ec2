"""The way from an HTTP route to the schedulers, which answer between two steps."""

from typing import Any, TypeVar

import msgspec
from fastapi import HTTPException, Request, Response
from tlt_client.schemas import Load

from tlt_server.engine.messages import Answer, Ask, pack, unpack_answer
from tlt_server.errors import ConfigError

T = TypeVar("T")


def as_json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def body(request: Request, kind: type[T]) -> T:
    """A request's JSON as `kind`; an empty body is an empty object. Raises HTTPException: 400, it is not one."""
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise HTTPException(400, str(error)) from error


def tokenizer_manager() -> Any:
    """Upstream's, of this process."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


async def ask(message: Ask) -> list[Answer]:
    """What each data-parallel replica answers; one asks at a time, the others wait.

    Raises HTTPException: what a replica refuses, or cannot be sent, 400; for what is active, 409; for settings that
        cannot be, 422; where it failed, 500.
    """
    from sglang.srt.managers.io_struct import TltReqInput

    try:
        packed = pack(message)
    except OverflowError as error:  # JSON bounds no integer
        raise HTTPException(400, f"an integer that no version, sequence number or count can be: {error}") from error
    manager = tokenizer_manager()
    manager.auto_create_handle_loop()
    outputs = await manager.tlt_communicator(TltReqInput(body=packed))
    answers = [unpack_answer(output.body) for output in outputs]
    if failures := sorted({answer.failure for answer in answers if answer.failure}):
        raise HTTPException(500, "; ".join(failures))
    if refused := [answer for answer in answers if answer.refusal]:
        status = 409 if all(answer.out_of_turn for answer in refused) else 400
        status = 422 if any(answer.invalid for answer in refused) else status
        raise HTTPException(status, "; ".join(sorted({str(answer.refusal) for answer in refused})))
    return answers


async def load() -> Load:
    """Requests of all replicas, from what each scheduler leaves in shared memory: no step waits for it."""
    loads = await tokenizer_manager().get_loads(include=["core"])
    return Load(sum(each.num_running_reqs for each in loads), sum(each.num_waiting_reqs for each in loads))


def tell(message: Ask) -> None:
    """Sends what is not answered."""
    from sglang.srt.managers.io_struct import TltReqInput

    tokenizer_manager()._dispatch_to_scheduler(TltReqInput(body=pack(message)))
