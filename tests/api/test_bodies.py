"""Bodies of the control routes: what is not of its schema is refused in a line, and the schema knows every field."""

import asyncio
import json
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from sglang.srt.managers import io_struct
from starlette.applications import Starlette

from benchmarks.lib.safety.odd import NO_JSON, odd_body
from benchmarks.lib.safety.routes import VALID
from tlt_server.api.bodies import BODIES, body_of
from tlt_server.api.control import unreachable
from tlt_server.api.fields.field import Server
from tlt_server.api.fields.routes import UNSERVED
from tlt_server.api.rollouts.gate import Gate, require_fit
from tlt_server.errors import BadRequest
from tlt_server.process import free_port

UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("/pause_generation", {"mode": "forever"}, "mode"),
    ("/continue_generation", {"torch_empty_cache": "yes"}, "torch_empty_cache"),
    ("/abort_request", {"rid": ["a"]}, "rid"),
    ("/abort_request", {"rid": "a", "http_worker_ipc": "ipc:///tmp/a"}, "http_worker_ipc"),
    ("/update_weights_from_disk", {"model_path": "a\x00b"}, "model_path"),
    ("/update_weights_from_disk", {"model_path": "/a", "token_step": 2**64}, "token_step"),
    ("/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": []}, "of one length"),
    ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["b"], "shapes": [[-1]]}, "shapes"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["not base64!"]}, "serialized_named_tensors"),
    (
        "/init_weights_update_group",
        {"master_address": "a", "master_port": 1, "rank_offset": 0, "world_size": 2},
        "rank_offset",
    ),
    (
        "/init_weights_update_group",
        {"master_address": "a", "master_port": 1, "rank_offset": 2, "world_size": 2},
        "rank_offset 2 must be below world_size 2",
    ),
    ("/set_internal_state", {"server_args": {"speculative_accept_threshold_single": 0.5}}, "threshold_single"),
    ("/configure_logging", {"log_level": "loud"}, "log_level"),
    ("/configure_logging", {"dump_requests_folder": "/etc"}, "dump_requests_folder"),
    ("/start_profile", {"activities": ["CPU"]}, "num_steps"),
    ("/start_profile", {"num_steps": 2, "activities": ["RPD"]}, "activities"),
]


@pytest.mark.parametrize(
    "path", sorted(set(BODIES) - {"/begin_weight_update", "/post_process_weights", "/pull_weights"})
)
def test_every_field_of_upstreams_is_known(path: str) -> None:
    """A field that an upgrade adds would reach a scheduler unread. Left out are those that SGLang has not."""
    upstream = getattr(io_struct, BODIES[path].__name__)
    assert BODIES[path].__struct_fields__ == upstream.__struct_fields__
    assert path not in UNSERVED


def test_a_field_that_nothing_bounds_is_no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_struct, "Tomorrow", msgspec.defstruct("Tomorrow", [("count", int)]), raising=False)
    with pytest.raises(TypeError, match=r"Tomorrow\.count has no bound"):
        body_of("Tomorrow")


def misfit(path: str, body: bytes) -> str | None:
    try:
        require_fit(path, body)
    except BadRequest as error:
        return str(error)
    return None


def read_nothing() -> Server:
    raise AssertionError("no request for responses comes")


@pytest.mark.parametrize(("path", "body", "named"), UNFIT)
def test_what_does_not_fit_is_named_in_a_line(path: str, body: dict[str, Any], named: str) -> None:
    said = misfit(path, json.dumps(body).encode())
    assert said is not None
    assert named in said
    assert "\n" not in said


@pytest.mark.parametrize("path", BODIES)
def test_any_body_fits_or_does_not(path: str) -> None:
    """Nothing else: no other exception, and what fits has the declared types."""
    random = Random(path)
    fields = list(BODIES[path].__struct_fields__)
    for body in (*NO_JSON, *(odd_body(VALID.get(path, {}), fields, random) for _ in range(200))):
        if misfit(path, body) is None and body:
            msgspec.json.decode(body, type=BODIES[path])


VALID_ANYWAY = [
    path for path in BODIES if path in VALID and path not in ("/init_weights_update_group", "/start_profile")
]


@pytest.mark.parametrize("path", VALID_ANYWAY)
def test_what_trainers_send_fits(path: str) -> None:
    assert misfit(path, json.dumps(VALID[path] | {"a field of tomorrow": 1}).encode()) is None


def test_a_port_may_be_a_text() -> None:
    group = {"master_address": "a", "master_port": "29500", "rank_offset": 1, "world_size": 2}
    assert misfit("/init_weights_update_group", json.dumps(group).encode()) is None


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_group_that_nobody_opened_is_not_joined() -> None:
    port = free_port()
    said = await unreachable("127.0.0.1", port, within_s=1)
    assert said is not None
    assert f"no store of a process group answers at 127.0.0.1:{port} within 1 s" in said


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_listener_that_says_nothing_is_no_group() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert await unreachable("127.0.0.1", silent.getsockname()[1], within_s=0.5) is not None


@pytest.mark.anyio
async def test_a_group_that_was_opened_is_joined() -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    assert await unreachable("127.0.0.1", store.port, within_s=5) is None


@pytest.mark.parametrize("root", ["", "/proxied"])
def test_the_door_stands_behind_a_proxy_too(root: str) -> None:
    """`--fastapi-root-path` puts its prefix before every path."""
    app = Gate(Starlette(), server=read_nothing)

    async def asked(path: str, body: dict[str, object]) -> str:
        transport = httpx.ASGITransport(app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return (await http.post(root + path, json=body)).text

    assert "mode" in asyncio.run(asked("/pause_generation", {"mode": "forever"}))
    assert "not served" in asyncio.run(asked("/slow_down", {}))
