"""What servers did between two reads of their status."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from tlt_client.schemas import Status


class Rates(NamedTuple):
    """tokens_per_s: None where nobody can tell. drafts, accepted: that came meanwhile."""

    tokens_per_s: float | None = None
    drafts: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float | None:
        """Tokens of a verifying pass; None: there was none."""
        return 1 + self.accepted / self.drafts if self.drafts > 0 else None

    @classmethod
    def between(cls, before: Status | None, now: Status) -> Self:
        """Nothing where the server was started anew, or nothing is known from before."""
        if before is None or now.uptime_s <= before.uptime_s:
            return cls()
        tokens = None
        if now.generated_tokens is not None and before.generated_tokens is not None:
            tokens = (now.generated_tokens - before.generated_tokens) / (now.uptime_s - before.uptime_s)
        drafts = now.counters.drafts - before.counters.drafts
        return cls(tokens, drafts, now.counters.accepted_tokens - before.counters.accepted_tokens)

    @classmethod
    def summed(cls, rates: Iterable["Rates"]) -> Self:
        every = list(rates)
        known = [each.tokens_per_s for each in every if each.tokens_per_s is not None]
        tokens = sum(known) if known else None
        return cls(tokens, sum(each.drafts for each in every), sum(each.accepted for each in every))
