"""Weights over CUDA IPC, as checkpoint-engine sends them to an inference engine.

Sender and engine share a GPU. For each rank there is a REQ socket here and a REP socket there (checkpoint-engine 0.4,
worker.py): a handle of one flat buffer; a list of what lies where in it, which the engine loads; None, upon which it
lets the buffer go; and None again, upon which it is done. An answer that is not empty is an error's text.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor

from benchmarks.lib.reload.weights import Tensors
from tlt_server.errors import ServerFailed

T = TypeVar("T")
ALIGNED = 256
"""Bytes that each tensor in the buffer begins at a multiple of."""
ANSWER_S = 30


def send(tensors: Tensors, ranks: int, post: Callable[[dict[str, str]], T]) -> T:
    """What `post` answers, the engine having read the tensors meanwhile.

    Args:
        ranks: of the engine, on GPUs 0 to `ranks` - 1.
        post: asks the engine to read, given the address of each GPU's socket by the GPU's UUID.

    Raises:
        ServerFailed: it says that it could not, or says nothing.
    """
    with TemporaryDirectory(prefix="tlt-ipc-") as folder, zmq.Context() as context:
        addresses = [f"ipc://{Path(folder) / str(rank)}" for rank in range(ranks)]
        uuids = [f"GPU-{torch.cuda.get_device_properties(rank).uuid}" for rank in range(ranks)]
        with ThreadPoolExecutor(1 + ranks) as pool:
            sending = [pool.submit(_to_rank, context, address, tensors, i) for i, address in enumerate(addresses)]
            answer = pool.submit(post, dict(zip(uuids, addresses, strict=True)))
            for each in sending:
                each.result()
            return answer.result()


def _to_rank(context: "zmq.Context[zmq.Socket[bytes]]", address: str, tensors: Tensors, rank: int) -> None:
    layout, buffer = flat(tensors, f"cuda:{rank}")
    torch.cuda.synchronize(rank)
    with context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.RCVTIMEO, 1000 * ANSWER_S)
        socket.bind(address)
        for message in (reduce_tensor(buffer), layout, None, None):
            socket.send_pyobj(message)
            try:
                refusal = socket.recv().decode()
            except zmq.Again as error:
                raise ServerFailed(
                    f"rank {rank} did not answer within {ANSWER_S} s: is checkpoint-engine there?"
                ) from error
            if refusal:
                socket.send_pyobj(RuntimeError(refusal))  # without one more message the engine would wait for ever
                raise ServerFailed(f"rank {rank} could not read the weights: {refusal}")


def flat(tensors: Tensors, device: str) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """One buffer of all tensors, [bytes] uint8, and where each lies in it, in checkpoint-engine's words."""
    layout, end = [], 0
    for name, tensor in tensors.items():
        layout.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": end})
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    for place in layout:
        data = tensors[place["name"]].contiguous().flatten().view(torch.uint8)
        buffer[place["offset"] : place["offset"] + len(data)].copy_(data)
    return layout, buffer
