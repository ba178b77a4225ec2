"""Pickles that do harm (chains.py), sent to a real server where it takes tensors; and those that trainers send.

gadgets_tried: payloads, each of which would make a file, or connect to a socket of ours. gadgets_run: those that did.
legitimate_refused: payloads of trainers that were not taken.
"""

import base64
import io
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from random import Random
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from benchmarks.lib.safety.chains import gadgets, text
from benchmarks.lib.servers import Serving
from tlt_server.demo import default_paths
from tlt_server.process import running_server
from tlt_server.results import Figures

NORM = "model.norm.weight"
WEIGHTS = "sglang.srt.model_executor.model_runner_components.weight_updater"


def measure(count: int, seed: int, logs: Path, serving: Serving = running_server) -> Figures:
    """Sends one server `count` payloads that do harm, in an order drawn from `seed`, and each kind that does none."""
    draw, folder = Random(seed), logs / "gadgets"
    folder.mkdir()
    with serving([], logs / "server.log") as url, httpx.Client(base_url=url, timeout=60) as http:
        with listening(folder / "socket") as (port, path, connections):
            prepared = list(gadgets(folder, port, path))
            for number in range(count):
                if number % len(prepared) == 0:
                    draw.shuffle(prepared)
                send(http, wrapped(draw, prepared[number % len(prepared)][2]))
            time.sleep(0.5)
            run = sum(marker.exists() for _, marker, _ in prepared) + len(connections)
        refused = [name for name, fields in legitimate().items() if not taken(http, fields)]
        http.get("/health").raise_for_status()
    return {"gadgets_tried": count, "gadgets_run": run, "legitimate_refused": len(refused)}


@contextmanager
def listening(path: Path) -> Iterator[tuple[int, str, list[Any]]]:
    """A port of loopback, a socket's path, and who has connected to them."""
    found: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        for listener in (tcp, unix):
            threading.Thread(target=accept, args=(listener, found), daemon=True).start()
        yield tcp.getsockname()[1], str(path), found
        for listener in (tcp, unix):
            listener.shutdown(socket.SHUT_RDWR)  # else accept would hold it open


def accept(listener: socket.socket, found: list[Any]) -> None:
    """Until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.close()
        found.append(connection)


def serialized(value: Any) -> bytes:
    """As SGLang's `MultiprocessingSerializer` does it."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, 4).dump(value)
    return buffer.getvalue()


def wrapped(draw: Random, gadget: bytes) -> dict[str, Any]:
    """A request with a gadget: bare, in place of a tensor, or in a pickle that is read later."""
    inner = gadget[2:] if gadget[:1] == pickle.PROTO else gadget
    as_tensor = b"\x80\x04](\x8c\x01x" + inner[:-1] + b"\x86e."
    values = b"}\x8c\x06values](B" + len(gadget).to_bytes(4, "little") + gadget + b"es"
    later = b"\x80\x04](\x8c\x01x" + text(WEIGHTS) + text("LocalSerializedTensor") + b"\x93)\x81" + values + b"b\x86e."
    fields = draw.choice(
        [
            {"serialized_named_tensors": [gadget]},
            {"serialized_named_tensors": [as_tensor]},
            {"serialized_named_tensors": [gadget], "load_format": "flattened_bucket"},
            {"serialized_named_tensors": [later], "load_format": "direct"},
        ]
    )
    return fields | {"flush_cache": draw.random() < 0.5}


def legitimate() -> dict[str, dict[str, Any]]:
    """Requests as trainers make them, with weights that the server has already."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    torch.multiprocessing.set_sharing_strategy("file_system")
    norm = load_file(default_paths()[0] / "model.safetensors")[NORM]
    bucket = FlattenedTensorBucket(named_tensors=[(NORM, norm)])
    flat = {"flattened_tensor": bucket.flattened_tensor, "metadata": bucket.metadata}
    local = LocalSerializedTensor(values=[serialized(norm)])
    held.extend([norm, bucket])
    view = torch.stack([norm, norm])[1]
    half = norm.bfloat16()
    kinds = {
        "tensors": ([(NORM, norm)], None),
        "a parameter": ([(NORM, torch.nn.Parameter(norm))], None),
        "a view": ([(NORM, view)], None),
        "half precision": ([(NORM, half)], None),
        "a flattened bucket": (flat, "flattened_bucket"),
        "a tensor for each rank": ([(NORM, local)], "direct"),
        "direct": ([(NORM, norm)], "direct"),
        "by value": (pickle.dumps([(NORM, norm)]), None),
    }
    held.extend(kinds.values())
    return {
        name: {"serialized_named_tensors": [said if isinstance(said, bytes) else serialized(said)], "load_format": how}
        for name, (said, how) in kinds.items()
    }


held: list[Any] = []
"""What was shared must stay until the server has read it."""


def taken(http: httpx.Client, fields: dict[str, Any]) -> bool:
    """Whether a request was: the server says so."""
    answer = send(http, fields)
    return answer.status_code == 200 and bool(answer.json()["success"])


def send(http: httpx.Client, fields: dict[str, Any]) -> httpx.Response:
    """The pickles in base64, as HTTP wants them."""
    payloads = [base64.b64encode(payload).decode() for payload in fields["serialized_named_tensors"]]
    return http.post("/update_weights_from_tensor", json=fields | {"serialized_named_tensors": payloads})
