"""`python -m tests.trainer.follower FOLDER CONTROL FEATURES NAME`: a server as a process, until its stdin ends."""

import sys
from pathlib import Path

from tests.trainer.stand_in import Server

if __name__ == "__main__":
    with Server(Path(sys.argv[1]), *sys.argv[2:]):
        sys.stdin.read()
