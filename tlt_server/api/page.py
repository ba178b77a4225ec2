"""The page at `/tlt/`, on a server."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from tlt_server.watch.page import FILES, HEADERS

router = APIRouter()


def _answering(file: Path, kind: str) -> Callable[[], Awaitable[FileResponse]]:
    async def answer() -> FileResponse:
        return FileResponse(file, media_type=kind, headers=dict(HEADERS))

    return answer


for _path, (_file, _kind) in FILES.items():
    router.add_api_route(_path, _answering(_file, _kind), methods=["GET"])
