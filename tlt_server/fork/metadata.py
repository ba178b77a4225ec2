"""What the fork says of itself to installers: its version and its requirements.

Upstream requires every package that any of its models or kernels may want. The fork's core is CORE, which text serving
needs; upstream's own list stands word for word in the extra `gpu`, beside upstream's other extras.
"""

import hashlib
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tlt_server.errors import PatchError
from tlt_server.fork.pristine import SGLANG
from tlt_server.fork.series import Series

GPU = "gpu"

# Raise it when the builder writes other bytes for the same series.
FORMAT = 1

# What the server, its workers and the text models import, found in an environment that had nothing else. A name
# without a version takes upstream's constraint where upstream has one.
CORE = (
    "aiohttp",
    "apache-tvm-ffi",
    "compressed-tensors",
    "dill",
    "einops",
    "fastapi",
    "gguf",
    "IPython",
    "jsonschema",
    "loguru",
    "msgspec",
    "numpy",
    "openai",
    "orjson",
    "packaging",
    "partial_json_parser",
    "pillow",
    "prometheus-client",
    "psutil",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "requests",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    # Upstream pins the torch that its CUDA kernels were built for, which stands in `gpu`; on a CPU a newer one serves.
    "torch>=2.11",
    "torchvision",
    "tqdm",
    "transformers",
    "triton",
    "uvicorn",
    "uvloop",
    "xgrammar",
)


def fork_version(series: Series) -> str:
    """`0.5.17+tlt.<hash>`, the hash naming this series and these requirements. The hash is nine hex digits of a sha256
    that begin with a letter: installers drop the leading zeros of a part that has digits only."""
    digest = hashlib.sha256(repr((FORMAT, CORE)).encode())
    for patch in series.patches:
        digest.update(f"\0{patch.name}\0{len(patch.content)}\0".encode() + patch.content)
    match = re.search("[a-f][0-9a-f]{8}", digest.hexdigest())
    assert match, "64 hex digits without a letter in the first 56"
    return f"{SGLANG.version}+tlt.{match[0]}"


def rewrite_metadata(upstream: str, version: str) -> str:
    """METADATA of the fork from upstream's: another version, NOTICE added, requirements cut as the module says."""
    headers, blank, body = upstream.partition("\n\n")
    kept: list[str] = []
    required: list[str] = []
    for line in headers.split("\n"):
        name, _, value = line.partition(": ")
        if name == "Requires-Dist" and "extra ==" not in value.partition(";")[2]:
            required.append(value)
        else:
            kept.append(f"Version: {version}" if name == "Version" else line)
    first = next((i for i, line in enumerate(kept) if line.startswith("Provides-Extra: ")), len(kept))
    upstreams = {canonicalize_name(Requirement(line).name): line for line in required}
    core = (line if Requirement(line).specifier else upstreams.get(canonicalize_name(line), line) for line in CORE)
    ours = [f"Requires-Dist: {line}" for line in core]
    ours += [f"Provides-Extra: {GPU}", *(f"Requires-Dist: {_as_extra(line)}" for line in required)]
    return "\n".join([*kept[:first], *ours, *kept[first:], "License-File: NOTICE"]) + blank + body


def rewrite_version(source: str, version: str) -> str:
    """sglang/_version.py with the fork's version. Raises PatchError where upstream's is not there exactly once."""
    public, _, local = version.partition("+")
    numbers = ", ".join(public.split("."))
    for old, new in ((f"'{public}'", f"'{version}'"), (f"({numbers})", f"({numbers}, '{local}')")):
        if source.count(old) != 1:
            raise PatchError(f"sglang/_version.py has {old} {source.count(old)} times: not the file of SGLang {public}")
        source = source.replace(old, new)
    return source


def _as_extra(requirement: str) -> str:
    name, _, marker = requirement.partition(";")
    condition = f"({marker.strip()}) and " if marker else ""
    return f'{name.rstrip()}; {condition}extra == "{GPU}"'
