"""Features off the wire: checked, put into tensors, under the trainer's own number of their target."""

import logging
import time
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from tlt_server.config import DrafterKind
from tlt_server.errors import WireError
from tlt_server.trainer.data.features import Feature
from tlt_server.trainer.data.targets import Targets
from tlt_server.wire.features import FeatureBatch, FeatureHeader
from tlt_server.wire.messages import Buffer, ModelIdentity
from tlt_server.wire.sockets import Inlet

log = logging.getLogger(__name__)

MOST_AT_ONCE, MOST_S = 16, 1.0
"""Messages, and seconds that they take, between two steps of training."""

LARGEST = 1e6
"""Of a state's numbers: ten times what the largest activations of models are, and its square is far from overflow."""


class Inbox:
    """What arrives on the features link of `model`; `width` is of what the drafter reads. received: tokens taken.
    dropped: tokens that were not, by reason; a message that cannot be read counts as one."""

    def __init__(self, inlet: Inlet, model: ModelIdentity, kind: DrafterKind, width: int, targets: Targets) -> None:
        self._inlet, self._model, self._kind, self._width, self._targets = inlet, model, kind, width, targets
        self.received = 0
        self.dropped = Counter[str]()

    def read(self) -> Iterator[Feature]:
        """Those that have arrived, of a few messages."""
        until = time.monotonic() + MOST_S
        for _ in range(MOST_AT_ONCE):
            if time.monotonic() > until or (frames := self._inlet.receive()) is None:
                return
            yield from self._features(frames)

    def _features(self, frames: list[Buffer]) -> Iterator[Feature]:
        try:
            batch = FeatureBatch.decode(frames)
        except WireError as error:
            self._drop("malformed", 1, str(error))
            return
        if fault := self._fault(batch.header):
            self._drop("another model", batch.header.tokens, fault)
            return
        yield from self._known(batch.header, *tensors(batch))

    def _fault(self, header: FeatureHeader) -> str:
        """Why these are not features of our target; empty where they are."""
        said, wanted = (header.model, header.kind, header.width), (self._model, str(self._kind), self._width)
        if said == wanted:
            return ""
        return f"features of {header.server}: {said[0]}, {said[1]}, width {said[2]}; wanted {wanted}"

    def _known(self, header: FeatureHeader, tokens: Tensor, hidden: Tensor, finals: Tensor | None) -> Iterator[Feature]:
        """One for each group of rows whose target is known."""
        if fault := self._unusable(tokens, hidden, finals):
            self._drop("malformed", header.tokens, f"features of {header.server}: {fault}")
            return
        stop = 0
        for rows in header.rows:
            here = slice(stop, stop := stop + rows.count)
            version = self._targets.of(header.server, rows.target_version)
            if rows.partial or version is None:  # the control link tells of it a moment later
                self._drop("between targets" if rows.partial else "unknown target", rows.count)
                continue
            self.received += rows.count
            yield Feature(
                request=f"{header.server} {rows.rid}",  # no server speaks of another one's requests
                group=rows.group,
                prompt=rows.prompt_tokens,
                first=rows.start,
                tokens=tokens[here],
                states=hidden[here],
                target_version=version,
                finals=None if finals is None else finals[here],
            )

    def _unusable(self, tokens: Tensor, *states: Tensor | None) -> str:
        if tokens.min() < 0 or tokens.max() >= self._model.vocab_size:
            return f"a token outside the vocabulary of {self._model.vocab_size}"
        extremes = [bound for each in states if each is not None for bound in each.aminmax()]
        if not all(-LARGEST <= bound.item() <= LARGEST for bound in extremes):  # so that NaN, too, is refused
            return f"states that are not finite, or beyond {LARGEST:g}"
        return ""

    def _drop(self, reason: str, tokens: int, why: str = "") -> None:
        if why and not self.dropped[reason]:
            log.warning("dropped: %s; further ones are only counted", why)
        self.dropped[reason] += tokens


def tensors(batch: FeatureBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Views of the frames: tokens [N], states [N, W], and final hidden states [N, H] where they are there."""
    header = batch.header
    dtype = getattr(torch, header.dtype)
    tokens = torch.frombuffer(batch.tokens, dtype=torch.int32)
    hidden = torch.frombuffer(batch.hidden, dtype=dtype).view(-1, header.width)
    if header.kind == "eagle":
        return tokens, hidden, None
    return tokens, hidden, torch.frombuffer(batch.finals, dtype=dtype).view(-1, header.model.hidden_size)
