"""The feature tap: the target's hidden states that verification and prefill compute anyway, on their way to who learns
from them.

    launch     a copy of the step's states is taken on its own stream, before anything overwrites them
    credited   counts are on the CPU, tokens not yet appended: whose rows they are, at which position, of which target
    sent       tokens are appended, ends and grammars have cut them: what is left goes off

The state of a position is that of the pass that read its token. A decode step reads the token sampled last, at the
position where the sequence ends, and the drafts behind it; so the token that it samples has its state from the next
step, and the last one of a response has one only where a step went on beyond it. Rows of positions that came out of the
radix cache are not computed, and not there. A request that was retracted is computed again, and sent again.
"""

import hashlib
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import PretrainedConfig

from tlt_server.config import ServerConfig
from tlt_server.engine.courier import Courier
from tlt_server.engine.parcels import PARCEL_BYTES, Parcels, Rows, States, cut
from tlt_server.engine.quota import Follow, Quota, Standing
from tlt_server.engine.state import Stamp
from tlt_server.metrics import count_features_dropped
from tlt_server.wire.features import FeatureHeader
from tlt_server.wire.features import Rows as Described
from tlt_server.wire.messages import ModelIdentity
from tlt_server.wire.sockets import CurveKeys, Outlet

Kind = Literal["eagle", "eagle3"]
Dtype = Literal["float32", "bfloat16", "float16"]
STATES_EAGLE3 = 4
"""Hidden states of a token: three that the drafter reads, and the final one."""
HEALTH_CHECK = "HEALTH_CHECK"
"""How upstream's own requests are named (srt/constants.py)."""


@dataclass
class Span:
    """Of a followed request in a step. row: of its first state. start, count: None until a decode step is credited."""

    req: Any
    row: int
    start: int | None = None
    count: int | None = None


@dataclass
class Tapped:
    """What was taken of one step; travels with its result.

    states: copies; None where no request is followed. live: requests of a decode step that its result counts for.
    """

    tap: "Tap"
    decode: bool
    spans: list[Span]
    states: States | None
    stamp: Stamp | None = None
    live: list[Any] = field(default_factory=list)

    def credit(self, counts: Sequence[tuple[Any, int]], stamp: Stamp) -> None:
        """Settles whose rows these are, before tokens are appended.

        Args:
            counts: the live requests of the batch, with how many tokens the step gives them.
            stamp: the weights that it was launched with.
        """
        by_request = {id(req): count for req, count in counts}
        self.stamp, self.live = stamp, [req for req, _ in counts]
        self.spans = [span for span in self.spans if id(span.req) in by_request]
        for span in self.spans if self.decode else ():
            span.start = len(span.req.origin_input_ids) + len(span.req.output_ids) - 1
            span.count = by_request[id(span.req)]

    def rows(self) -> Iterator[Rows]:
        """What is left of it, once tokens are appended."""
        assert self.stamp is not None
        for span in self.spans:
            req = span.req
            assert span.start is not None
            assert span.count is not None
            if tokens := _tokens(req, span.start, span.start + span.count):
                yield Rows(
                    rid=req.rid,
                    group=group_of(req),
                    prompt=len(req.origin_input_ids),
                    start=span.start,
                    tokens=tokens,
                    target_version=self.stamp.target_version,
                    partial=self.stamp.partial,
                    row=span.row,
                )


class Tap:
    """Of one replica; in the process of its first rank alone, as all ranks have the same states.

    The methods are called by the scheduler's thread, in the order of a step's life.
    """

    def __init__(self, quota: Quota, parcels: Parcels, courier: Courier) -> None:
        self._quota, self._parcels, self._courier = quota, parcels, courier

    def chunks(self, batch: Any) -> list[Span]:
        """What a prefill is about to compute of requests that are followed; upstream edits its batch on the way."""
        spans, row = [], 0
        for req, start, count in zip(batch.reqs, batch.prefix_lens or (), batch.extend_lens or (), strict=True):
            if self._follow(req).on:
                spans.append(Span(req, row, start, count))
            row += count
        return spans

    def take_chunks(self, result: Any, chunks: list[Span]) -> None:
        """Takes the states of a prefill, [all its tokens, W]."""
        output = result.logits_output
        taken: list[Span] = []
        row = 0
        for span in chunks:
            assert span.count is not None
            taken.append(Span(span.req, row, span.start, span.count))
            row += span.count

        def picked(states: torch.Tensor) -> torch.Tensor:
            return torch.cat([states[span.row : span.row + (span.count or 0)] for span in chunks])

        result.tapped = Tapped(self, False, taken, self._copies(output, picked) if chunks else None)

    def take_step(self, reqs: Sequence[Any], result: Any, most: int) -> None:
        """Takes the states of a decode step, [len(reqs) * nodes, W].

        Args:
            most: tokens that the step may give a request: its accepted path lies in front of each request's nodes.
        """
        spans = [Span(req, index * most) for index, req in enumerate(reqs) if self._follow(req).on]

        def fronts(states: torch.Tensor) -> torch.Tensor:
            nodes = states.view(len(reqs), -1, states.shape[-1])
            return nodes[:, :most].clone(memory_format=torch.contiguous_format).flatten(0, 1)

        result.tapped = Tapped(self, True, spans, self._copies(result.logits_output, fronts) if spans else None)

    def send(self, tapped: Tapped) -> None:
        """Sends off what is left of a step, and lets the quota look at who runs."""
        rows, nbytes = list(tapped.rows()), 0
        if tapped.states is not None:
            size = tapped.states.row_bytes
            nbytes = size * sum(len(each.tokens) for each in rows)
            for part in cut(rows, PARCEL_BYTES // size):
                self._ship(part, tapped.states)
        running = []
        for req in tapped.live:
            follow = self._follow(req)
            if req.finished():
                self._quota.ended(follow)
            else:
                running.append((follow, len(req.output_ids)))
        if tapped.decode:
            self._quota.step(nbytes, running)
        else:
            self._quota.prompts(nbytes)

    def _ship(self, rows: Sequence[Rows], states: States) -> None:
        if (parcel := self._parcels.ship(rows, states)) is not None:
            self._courier.take(parcel)
        else:
            count_features_dropped(sum(len(each.tokens) for each in rows), "no_room")

    def _follow(self, req: Any) -> Follow:
        """Rests on the request, which may end anywhere."""
        follow: Follow | None = getattr(req, "tlt_follow", None)
        if follow is None:
            ours = req.rid.startswith(HEALTH_CHECK)
            follow = req.tlt_follow = Follow(Standing.OVER) if ours else self._quota.admit(req.rid)
        return follow

    def _copies(self, output: Any, copy: Any) -> States:
        finals = output.last_hidden_states
        return States(copy(output.hidden_states), None if finals is None else copy(finals))


def send_features(result: Any) -> None:
    """Sends what was tapped of a result, whose tokens are appended."""
    if (tapped := getattr(result, "tapped", None)) is not None:
        tapped.tap.send(tapped)


def group_of(req: Any) -> int:
    """The same for all requests of one prompt: 64 bits of a hash of its tokens."""
    if (group := getattr(req, "tlt_group", None)) is None:
        group = req.tlt_group = int.from_bytes(
            hashlib.blake2b(array("q", req.origin_input_ids), digest_size=8).digest()
        )
    assert isinstance(group, int)
    return group


def _tokens(req: Any, start: int, stop: int) -> Sequence[int]:
    """Those of a request at the positions [start, stop), as far as its response goes."""
    prompt = len(req.origin_input_ids)
    head = list(req.origin_input_ids[start:stop])
    return head if stop <= prompt else head + list(req.output_ids_through_stop[max(start - prompt, 0) : stop - prompt])


def tap_of(worker: Any) -> Tap | None:
    """The tap of an EAGLE worker; None where nobody is sent features, or another rank sends them."""
    config, runner = ServerConfig.from_environment(), worker.target_worker.model_runner
    if config.trainer is None or not config.taps or worker.ps.tp_rank != 0:
        return None
    trainer, args = config.trainer, runner.server_args
    model = ModelIdentity.of(PretrainedConfig.get_config_dict(args.model_path, revision=args.revision)[0])
    kind: Kind = "eagle3" if args.speculative_algorithm == "EAGLE3" else "eagle"

    def header(rows: tuple[Described, ...], hidden: torch.Tensor) -> FeatureHeader:
        dtype = cast(Dtype, str(hidden.dtype).removeprefix("torch."))
        name, width = trainer.name_of(args.port), hidden.shape[1]
        return FeatureHeader(server=name, model=model, kind=kind, dtype=dtype, width=width, rows=rows)

    curve = CurveKeys(Path(trainer.key), Path(trainer.trainer_key)) if trainer.key and trainer.trainer_key else None
    states = model.hidden_size * (STATES_EAGLE3 if kind == "eagle3" else 1)
    features = config.features
    quota = Quota(features.budget_mb_s * 1e6, features.share, states * runner.dtype.itemsize, time.monotonic)
    parcels = Parcels(torch.device(runner.device))
    return Tap(quota, parcels, Courier(parcels, lambda: Outlet(trainer.features_address, curve), header))
