"""How fast features go from a server's end of the link into the trainer's buffer."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

import torch

from tlt_server.config import DrafterKind
from tlt_server.trainer.data.buffer import Buffer
from tlt_server.trainer.data.inbox import Inbox
from tlt_server.trainer.data.intake import Intake
from tlt_server.trainer.data.targets import Targets
from tlt_server.wire.features import FeatureBatch, FeatureHeader, Rows
from tlt_server.wire.messages import ModelIdentity
from tlt_server.wire.sockets import Inlet, Outlet

SERVER, PROMPT, WINDOW = "one:1", 16, 4096
PIECE = 4
"""Tokens that a decode step brings of a request, with a chain of three drafts."""
WAIT_S = 300.0


def seconds(requests: int, length: int, width: int) -> float:
    """From the first feature that arrives to the last that is in the buffer, of responses that grow side by side;
    `length` a multiple of `PIECE`. Raises AssertionError: some were lost."""
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as folder:
        inlet = Inlet(f"ipc://{folder}/features")
        try:
            return _taken(inlet, requests, length, width)
        finally:
            inlet.close()


def _taken(inlet: Inlet, requests: int, length: int, width: int) -> float:
    targets = Targets()
    targets.hear(SERVER, 0, "default")
    inbox = Inbox(inlet, _model(width), DrafterKind.EAGLE, width, targets)
    buffer = Buffer(width, width, 1 << 40, WINDOW, held_out=0)
    spawn = multiprocessing.get_context("spawn")
    over = spawn.Event()
    sending = spawn.Process(target=_send, args=(inlet.address, requests, length, width, over))
    intake = Intake(inlet, inbox, buffer)
    with intake.open():
        sending.start()
        _until(lambda: inbox.received, sending)
        began = time.perf_counter()
        _until(lambda: inbox.received == requests * length, sending)
    took = time.perf_counter() - began  # the thread has ended: what was received is in the buffer
    over.set()
    sending.join()
    assert not inbox.dropped, inbox.dropped
    assert not buffer.dropped, buffer.dropped
    return took


def _until(done: Callable[[], object], sending: BaseProcess) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, f"features are missing; the sender's exit code: {sending.exitcode}"
        time.sleep(0.002)


def _model(width: int) -> ModelIdentity:
    return ModelIdentity("LlamaForCausalLM", width, 1000)


def _send(address: str, requests: int, length: int, width: int, over: Event) -> None:
    """In a process of its own, which stays until all was taken: what is closed drops what it has not sent."""
    outlet = Outlet(address)
    tokens = torch.arange(requests * PIECE, dtype=torch.int32)
    states = torch.randn(requests * PIECE, width).to(torch.bfloat16).view(torch.uint8)
    for start in range(0, length, PIECE):
        rows = tuple(Rows(str(each), each, PROMPT, start, PIECE, 0) for each in range(requests))
        header = FeatureHeader(
            server=SERVER, model=_model(width), kind="eagle", dtype="bfloat16", width=width, rows=rows
        )
        frames = FeatureBatch(header, tokens.numpy().data, states.numpy().data, b"").encode()
        while not outlet.send(frames):
            time.sleep(1e-4)
    over.wait(WAIT_S)
    outlet.close()
