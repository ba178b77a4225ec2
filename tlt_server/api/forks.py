"""Routes that SGLang has in its trainers' own builds, slime's and Miles': what they do with a target that is neither
packed nor spread over machines."""

import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, HTTPException, Response
from fastapi.concurrency import run_in_threadpool
from sglang.srt.utils.auth import AuthLevel, auth_level

from tlt_server.api.scheduler import as_json, tokenizer_manager
from tlt_server.engine.loading.schema import holds_as_published
from tlt_server.errors import OutOfTurn, UpdateRefused
from tlt_server.files import read_object, regular

router = APIRouter()

INDEX = "model.safetensors.index.json"
MARK = ".tlt-pulled.json"
"""Which version a folder is a copy of; without it, a folder is not ours to replace."""
CHUNK = 16 << 20

_pulling = threading.Lock()


class _Delta(Exception):
    """A version that holds differences."""


@router.post("/post_process_weights")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def post_process_weights() -> Response:
    """Unpacks quantized weights before an update, and packs them after. Where none are packed there is nothing to do.
    501: the target's are."""
    if not holds_as_published(config := tokenizer_manager().model_config):
        message = f"{config.quantization}: updates of targets that are quantized so are not served"
        return as_json({"success": False, "message": message}, 501)
    return as_json({"success": True, "message": "The target's weights lie as published: there is nothing to do."})


@router.get("/parallelism_config")
async def parallelism_config(rank: int = 0) -> Response:
    """Which part of the target a rank has. 400: there is no such rank."""
    args = tokenizer_manager().server_args
    size = args.tp_size * args.pp_size
    if not 0 <= rank < size:
        raise HTTPException(400, f"rank {rank}: this server has ranks 0 to {size - 1}")
    return as_json(parallelism(args, rank))


def parallelism(args: Any, rank: int) -> dict[str, int]:
    """A rank of a replica, under the names of Miles' `RankParallelismConfig`. args: upstream's `ServerArgs`."""
    stage, part = divmod(rank, args.tp_size)
    attn_dp_size = args.dp_size if args.enable_dp_attention else 1
    attn_tp_size, moe_tp_size = args.tp_size // attn_dp_size, args.tp_size // args.ep_size
    return {
        **{"tp_size": args.tp_size, "tp_rank": part, "pp_size": args.pp_size, "pp_rank": stage},
        **{"ep_size": args.ep_size, "ep_rank": part // moe_tp_size},
        **{"moe_tp_size": moe_tp_size, "moe_tp_rank": part % moe_tp_size},
        **{"attn_tp_size": attn_tp_size, "attn_tp_rank": part % attn_tp_size},
        **{"attn_dp_size": attn_dp_size, "attn_dp_rank": part // attn_tp_size},
        **{"world_size": args.tp_size * args.pp_size, "global_rank": rank, "local_rank": rank},
    }


@router.post("/pull_weights")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def pull_weights(
    local_checkpoint_dir: Annotated[str, Body()],
    source_dir: Annotated[str, Body()],
    target_version: Annotated[int, Body()],
) -> Response:
    """Copies a version that a trainer has published on a shared file system to the server's own disk, from where
    `/update_weights_from_disk` reads it: `source_dir/weight_v000017`; version 0 is what the server started from.

    400: it is not there, or no checkpoint. 409: the local folder holds something else. 501: it is a delta, which is
    what slime and Miles publish with `--update-weight-mode delta`.
    """
    start = tokenizer_manager().server_args.model_path
    source = Path(source_dir, f"weight_v{target_version:06d}") if target_version else Path(start)
    status, message = await run_in_threadpool(_pulled, source, Path(local_checkpoint_dir))
    return as_json({"success": status == 200, "message": message}, status)


def _pulled(source: Path, local: Path) -> tuple[int, str]:
    """Status and message."""
    try:
        with _pulling:
            pull(source, local)
    except OutOfTurn as refused:
        return 409, str(refused)
    except UpdateRefused as refused:
        return 400, str(refused)
    except _Delta:
        return 501, f"{source} is a delta: publish whole checkpoints, by --update-weight-mode full"
    except OSError as error:
        return 400, f"{error.filename or source}: {error.strerror}"
    return 200, "Success."


def pull(source: Path, local: Path) -> None:
    """Makes `local` a copy of the checkpoint in `source`: whole, or as it was before.

    Raises UpdateRefused: source is no checkpoint, or a path is not absolute. OutOfTurn: local holds what is no copy of
    ours. OSError: something cannot be read or written.
    """
    if not local.is_absolute() or not source.is_absolute():
        raise UpdateRefused(f"{source} and {local} must be absolute: they are folders on the server's machine")
    names = sorted(entry.name for entry in os.scandir(source) if entry.is_file() and entry.name != MARK)
    if not any(name.endswith(".safetensors") for name in names):
        raise UpdateRefused(f"{source} holds no safetensors file: it is no checkpoint")
    if INDEX in names and "delta_encoding" in _metadata(source / INDEX):
        raise _Delta
    if local.exists() and any(local.iterdir()) and not (local / MARK).exists():
        raise OutOfTurn(f"{local} holds files that were not pulled: name a folder that is empty, or not there")
    local.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{local.name}-", dir=local.parent) as made:
        new, old = Path(made, "new"), Path(made, "old")
        new.mkdir()
        for name in names:
            _copy(source / name, new / name)
        (new / MARK).write_text(json.dumps({"of": str(source)}))
        if local.exists():
            local.rename(old)  # who reads its files goes on reading them
        try:
            new.rename(local)
        except OSError:
            if old.exists():
                old.rename(local)
            raise


def _metadata(index: Path) -> dict[str, object]:
    try:
        found = read_object(index).get("metadata")
    except ValueError as error:
        raise UpdateRefused(f"{index}: {error}") from error
    return found if isinstance(found, dict) else {}


def _copy(source: Path, copy: Path) -> None:
    with regular(source) as (file, size), copy.open("wb") as written:
        shutil.copyfileobj(file, written, CHUNK)
    if copy.stat().st_size != size:
        raise UpdateRefused(f"{source} changed while it was read: publish first, then call")
