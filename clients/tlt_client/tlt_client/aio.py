"""The client that awaits, for asyncio. The same flows as `tlt_client.client`, run by an event loop."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import httpx

from tlt_client import schemas
from tlt_client.control import PauseMode
from tlt_client.errors import TltClientError
from tlt_client.flow import Call, Close, Flow, Outcome, Pause, Read, Reply, Sample, Step, Work
from tlt_client.rollouts import Chunk, Rollout
from tlt_client.sampling import SamplingParams
from tlt_client.session import Asked, AskedAgain, AskedOnce, Options, Session, harvest
from tlt_client.streams import Streaming
from tlt_client.transports import base_url_of, certificates_for, limits, socket_options
from tlt_client.weights.flows import Backend, Sent, Weights
from tlt_client.wire import Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's own from Python 3.11 on

    from tlt_client.weights.flows import NamedTensors
    from tlt_client.weights.group import WeightsUpdateGroup

T = TypeVar("T")
A = TypeVar("A", bound="AsyncClient")


class AsyncClient:
    """`Client`, awaited: every argument and method means what it means there. Cancelling the task of a call closes its
    connection, on which the server aborts what it was sampling."""

    def __init__(
        self,
        base_url: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **options: "Unpack[Options]",
    ) -> None:
        self._session, self._sleep = Session(**options), sleep
        self._control = self._session.control
        self._weights = Weights(self._control)
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

    async def continue_rollout(
        self, rollout: Rollout, prompt: Sequence[int], sampling: SamplingParams, **asked: "Unpack[AskedAgain]"
    ) -> Rollout:
        return await self._run(self._session.rollout(self._session.continuation(rollout, prompt, sampling, **asked)))

    async def continue_batch(
        self,
        rollouts: Sequence[Rollout],
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        **asked: "Unpack[AskedAgain]",
    ) -> list[Rollout]:
        return await self._all(self._session.continuations(rollouts, prompts, sampling, **asked))

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **asked: "Unpack[AskedOnce]"
    ) -> AsyncGenerator[Chunk, None]:
        """To leave the loop early, iterate inside `contextlib.aclosing`: else the loop closes it when it gets to it."""
        return self._chunks(Streaming(self._session.policy, self._session.one(prompt, sampling, **asked)))

    async def health(self) -> bool:
        return await self._run(self._control.healthy())

    async def status(self) -> schemas.Status:
        return await self._run(self._control.status())

    async def server_info(self) -> dict[str, Any]:
        return await self._run(self._control.server_info())

    async def metrics(self) -> str:
        return await self._run(self._control.metrics())

    async def abort(self, rid: str) -> None:
        await self._run(self._control.abort(rid))

    async def abort_all(self) -> None:
        await self._run(self._control.abort(None))

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        await self._run(self._control.flush_cache(wait_s))

    async def events(self, after: int = 0) -> list[schemas.Event]:
        return await self._run(self._control.events(after))

    async def load(self) -> schemas.Load:
        return await self._run(self._control.load())

    async def drafter(self) -> schemas.Drafter:
        return await self._run(self._control.drafter())

    async def update_drafter(self, update: schemas.DrafterUpdate, *, within_s: float = 120.0) -> schemas.Drafter:
        return await self._run(self._control.update_drafter(update, within_s))

    async def roll_back_drafter(self) -> schemas.Drafter:
        return await self._run(self._control.roll_back_drafter())

    async def freeze_drafter(self, frozen: bool = True) -> schemas.Drafter:
        return await self._run(self._control.freeze_drafter(frozen))

    async def strategy(self) -> schemas.Speculation:
        return await self._run(self._control.strategy())

    async def set_strategy(self, update: schemas.StrategyUpdate) -> schemas.Speculation:
        return await self._run(self._control.strategy(update))

    async def step_times(self) -> schemas.StepTimes:
        return await self._run(self._control.step_times())

    async def learned(self) -> dict[str, Any]:
        return await self._run(self._control.learned())

    async def learn(self, learned: Mapping[str, Any]) -> None:
        await self._run(self._control.learn(learned))

    async def history(self) -> schemas.History:
        return await self._run(self._control.history())

    async def load_history(self, load: schemas.HistoryLoad) -> schemas.History:
        return await self._run(self._control.history(load))

    async def forget_history(self, namespace: str | None = None) -> schemas.History:
        return await self._run(self._control.forget_history(namespace))

    async def report_trainer(self, trainer: schemas.DrafterTrainer) -> None:
        await self._run(self._control.report_trainer(trainer))

    async def train_drafter(
        self, steps: int, *, within_s: float = 60.0, until: schemas.TrainedUntil = "active"
    ) -> schemas.TrainedSteps:
        """Has the drafter trainer whose URL this client has, with `on_demand`, take so many steps, judge, and publish
        what is better; returns when that is active, or the time is over; `until` says for less: `taken`, `judged`. By 0
        steps it judges what it has learnt so far.
        VersionConflict: it trains by itself, or for another."""
        return await self._run(self._control.train_drafter(steps, within_s, until))

    async def set_watchdog(self, mode: Literal["armed", "observe"]) -> schemas.Drafter:
        """`armed`: a drafter that is plainly worse is rolled back by itself; `observe`: the server only says so."""
        return await self._run(self._control.set_watchdog(mode))

    async def share_target(self, path: str, *, within_s: float = 60.0) -> schemas.SharedTarget:
        return await self._run(self._control.share_target(path, within_s))

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        await self._run(self._control.pause_generation(mode))

    async def continue_generation(self) -> None:
        await self._run(self._control.continue_generation())

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        await self._run(self._control.release_memory_occupation(tags))

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        await self._run(self._control.resume_memory_occupation(tags))

    async def weight_version(self) -> str:
        return await self._run(self._control.weight_version())

    async def update_weight_version(self, new_version: str) -> None:
        await self._run(self._control.update_weight_version(new_version))

    async def begin_weight_update(self, selector: str | None = None, *, allow_partial: bool = False) -> None:
        await self._run(self._control.begin_weight_update(selector, allow_partial))

    async def end_weight_update(self) -> None:
        await self._run(self._control.end_weight_update())

    async def update_weights_from_disk(
        self,
        model_path: str,
        weight_version: str | None = None,
        *,
        flush_cache: bool = True,
        within_s: float = 600.0,
    ) -> None:
        await self._run(self._control.update_weights_from_disk(model_path, weight_version, flush_cache, within_s))

    async def update_weights_from_tensor(
        self,
        tensors: "NamedTensors",
        weight_version: str | None = None,
        **sent: "Unpack[Sent]",
    ) -> None:
        """An iterable is read in a thread, where collectives of the trainer's block nobody."""
        await self._run(self._weights.from_tensor(tensors, weight_version, **sent))

    async def init_weights_update_group(
        self, master_address: str = "127.0.0.1", *, backend: Backend = "nccl", within_s: float = 60.0
    ) -> "WeightsUpdateGroup":
        return await self._run(self._weights.init_group(master_address, backend, within_s))

    async def update_weights_from_distributed(
        self,
        group: "WeightsUpdateGroup",
        tensors: "NamedTensors",
        weight_version: str | None = None,
        **sent: "Unpack[Sent]",
    ) -> None:
        await self._run(self._weights.from_group(group, tensors, weight_version, **sent))

    async def destroy_weights_update_group(self, group: "WeightsUpdateGroup") -> None:
        await self._run(self._weights.destroy_group(group))

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
            case Work(function):
                return await asyncio.to_thread(function)
        return None
