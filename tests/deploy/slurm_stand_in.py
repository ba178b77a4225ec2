"""Stands in for `scontrol`, `srun`, `scancel` and `tlt-server`, by the name it is called by: nodes are addresses of
this machine, and programs note how they were started, in the file RECORD, rather than load a model."""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def srun(words: list[str]) -> None:
    options = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    command = next(at for at, word in enumerate(words) if not word.startswith("--"))
    with open(options["--output"], "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["NODE"] = options["--nodelist"]
    with open(os.environ["RECORD"] + ".steps", "a") as steps:
        steps.write(f"{os.getpid()}\n")
    os.execvp(words[command], words[command:])


def scancel() -> None:
    assert sys.argv[1:] == ["--signal=TERM", os.environ["SLURM_JOB_ID"]], sys.argv
    for pid in Path(os.environ["RECORD"] + ".steps").read_text().split():
        os.kill(int(pid), signal.SIGTERM)


def end(*_: object) -> None:
    with open(os.environ["RECORD"] + ".ended", "a") as ended:
        ended.write(f"{os.getpid()}\n")
    os._exit(0)


def tlt_server(words: list[str]) -> None:
    signal.signal(signal.SIGTERM, end)
    node = os.environ.get("NODE")
    keys = [os.environ.get(name) for name in ("TLT_API_KEY", "TLT_ADMIN_API_KEY")]
    with open(os.environ["RECORD"], "a") as record:
        record.write(json.dumps({"node": node, "words": words, "pid": os.getpid(), "keys": keys}) + "\n")
    if node and node == os.environ.get("DIES_ONCE") and not (mark := Path(os.environ["RECORD"] + ".died")).exists():
        mark.touch()
        sys.exit("cannot go on")
    if words[0] == "fleet":
        ThreadingHTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Health).serve_forever()
    time.sleep(600)


if __name__ == "__main__":
    match Path(sys.argv[0]).name:
        case "scontrol":
            print(os.environ["SLURM_JOB_NODELIST"].replace(",", "\n"))  # noqa: T201
        case "srun":
            srun(sys.argv[1:])
        case "scancel":
            scancel()
        case "tlt-server":
            tlt_server(sys.argv[1:])
