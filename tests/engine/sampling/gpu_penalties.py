"""Penalties on a GPU against those on a CPU, bit for bit, with times; or small, by Triton's interpreter, without one.

python -m tests.engine.sampling.gpu_penalties
TRITON_INTERPRET=1 python -m tests.engine.sampling.gpu_penalties --small
"""

import argparse
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from tlt_server.engine.sampling.penalties import Penalties, penalise_on_cpu
from tlt_server.engine.sampling.penalty_kernels import BLOCK, penalise

VOCAB = 152_064
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(bs: int, nodes: int, depth: int, vocab: int, dtype: torch.dtype = torch.float32, padded: int = 0) -> Inputs:
    """As `penalise_on_cpu` has them, on a CPU: one request in three asks for nothing, and tokens repeat."""
    random = torch.Generator().manual_seed(bs + nodes + depth + vocab)
    logits = torch.randn(bs * nodes, vocab + padded, generator=random) * 4
    logits[:, ::7] = float("-inf")
    counts = torch.randint(-3, 4, (bs + 1, vocab), generator=random).clamp(min=0).to(torch.int32)
    factors = torch.rand(bs + 1, 3, generator=random) * torch.tensor([2.0, 2.0, 1.5]) + torch.tensor([-1.0, -1.0, 0.2])
    rows = 1 + torch.randperm(bs, generator=random)
    rows[::3] = 0
    paths = torch.randint(-1, min(vocab, 5), (bs * nodes, depth), generator=random)
    paths[:, 1::2] = torch.randint(-1, vocab, paths[:, 1::2].shape, generator=random)
    return logits.to(dtype), counts, factors, rows, paths


def check_penalise(device: str, small: bool) -> int:
    """Prints a line a case; returns how many failed."""
    failed = 0
    vocabs = (1, BLOCK - 1, BLOCK + 3) if small else (1, BLOCK - 1, BLOCK, BLOCK + 3, 32_000, 150_001, VOCAB)
    dtypes = (torch.float32,) if small else (torch.float32, torch.bfloat16)  # which the interpreter rounds otherwise
    for vocab, (nodes, depth), dtype in product(vocabs, ((1, 0), (4, 3), (16, 5)), dtypes):
        logits, *rest = inputs(3 if small else 20, nodes, depth, vocab, dtype, padded=5)
        found = logits.clone().to(device)
        penalise(found[:, :vocab], *(each.to(device) for each in rest))
        wanted = logits[:, :vocab].clone()
        penalise_on_cpu(wanted, *rest)
        wrong = int((found.cpu()[:, :vocab] != wanted).sum()) + int((found.cpu()[:, vocab:] != logits[:, vocab:]).sum())
        failed += bool(wrong)
        say(f"{'WRONG' if wrong else 'right'}  {wrong} of {wanted.numel()} logits  {vocab=} {nodes=} {depth=} {dtype}")
    return failed


class Request:
    """As much of upstream's as is read."""

    def __init__(self, slot: int) -> None:
        self.req_pool_idx, self.output_ids = slot, [slot] * slot
        self.sampling_params = SimpleNamespace(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5)

    def finished(self) -> bool:
        return False


def check_steps(device: str) -> int:
    """A prefill and two steps are on a GPU what they are on a CPU, and nothing of them waits for it; returns how many
    failed."""
    found = [steps(where) for where in (device, "cpu")]
    wrong = int((found[0].cpu() != found[1]).sum())
    say(f"{'WRONG' if wrong else 'right'}  {wrong} of {found[1].numel()} logits, after a prefill and two steps")
    return bool(wrong)


def steps(device: str, bs: int = 5, nodes: int = 8, vocab: int = 1000) -> torch.Tensor:
    """The second step's logits."""
    random = torch.Generator().manual_seed(1)
    drafts, tokens, logits = (
        each.to(device)
        for each in (
            torch.randint(0, 9, (bs * nodes,), generator=random),
            torch.randint(0, 9, (3, bs * nodes), generator=random),
            torch.randn(2, bs * nodes, vocab, generator=random),
        )
    )
    links = torch.full((2, bs, nodes), -1)
    links[0, :, 0], links[1, :, 1], links[0, :, 2], links[0, :, 3] = 1, 2, 3, 4
    links, accepted = links.to(device), torch.arange(1, bs + 1).to(device)
    batch: Any = SimpleNamespace(
        reqs=[Request(slot) for slot in range(bs)], req_pool_indices=torch.arange(bs).to(device)
    )
    tree = SimpleNamespace(
        draft_token=drafts, retrieve_next_token=links[0], retrieve_next_sibling=links[1], topk=2, spec_steps=3
    )
    penalties = Penalties(8, vocab, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    penalties.begin(batch)
    penalties.count(batch, tokens[0, :bs])
    for step in (1, 2):
        penalties.apply(logits[step - 1], batch, tree)
        penalties.count(batch, tokens[step], accepted)
    roots = logits[1].view(bs, nodes, -1)[:, 5].contiguous()
    penalties.apply(roots, batch)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return torch.cat((logits[1], roots))


def time_penalise(device: str, bs: int, nodes: int) -> None:
    """Prints median times in microseconds, of calls that find their inputs in no cache; a copy of the logits beside."""
    from triton.testing import do_bench

    logits, *rest = (each.to(device) for each in inputs(bs, nodes, 5, VOCAB))
    all_ask = torch.arange(1, bs + 1, device=device)
    none, other = torch.zeros_like(all_ask), torch.empty_like(logits)
    calls = {
        "all ask": lambda: penalise(logits, rest[0], rest[1], all_ask, rest[3]),
        "none": lambda: penalise(logits, rest[0], rest[1], none, rest[3]),
        "copy": lambda: other.copy_(logits),
    }
    times = (f"{name} {1000 * do_bench(call, return_mode='median'):.1f}" for name, call in calls.items())
    say(f"{bs} requests of {nodes} nodes, us: {', '.join(times)}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes for the interpreter, no times")
    small = parser.parse_args().small
    device = "cpu" if small else "cuda"
    say("interpreted" if small else torch.cuda.get_device_name())
    failed = check_penalise(device, small)
    if not small:
        failed += check_steps(device)
        for bs, nodes in ((1, 1), (1, 16), (32, 1), (32, 16), (128, 4), (128, 8)):
            time_penalise(device, bs, nodes)
    say(f"{failed} checks failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
