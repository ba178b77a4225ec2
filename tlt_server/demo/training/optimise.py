"""The one training loop: AdamW, warm-up, cosine decay to nothing."""

import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tlt_server.demo.training.corpus import Sequence

WARMUP = 200
REPORT_EVERY = 500

Loss = Callable[[list[Sequence]], Tensor]


def optimise(
    name: str, module: nn.Module, loss: Loss, batches: Iterator[list[Sequence]], steps: int, peak_rate: float
) -> None:
    """Train the parameters of `module` for `steps` batches; prints the mean loss now and then."""
    decayed = [p for p in module.parameters() if p.dim() > 1]
    plain = [p for p in module.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    device, begin, recent = next(module.parameters()).device, time.monotonic(), list[Tensor]()
    for step in range(1, steps + 1):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(next(batches))
        optimiser.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        recent.append(value.detach())
        if step % REPORT_EVERY == 0 or step == steps:
            mean = torch.stack(recent).mean().item()
            print(f"{name} step {step} loss {mean:.4f} {time.monotonic() - begin:.0f} s", flush=True)  # noqa: T201
            recent = []
