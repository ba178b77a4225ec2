"""Updates of the target whose tensors come from this process, as flows."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from tlt_client import errors, wire
from tlt_client.control import Control
from tlt_client.flow import Flow, work

if TYPE_CHECKING:
    import torch

    from tlt_client.weights.group import WeightsUpdateGroup

Named: TypeAlias = "tuple[str, torch.Tensor]"
NamedTensors: TypeAlias = "Mapping[str, torch.Tensor] | Iterable[Named]"
"""By the checkpoint's names: a `state_dict()`, or pairs, which are read as they are sent."""

Backend = Literal["nccl", "gloo"]
Fields = dict[str, Any]


class Sent(TypedDict, total=False):
    """How tensors are sent. flush_cache: by the last bucket; True by default. bucket_bytes: of a bucket, unless one
    tensor is larger; 512 MiB. within_s: for each bucket; 600."""

    flush_cache: bool
    bucket_bytes: int
    within_s: float


class Weights:
    """The flows of both clients, whose methods say what each does."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def from_tensor(self, tensors: "NamedTensors", weight_version: str | None, **sent: Any) -> Flow[None]:
        _require_torch()
        from tlt_client.weights.tensors import FlatBucket

        ranks = yield from self._parts()

        def send(bucket: "list[Named]", post: Callable[[str, Fields], Flow[None]]) -> Flow[None]:
            flat = yield from work(partial(FlatBucket, bucket))
            try:
                payloads = yield from work(partial(flat.serialized, ranks))
                yield from post("/update_weights_from_tensor", {"serialized_named_tensors": payloads})
            finally:
                flat.unlink()

        yield from self._in_buckets(send, tensors, weight_version, **sent)

    def from_group(
        self, group: "WeightsUpdateGroup", tensors: "NamedTensors", weight_version: str | None, **sent: Any
    ) -> Flow[None]:
        from tlt_client.weights.tensors import FlatBucket

        def send(bucket: "list[Named]", post: Callable[[str, Fields], Flow[None]]) -> Flow[None]:
            group.require()
            flat = yield from work(partial(FlatBucket, bucket, group.device))
            sending = group.broadcast(flat.data)
            try:
                yield from post("/update_weights_from_distributed", {"group_name": group.name, **flat.described()})
                yield from work(partial(group.await_sent, sending))
            except BaseException:
                # A server that refuses may not have read the bucket: the next one would be taken for its rest.
                group.lose()
                raise

        yield from self._in_buckets(send, tensors, weight_version, **sent)

    def init_group(self, master_address: str, backend: Backend, within_s: float) -> "Flow[WeightsUpdateGroup]":
        _require_torch()
        from tlt_client.weights.group import Opening

        ranks = yield from self._ranks()
        opening = Opening(master_address, 1 + ranks, backend, within_s)
        call = self._control.call("POST", "/init_weights_update_group", opening.asked, within_s)
        try:
            yield from self._control.policy.fetch(call)
        except Exception:
            yield from work(opening.abandon)
            raise
        return (yield from work(opening.group))

    def destroy_group(self, group: "WeightsUpdateGroup") -> Flow[None]:
        call = self._control.call("POST", "/destroy_weights_update_group", {"group_name": group.name})
        try:
            yield from self._control.policy.fetch(call)
        finally:
            group.close()

    def _ranks(self) -> Flow[int]:
        """That join a group: of a fleet all members', or its keeper's; one server has no route for it, but in vLLM's
        dialect."""
        try:
            return (yield from self._control.world_size())
        except errors.RequestRefused as refused:
            if refused.status != 404:
                raise
        return (yield from self._parts())

    def _parts(self) -> Flow[int]:
        """Ranks that hold a part of the target."""
        parts: int = (yield from self._control.server_info()).get("tp_size", 1)
        return parts

    def _in_buckets(
        self,
        send: "Callable[[list[Named], Callable[[str, Fields], Flow[None]]], Flow[None]]",
        tensors: "NamedTensors",
        weight_version: str | None,
        *,
        flush_cache: bool = True,
        bucket_bytes: int = 1 << 29,
        within_s: float = 600.0,
    ) -> Flow[None]:
        """Sends each bucket by one call. Sent once: what a lost call has written is not known."""
        from tlt_client.weights.tensors import buckets

        parts, written = buckets(tensors, bucket_bytes), 0
        part = yield from work(partial(next, parts, None))
        while part:
            following = yield from work(partial(next, parts, None))
            common = wire.update_fields(weight_version, flush_cache and not following, load_format="flattened_bucket")

            def post(path: str, fields: Fields, common: Fields = common) -> Flow[None]:
                yield from self._control.policy.fetch(self._control.call("POST", path, common | fields, within_s))

            try:
                yield from send(part, post)
            except errors.TltClientError as error:
                if written:
                    what = "1 bucket before it is" if written == 1 else f"{written} buckets before it are"
                    error.args = (f"{error}. {what} written: send the whole target again",)
                raise
            part, written = following, written + 1


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise errors.TorchNeeded("sending tensors needs torch: pip install 'tlt-client[weights]'") from error
