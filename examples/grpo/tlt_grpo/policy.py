"""The policy: a causal language model of transformers, its optimiser, and what one step does to it."""

import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tlt_server.engine.cpu.torchvision import mend_torchvision
from torch import Tensor

from tlt_grpo.batches import Trajectory, batches, shares
from tlt_grpo.config import Config
from tlt_grpo.errors import GrpoError
from tlt_grpo.loss import clipped_terms, divergence

LONGEST_GRADIENT = 1.0


class Learnt(msgspec.Struct, frozen=True):
    """What an update found; means are over its tokens."""

    mismatch: float
    """The greatest |new/old - 1| of a token. Before a step's first update: what the server's numerics differ by."""
    drift: float
    """KL from the policy that sampled, in nats."""
    clipped: float
    """Share of tokens whose gradient was clipped away."""
    gradient: float
    """Its norm, before that was bounded by 1."""
    kl: float | None
    """From the start in nats, by its plain estimate; None where no copy of the start is kept."""


class Policy:
    """A model that learns.

    Raises:
        GrpoError: it cannot be loaded, or not to that device.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.model, self.tokenizer = _load(config.model, config.device)
        self._start = copy.deepcopy(self.model).requires_grad_(False) if config.kl is not None else None
        # no weight decay: it pulls at weights of which no reward has said anything
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=0.0)

    def tokens(self, prompt: str) -> tuple[int, ...]:
        """A prompt as the model reads it."""
        return tuple(self.tokenizer.encode(prompt))

    def save(self, folder: Path) -> None:
        """A checkpoint that SGLang and transformers load, in the dtype of the sums: a server that computes in bfloat16
        would round a larger one itself."""
        dtype = getattr(torch, self._config.dtype)
        weights = {name: weight.to(dtype) for name, weight in self.model.state_dict().items()}
        self.model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)

    def learn(self, trajectories: Sequence[Trajectory], step: int) -> Learnt | None:
        """The updates of one step; those with an advantage of 0 are left out, and None is returned if all have."""
        telling = [each for each in trajectories if each.advantage != 0]
        parts = shares(telling, self._config.updates, f"{self._config.seed} {step}")
        found = [self._update(part) for part in parts]
        return _over(found) if found else None

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of tokens [B, T + 1], each after those before it: [B, T] float32, with gradient."""
        return self._logprobs(self.model, tokens)

    def _logprobs(self, model: Any, tokens: Tensor) -> Tensor:
        bfloat16 = self._config.dtype == "bfloat16"
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        logits = logits.float() / self._config.temperature
        return logits.gather(-1, tokens[:, 1:, None])[..., 0] - logits.logsumexp(-1)

    def _update(self, trajectories: Sequence[Trajectory]) -> Learnt:
        """One step of the optimiser."""
        config, total = self._config, sum(len(each.response) for each in trajectories)
        mismatch = drift = clipped = kl = 0.0
        for batch in batches(trajectories, config.batch_tokens, config.device):
            new = self.logprobs(batch.tokens)
            terms = clipped_terms(new, batch.old, batch.advantages, batch.counts, config.clip_low, config.clip_high)
            loss = terms.objective
            if self._start is not None:
                start = self._logprobs(self._start, batch.tokens)
                loss = loss + (config.kl or 0.0) * divergence(new, start, batch.counts)
                kl += ((new.detach() - start) * batch.counts).sum().item() / total
            (loss / total).backward()
            off = ((new.detach() - batch.old).exp() - 1).abs()
            mismatch = max(mismatch, (off * batch.counts).max().item())
            drift += terms.drift.item() / total
            clipped += terms.clipped.item() / total
        gradient = torch.nn.utils.clip_grad_norm_(self.model.parameters(), LONGEST_GRADIENT).item()
        self._optimiser.step()
        self._optimiser.zero_grad()
        return Learnt(mismatch, drift, clipped, gradient, None if self._start is None else kl)


def _over(updates: Sequence[Learnt]) -> Learnt:
    """Of a step: the first update's mismatch, the last one's drift and KL, means of the rest."""
    return msgspec.structs.replace(
        updates[-1],
        mismatch=updates[0].mismatch,
        clipped=statistics.fmean(each.clipped for each in updates),
        gradient=statistics.fmean(each.gradient for each in updates),
    )


def _load(name: str, device: str) -> tuple[Any, Any]:
    mend_torchvision()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise GrpoError(f"model={name}: {str(error).splitlines()[0]}") from error
    try:
        return model.to(device), tokenizer
    except (RuntimeError, AssertionError) as error:  # how torch refuses a device
        raise GrpoError(f"device={device}: {str(error).splitlines()[0]}") from error
