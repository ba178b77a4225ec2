"""Frequency, presence and repetition penalties after any prefix: of plain steps, and of each node of chains and trees.

As upstream's penalties are defined: they look at the tokens of the response alone, its prompt left out. With c(i) of
token i among them, its logit x becomes, before bias and grammar,
    x - c(i) * frequency - [c(i) > 0] * presence,
and that, where c(i) > 0, is multiplied by `repetition` if it is negative, else divided by it. Of a node of a tree, c
counts the draft tokens on its path too.

Upstream counts on the host, which under overlap knows a token one step late: its plain decoding leaves out the newest
token then, and counts the prompt's last in its place. Here counts stay on the device, where the next step finds what a
step has given.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tlt_server.engine.requests.continued import prompt_length

NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def factors_of(req: Any) -> tuple[float, ...]:
    """A request's frequency, presence and repetition penalty."""
    return tuple(getattr(req.sampling_params, name) for name in NEUTRAL)


def asks(req: Any) -> bool:
    """Whether a request has any penalty."""
    return factors_of(req) != tuple(NEUTRAL.values())


def generated(req: Any) -> Sequence[int]:
    """The tokens of a response that the host knows, what others sampled of it first: all at a prefill, before which
    nothing is in flight."""
    return (*req.origin_input_ids[prompt_length(req) :], *req.output_ids)


class _Table(NamedTuple):
    """rows: [slots] int64, of each request-pool slot; row 0 is of all that ask for nothing. counts: [n, vocab] int32.
    factors: [n, 3] float32, as `factors_of`."""

    rows: torch.Tensor
    counts: torch.Tensor
    factors: torch.Tensor


class Penalties:
    """Of one rank's requests. Nothing is allocated, or runs, while none of them asks; of each that does, `4 * vocab`
    bytes are taken from its prefill to the first prefill after its end. Nothing waits for a GPU.

    slots: of the request pool. vocab: tokens.
    """

    def __init__(self, slots: int, vocab: int, device: Any) -> None:
        self._slots, self._vocab, self._device = slots, vocab, device
        self._row_of: dict[Any, int] = {}
        self._table: _Table | None = None
        if torch.device(device).type == "cuda":
            from tlt_server.engine.sampling.penalty_kernels import compile_kernel

            compile_kernel(vocab, device)

    @property
    def bytes(self) -> int:
        """What is allocated."""
        return sum(part.nbytes for part in self._table or ())

    def begin(self, batch: Any) -> None:
        """At each prefill, a chunk's or a resumed request's too: counts what was generated before.

        A prefill is all that a request's decode steps can begin with, and nothing of the request is in flight then, so
        that the host knows each of its tokens.
        """
        self._row_of = {req: row for req, row in self._row_of.items() if _is_running(req)}
        asking = [req for req in batch.reqs if asks(req)]
        for req in asking:
            self._row_of.setdefault(req, min({*range(1, len(self._row_of) + 2)} - {*self._row_of.values()}))
        self._table = self._fitting(1 + max(self._row_of.values())) if self._row_of else None
        if self._table is not None:
            self._table.rows[batch.req_pool_indices] = self._sent([self._row_of.get(req, 0) for req in batch.reqs])
            self._count_from(self._table, asking)

    def _count_from(self, table: _Table, reqs: list[Any]) -> None:
        """Of requests that ask, what the host knows."""
        rows = [self._row_of[req] for req in reqs]
        index = self._sent(rows)
        table.counts.index_fill_(0, index, 0)
        table.factors[index] = self._sent([factors_of(req) for req in reqs], torch.float32).view(-1, len(NEUTRAL))
        places = [row * self._vocab + token for row, req in zip(rows, reqs, strict=True) for token in generated(req)]
        _add(table.counts, self._sent(places), torch.ones(len(places), dtype=torch.int32, device=self._device))

    def apply(self, logits: torch.Tensor, batch: Any, tree: Any = None) -> None:
        """Penalises in place.

        Args:
            logits: [bs * nodes, vocab], as the target gave them.
            batch: upstream's `ScheduleBatch` of the bs requests, whose newest tokens, the roots, have been counted.
            tree: upstream's `EagleVerifyInput`; None: each request has one node, its root.
        """
        if (table := self._asked(batch)) is None:
            return
        rows = table.rows[batch.req_pool_indices]
        paths = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device) if tree is None else paths_of(tree)
        if logits.is_cuda:
            from tlt_server.engine.sampling.penalty_kernels import penalise
        else:
            penalise = penalise_on_cpu
        penalise(logits, table.counts, table.factors, rows, paths)

    def count(self, batch: Any, tokens: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Adds what a step, or a prefill, gave.

        Args:
            tokens: [bs * width] int, of each request the first are counted.
            counts: [bs] int, how many; None: all.
        """
        if (table := self._asked(batch)) is None:
            return
        rows = table.rows[batch.req_pool_indices][:, None]
        tokens = tokens.view(len(rows), -1).to(torch.int64)
        counted = (rows > 0).expand_as(tokens)
        if counts is not None:
            counted = counted & (torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None])
        places = (rows * self._vocab + tokens).masked_fill(~counted, 0)  # where 0 is added
        _add(table.counts, places.flatten(), counted.flatten().to(torch.int32))

    def terms(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What upstream adds to logits, and then scales them by, after each request's newest token: [bs, vocab] float32
        each; None: scales nothing."""
        if (table := self._asked(batch)) is None:
            return torch.zeros(len(batch.reqs), self._vocab, device=self._device), None
        rows = table.rows[batch.req_pool_indices]
        return _terms(table.counts[rows], table.factors[rows])

    def applies(self, batch: Any) -> bool:
        """Whether any request of a batch asks."""
        return self._asked(batch) is not None

    def _asked(self, batch: Any) -> _Table | None:
        return self._table if self._row_of and any(req in self._row_of for req in batch.reqs) else None

    def _fitting(self, rows: int) -> _Table:
        """The table with room for so many rows; twice as large where it was too small, or of a row for each slot."""
        table = self._table
        if table is None:
            table = _Table(
                torch.zeros(self._slots, dtype=torch.int64, device=self._device),
                torch.zeros(0, self._vocab, dtype=torch.int32, device=self._device),
                torch.zeros(0, len(NEUTRAL), device=self._device),
            )
        if rows <= len(table.counts):
            return table
        more = max(rows, min(2 * len(table.counts), 1 + self._slots)) - len(table.counts)
        return _Table(table.rows, *(torch.cat((part, part.new_zeros(more, part.shape[1]))) for part in table[1:]))

    def _sent(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


def _add(counts: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor) -> None:
    """To counts, at places of them all, [n] int64 and [n] int32."""
    counts.view(-1).scatter_add_(0, places, numbers)


def _is_running(req: Any) -> bool:
    """Whether a step that is launched from now on can have a request in it, before its next prefill."""
    return req.req_pool_idx is not None and not req.finished()


def _terms(counts: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to logits, and what scales them then: of counts [n, vocab] and factors [n, 3]."""
    frequency, presence, repetition = factors[..., None].unbind(-2)
    seen = counts > 0
    return -(counts * frequency + seen * presence), torch.where(seen, repetition, 1.0)


def penalise_on_cpu(
    logits: torch.Tensor, counts: torch.Tensor, factors: torch.Tensor, rows: torch.Tensor, paths: torch.Tensor
) -> None:
    """Penalises logits in place, as the module says; `penalty_kernels.penalise` is the same on a GPU.

    Args:
        logits: [bs * nodes, vocab] float.
        counts: [n, vocab] int32, of each row's response.
        factors: [n, 3] float32, as `factors_of`.
        rows: [bs] int64, each request's; 0: it asks for nothing.
        paths: [bs * nodes, depth] int64, the tokens from below the root to each node, in any order; -1: none.
    """
    nodes = len(logits) // len(rows)
    for request, row in enumerate(rows.tolist()):
        if not row:
            continue
        own = slice(request * nodes, (request + 1) * nodes)
        there = counts[row].repeat(nodes, 1)
        there.scatter_add_(1, paths[own].clamp(min=0), (paths[own] >= 0).to(torch.int32))
        additive, scaling = _terms(there, factors[row])
        penalised = logits[own] + additive
        logits[own] = torch.where(penalised < 0, penalised * scaling, penalised / scaling)


def paths_of(tree: Any) -> torch.Tensor:
    """The draft tokens on the way from the root to each node: [bs * nodes, depth] int64, -1 beyond; roots have none.

    tree: upstream's `EagleVerifyInput`, its links whole. They alone are the same in all layouts of its mask.
    """
    first_child, next_sibling = tree.retrieve_next_token, tree.retrieve_next_sibling
    bs, nodes = first_child.shape
    tokens = tree.draft_token.view(bs, nodes).to(torch.int64)
    node = torch.arange(nodes, device=tokens.device).expand(bs, -1)
    # One column more: what leads nowhere is written there.
    parent = torch.full((bs, nodes + 1), -1, dtype=torch.int64, device=tokens.device)
    parent.scatter_(1, first_child.where(first_child >= 0, nodes), node)
    sibling = next_sibling.where(next_sibling >= 0, nodes)
    for _ in range(tree.topk - 1):
        parent = parent.scatter(1, sibling, parent[:, :nodes])
    path, at = [], node
    for _ in range(tree.spec_steps):
        path.append(tokens.gather(1, at.clamp(min=0)).where(at > 0, -1))
        at = parent.gather(1, at.clamp(min=0))
    return torch.stack(path, dim=-1).view(bs * nodes, -1)
