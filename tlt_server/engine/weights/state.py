"""What hot reload knows in one scheduler process."""

import gc
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import asdict
from tlt_client.schemas import DrafterTrainer, DrafterVersion, Event, TargetVersion, Versions

from tlt_server.config import Arm, ServerConfig
from tlt_server.engine.decode.history import Histories
from tlt_server.engine.decode.speculation import Speculation
from tlt_server.engine.decode.steplog import StepLog
from tlt_server.engine.decode.verify import counts_late
from tlt_server.engine.events import EventLog
from tlt_server.engine.features.sharing import Sharing, sharing_of
from tlt_server.engine.ranks import gathered
from tlt_server.engine.requests.delay import delay_prefills
from tlt_server.engine.sampling.undrafted import Undrafted
from tlt_server.engine.weights.drafter import Drafter
from tlt_server.engine.weights.head import head_of
from tlt_server.engine.weights.publications import Gaps, Publications, Published
from tlt_server.engine.weights.vocabulary import DraftVocabulary
from tlt_server.engine.weights.watchdog import Watchdog
from tlt_server.errors import listed
from tlt_server.metrics import DRAFT_VOCAB, count_each, show_event, show_staleness, show_watch
from tlt_server.wire.devices import identity


class Stamp(NamedTuple):
    """The weights that a step was launched with. drafter_version: None where there is no drafter."""

    weight_version: str
    target_version: int
    partial: bool
    drafter_version: int | None


SHOWN_NAMES = 10
"""Of tensors that are missing."""
SHOWN_EVERY = 64
"""Steps after which the metrics show again what the watchdog sees: a gauge costs more than a step has to spare."""


@dataclass
class EngineState:
    """Versions and events, beside the models that they speak of. devices: of all ranks, the same on each. target_era:
    counts the calls that wrote to the target. show_history: whether this rank tells the metrics of it."""

    publications: Publications
    events: EventLog
    drafter: Drafter | None
    speculation: Speculation
    sharing: Sharing | None
    devices: list[str]
    trainer: DrafterTrainer | None = None
    step_log: StepLog | None = None
    history: Histories | None = None
    vocabulary: DraftVocabulary | None = None
    show_history: bool = False
    target_era: int = 0
    _settled: int = 0

    @property
    def stamp(self) -> Stamp:
        weight_version, version = self.publications.sampling
        drafter = None if self.drafter is None else self.drafter.live.version
        return Stamp(weight_version, version, self.publications.partial, drafter)

    @property
    def era(self) -> str:
        """Of the prefix cache (engine/eras.py): alike on all ranks; empty for the first one."""
        eras = {"drafter era": self.drafter.cache_era if self.drafter else 0, "target era": self.target_era}
        return " ".join(f"{name} {count}" for name, count in eras.items() if count)

    def probe_due(self) -> str | None:
        """Why speculation is to be tried again now; None where it is not, or on."""
        if self.drafter is None or self.speculation.held is None:
            return None
        self.publications.tick()
        return self.drafter.watchdog.probe_due(self.publications.version)

    def versions(self) -> Versions:
        """What is active, as our routes show it."""
        target = self.publications
        drafter = None if self.drafter is None else self.drafter.describe()
        missing = tuple(target.missing[:SHOWN_NAMES])
        return Versions(TargetVersion(target.version, target.weight_version, target.partial, missing), drafter)

    def hear_trainer(self, trainer: DrafterTrainer) -> None:
        """Takes what the link says of the drafter trainer, and notes what is new in it."""
        before = self.trainer or DrafterTrainer(address=trainer.address, connected=False)
        self.trainer = trainer
        if trainer.connected != before.connected:
            self.events.add("trainer_connected" if trainer.connected else "trainer_lost", address=trainer.address)
        if trainer.refused is not None and trainer.refused != before.refused:
            self.events.add("drafter_refused", version=trainer.refused, why=trainer.reason)

    def settled(
        self, drafter_version: int | None, arm: Arm | None, batch: int, accepted: Sequence[tuple[str, int]], late: bool
    ) -> None:
        """A decode step was settled: its drafter and arm (None: off) at launch, requests in its batch, and accepted
        drafts of each request that counts. late: its result had been there before."""
        self.speculation.settled(batch, [count for _, count in accepted], late)
        if arm is None or arm.of_history or not accepted:
            return
        assert self.drafter is not None
        assert drafter_version is not None
        self.drafter.settled(drafter_version, arm, accepted)
        self._settled += 1
        if self._settled % SHOWN_EVERY == 0 and self.events.told is not None:
            self.show_watch()
            if self.vocabulary is not None:
                count_each(DRAFT_VOCAB, self.vocabulary.untold())

    def show(self, event: Event) -> None:
        """Shows an event in the metrics, and how many publications the drafter is behind since."""
        show_event(event)
        if self.drafter is not None:
            trained_on = self.drafter.live.trained_on
            show_staleness(None if trained_on is None else self.publications.version - trained_on)
            self.show_watch()

    def show_watch(self) -> None:
        """Shows in the metrics what the watchdog sees."""
        if self.drafter is not None:
            watch = self.drafter.watchdog.describe()
            show_watch(watch.accept_length, watch.baseline, self.speculation.on)


def state_of(scheduler: Any, gaps: Gaps) -> EngineState:
    """The state of upstream's `Scheduler`, its models loaded."""
    events = EventLog(scheduler.ps.dp_rank or 0)
    config = ServerConfig.from_environment()
    publications = Publications(
        scheduler.server_args.weight_version,
        config.publication_silence_s,
        time.monotonic,
        lambda published: _note(events, published),
        gaps,
        allow_partial=config.allow_partial,
    )
    worker = scheduler.draft_worker if hasattr(scheduler.draft_worker, "all_arms") else None
    speculation = Speculation(worker, scheduler.max_running_requests, events, leads=scheduler.ps.tp_rank == 0)
    if worker is not None:
        worker.speculation = speculation
    elif scheduler.is_generation and not counts_late(scheduler.server_args):
        Undrafted(scheduler.tp_worker)
    drafter = _drafter(scheduler, events, speculation, config)
    delay_prefills(scheduler, config.prefill_delay_steps)
    speaks = scheduler.ps.attn_tp_rank == 0  # each rank settles the same steps
    step_log = StepLog(Path(config.step_log)) if config.step_log and speaks else None
    sharing, group = sharing_of(scheduler, publications), scheduler.tp_cpu_group
    devices = gathered(group, identity(torch.device(scheduler.device, scheduler.ps.gpu_id)))
    history = None if worker is None else worker.history
    parts = publications, events, drafter, speculation, sharing, devices
    vocabulary = None if worker is None else worker.draft_worker.vocabulary
    state = EngineState(*parts, step_log=step_log, history=history, vocabulary=vocabulary)
    if history is not None:
        history.version = lambda: state.target_era
    if vocabulary is not None:
        vocabulary.version = lambda: state.target_era
    if scheduler.ps.tp_rank == 0:
        events.told = state.show
        state.show_watch()
        state.show_history = True
    gc.collect()
    gc.freeze()  # what is there stays; checkpoint-engine collects all garbage at each update, with decoding at a stop
    return state


def _note(events: EventLog, published: Published) -> None:
    told = asdict(published) | {"seconds": round(published.seconds, 6)}
    missing = told.pop("missing")
    events.add("target_published", **told)
    if missing:
        of = {name: told[name] for name in ("version", "weight_version")}
        events.add("target_incomplete", **of, missing=len(missing), names=listed(missing))


def _drafter(scheduler: Any, events: EventLog, speculation: Speculation, config: ServerConfig) -> Drafter | None:
    worker = scheduler.draft_worker
    if getattr(worker, "weights", None) is None:
        return None

    def between_steps() -> AbstractContextManager[Any]:
        """Forwards run on a stream of their own under overlap: what is copied there falls between two of them."""
        context: AbstractContextManager[Any] = (
            scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext()
        )
        return context

    start = DrafterVersion(0, str(scheduler.server_args.speculative_draft_model_path), None, None)
    arms = [arm for arm in worker.all_arms if not arm.of_history]
    watchdog = Watchdog(arms, config.watchdog, config.accept_length_floor, time.time)
    parts = worker.weights, scheduler.tp_cpu_group, between_steps, events, start, watchdog, speculation
    return Drafter(*parts, untrained=config.begins_untrained, follows=head_of(worker) is not None)
