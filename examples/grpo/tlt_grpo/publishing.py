"""The policy's way into the server, by one of tlt-client's routes."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tlt_client import Client
from tlt_client.weights.flows import Sent
from tlt_client.weights.group import WeightsUpdateGroup

from tlt_grpo.config import Route
from tlt_grpo.learning.policy import Policy


class Publisher:
    """Puts each version of the policy in force. in_flight: between two tokens of what is running, which goes on; else
    no request of ours may be.

    By `disk` the last one stays there; `out` may be on another disk than the server's only if the server sees it under
    the same path.
    """

    def __init__(self, client: Client, out: Path, route: Route = "disk", *, in_flight: bool = False) -> None:
        self._client, self._out, self._in_flight = client, out.absolute(), in_flight
        self._sent: Sent = {"flush_cache": not in_flight}
        self._group: WeightsUpdateGroup | None = None
        self._send = {"disk": self._by_disk, "tensor": self._by_tensor, "broadcast": self._by_broadcast}[route]
        self.weight_version = ""
        """Of what is in force."""
        self.folder: Path | None = None
        """Of the last checkpoint."""

    def publish(self, policy: Policy, weight_version: str) -> None:
        """Returns once the server samples from it."""
        self.weight_version = weight_version
        self._send(policy)

    def again(self, policy: Policy) -> None:
        """Sends what is in force once more, to a server that was restarted meanwhile."""
        self._group = None  # the server's end of it is gone
        self._send(policy)

    def save(self, policy: Policy) -> Path:
        """A checkpoint of what is in force, in place of the one before."""
        before, folder = self.folder, self._out / f"policy-{self.weight_version}"
        if before != folder:
            policy.save(folder)
            self.folder = folder
            if before is not None:
                shutil.rmtree(before)
        return folder

    def close(self) -> None:
        """Leaves what it has joined."""
        if self._group is not None:
            self._client.destroy_weights_update_group(self._group)
            self._group = None

    def _by_disk(self, policy: Policy) -> None:
        folder, put = str(self.save(policy)), self._client.update_weights_from_disk
        if self._in_flight:
            self._between_tokens(lambda: put(folder, self.weight_version, flush_cache=False))
        else:
            put(folder, self.weight_version)

    def _by_tensor(self, policy: Policy) -> None:
        put = self._client.update_weights_from_tensor
        self._whole(lambda: put(policy.weights(), self.weight_version, **self._sent))

    def _by_broadcast(self, policy: Policy) -> None:
        if self._group is None:
            on_gpu = next(iter(policy.weights().values())).is_cuda
            self._group = self._client.init_weights_update_group(backend="nccl" if on_gpu else "gloo")
        group, put = self._group, self._client.update_weights_from_distributed
        self._whole(lambda: put(group, policy.weights(), self.weight_version, **self._sent))

    def _whole(self, send: Callable[[], None]) -> None:
        """Buckets that are one publication, whose end says whether the target is whole."""
        if self._in_flight:
            self._between_tokens(send)
            return
        self._client.begin_weight_update()
        send()  # where it fails the next one that begins takes its place
        self._client.end_weight_update()

    def _between_tokens(self, send: Callable[[], None]) -> None:
        """Likewise; what is running keeps what it has cached, and new requests share none of that."""
        self._client.pause_generation("in_place")
        try:
            send()
        finally:
            self._client.continue_generation()
