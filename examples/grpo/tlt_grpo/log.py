"""What a run says of itself: a JSON object a line, flushed as it comes."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tlt_grpo.errors import GrpoError
from tlt_grpo.learning.policy import Learnt
from tlt_grpo.rollouts import Rollouts, accept_length

PHASES = ("rollout", "grade", "learn", "offload", "draft", "publish", "keep")
"""Of a step."""


class Step(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One step. Its updates come after its rollouts: what is said of those is of the policy before."""

    step: int
    """From 1."""
    weight_version: str
    """Our name of the weights that sampled."""
    target_versions: tuple[int, ...]
    """The server's numbers of them; empty from a server that does not say."""
    drafter_versions: tuple[int, ...]
    """Which drafted."""
    responses: int
    reward: float
    """Mean over the responses."""
    length_mean: float
    """Tokens of a response."""
    length_p90: float
    length_max: int
    accept_length: float | None
    """Tokens per verifying target pass, the bonus token counted; None without speculation."""
    tokens: int
    """Sampled."""
    tokens_per_s: float
    """Of the rollouts alone."""
    rollout_s: float
    grade_s: float
    learn_s: float
    publish_s: float
    keep_s: float
    """To leave what the run can be resumed from."""
    step_s: float
    """From prompts to prompts: those phases, and what is between them."""
    failed_requests: int
    learnt: Learnt | None
    """None where every group's responses were equally good."""
    lengths: tuple[int, ...] = ()
    """Tokens of each response, group by group."""
    age_mean: float = 0.0
    """Publications since the weights that sampled a token; over all tokens."""
    age_max: int = 0
    too_old: float = 0.0
    """Share of tokens that were not learnt from for their age."""
    offload_s: float = 0.0
    """To release the server's memory, and to resume it."""
    draft_s: float = 0.0
    """That the drafter trainer was waited for."""
    drafter_steps: int = 0
    """That it took."""

    @classmethod
    def of(
        cls,
        number: int,
        weight_version: str,
        rollouts: Rollouts,
        rewards: Sequence[float],
        learnt: Learnt | None,
        seconds: Mapping[str, float],
        said: dict[str, Any],
    ) -> "Step":
        """`seconds`: by phase, and `whole`. said: other fields."""
        lengths = [each.completion_tokens for each in rollouts.all]
        said = {f"{phase}_s": seconds.get(phase, 0.0) for phase in PHASES} | said
        return cls(
            step=number,
            weight_version=weight_version,
            target_versions=_distinct(span.target_version for each in rollouts.all for span in each.weight_versions),
            drafter_versions=_distinct(span.version for each in rollouts.all for span in each.drafter_versions),
            responses=len(rewards),
            reward=statistics.fmean(rewards),
            length_mean=statistics.fmean(lengths),
            length_p90=statistics.quantiles(lengths, n=10, method="inclusive")[8],
            length_max=max(lengths),
            accept_length=accept_length(rollouts.all),
            tokens=sum(lengths),
            tokens_per_s=sum(lengths) / seconds["rollout"],
            step_s=seconds["whole"],
            failed_requests=rollouts.failed,
            learnt=learnt,
            lengths=tuple(lengths),
            **said,
        )

    def __str__(self) -> str:
        drafted = "" if self.accept_length is None else f", accept length {self.accept_length:.2f}"
        return (
            f"step {self.step}: reward {self.reward:.3f}, {self.length_mean:.0f} tokens a response{drafted}, "
            f"{self.tokens_per_s:.0f} tokens/s; "
            f"{self.rollout_s:.1f} s to roll out, {self.learn_s:.1f} s to learn, {self.publish_s:.1f} s to publish"
        )


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="held_out"):
    """The policy on problems that it is not trained on."""

    step: int
    """After which; 0: the start."""
    problems: int
    accuracy: float

    def __str__(self) -> str:
        return f"held out: {self.accuracy:.0%} of {self.problems} problems"


Line = Step | HeldOut


class Log:
    """A new file; or, of a run that goes on, what was written up to the step that it goes on from.

    Raises:
        GrpoError: there is one already, or it cannot be made.
    """

    def __init__(self, path: Path, go_on_from: int | None = None) -> None:
        self.require_place(path, resume=go_on_from is not None)
        kept = (
            [] if go_on_from is None or not path.exists() else [line for line in read(path) if line.step <= go_on_from]
        )
        self._path, self._file = path, path.open("wb", buffering=0)
        for line in kept:
            self.write(line)

    @staticmethod
    def require_place(path: Path, *, resume: bool = False) -> None:
        """Raises GrpoError, as making one would: before what takes long."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not resume:
                raise GrpoError(f"{path}: a run was logged here; name another folder by --out, or go on by --resume")
        except OSError as error:
            raise GrpoError(f"{path}: {error.strerror}") from error

    def write(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if not self._path.stat().st_size:  # nothing was logged: the same folder may be used again
            self._path.unlink()


def read(path: Path) -> list[Line]:
    """What was written so far; a line that is being written is left out."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]


def _distinct(versions: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(sorted({each for each in versions if each is not None}))


def aged(ages: Sequence[int], most: int) -> dict[str, Any]:
    """Fields of a step that say how old its tokens are; none, of one that rolled out when it began."""
    if not ages:
        return {}
    return {
        "age_mean": statistics.fmean(ages),
        "age_max": max(ages),
        "too_old": sum(age > most for age in ages) / len(ages),
    }
