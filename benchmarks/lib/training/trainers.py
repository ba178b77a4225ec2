"""A drafter trainer beside a server: `tlt-server train` as a child process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tlt_server.process import await_answer, free_port, running


@contextmanager
def training(
    control: str,
    config: Path,
    drafters: Path,
    log: Path,
    *flags: str,
    module: Sequence[str] = ("tlt_server",),
) -> Iterator[str]:
    """Runs one; the URL of its status.

    Args:
        control: address that a server follows it at.
        config: file of its settings.
        drafters: its folder.
        module: that runs, and words before `train`.

    Raises:
        ServerFailed: it ended early.
    """
    port = free_port()
    command = [*module, "train", "--tlt-config", str(config), "--folder", str(drafters), *flags]
    command += ["--listen", control, "--port", str(port)]
    with running(command, log, environment={"OMP_NUM_THREADS": "1"}) as process:
        status = f"http://127.0.0.1:{port}/tlt/v1/train/status"
        await_answer(process, status, log, 120)
        yield status
