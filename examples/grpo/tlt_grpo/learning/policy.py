"""The policy: a causal language model of transformers, its optimiser, and what one step does to it."""

import copy
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tlt_server.engine.cpu.torchvision import mend_torchvision
from torch import Tensor

from tlt_grpo.clock import Clock
from tlt_grpo.config import Config
from tlt_grpo.errors import GrpoError
from tlt_grpo.learning.batches import Pack, Trajectory, packs, shares
from tlt_grpo.learning.loss import clipped_terms, divergence
from tlt_grpo.learning.optimiser import MasterAdamW, Masters, Optimiser
from tlt_grpo.learning.passes import pack_logprobs, packed_attention

SETTINGS_THAT_COUNT = ("model", "prompts", "group", "learning_rate", "updates", "seed")
"""A run that goes on must have them as it began."""


class Learnt(msgspec.Struct, frozen=True):
    """What an update found; means are over its tokens."""

    mismatch: float
    """The greatest |new/sampled - 1| of a token, in responses that are the newest weights' alone. Before a step's first
    update: what the server's numerics differ by."""
    drift: float
    """KL from the policy that sampled, in nats."""
    clipped: float
    """Share of tokens whose gradient was clipped away."""
    truncated: float
    """Share of tokens whose importance weight was truncated."""
    gradient: float
    """Its norm, before that was bounded by 1."""
    kl: float | None
    """From the start in nats, by its plain estimate; None where no copy of the start is kept."""
    tokens: int
    """That passes read, prompts included."""
    passes_s: float
    """Of forward and backward passes."""
    optimiser_s: float


class Policy:
    """A model that learns.

    optimiser: made of the model; None: AdamW on float32 copies of its weights.

    Raises:
        GrpoError: it cannot be loaded, or not to that device, or is of a kind that passes.py does not compute.
    """

    def __init__(self, config: Config, optimiser: Callable[[Any], Optimiser] | None = None) -> None:
        self._config = config
        self.model, self.tokenizer = _load(config)
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)  # kernels, and NCCL, take the current one
        self._start = copy.deepcopy(self.model).requires_grad_(False) if config.kl is not None else None
        if config.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # in which alone transformers computes activations again
        if optimiser is None:
            self.masters = Masters(self.model.parameters())
            self.optimiser: Optimiser = MasterAdamW(self.masters, config.learning_rate)
        else:
            self.optimiser = optimiser(self.model)

    def tokens(self, prompt: str) -> tuple[int, ...]:
        """A prompt as the model reads it."""
        return tuple(self.tokenizer.encode(prompt))

    def weights(self) -> Mapping[str, Tensor]:
        """By their names in a checkpoint; tied ones once."""
        return {name: weight.detach() for name, weight in self.model.named_parameters()}

    def save(self, folder: Path) -> None:
        """A checkpoint that SGLang and transformers load."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def keep(self, file: Path, step: int) -> None:
        """What a run goes on from, whole or not at all."""
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        told = {name: getattr(self._config, name) for name in SETTINGS_THAT_COUNT}
        file.parent.mkdir(parents=True, exist_ok=True)  # by disk alone a step has made it
        torch.save({"step": step, "settings": told, "optimiser": self.optimiser.state_dict()}, partial)
        partial.replace(file)

    def go_on(self, file: Path) -> int:
        """From what was kept: the step after which that was.

        Raises:
            GrpoError: there is none, or it is of another run.
        """
        if not file.exists():
            raise GrpoError(f"{file}: there is nothing to resume from. Leave --resume out, or name another --out")
        kept = torch.load(file, map_location=self._config.device, weights_only=True)
        for name, value in kept["settings"].items():
            if value != getattr(self._config, name):
                raise GrpoError(
                    f"{name}={getattr(self._config, name)}: the run in {file} has {value}. Resume with that"
                )
        self.optimiser.load_state_dict(kept["optimiser"])
        return int(kept["step"])

    def learn(self, trajectories: Sequence[Trajectory], step: int) -> Learnt | None:
        """The updates of one step. Unless settings want them, those with an advantage of 0 are left out, which costs
        nothing but a pull to the start; None is returned if all are."""
        telling = [each for each in trajectories if each.advantage != 0 or self._config.all_responses]
        parts = shares(telling, self._config.updates, f"{self._config.seed} {step}")
        config = self._config
        made = [packs(part, config.batch_tokens, config.device, config.max_age) for part in parts]
        clock = Clock(settle=self.settle)
        with clock.phase("passes"), torch.no_grad():
            # of the first update the policy is still the old one, and its own pass says so
            old = [None, *([self.logprobs(pack) for pack in some] for some in made[1:])]
        found = [self._update(some, before, clock) for some, before in zip(made, old, strict=bool(made))]
        return _over(found, clock) if found else None

    def rest(self, unless_free: float = 1.0) -> None:
        """Gives memory back that it does not use now, where less than this share of the device's is free."""
        if self._config.device != "cpu":
            free, total = torch.cuda.mem_get_info(self._config.device)
            if free < unless_free * total:
                torch.cuda.empty_cache()

    def settle(self) -> None:
        """Waits for the device."""
        if self._config.device != "cpu":
            torch.cuda.synchronize(self._config.device)

    def logprobs(self, pack: Pack) -> Tensor:
        """Log-probabilities of a pack's responses: [N] float32, with gradient."""
        return self._logprobs(self.model, pack)

    def _logprobs(self, model: Any, pack: Pack) -> Tensor:
        return pack_logprobs(model, pack, self._config.temperature, self._config.head_rows)

    def _update(self, some: Sequence[Pack], old: Sequence[Tensor] | None, clock: Clock) -> Learnt:
        """One step of the optimiser, of all these packs."""
        config, total = self._config, sum(len(pack.at) for pack in some)
        mismatch = drift = clipped = truncated = kl = 0.0
        with clock.phase("passes"):
            for number, pack in enumerate(some):
                new = self.logprobs(pack)
                before = new.detach() if old is None else old[number]
                terms = clipped_terms(
                    new, before, pack.sampled, pack.advantages, config.clip_low, config.clip_high, config.truncate
                )
                loss = terms.objective
                if self._start is not None:
                    start = self._logprobs(self._start, pack)
                    loss = loss + (config.kl or 0.0) * divergence(new, start)
                    kl += (new.detach() - start).sum().item() / total
                self.backward(loss / total, pack, before, total)
                apart = ((new.detach() - pack.sampled).exp() - 1).abs() * pack.fresh
                mismatch = max(mismatch, apart.max().item())
                drift += terms.drift.item() / total
                clipped += terms.clipped.item() / total
                truncated += terms.truncated.item() / total
        with clock.phase("optimiser"):
            self.optimiser.step()
        read = sum(sum(pack.lengths) for pack in some)
        penalised = None if self._start is None else kl
        return Learnt(mismatch, drift, clipped, truncated, self.optimiser.norm, penalised, read, 0.0, 0.0)

    def backward(self, loss: Tensor, pack: Pack, old: Tensor, total: int) -> None:  # noqa: ARG002 - for who checks it
        """The backward pass of a pack; `total`: tokens of the update that loss is divided by."""
        loss.backward()
        self.optimiser.gather()


def _over(updates: Sequence[Learnt], clock: Clock) -> Learnt:
    """Of a step: the first update's mismatch, the last one's drift and KL, means of the rest, sums of what it took."""
    seconds = clock.seconds()
    return msgspec.structs.replace(
        updates[-1],
        mismatch=updates[0].mismatch,
        clipped=statistics.fmean(each.clipped for each in updates),
        truncated=statistics.fmean(each.truncated for each in updates),
        gradient=statistics.fmean(each.gradient for each in updates),
        tokens=sum(each.tokens for each in updates),
        passes_s=seconds["passes"],
        optimiser_s=seconds["optimiser"],
    )


def _load(config: Config) -> tuple[Any, Any]:
    mend_torchvision()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    name, device = config.model, config.device
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=getattr(torch, config.weights), attn_implementation=packed_attention()
        )
    except (OSError, ValueError) as error:
        raise GrpoError(f"model={name}: {str(error).splitlines()[0]}") from error
    if getattr(model.config, "final_logit_softcapping", None):
        raise GrpoError(f"model={name}: caps its logits, which passes.py does not compute. Take another model")
    try:
        return model.to(device), tokenizer
    except (RuntimeError, AssertionError) as error:  # how torch refuses a device
        raise GrpoError(f"device={device}: {str(error).splitlines()[0]}") from error
