"""What servers did between two reads of their status."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from tlt_client.schemas import Status


class Rates(NamedTuple):
    """tokens_per_s: None where nobody can tell. drafts, accepted: that came meanwhile; recalls, recalled: those of
    history."""

    tokens_per_s: float | None = None
    drafts: int = 0
    accepted: int = 0
    recalls: int = 0
    recalled: int = 0

    @property
    def accept_length(self) -> float | None:
        """Tokens of a verifying pass; None: there was none."""
        return 1 + self.accepted / self.drafts if self.drafts > 0 else None

    @property
    def history_length(self) -> float | None:
        """The same of passes that history drafted for."""
        return 1 + self.recalled / self.recalls if self.recalls > 0 else None

    @classmethod
    def between(cls, before: Status | None, now: Status) -> Self:
        """Nothing where the server was started anew, or nothing is known from before."""
        if before is None or now.uptime_s <= before.uptime_s:
            return cls()
        tokens = None
        if now.generated_tokens is not None and before.generated_tokens is not None:
            tokens = (now.generated_tokens - before.generated_tokens) / (now.uptime_s - before.uptime_s)
        drafts = now.counters.drafts - before.counters.drafts
        accepted = now.counters.accepted_tokens - before.counters.accepted_tokens
        if now.history is None or before.history is None:
            return cls(tokens, drafts, accepted)
        recalls = now.history.lookups - before.history.lookups
        return cls(tokens, drafts, accepted, recalls, now.history.accepted - before.history.accepted)

    @classmethod
    def summed(cls, rates: Iterable["Rates"]) -> Self:
        every = list(rates)
        known = [each.tokens_per_s for each in every if each.tokens_per_s is not None]
        tokens = sum(known) if known else None
        counts = zip(*(each[1:] for each in every), strict=True)
        return cls(tokens, *map(sum, counts))
