"""The target's checkpoint, of which only what a drafter starts from is read."""

from pathlib import Path

from torch import Tensor

from tlt_server.drafter.config import ModelConfig, target_config
from tlt_server.errors import ConfigError
from tlt_server.preflight import model_folder, read_config


def find_target(name: str) -> tuple[Path, ModelConfig]:
    """A target's folder and config, by its folder or its name on the hub.

    Raises:
        ConfigError: there is none, or no drafter can be made for it.
    """
    folder = model_folder("target", name)
    return folder, target_config(read_config(folder), str(folder / "config.json"))


def read_tensor(folder: Path, *names: str) -> Tensor:
    """The first of `names` that the safetensors files in `folder` hold; of all others the headers alone are read.

    Raises:
        ConfigError: they hold none of them, or one of the files is damaged.
    """
    from safetensors import SafetensorError, safe_open

    for name in names:
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    if name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                        return file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: damaged or incomplete ({error}). Copy or download it again") from error
    raise ConfigError(f"target {folder}: its safetensors files hold no {' and no '.join(names)}. Download it whole")
