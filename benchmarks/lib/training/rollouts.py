"""Rollouts of the embedded target with its states, as a server would send them, but without one."""

from collections.abc import Iterator, Sequence

import torch

from tlt_server.config import DrafterKind
from tlt_server.demo.training.corpus import Sequence as Rollout
from tlt_server.demo.training.model import Target
from tlt_server.launch import has_gpu
from tlt_server.trainer.learn.packing import Run


def state_dtype() -> torch.dtype:
    """Of states, and of what is learnt from them."""
    return torch.bfloat16 if has_gpu() else torch.float32


@torch.no_grad()
def runs(target: Target, kind: DrafterKind, rollouts: Sequence[Rollout]) -> Iterator[Run]:
    """What a drafter of this kind reads of them, in `state_dtype`, on the target's device."""
    device = target.lm_head.weight.device
    for rollout in rollouts:
        tokens = torch.from_numpy(rollout.tokens).long()
        hidden, layers = target(tokens.to(device)[None], target.shape.rope(torch.arange(len(tokens), device=device)))
        final = hidden[0].to(state_dtype())
        eagle3 = kind is DrafterKind.EAGLE3
        reads = torch.cat([layer[0] for layer in layers[:3]], -1).to(state_dtype()) if eagle3 else final
        yield Run(tokens, reads, final, prompt=rollout.prompt_length)
