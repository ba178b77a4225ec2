"""Arms: ways to speculate, of which a step has one or none."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Self

import msgspec

from tlt_server.errors import ConfigError


class Source(StrEnum):
    """Where an arm's drafts come from: the drafter's passes; or what was said to the same prompt before."""

    DRAFTER = "drafter"
    HISTORY = "history"


class Arm(msgspec.Struct, frozen=True, array_like=True):
    """A speculative strategy: draft depth, branches kept at each depth, tokens verified in one target pass."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    source: Source = Source.DRAFTER

    def __post_init__(self) -> None:
        if min(self.num_steps, self.topk) < 1:
            raise ConfigError(f"arm {self}: num_steps and topk must be at least 1")
        if self.of_history and self.topk > 1:
            raise ConfigError(f"arm {self}, {self.topk} branches: what history drafts is a chain")
        if self.topk == 1 and self.num_draft_tokens != self.path:
            raise ConfigError(f"arm {self}: a chain verifies num_steps + 1 = {self.path} tokens")
        # SGLang's kernels end where fewer tokens are verified than one path has
        if not self.path <= self.num_draft_tokens <= self.tree_size:
            raise ConfigError(
                f"arm {self}: num_draft_tokens must lie between {self.path} and {self.tree_size}, the whole tree"
            )

    def __str__(self) -> str:
        own = f"({self.num_steps},{self.topk},{self.num_draft_tokens})"
        return f"{Source.HISTORY}:{self.num_steps}" if self.of_history else own

    @property
    def of_history(self) -> bool:
        """Whether it needs no drafter."""
        return self.source is Source.HISTORY

    @property
    def path(self) -> int:
        """Tokens from the root (the last sampled token) to a leaf: as many as a step can add to a request."""
        return self.num_steps + 1

    @property
    def tree_size(self) -> int:
        """Nodes that a draft of this depth and width has, its root included."""
        return 1 + self.topk + (self.num_steps - 1) * self.topk**2

    @classmethod
    def parse(cls, text: str) -> Self:
        """An arm from `num_steps,topk,num_draft_tokens`, or from `history:num_steps`. ConfigError: it is neither."""
        source, _, steps = text.partition(":")
        of_history = source == Source.HISTORY
        try:
            numbers = [int(part) for part in (steps or HISTORY_STEPS if of_history else text).split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != (1 if of_history else 3):
            raise ConfigError(f"arm {text!r}: write num_steps,topk,num_draft_tokens, as in 3,1,4; or history:7")
        return cls.history(numbers[0]) if of_history else cls(numbers[0], numbers[1], numbers[2])

    @classmethod
    def history(cls, steps: int) -> Self:
        """One that drafts so many tokens from history."""
        return cls(steps, 1, steps + 1, Source.HISTORY)


HISTORY_STEPS = "7"
"""Of an arm that says `history` alone."""


def widest(arms: Sequence[Arm]) -> Arm:
    """The smallest arm of a drafter that is nowhere smaller than one of these: what buffers are sized by."""
    return Arm(*(max(values) for values in zip(*(sizes(arm) for arm in arms), strict=True)))


def sizes(arm: Arm) -> tuple[int, int, int]:
    """Its three numbers."""
    return arm.num_steps, arm.topk, arm.num_draft_tokens


CANDIDATES = (
    *(Arm(steps, 1, steps + 1) for steps in (1, 3, 5, 7, 11, 15)),
    *(Arm(5, 4, 8), Arm(5, 4, 16), Arm(8, 4, 16), Arm(8, 4, 32)),
)
"""What a server tries that is to find its arms itself: from what hardly costs anything to what few requests at once can
afford on a large GPU."""
