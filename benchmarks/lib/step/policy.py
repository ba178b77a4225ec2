"""The policy that learns: the served model itself; of a padded one, the small model in it, at the large one's cost."""

import copy
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tlt_grpo.config import Config
from tlt_grpo.learning.batches import Pack, Trajectory
from tlt_grpo.learning.loss import clipped_terms
from tlt_grpo.learning.optimiser import MasterAdamW, Masters, Optimiser
from tlt_grpo.learning.passes import pack_logprobs, packed_attention
from tlt_grpo.learning.policy import Learnt, Policy
from torch import Tensor, nn

from benchmarks.lib.adaptation.policy import BETAS, Lesson, Lessons
from benchmarks.lib.adaptation.rl import OTHER_SIGNS
from benchmarks.models.padded_adamw import PaddedAdamW
from benchmarks.models.padding import Padding
from benchmarks.models.shapes import Shape
from tlt_server.demo.checkpoint import load_target
from tlt_server.errors import ServerFailed

LEAST_COSINE = {torch.float32: 0.9999, torch.bfloat16: 0.9}
"""Of a padded model's gradient with the small one's own, in the median of the updates so far: below that another
function is being learnt. One update's may be lower: where what responses ask for nearly cancels, bfloat16's rounding is
not small beside what is left."""


class Learner(Policy):
    """Can begin anew, and says what it is: `learner` makes one."""

    def __init__(self, config: Config, optimiser: Any = None) -> None:
        super().__init__(config, optimiser)
        self._first = copy.deepcopy(self.optimiser.state_dict())
        self._lessons: Lessons | None = None
        self.check_s = 0.0
        """That self-checks took, within the passes, since this was last asked for and set to 0."""

    def begin(self, lesson: Lesson | None = None) -> None:
        """As it was made: weights, moments. lesson: given to the small model, in its steps."""
        self.optimiser.load_state_dict(copy.deepcopy(self._first))
        self._lessons = Lessons(lesson, OTHER_SIGNS, self._config) if lesson else None
        self._imitating = MasterAdamW(self._small_masters(), lesson.rate, BETAS) if lesson else None

    def learn(self, trajectories: Sequence[Trajectory], step: int) -> Learnt | None:
        """What GRPO found; a lesson comes after it, for `trajectories` are of the policy before."""
        learnt = super().learn(trajectories, step)
        if self._lessons is not None and self._imitating is not None:
            self._lessons.give(self, self.small, self._imitating, step)
            self._taught()
        return learnt

    def _small_masters(self) -> Masters:
        return self.masters

    def _taught(self) -> None:
        """After a lesson of the small model."""

    @property
    def small(self) -> Any:
        """The model that learns: a small one, whatever is served."""
        return self.model

    def checked(self) -> list[float]:
        """Of the last update: the gradient's cosine with the small model's own, where there is one.

        Raises:
            ServerFailed: a self-check failed.
        """
        return []

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with, so that 6 operations each make a training pass."""
        return (
            sum(weight.numel() for weight in self.model.parameters()) - self.model.get_input_embeddings().weight.numel()
        )


class PaddedLearner(Learner):
    """What is learnt is the small model's, in float32. Its own gradient is computed along with each pass."""

    def __init__(self, config: Config, small: Path, padding: Padding) -> None:
        from transformers import AutoModelForCausalLM

        packed = packed_attention()
        self._small = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32, attn_implementation=packed)
        self._small.to(config.device)
        self._cosines = list[float]()
        super().__init__(config, partial(_padded, small=self._small, padding=padding, rate=config.learning_rate))

    def begin(self, lesson: Lesson | None = None) -> None:
        super().begin(lesson)
        self._cosines.clear()

    @property
    def small(self) -> Any:
        return self._small

    def _small_masters(self) -> Masters:
        return Masters(self._small.parameters())

    def _taught(self) -> None:
        assert isinstance(self.optimiser, PaddedAdamW)
        self.optimiser.push()

    def backward(self, loss: Tensor, pack: Pack, old: Tensor, total: int) -> None:
        super().backward(loss, pack, old, total)
        self.settle()
        began, config = time.monotonic(), self._config
        new = pack_logprobs(self._small, pack, config.temperature, config.head_rows)
        asked = (pack.sampled, pack.advantages, config.clip_low, config.clip_high, config.truncate)
        (clipped_terms(new, new.detach(), *asked).objective / total).backward()
        self.settle()
        self.check_s += time.monotonic() - began

    def checked(self) -> list[float]:
        optimiser: Optimiser = self.optimiser
        assert isinstance(optimiser, PaddedAdamW)
        if changed := optimiser.changed():
            raise ServerFailed(f"the padding of {changed[0]} has changed: what is learnt is not the small model's")
        if not optimiser.norm:
            return []
        cosine = math.nan if optimiser.cosine is None else optimiser.cosine
        self._cosines.append(cosine)
        least = LEAST_COSINE[next(self.model.parameters()).dtype]
        if not (cosine > 0 and median(self._cosines) >= least):
            raise ServerFailed(
                f"the padded model's gradient has cosine {cosine} with the small one's own, "
                f"and {median(self._cosines)} in the median of {len(self._cosines)} updates"
            )
        return [cosine]


def _padded(model: nn.Module, small: nn.Module, padding: Padding, rate: float) -> PaddedAdamW:
    return PaddedAdamW(model, small, padding, rate)


def learner(config: Config, shape: Shape | None, small: Path) -> Learner:
    """Of a model that was padded to a shape, or, by None, of one as it is. small: folder of the small model."""
    if shape is None:
        return Learner(config)
    padding = Padding(load_target(small).shape, shape, getattr(torch, config.weights), config.device, 0)
    return PaddedLearner(config, small, padding)


@torch.no_grad()
def laws(model: Any, sequences: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Log-probabilities [T, vocab] float32 of what follows each token of each sequence."""
    device = next(model.parameters()).device
    return [
        model(
            input_ids=torch.tensor([each], device=device),
            position_ids=torch.arange(len(each), device=device)[None],
            lengths=(len(each),),
            use_cache=False,
        ).logits[0].float().log_softmax(-1)
        for each in sequences
    ]  # fmt: skip


def divergence(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """KL(one || other) in nats a token, exactly: the sum over the vocabulary, the mean over all tokens."""
    sums = [(a.exp() * (a - b)).sum().item() for a, b in zip(one, other, strict=True)]
    return sum(sums) / sum(len(each) for each in one)
