"""The command line of a keeper."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tlt_server.errors import ConfigError
from tlt_server.keys import Keys
from tlt_server.preflight import check_place

_out = Console(highlight=False, soft_wrap=True)


def keeper(
    model_path: Annotated[Path, typer.Option(help="The checkpoint that members started from: a folder.")],
    folder: Annotated[Path, typer.Option(help="Where members read weights: shared, or in /dev/shm of one host.")],
    device: Annotated[str, typer.Option(help="cpu, which receives by gloo; cuda:0, by NCCL.")] = "cpu",
    host: Annotated[str, typer.Option(help="Where it listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Likewise.")] = 30050,
    api_key_file: Annotated[Path | None, typer.Option(help="Of the fleet's clients; or TLT_API_KEY.")] = None,
    admin_api_key_file: Annotated[Path | None, typer.Option(help="For changes; or TLT_ADMIN_API_KEY.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen though others may get in.")] = False,
) -> None:
    """Receive a trainer's broadcasts for a fleet, so that no member that ends takes the trainer's group with it."""
    keys = Keys.read(api_key_file, admin_api_key_file)
    check_place(host, port, keyed=bool(keys.api), insecure=insecure)
    import torch
    from aiohttp import web

    from tlt_server.engine.cpu.torchvision import mend_torchvision

    mend_torchvision()  # which SGLang's modules import

    from tlt_server.config import ServerConfig
    from tlt_server.fleet.keeper.app import Keeper
    from tlt_server.fleet.keeper.folder import Kept
    from tlt_server.fleet.keeper.receive import Receiver

    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise ConfigError(f"--device {device}: must be cpu, or a GPU of this machine, as cuda:0")
    kept = Kept(folder, model_path)
    receiver = Receiver(kept, torch.device(device), ServerConfig().transfer_timeout_s)
    _out.print(f"keeper      http://{host}:{port}, weights in {folder}")
    web.run_app(Keeper(kept, receiver, keys).app(), host=host, port=port, print=None, access_log=None)
