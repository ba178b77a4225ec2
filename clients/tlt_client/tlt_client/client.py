"""The client that blocks."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import httpx

from tlt_client import schemas
from tlt_client.control import PauseMode
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
C = TypeVar("C", bound="Client")


class Client:
    """Rollouts from one server. Threads may share it; close it, or use it in a `with`.

    A rollout has no time limit unless a `deadline_s` is given, in seconds, of which retries are part. How failures are
    met, and why no rollout is ever counted twice: `tlt_client.flow`. What is raised: `tlt_client.errors`.

    A batch or a group is sent as one request per sample, at most `max_concurrency` at a time, and comes back in order.
    So a lost connection costs one sample, each has a rid of its own, and a server whose queue is bounded can take a
    batch that is larger. The first failure ends the batch: the samples still running are aborted, and the error that is
    raised holds those that are complete (`error.finished`).

    A `version` is of the target, and must be active when a rollout begins: the trainer's name for the weights (str),
    or the server's number, `Versions.target.version` (int). VersionConflict where it is not. A plain SGLang does not
    look.

    base_url: of the server, as http://127.0.0.1:30000; a path in it is kept.
    api_key, admin_key: SGLang's `--api-key` and `--admin-api-key`; the second is for control routes, abort among them.
    transport: any httpx transport. The default takes no proxy from the environment, since rollout servers are inside
        the cluster; for one, give httpx.HTTPTransport(proxy=...).
    retry: how often a request is sent again.
    connect_timeout_s, read_timeout_s, control_timeout_s: for one connection; for one silence of the server while it
        samples (None: as long as it takes); for everything but sampling.
    clock, sleep, draw: monotonic seconds, what waits, and uniform numbers in [0, 1) for jitter.
    """

    def __init__(
        self,
        base_url: str,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        **options: "Unpack[Options]",
    ) -> None:
        self._session, self._sleep = Session(**options), sleep
        self._control = self._session.control
        self._weights = Weights(self._control)
        url = base_url_of(base_url)
        if transport is None:
            transport = httpx.HTTPTransport(
                verify=certificates_for(url), limits=limits(), socket_options=socket_options()
            )
        self._http = httpx.Client(base_url=url, transport=transport)

    def generate(self, prompt: Prompt, sampling: SamplingParams | None = None, **asked: "Unpack[AskedOnce]") -> Rollout:
        """One rollout."""
        return self._run(self._session.rollout(self._session.one(prompt, sampling, **asked)))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **asked: "Unpack[Asked]",
    ) -> list[Rollout]:
        """One rollout for each prompt, in order. `sampling` is for all, or one for each."""
        return self._all(self._session.samples(prompts, sampling, **asked))

    def generate_group(
        self, prompt: Prompt, n: int, sampling: SamplingParams | None = None, **asked: "Unpack[Asked]"
    ) -> list[Rollout]:
        """n rollouts of one prompt, as GRPO wants them. A sampling_seed becomes `sample_seed(seed, i)` for sample i."""
        return self._all(self._session.group(prompt, n, sampling, **asked))

    def continue_rollout(
        self, rollout: Rollout, prompt: Sequence[int], sampling: SamplingParams, **asked: "Unpack[AskedAgain]"
    ) -> Rollout:
        """An aborted rollout, sampled to its end: one rollout, with the tokens, logprobs and versions of both parts.
        Its tokens are those that it would have had, unless weights changed.

        prompt, sampling: as it began with, the prompt in token ids. One that is whole is returned as it is.
        A server that tells no seed does not know that it goes on: it finds stop strings in the new part only, and by
        grammars and penalties, which look back at sampled tokens, it is InvalidArgument.
        """
        return self._run(self._session.rollout(self._session.continuation(rollout, prompt, sampling, **asked)))

    def continue_batch(
        self,
        rollouts: Sequence[Rollout],
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        **asked: "Unpack[AskedAgain]",
    ) -> list[Rollout]:
        """`continue_rollout` for each, in order; only those that are not whole are sent.

        Each goes on with the seed that it tells, whatever `sampling` says.
        """
        return self._all(self._session.continuations(rollouts, prompts, sampling, **asked))

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **asked: "Unpack[AskedOnce]"
    ) -> Generator[Chunk, None, None]:
        """One rollout, piece by piece; the last piece holds the whole. Leaving the loop early aborts it.

        A failure after the first piece is raised, never retried: a second sample would not continue the first.
        """
        return self._chunks(Streaming(self._session.policy, self._session.one(prompt, sampling, **asked)))

    def health(self) -> bool:
        """Whether the server can serve; False too where it cannot be reached."""
        return self._run(self._control.healthy())

    def status(self) -> schemas.Status:
        """What tlt-server says of itself. BadRequest (404) from a plain SGLang."""
        return self._run(self._control.status())

    def server_info(self) -> dict[str, Any]:
        """SGLang's own description: its arguments, versions and internal state."""
        return self._run(self._control.server_info())

    def metrics(self) -> str:
        """Prometheus text."""
        return self._run(self._control.metrics())

    def abort(self, rid: str) -> None:
        """Ends the requests whose rid begins with `rid`. Who waits for one gets a rollout that is `aborted`."""
        self._run(self._control.abort(rid))

    def abort_all(self) -> None:
        """Ends every request that the server has."""
        self._run(self._control.abort(None))

    def flush_cache(self, wait_s: float = 0.0) -> None:
        """Empties the prefix cache, once the server is idle. BadRequest if it is not within `wait_s`."""
        self._run(self._control.flush_cache(wait_s))

    def events(self, after: int = 0) -> list[schemas.Event]:
        """What happened to the weights after the event of this number, as far back as the server remembers."""
        return self._run(self._control.events(after))

    def load(self) -> schemas.Load:
        """Requests that run and that wait, as SGLang's /v1/loads counts them."""
        return self._run(self._control.load())

    def drafter(self) -> schemas.Drafter:
        """Which drafter is active. BadRequest (404) from a server without one."""
        return self._run(self._control.drafter())

    def update_drafter(self, update: schemas.DrafterUpdate, *, within_s: float = 120.0) -> schemas.Drafter:
        """Activates another drafter, without a pause; returns when it is. Harmless to send again with its version.

        BadRequest: it is not a drafter for this server. VersionConflict: it is too old, or was overtaken.
        """
        return self._run(self._control.update_drafter(update, within_s))

    def roll_back_drafter(self) -> schemas.Drafter:
        """Activates the drafter of before. VersionConflict if there is none. Sent once: a lost answer is raised."""
        return self._run(self._control.roll_back_drafter())

    def freeze_drafter(self, frozen: bool = True) -> schemas.Drafter:
        """Holds updates of the drafter back, or lets them in again."""
        return self._run(self._control.freeze_drafter(frozen))

    def strategy(self) -> schemas.Speculation:
        """How decode steps speculate, and whether."""
        return self._run(self._control.strategy())

    def set_strategy(self, update: schemas.StrategyUpdate) -> schemas.Speculation:
        """From the next decode step on. VersionConflict from a server without a drafter."""
        return self._run(self._control.strategy(update))

    def step_times(self) -> schemas.StepTimes:
        """What decode steps took, and what they take usually."""
        return self._run(self._control.step_times())

    def learned(self) -> dict[str, Any]:
        """What the server has learned of its arms, to be kept for the next one."""
        return self._run(self._control.learned())

    def learn(self, learned: Mapping[str, Any]) -> None:
        """Lets a server go on from what another one had `learned`."""
        self._run(self._control.learn(learned))

    def history(self) -> schemas.History:
        """What the server remembers of responses, to draft others from."""
        return self._run(self._control.history())

    def load_history(self, load: schemas.HistoryLoad) -> schemas.History:
        """Has it remember responses that were sampled elsewhere, or before it started."""
        return self._run(self._control.history(load))

    def forget_history(self, namespace: str | None = None) -> schemas.History:
        """All of it; what it has of one namespace, if one is named."""
        return self._run(self._control.forget_history(namespace))

    def report_trainer(self, trainer: schemas.DrafterTrainer) -> None:
        """Tells a server how its link to a drafter trainer stands, for its status and events. The link itself does."""
        self._run(self._control.report_trainer(trainer))

    def train_drafter(
        self, steps: int, *, within_s: float = 60.0, until: schemas.TrainedUntil = "active"
    ) -> schemas.TrainedSteps:
        """Has the drafter trainer whose URL this client has, with `on_demand`, take so many steps, judge, and publish
        what is better; returns when that is active, or the time is over; `until` says for less: `taken`, `judged`. By 0
        steps it judges what it has learnt so far.
        VersionConflict: it trains by itself, or for another."""
        return self._run(self._control.train_drafter(steps, within_s, until))

    def set_watchdog(self, mode: Literal["armed", "observe"]) -> schemas.Drafter:
        """`armed`: a drafter that is plainly worse is rolled back by itself; `observe`: the server only says so."""
        return self._run(self._control.set_watchdog(mode))

    def share_target(self, path: str, *, within_s: float = 60.0) -> schemas.SharedTarget:
        """Has the server write what drafters share with its target to a folder that is not there yet, on its machine.

        VersionConflict: the target was written meanwhile. Sent once: a lost answer is raised.
        """
        return self._run(self._control.share_target(path, within_s))

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stops decoding. `abort`: what runs comes back as it is; `retract`: it goes back to the queue; `in_place`: it
        stays as it is. What comes meanwhile waits. What is written until generation continues is one publication.
        """
        self._run(self._control.pause_generation(mode))

    def continue_generation(self) -> None:
        """Ends a pause. RequestRefused if what was written meanwhile is not the whole target: send all of it again.

        Generation continues even then. Sent once: a lost answer is raised.
        """
        self._run(self._control.continue_generation())

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Gives GPU memory back: `kv_cache`, `weights`, `cuda_graph`; all by default. Requests wait for its return.

        VersionConflict: requests are running, and generation is not paused.
        """
        self._run(self._control.release_memory_occupation(tags))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Takes it again. The target's weights are to be sent after that, the drafter's come back."""
        self._run(self._control.resume_memory_occupation(tags))

    def weight_version(self) -> str:
        """The trainer's name for the active target."""
        return self._run(self._control.weight_version())

    def update_weight_version(self, new_version: str) -> None:
        """Names the active target, or the one that is being written; no request is aborted."""
        self._run(self._control.update_weight_version(new_version))

    def begin_weight_update(self, selector: str | None = None, *, allow_partial: bool = False) -> None:
        """Opens a publication of the target; `allow_partial`: what it leaves out stays as it is.

        RequestRefused if one is open. Sent once: a lost answer is raised.
        """
        self._run(self._control.begin_weight_update(selector, allow_partial))

    def end_weight_update(self) -> None:
        """Closes it: `Versions.target.version` grows. Sent once.

        RequestRefused if none is open, or if what was written is not the whole target: send all of it again.
        """
        self._run(self._control.end_weight_update())

    def update_weights_from_disk(
        self,
        model_path: str,
        weight_version: str | None = None,
        *,
        flush_cache: bool = True,
        within_s: float = 600.0,
    ) -> None:
        """Makes a checkpoint the active target, once no request runs or in a pause. The path is the server's.

        RequestRefused, here and in the two that follow: it does not fit, and the message says what was written.
        """
        self._run(self._control.update_weights_from_disk(model_path, weight_version, flush_cache, within_s))

    def update_weights_from_tensor(
        self,
        tensors: "NamedTensors",
        weight_version: str | None = None,
        **sent: "Unpack[Sent]",
    ) -> None:
        """Sends a target to a server on this machine: by shared memory from a CPU, by CUDA IPC from a GPU.

        Tensors go in flat buckets, a call for each. Send them in a pause or a weight update, whose end says whether
        the target is whole. TorchNeeded: torch is not installed here.
        """
        self._run(self._weights.from_tensor(tensors, weight_version, **sent))

    def init_weights_update_group(
        self, master_address: str = "127.0.0.1", *, backend: Backend = "nccl", within_s: float = 60.0
    ) -> "WeightsUpdateGroup":
        """Joins the server's ranks in a process group, this process being rank 0.

        master_address: of this machine, where the server reaches it; a free port there is taken. With nccl tensors
        are sent from the current CUDA device, which no rank of the server may have.
        """
        return self._run(self._weights.init_group(master_address, backend, within_s))

    def update_weights_from_distributed(
        self,
        group: "WeightsUpdateGroup",
        tensors: "NamedTensors",
        weight_version: str | None = None,
        **sent: "Unpack[Sent]",
    ) -> None:
        """Sends a target by broadcasts to the server's ranks; otherwise as `update_weights_from_tensor`.

        A group in which a broadcast was not received is lost (`group.lost`): destroy it and open another.
        """
        self._run(self._weights.from_group(group, tensors, weight_version, **sent))

    def destroy_weights_update_group(self, group: "WeightsUpdateGroup") -> None:
        """Leaves it, on both sides."""
        self._run(self._weights.destroy_group(group))

    def close(self) -> None:
        self._http.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _all(self, samples: list[Sample]) -> list[Rollout]:
        if not samples:
            return []
        pool = ThreadPoolExecutor(min(self._session.max_concurrency, len(samples)), "tlt-client")
        try:
            jobs = [pool.submit(self._run, self._session.rollout(sample)) for sample in samples]
            wait(jobs, return_when=FIRST_EXCEPTION)
            return harvest(jobs)
        except BaseException:  # KeyboardInterrupt as well: the threads wait on the server, which must be told
            self._run(self._session.abandon(samples))
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _chunks(self, streaming: Streaming) -> Generator[Chunk, None, None]:
        try:
            while chunks := self._run(streaming.more()):
                yield from chunks
        finally:
            if streaming.reply is not None:
                self._perform(Close(streaming.reply))

    def _run(self, flow: Flow[T]) -> T:
        """Performs each step that the flow asks for, tells it the outcome, and returns what it returns."""
        try:
            step = next(flow)
            while True:
                try:
                    outcome = self._perform(step)
                except httpx.RequestError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as stop:
            return cast(T, stop.value)
        finally:
            flow.close()

    def _perform(self, step: Step) -> Outcome:
        match step:
            case Call():
                response = self._http.send(self._session.request(self._http, step), stream=True)
                return Reply(response, response.iter_bytes())
            case Read(reply):
                return next(cast(Iterator[bytes], reply.pieces), b"")
            case Close(reply):
                reply.response.close()
            case Pause(seconds):
                self._sleep(seconds)
            case Work(function):
                return function()
        return None
