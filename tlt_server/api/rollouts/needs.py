"""The weights that a request needs: answered 409 where others are active, before it is scheduled.

Asked for by a header, which reaches us on every route, OpenAI's too; a field of the body that SGLang does not know is
dropped on the way. A request without the header passes untouched. Weights may change between the question and the first
token, and afterwards: `meta_info.weight_versions` has the last word on what sampled a token.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from fastapi import Response
from tlt_client.schemas import TargetVersion
from tlt_client.wire import TARGET_VERSION, WEIGHT_VERSION

from tlt_server.api.scheduler import as_json, ask
from tlt_server.engine.messages import Answer, ReadVersions
from tlt_server.errors import listed

_HEADERS = {name.lower().encode(): name for name in (WEIGHT_VERSION, TARGET_VERSION)}


class NeededWeights:
    """ASGI middleware around SGLang's application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._asking = asyncio.Lock()
        self._next: asyncio.Task[list[Answer]] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        needs = {
            _HEADERS[name]: value.decode("latin-1") for name, value in scope.get("headers", ()) if name in _HEADERS
        }
        refusal = await self._refusal(needs) if needs else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    async def _refusal(self, needs: dict[str, str]) -> Response | None:
        if not needs.get(TARGET_VERSION, "0").isdecimal():
            return as_json({"message": f"{TARGET_VERSION}: {needs[TARGET_VERSION]!r} is not a number"}, 400)
        targets = [answer.versions.target for answer in await self._versions() if answer.versions]
        why = conflict(needs, targets)
        return None if why is None else as_json({"message": why, "target": targets[0]}, 409)

    async def _versions(self) -> list[Answer]:
        """Read after this call. Schedulers answer once a step, so those who come meanwhile share the next answer."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
        return await asyncio.shield(self._next)

    async def _ask(self) -> list[Answer]:
        async with self._asking:
            self._next = None
            return await ask(ReadVersions())


def conflict(needs: dict[str, str], targets: Iterable[TargetVersion]) -> str | None:
    """Why a request must not be sampled now; None where it may. needs: the values of the headers by their names.
    targets: what is active on each replica."""
    for target in targets:
        active = f"{target.weight_version!r} is, target_version {target.version}"
        if target.partial:
            return f"a publication is under way: before it, {active}"
        if target.missing:
            return f"the target lacks {listed(target.missing)}: publish the whole of it again. {active}"
        if needs.get(WEIGHT_VERSION, target.weight_version) != target.weight_version:
            return f"weight_version {needs[WEIGHT_VERSION]!r} is not active: {active}"
        if int(needs.get(TARGET_VERSION, target.version)) != target.version:
            return f"target_version {needs[TARGET_VERSION]} is not active: {active}"
    return None
