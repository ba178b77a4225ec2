"""The embedded default: a small target and its drafter, the task they were made for, and the script that made them."""

from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"


def default_paths() -> tuple[Path, Path]:
    """The checkpoint folders of the embedded target and its EAGLE drafter."""
    return _ASSETS / "target", _ASSETS / "drafter"


def eagle3_path() -> Path:
    """The checkpoint folder of the embedded target's EAGLE-3 drafter."""
    return _ASSETS / "drafter_eagle3"
