"""Features off the wire become those that were sent, for either kind of drafter."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from tests.trainer.stand_in import MODEL
from tlt_server.config import DrafterKind
from tlt_server.trainer.data.inbox import Inbox
from tlt_server.trainer.data.targets import Targets
from tlt_server.wire.features import FeatureBatch, FeatureHeader, Rows
from tlt_server.wire.sockets import Inlet

ROWS = (Rows("r", 2**64 - 1, 3, 0, 4, 7), Rows("s", 1, 2, 10, 2, 7, partial=True), Rows("t", 1, 2, 5, 3, 7))


@pytest.fixture
def inlet(tmp_path: Path) -> Iterator[Inlet]:
    made = Inlet(f"ipc://{tmp_path}/features")
    yield made
    made.close()


@pytest.mark.parametrize(("kind", "width"), [("eagle", 256), ("eagle3", 768)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_arrives_is_what_was_sent(inlet: Inlet, kind: str, width: int, dtype: str) -> None:
    targets = Targets()
    targets.hear("one", 7, "step")
    inbox = Inbox(inlet, MODEL, DrafterKind(kind), width, targets)
    tokens = torch.arange(9, dtype=torch.int32)
    hidden, finals = (torch.randn(9, size).to(getattr(torch, dtype)) for size in (width, 256))
    header = FeatureHeader(server="one", model=MODEL, kind=kind, dtype=dtype, width=width, rows=ROWS)
    raw = [each.view(torch.uint8).numpy().data for each in (tokens, hidden, finals)]
    with zmq.Context() as context, context.socket(zmq.PUSH) as outlet:
        outlet.connect(inlet.address)
        outlet.send_multipart(FeatureBatch(header, raw[0], raw[1], raw[2] if kind == "eagle3" else b"").encode())
        inlet.wait(5)
        whole, later = inbox.read()
    assert (whole.request, whole.group, whole.prompt, whole.first, whole.target_version) == (
        "one r",
        2**64 - 1,
        3,
        0,
        0,
    )
    assert (later.request, later.first) == ("one t", 5)
    for feature, rows in ((whole, slice(0, 4)), (later, slice(6, 9))):
        assert torch.equal(feature.tokens, tokens[rows])
        assert torch.equal(feature.states, hidden[rows])
        assert feature.finals is None if kind == "eagle" else torch.equal(feature.finals, finals[rows])
    assert (inbox.received, inbox.dropped) == (7, {"between targets": 2})
