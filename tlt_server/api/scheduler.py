"""The way from an HTTP route to the schedulers, which answer between two steps."""

from typing import Any

from fastapi import HTTPException

from tlt_server.engine.messages import Answer, Ask, pack, unpack_answer


def tokenizer_manager() -> Any:
    """Upstream's, of this process."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


async def ask(message: Ask) -> list[Answer]:
    """What each data-parallel replica answers; one asks at a time, the others wait.

    Raises:
        HTTPException: 409, a replica refuses; 500, it failed.
    """
    from sglang.srt.managers.io_struct import TltReqInput

    manager = tokenizer_manager()
    manager.auto_create_handle_loop()
    outputs = await manager.tlt_communicator(TltReqInput(body=pack(message)))
    answers = [unpack_answer(output.body) for output in outputs]
    for status, said in ((500, [a.failure for a in answers]), (409, [a.refusal for a in answers])):
        if found := sorted({each for each in said if each}):
            raise HTTPException(status, "; ".join(found))
    return answers


def tell(message: Ask) -> None:
    """Sends what is not answered."""
    from sglang.srt.managers.io_struct import TltReqInput

    tokenizer_manager()._dispatch_to_scheduler(TltReqInput(body=pack(message)))
