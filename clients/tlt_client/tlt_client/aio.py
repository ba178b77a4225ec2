"""The client that awaits, for asyncio. The same flows as `tlt_client.client`, run by an event loop."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import httpx

from tlt_client import schemas
from tlt_client.errors import TltClientError
from tlt_client.flow import Call, Close, Flow, Outcome, Pause, Read, Reply, Sample, Step
from tlt_client.rollouts import Chunk, Rollout
from tlt_client.sampling import SamplingParams
from tlt_client.session import Asked, AskedOnce, Options, Session, harvest
from tlt_client.streams import Streaming
from tlt_client.transports import base_url_of, certificates_for, limits, socket_options
from tlt_client.wire import Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's own from Python 3.11 on

T = TypeVar("T")
A = TypeVar("A", bound="AsyncClient")


class AsyncClient:
    """`Client`, awaited: every argument and method means what it means there.

    Cancelling the task of a call closes its connection, on which the server aborts what it was sampling.
    """

    def __init__(
        self,
        base_url: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **options: "Unpack[Options]",
    ) -> None:
        self._session, self._sleep = Session(**options), sleep
        url = base_url_of(base_url)
        if transport is None:
            transport = httpx.AsyncHTTPTransport(
                verify=certificates_for(url), limits=limits(), socket_options=socket_options()
            )
        self._http = httpx.AsyncClient(base_url=url, transport=transport)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **asked: "Unpack[AskedOnce]"
    ) -> Rollout:
        return await self._run(self._session.rollout(self._session.one(prompt, sampling, **asked)))

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **asked: "Unpack[Asked]",
    ) -> list[Rollout]:
        return await self._all(self._session.samples(prompts, sampling, **asked))

    async def generate_group(
        self, prompt: Prompt, n: int, sampling: SamplingParams | None = None, **asked: "Unpack[Asked]"
    ) -> list[Rollout]:
        return await self._all(self._session.group(prompt, n, sampling, **asked))

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **asked: "Unpack[AskedOnce]"
    ) -> AsyncGenerator[Chunk, None]:
        """To leave the loop early, iterate inside `contextlib.aclosing`: else the loop closes it when it gets to it."""
        return self._chunks(Streaming(self._session.policy, self._session.one(prompt, sampling, **asked)))

    async def health(self) -> bool:
        return await self._run(self._session.healthy())

    async def status(self) -> schemas.Status:
        return await self._run(self._session.status())

    async def server_info(self) -> dict[str, Any]:
        return await self._run(self._session.server_info())

    async def metrics(self) -> str:
        return await self._run(self._session.metrics())

    async def abort(self, rid: str) -> None:
        await self._run(self._session.abort(rid))

    async def abort_all(self) -> None:
        await self._run(self._session.abort(None))

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        await self._run(self._session.flush_cache(wait_s))

    async def events(self, after: int = 0) -> list[schemas.Event]:
        return await self._run(self._session.events(after))

    async def load(self) -> schemas.Load:
        return await self._run(self._session.load())

    async def drafter(self) -> schemas.Drafter:
        return await self._run(self._session.drafter())

    async def update_drafter(self, update: schemas.DrafterUpdate, *, within_s: float = 120.0) -> schemas.Drafter:
        return await self._run(self._session.update_drafter(update, within_s))

    async def roll_back_drafter(self) -> schemas.Drafter:
        return await self._run(self._session.roll_back_drafter())

    async def freeze_drafter(self, frozen: bool = True) -> schemas.Drafter:
        return await self._run(self._session.freeze_drafter(frozen))

    async def strategy(self) -> schemas.Speculation:
        return await self._run(self._session.strategy())

    async def set_strategy(self, update: schemas.StrategyUpdate) -> schemas.Speculation:
        return await self._run(self._session.strategy(update))

    async def learned(self) -> dict[str, Any]:
        return await self._run(self._session.learned())

    async def learn(self, learned: Mapping[str, Any]) -> None:
        await self._run(self._session.learn(learned))

    async def report_trainer(self, trainer: schemas.DrafterTrainer) -> None:
        await self._run(self._session.report_trainer(trainer))

    async def set_watchdog(self, mode: Literal["armed", "observe"]) -> schemas.Drafter:
        """`armed`: a drafter that is plainly worse is rolled back by itself; `observe`: the server only says so."""
        return await self._run(self._session.set_watchdog(mode))

    async def share_target(self, path: str, *, within_s: float = 60.0) -> schemas.SharedTarget:
        return await self._run(self._session.share_target(path, within_s))

    async def begin_weight_update(self, selector: str | None = None) -> None:
        await self._run(self._session.begin_weight_update(selector))

    async def end_weight_update(self) -> None:
        await self._run(self._session.end_weight_update())

    async def update_weights_from_disk(
        self, model_path: str, weight_version: str | None = None, *, within_s: float = 600.0
    ) -> None:
        await self._run(self._session.update_weights_from_disk(model_path, weight_version, within_s))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self: A) -> A:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _all(self, samples: list[Sample]) -> list[Rollout]:
        if not samples:
            return []
        places = asyncio.Semaphore(self._session.max_concurrency)

        async def one(sample: Sample) -> Rollout:
            async with places:
                return await self._run(self._session.rollout(sample))

        jobs = [asyncio.create_task(one(sample)) for sample in samples]
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_EXCEPTION)
            return harvest(jobs)
        except TltClientError:
            await self._run(self._session.abandon(samples))
            raise
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _chunks(self, streaming: Streaming) -> AsyncGenerator[Chunk, None]:
        try:
            while chunks := await self._run(streaming.more()):
                for chunk in chunks:
                    yield chunk
        finally:
            if streaming.reply is not None:
                await self._perform(Close(streaming.reply))

    async def _run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                try:
                    outcome = await self._perform(step)
                except httpx.RequestError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as stop:
            return cast(T, stop.value)
        finally:
            flow.close()

    async def _perform(self, step: Step) -> Outcome:
        match step:
            case Call():
                response = await self._http.send(self._session.request(self._http, step), stream=True)
                return Reply(response, response.aiter_bytes())
            case Read(reply):
                return await anext(cast(AsyncIterator[bytes], reply.pieces), b"")
            case Close(reply):
                await reply.response.aclose()
            case Pause(seconds):
                await self._sleep(seconds)
        return None
