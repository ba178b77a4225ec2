"""What hot reload knows in one scheduler process."""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlt_client.schemas import TargetVersion, Versions

from tlt_server.config import ServerConfig
from tlt_server.engine.events import EventLog
from tlt_server.engine.publications import Publications, Published
from tlt_server.metrics import show_target_version


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
    speculation: bool

    @classmethod
    def of(cls, scheduler: Any) -> "EngineState":
        """The state of a scheduler that has just loaded its models."""
        events = EventLog(scheduler.ps.dp_rank or 0)
        shown = scheduler.ps.tp_rank == 0

        def published(publication: Published) -> None:
            events.add(
                "target_published",
                version=publication.version,
                weight_version=publication.weight_version,
                calls=publication.calls,
                refused=publication.refused,
                torn=publication.torn,
                seconds=publication.seconds,
            )
            if shown:
                show_target_version(publication.version)

        silence_s = ServerConfig.from_environment().publication_silence_s
        publications = Publications(scheduler.server_args.weight_version, silence_s, time.monotonic, published)
        return cls(publications, events, scheduler.draft_worker is not None)

    @property
    def stamp(self) -> Stamp:
        weight_version, version = self.publications.sampling
        return Stamp(weight_version, version, self.publications.partial, 0 if self.speculation else None)

    def versions(self) -> Versions:
        """What is in force, as our routes show it."""
        target = self.publications
        return Versions(TargetVersion(target.version, target.weight_version, target.partial))
