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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig

from tlt_server.config import ServerConfig
from tlt_server.engine.features.pinned import BATCH_BYTES, PinnedMemory, Rows, States, cut, tokens_of
from tlt_server.engine.features.quota import Follow, Quota
from tlt_server.engine.features.sender import Sender
from tlt_server.engine.requests.remembered import HEALTH_CHECK
from tlt_server.engine.weights.state import Stamp
from tlt_server.metrics import count_features_dropped, count_features_sent
from tlt_server.wire.features import FeatureHeader
from tlt_server.wire.features import Rows as Described
from tlt_server.wire.messages import ModelIdentity
from tlt_server.wire.sockets import CurveKeys, Outlet

Kind = Literal["eagle", "eagle3"]
Dtype = Literal["float32", "bfloat16", "float16"]
STATES_EAGLE3 = 4
"""Hidden states of a token: three that the drafter reads, and the final one."""


@dataclass(slots=True)
class Span:
    """Of a followed request in a step. row: of its first state. start, count: its position, and how many there are,
    which a decode step has once it is credited."""

    req: Any
    row: int
    start: int = 0
    count: int = 0


@dataclass
class Tapped:
    """What was taken of one step; travels with its result. states: copies; None where no request is followed, or there
    was no memory for them. live: requests that the step's result counts for."""

    tap: "Tap"
    decode: bool
    spans: list[Span]
    states: States | None
    stamp: Stamp | None = None
    live: list[Any] = field(default_factory=list)

    def credit(self, counts: Sequence[tuple[Any, int]], stamp: Stamp) -> None:
        """Settles whose rows these are, before tokens are appended. counts: the live requests of the batch, with how
        many tokens the step gives them. stamp: the weights that it was launched with."""
        by_request = {id(req): count for req, count in counts}
        self.stamp, self.live = stamp, [req for req, _ in counts]
        self.spans = [span for span in self.spans if id(span.req) in by_request]
        for span in self.spans if self.decode else ():
            span.start = len(span.req.origin_input_ids) + len(span.req.output_ids) - 1
            span.count = by_request[id(span.req)]

    def rows(self) -> Iterator[Rows]:
        """What is left of it, once tokens are appended."""
        assert self.stamp is not None
        _, version, partial, _ = self.stamp
        for span in self.spans:
            req = span.req
            if tokens := _tokens(req, span.start, span.start + span.count):
                prompt = len(req.origin_input_ids)
                yield Rows(req.rid, group_of(req), prompt, span.start, tokens, version, partial, span.row)


class Tap:
    """Of one replica; in the process of its first rank alone, as all ranks have the same states. The methods are called
    by the scheduler's thread, in the order of a step's life."""

    def __init__(self, quota: Quota, pinned: PinnedMemory, sender: Sender) -> None:
        self._quota, self._pinned, self._sender = quota, pinned, sender

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

        def picked(states: Tensor) -> Tensor:
            return torch.cat([states[span.row : span.row + span.count] for span in chunks])

        states = _copies(result.logits_output, picked) if chunks else None
        begins = accumulate((span.count for span in chunks), initial=0)
        spans = [Span(span.req, row, span.start, span.count) for span, row in zip(chunks, begins, strict=False)]
        result.tapped = Tapped(self, False, spans, states)

    def take_step(self, reqs: Sequence[Any], result: Any, most: int) -> None:
        """Takes the states of a decode step, [len(reqs) * nodes, W].
        most: tokens that it may give a request, whose accepted path lies in front of its nodes."""

        output = result.logits_output
        nodes = len(output.hidden_states) // len(reqs)
        most = min(most, nodes)

        def fronts(states: Tensor) -> Tensor:
            front = states.view(len(reqs), nodes, -1)[:, :most]
            return front.clone(memory_format=torch.contiguous_format).flatten(0, 1)

        spans = [Span(req, index * most) for index, req in enumerate(reqs) if self._follow(req).on]
        result.tapped = Tapped(self, True, spans, _copies(output, fronts) if spans else None)

    def send(self, tapped: Tapped) -> None:
        """Sends off what is left of a step, and tells the quota who runs."""
        rows = list(tapped.rows())
        nbytes = self._ship(rows, tapped.states)
        for span in tapped.spans:
            if span.req.finished():
                self._quota.ended(self._follow(span.req))
        if not tapped.decode:
            self._quota.prompts(nbytes)
        elif self._quota.step(nbytes, len(rows)):
            running = [req for req in tapped.live if not req.finished()]
            self._quota.weigh([(self._follow(req), len(req.output_ids)) for req in running])

    def _ship(self, rows: Sequence[Rows], states: States | None) -> int:
        """Sends rows off, or counts them as lost; returns their bytes."""
        if not rows:
            return 0
        if states is None:
            count_features_dropped(tokens_of(rows), "no_room")
            return 0
        for part in cut(rows, BATCH_BYTES // states.row_bytes):
            if (pinned_batch := self._pinned.ship(part, states)) is not None:
                self._sender.take(pinned_batch)
            else:
                count_features_dropped(tokens_of(part), "no_room")
        return tokens_of(rows) * states.row_bytes

    def _follow(self, req: Any) -> Follow:
        """Rests on the request, which may end anywhere. One that is given as embeddings has no tokens to learn from."""
        follow: Follow | None = getattr(req, "tlt_follow", None)
        if follow is None:
            teaches = req.input_embeds is None and not req.rid.startswith(HEALTH_CHECK)
            follow = req.tlt_follow = self._quota.admit(req.rid) if teaches else Follow(over=True)
        return follow


def _copies(output: Any, copy: Callable[[Tensor], Tensor]) -> States | None:
    """Copies of a pass's states, on its stream; None where there is no memory for them: decoding goes on without."""
    finals = output.last_hidden_states
    try:
        return States(copy(output.hidden_states), None if finals is None else copy(finals))
    except torch.OutOfMemoryError:
        return None


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
    response: Sequence[int] = req.output_ids_through_stop
    if start >= prompt:
        return response[start - prompt : stop - prompt]
    head = req.origin_input_ids[start:stop]
    return [*head, *response[: stop - prompt]] if stop > prompt else head


def tap_of(worker: Any) -> Tap | None:
    """The tap of an EAGLE worker; None where nobody is sent features, or another rank sends them."""
    config, runner = ServerConfig.from_environment(), worker.target_worker.model_runner
    if config.trainer is None or not config.taps or worker.ps.tp_rank != 0:
        return None
    trainer, args = config.trainer, runner.server_args
    model = ModelIdentity.of(PretrainedConfig.get_config_dict(args.model_path, revision=args.revision)[0])
    kind: Kind = "eagle3" if args.speculative_algorithm == "EAGLE3" else "eagle"

    def header(rows: tuple[Described, ...], hidden: Tensor) -> FeatureHeader:
        dtype = cast(Dtype, str(hidden.dtype).removeprefix("torch."))
        name, width = trainer.name_of(args.port), hidden.shape[1]
        return FeatureHeader(server=name, model=model, kind=kind, dtype=dtype, width=width, rows=rows)

    curve = CurveKeys(Path(trainer.key), Path(trainer.trainer_key)) if trainer.key and trainer.trainer_key else None
    states = model.hidden_size * (STATES_EAGLE3 if kind == "eagle3" else 1)
    features = config.features
    quota = Quota(features.budget_mb_s * 1e6, features.share, states * runner.dtype.itemsize, time.monotonic)
    pinned = PinnedMemory(torch.device(runner.device))
    count_features_sent(0, 0)  # two threads will count: the counters are made before
    return Tap(quota, pinned, Sender(pinned, lambda: Outlet(trainer.features_address, curve), header))
