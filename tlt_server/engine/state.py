"""What hot reload knows in one scheduler process."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlt_client.schemas import Arm, DrafterTrainer, DrafterVersion, Event, TargetVersion, Versions

from tlt_server.config import ServerConfig
from tlt_server.engine.drafter import Drafter
from tlt_server.engine.events import EventLog
from tlt_server.engine.publications import Publications, Published
from tlt_server.engine.speculation import Speculation
from tlt_server.metrics import show_event, show_staleness


class Stamp(NamedTuple):
    """The weights that a step was launched with.

    drafter_version: None where there is no drafter.
    """

    weight_version: str
    target_version: int
    partial: bool
    drafter_version: int | None


@dataclass
class EngineState:
    """Versions and events, beside the models that they speak of."""

    publications: Publications
    events: EventLog
    drafter: Drafter | None
    speculation: Speculation
    trainer: DrafterTrainer | None = None

    @property
    def stamp(self) -> Stamp:
        weight_version, version = self.publications.sampling
        drafter = None if self.drafter is None else self.drafter.live.version
        return Stamp(weight_version, version, self.publications.partial, drafter)

    def versions(self) -> Versions:
        """What is in force, as our routes show it."""
        target = self.publications
        drafter = None if self.drafter is None else self.drafter.describe()
        return Versions(TargetVersion(target.version, target.weight_version, target.partial), drafter)

    def hear_trainer(self, trainer: DrafterTrainer) -> None:
        """Takes what the link says of the drafter trainer, and notes what is new in it."""
        before = self.trainer or DrafterTrainer(address=trainer.address, connected=False)
        self.trainer = trainer
        if trainer.connected != before.connected:
            self.events.add("trainer_connected" if trainer.connected else "trainer_lost", address=trainer.address)
        if trainer.refused is not None and trainer.refused != before.refused:
            self.events.add("drafter_refused", version=trainer.refused, why=trainer.reason)

    def show(self, event: Event) -> None:
        """Shows an event in the metrics, and how many publications the drafter is behind since."""
        show_event(event)
        if self.drafter is not None:
            trained_on = self.drafter.live.trained_on
            show_staleness(None if trained_on is None else self.publications.version - trained_on)


def state_of(scheduler: Any) -> EngineState:
    """The state of upstream's `Scheduler`, its models loaded."""
    events = EventLog(scheduler.ps.dp_rank or 0)
    silence_s = ServerConfig.from_environment().publication_silence_s
    publications = Publications(
        scheduler.server_args.weight_version, silence_s, time.monotonic, lambda published: _note(events, published)
    )
    speculation = Speculation(scheduler.draft_worker, _arm(scheduler.server_args), events)
    state = EngineState(publications, events, _drafter(scheduler, events), speculation)
    if scheduler.ps.tp_rank == 0:
        events.told = state.show
    return state


def _note(events: EventLog, published: Published) -> None:
    events.add(
        "target_published",
        version=published.version,
        weight_version=published.weight_version,
        calls=published.calls,
        refused=published.refused,
        torn=published.torn,
        seconds=round(published.seconds, 6),
    )


def _arm(server_args: Any) -> Arm | None:
    a = server_args
    if a.speculative_algorithm is None:
        return None
    return Arm(a.speculative_num_steps, a.speculative_eagle_topk, a.speculative_num_draft_tokens)


def _drafter(scheduler: Any, events: EventLog) -> Drafter | None:
    weights = getattr(scheduler.draft_worker, "weights", None)
    if weights is None:
        return None

    def between_steps() -> AbstractContextManager[Any]:
        """Forwards run on a stream of their own under overlap: what is copied there falls between two of them."""
        context: AbstractContextManager[Any] = (
            scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext()
        )
        return context

    start = DrafterVersion(0, str(scheduler.server_args.speculative_draft_model_path), None, None)
    return Drafter(weights, scheduler.tp_cpu_group, between_steps, events, start)
