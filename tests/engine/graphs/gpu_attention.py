"""Attention as SGLang's backend would ask for it, against float64: on a GPU; or small, by Triton's interpreter.

python -m tests.engine.graphs.gpu_attention
TRITON_INTERPRET=1 python -m tests.engine.graphs.gpu_attention --small
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tlt_server.engine.cpu.torchvision import mend_torchvision
from tlt_server.engine.graphs import attention_kernels
from tlt_server.engine.graphs.attention import (
    attend_decodes,
    attend_drafts,
    attend_extends,
    attend_verification,
    rows_of,
)

mend_torchvision()
SLOTS, WIDTH = 300, 2400
Seen = Callable[[int, int, int], torch.Tensor]
"""Of a request, a query of it, and how many keys there are before: the places in its row of the table."""


@dataclass(frozen=True)
class Case:
    """lens: of requests in the cache, before the queries. heads: of keys. each: queries' heads for one of them."""

    lens: Sequence[int]
    heads: int = 2
    each: int = 7
    dim: int = 64
    cap: float = 0.0
    scales: tuple[float | None, float | None] = (None, None)
    padding: int = 1
    """Requests that pad the batch, with lengths of 1."""


class FlashInferAttnBackend:
    """Of SGLang's, what is asked for."""

    dispatch_reason, enable_deterministic = None, False

    def __init__(self, table: torch.Tensor) -> None:
        self.indices_updater_prefill = SimpleNamespace(req_to_token=table, update=None)
        self.indices_updater_decode = SimpleNamespace(req_to_token=table, update=None)
        self.wrappers: list[Any] = []

    def _prepare_cuda_graph_metadata(self, bs: int, tokens: int, *_: Any) -> None:
        self.wrappers = self._create_decode_wrappers(bs, tokens)  # type: ignore[attr-defined]


class World:
    """A cache, a table of where a slot's tokens lie, and a batch of it."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.random = case, torch.Generator().manual_seed(len(case.lens))
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.device = device
        places = SLOTS * 30
        self.k, self.v = (self.drawn(places, case.heads, case.dim) for _ in range(2))
        rows = [torch.randperm(places, generator=self.random)[:WIDTH] for _ in range(8)]
        self.table = torch.stack([rows[slot % 8] for slot in range(SLOTS)]).int().to(device)
        self.requests = torch.randperm(SLOTS, generator=self.random)[: len(case.lens) + case.padding].to(device)
        self.lens = torch.tensor([*case.lens, *[1] * case.padding], device=device)

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.device, self.dtype)

    def error(self, queries: Any, rows: int, seen: Seen) -> float:
        """Of the output, the largest."""
        case, bs = self.case, len(self.lens)
        of_q = case.heads * case.each * case.dim
        beside_keys = self.drawn(bs * rows, of_q + 2 * case.heads * case.dim)
        q = rows_of(beside_keys[:, :of_q], queries).view(-1, case.heads * case.each, case.dim)
        scale, (k_scale, v_scale) = case.dim**-0.5, case.scales
        found = queries.forward(
            q, (self.k, self.v), sm_scale=scale, logits_soft_cap=case.cap, k_scale=k_scale, v_scale=v_scale
        )
        worst = 0.0
        for request in range(len(case.lens)):
            for row in range(rows):
                at = self.table[self.requests[request]][seen(request, row, case.lens[request])].long()
                keys, values = (each[at].double().repeat_interleave(case.each, 1) for each in (self.k, self.v))
                line = request * rows + row
                scores = torch.einsum("hd,nhd->hn", q[line].double(), keys) * scale * (k_scale or 1)
                scores = case.cap * torch.tanh(scores / case.cap) if case.cap else scores
                right = torch.einsum("hn,nhd->hd", scores.softmax(-1), values) * (v_scale or 1)
                worst = max(worst, (found[line].double() - right).abs().max().item())
        return worst


def of_verification(world: World, rows: int, *, chain: bool) -> float:
    """Tokens that lengths do not count; of a tree, with SGLang's mask of a part of the batch."""
    backend: Any = FlashInferAttnBackend(world.table)
    attend_verification(backend, rows, chain=chain)
    wrappers = backend._create_prefill_wrappers(len(world.lens), use_custom_mask=True)
    sees = torch.rand(len(world.lens), rows, rows, generator=world.random) < 0.4
    sees |= torch.eye(rows, dtype=torch.bool)
    if chain:
        sees = torch.ones_like(sees).tril()
    whole = [torch.cat((sees.new_ones(rows, n), sees[i]), 1).flatten() for i, n in enumerate(world.case.lens)]
    spec_info = SimpleNamespace(custom_mask=torch.cat(whole).to(world.device))
    backend.indices_updater_prefill.update(
        world.requests, world.lens, None, None, prefill_wrappers=wrappers, spec_info=spec_info
    )

    def seen(request: int, row: int, before: int) -> torch.Tensor:
        return torch.cat((torch.arange(before), before + sees[request, row].nonzero()[:, 0]))

    return world.error(wrappers[0], rows, seen)


def of_extends(world: World, rows: int) -> float:
    """Tokens that lengths count."""
    backend: Any = FlashInferAttnBackend(world.table)
    attend_extends(backend)
    wrappers = backend._create_prefill_wrappers(len(world.lens))
    backend.indices_updater_prefill.update(
        world.requests, world.lens + rows, None, None, prefill_wrappers=wrappers, spec_info=None
    )
    return world.error(wrappers[0], rows, lambda _, row, before: torch.arange(before + row + 1))


def of_decodes(world: World) -> float:
    backend: Any = FlashInferAttnBackend(world.table)
    attend_decodes(backend)
    wrappers = backend._create_decode_wrappers(len(world.lens), len(world.lens))
    backend.indices_updater_decode.update(world.requests, world.lens, None, None, decode_wrappers=wrappers)
    return world.error(wrappers[0], 1, lambda _, __, before: torch.arange(before))


def of_drafts(world: World, topk: int, steps: int) -> float:
    """Branches, each of which sees its own tokens."""
    backends: Any = [FlashInferAttnBackend(world.table) for _ in range(steps - 1)]
    attention: Any = SimpleNamespace(
        topk=topk,
        page_size=1,
        speculative_num_steps=steps,
        req_to_token_pool=SimpleNamespace(req_to_token=world.table),
        attn_backends=backends,
    )
    attention.init_forward_metadata_out_graph = None
    attend_drafts(attention)
    batch = SimpleNamespace(
        batch_size=len(world.lens), seq_lens=world.lens, req_pool_indices=world.requests, spec_info=None
    )
    attention.init_forward_metadata_out_graph(batch, in_capture=True)

    def error(number: int) -> float:
        def seen(_: int, row: int, before: int) -> torch.Tensor:
            own = before + (row * steps if topk > 1 else 0)
            return torch.cat((torch.arange(before), torch.arange(own, own + number + 1)))

        return world.error(backends[number].wrappers[0], topk, seen)

    return max(error(number) for number in range(steps - 1))


def errors(device: str, small: bool) -> dict[str, float]:
    """The largest of each kind of pass, over cases."""
    cases = [Case([3, 270]), Case([70, 1], heads=1, each=2, dim=80, cap=30.0, scales=(0.5, 2.0))]
    if not small:
        cases += [Case([2300, 5], dim=128, heads=4), Case(list(range(1, 1400, 11)), dim=128, heads=4)]
        cases += [Case([2000] * 40, heads=8, each=4, dim=128), Case([900] * 250, heads=4, dim=128, padding=6)]
    found: dict[str, float] = {}
    for case in cases:
        world = World(case, device)
        for kind, error in {
            "a chain's verification": max(
                of_verification(world, rows, chain=True) for rows in ((4,) if small else (2, 12))
            ),
            "a tree's verification": max(
                of_verification(world, rows, chain=False) for rows in ((11,) if small else (5, 33, 70))
            ),
            "draft-extend": of_extends(world, 3),
            "plain decoding": of_decodes(world),
            "a chain's drafts": of_drafts(world, 1, 4),
            "a tree's drafts": max(of_drafts(world, *tree) for tree in ((4, 3), (11, 6))),
        }.items():
            found[kind] = max(error, found.get(kind, 0.0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes for the interpreter, in float32")
    small = parser.parse_args().small
    if small:  # each program takes the interpreter long
        attention_kernels.CUTS = {tile: cut._replace(programs=32) for tile, cut in attention_kernels.CUTS.items()}
    found = errors("cpu" if small else "cuda", small)
    most = 2e-5 if small else 3e-2
    for kind, error in found.items():
        sys.stdout.write(f"{kind}: off by {error:.1e}, {most:.0e} allowed\n")
    sys.exit(any(not error <= most for error in found.values()))


if __name__ == "__main__":
    main()
