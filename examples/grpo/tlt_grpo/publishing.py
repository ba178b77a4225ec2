"""The policy's way into the server: a checkpoint on a disk that both see."""

import shutil
import time
from pathlib import Path

from tlt_client import Client

from tlt_grpo.policy import Policy


class Publisher:
    """Puts each version of the policy in force; the last one stays on disk, as the result of the run.

    `out` may be on another disk than the server's only if the server sees it under the same path.
    """

    def __init__(self, client: Client, out: Path) -> None:
        self._client, self._out = client, out.absolute()
        self.weight_version = ""
        """Of what is in force."""
        self.folder: Path | None = None
        """What is in force, on disk."""

    def publish(self, policy: Policy, weight_version: str) -> float:
        """Returns once the server samples from it; the seconds that it took. No request of ours may be running."""
        begin, before = time.monotonic(), self.folder
        self.folder, self.weight_version = self._out / f"policy-{weight_version}", weight_version
        policy.save(self.folder)
        self.again()
        if before is not None:
            shutil.rmtree(before)
        return time.monotonic() - begin

    def again(self) -> None:
        """Sends the last one once more, to a server that was restarted meanwhile."""
        self._client.update_weights_from_disk(str(self.folder), self.weight_version)
