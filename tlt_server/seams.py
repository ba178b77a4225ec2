"""Every point at which patched SGLang calls us. No logic lives here.

The patches in patches/ reach this module as `sglang.tlt`. It is None, and every seam is inert, unless the process
belongs to a server that `tlt-server serve` started.

What is put into SGLang's objects otherwise, while they run, is listed in patches/OVERRIDES.md.
"""

from typing import Any

from tlt_server.api.rollouts.aborts import abort_asked, still_wanted, wake_held
from tlt_server.api.rollouts.requests import add_counts_to_meta_info, check_request, settle_request
from tlt_server.api.rollouts.versions import add_versions_to_meta_info
from tlt_server.config import ServerConfig
from tlt_server.engine.cpu.install import (
    apply_token_bitmask,
    create_attention_backend,
    draft_backends,
    draft_extend_backends,
    install,
    start_method,
)
from tlt_server.engine.decode.crediting import credit_tokens
from tlt_server.engine.decode.verify import penalises, prepare_nodes, settle_end
from tlt_server.engine.features.finals import keeps_last_states
from tlt_server.engine.graphs.capture import capture_stream
from tlt_server.engine.loading.unpickling import unpickled
from tlt_server.engine.rendezvous import loopback_store
from tlt_server.engine.requests.eras import name_era
from tlt_server.engine.sampling.seeds import seeds_of
from tlt_server.keys import Keys, described
from tlt_server.metrics import count_verified

__all__ = [
    "abort_asked",
    "add_counts_to_meta_info",
    "add_routes",
    "add_versions_to_meta_info",
    "announcer",
    "answer_aborted",
    "api_key",
    "apply_token_bitmask",
    "capture_stream",
    "check_request",
    "choose_nodes",
    "count_verified",
    "create_attention_backend",
    "credit_tokens",
    "described",
    "detokenize",
    "disk_updates",
    "dispatch",
    "draft_backends",
    "draft_extend_backends",
    "draft_worker_class",
    "eagle_worker_class",
    "install",
    "keeps_last_states",
    "loopback_store",
    "name_era",
    "penalises",
    "prepare_nodes",
    "sampler",
    "seeds_of",
    "send_features",
    "sendable",
    "settle_end",
    "settle_request",
    "start_method",
    "still_wanted",
    "take",
    "unpickled",
    "update_lock",
    "wake_held",
    "weight_updater_class",
]


# What imports SGLang's modules is imported when it is called: SGLang imports this module before any of its own.


def add_routes(app: Any) -> None:
    """Our HTTP routes, in the process that serves HTTP."""
    from tlt_server.api.app import add_routes

    add_routes(app, ServerConfig.from_environment().dialect)


def disk_updates() -> Any:
    """A turn among the updates from disk, in the process that serves HTTP."""
    from tlt_server.api.weights import disk_updates

    return disk_updates()


def update_lock() -> Any:
    """What an update of the target waits for, in the process that serves HTTP."""
    from tlt_server.api.rollouts.held import UpdateLock

    return UpdateLock()


def api_key() -> Any:
    """What the server's own requests show: its settings have a mask in place of the key."""
    return Keys.from_environment().api


def weight_updater_class() -> type:
    """What a scheduler updates weights with."""
    from tlt_server.engine.weights.routing import WeightRouter

    return WeightRouter


def eagle_worker_class() -> type:
    """What a scheduler drafts and verifies with under EAGLE and EAGLE-3."""
    from tlt_server.engine.decode.worker import EagleWorker

    return EagleWorker


def sampler() -> Any:
    """What samples after a prefill and a plain step."""
    from tlt_server.engine.sampling.choice import OneSampler

    return OneSampler()


def choose_nodes(logits: Any, sampling_info: Any, positions: Any) -> Any:
    """The token after each node of a batch's trees."""
    from tlt_server.engine.sampling.choice import choose_nodes

    return choose_nodes(logits, sampling_info, positions)


def send_features(result: Any) -> None:
    """What a step has computed of the target's states, to who learns from them."""
    from tlt_server.engine.features.tap import send_features

    send_features(result)


def rows_of(q: Any, wrapper: Any) -> Any:
    """Queries as the attention of flashinfer's wrapper, or of what stands in for it, reads them."""
    from tlt_server.engine.graphs.attention import rows_of

    return rows_of(q, wrapper)


def draft_worker_class() -> type:
    """What an EAGLE worker drafts with."""
    from tlt_server.engine.decode.undrafted import draft_worker_class

    return draft_worker_class()


def announcer(scheduler: Any) -> Any:
    """What adds to the requests that rank 0 received."""
    from tlt_server.engine.decode.speculation import Announcer

    return Announcer(scheduler)


def answer_aborted(scheduler: Any, req: Any) -> None:
    """What an aborted request has, to the client."""
    from tlt_server.engine.requests.aborts import answer_aborted

    answer_aborted(scheduler, req)


def dispatch(scheduler: Any, recv_req: Any) -> Any:
    """One message to a scheduler, ours or SGLang's."""
    from tlt_server.engine.control import dispatch

    return dispatch(scheduler, recv_req)


def sendable(manager: Any, message: Any) -> Any:
    """A message, on its way from the HTTP process to a scheduler."""
    from tlt_server.api.messages import sendable

    return sendable(manager, message)


def take(manager: Any, message: Any) -> Any:
    """One that came back: a coroutine."""
    from tlt_server.api.messages import take

    return take(manager, message)


def detokenize(manager: Any, recv_obj: Any) -> Any:
    """A batch's tokens on their way to text."""
    from tlt_server.engine.requests.outputs import detokenize

    return detokenize(manager, recv_obj)
