"""A front over stand-ins that Ray keeps: `tlt-server fleet`, but for what a replica runs.

python -m benchmarks.lib.fleet.front --replicas 3 --port 30000 --state state --logs logs
"""

import argparse
import sys
from pathlib import Path

from tlt_server.errors import TltError
from tlt_server.fleet.links import Limits
from tlt_server.fleet.start.run import Wanted, run
from tlt_server.keys import Keys

LIMITS = Limits(probe_every=0.25, probe=1.5, call=5.0, patience=30.0)
"""A hang is found out in seconds: stand-ins answer in milliseconds."""
STAND_IN = ("benchmarks.lib.fleet.stand_in",)


def main(argv: list[str]) -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--replicas", type=int, default=0)
    flags.add_argument("--member", action="append", default=[])
    flags.add_argument("--address")
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--state", type=Path, required=True)
    flags.add_argument("--logs", type=Path, help="folder for what stand-ins log")
    flags.add_argument("--token-ms", default="1")
    asked = flags.parse_args(argv)
    stand_ins = ["--log", str(asked.logs), "--token-ms", asked.token_ms] if asked.replicas else []
    wanted = Wanted(
        replicas=asked.replicas, address=asked.address, gpus=0, serve=stand_ins, members=asked.member,
        host="127.0.0.1", port=asked.port, min_ready=1, state=asked.state, insecure=False, limits=LIMITS,
        module=STAND_IN,
    )  # fmt: skip
    try:
        run(wanted, Keys(), lambda line: print(line, flush=True))  # noqa: T201
    except TltError as error:
        sys.stderr.write(f"front: {error}\n")
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main(sys.argv[1:])
