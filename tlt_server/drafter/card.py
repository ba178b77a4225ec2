"""The model card of an exported drafter: a README.md with front matter, as the hub shows it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tlt_server import results
from tlt_server.config import DrafterForm
from tlt_server.drafter.config import EAGLE3
from tlt_server.errors import ConfigError

PAPERS = {"eagle": "2401.15077", "eagle3": "2503.01840"}
NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}
HEARD = "expected, on rollouts kept from training"
FACTS = {
    "trained_on": "version of the target's weights, as its servers counted",
    "tokens": "tokens learnt from",
    "steps": "training steps",
    "version": "version of the drafter",
    "revision": "revision of tlt-server",
    "made_by": "made by",
}
"""What is known of its weights, by its name in the file's metadata."""
_SHARES = re.compile(r"(?<!\S)\d+\.\d+(?!\S)")
_SHARE = re.compile(r"accepted_(\d+)_(.+)_batch_(\d+)")


class Lengths(NamedTuple):
    """Accept lengths. accepted: share of the steps that accept the draft of each depth, from the first."""

    measured: str
    temperature: str
    accepted: Sequence[float]

    def row(self, depths: int) -> list[str]:
        shares = [f"{share:.2f}" for share in self.accepted]
        return [
            self.measured,
            self.temperature,
            f"{1 + sum(self.accepted):.2f}",
            *shares,
            *[""] * (depths - len(shares)),
        ]


Measured = Sequence[Lengths]


def from_bench(path: Path) -> Measured:
    """What `tlt-server bench --json` found of a drafter, by arm and requests at once. Raises ConfigError: not that."""
    figures = results.read(path).figures
    shares: dict[tuple[str, str], dict[int, float]] = {}
    for name, share in figures.items():
        if found := _SHARE.fullmatch(name):
            depth, side, load = found.groups()
            shares.setdefault((side, load), {})[int(depth)] = share
    if not shares:
        raise ConfigError(f"{path}: no accepted drafts in it. Give what `tlt-server bench --json` wrote")
    temperature = f"{figures['temperature']:g}" if "temperature" in figures else ""
    return [
        Lengths(f"{side.replace('_', ',')}, {load} at once", temperature, [share for _, share in sorted(each.items())])
        for (side, load), each in shares.items()
    ]


def card(
    config: Mapping[str, Any],
    provenance: Mapping[str, str],
    form: DrafterForm,
    target: str | None,
    measured: Measured | None = None,
) -> str:
    """Markdown. config: by SGLang's names. provenance: what the weights' file says. target: folder or hub name."""
    kind = "eagle3" if config["architectures"][0] == EAGLE3 else "eagle"
    hub = target if target and re.fullmatch(r"[\w.-]+/[\w.-]+", target) and not Path(target).exists() else None
    named = hub or (Path(target).resolve().name if target else "its target")
    heard = [float(share) for share in _SHARES.findall(provenance.get("accepted", ""))]
    known = [Lengths(HEARD, provenance.get("temperature", ""), heard)] if heard else []
    base = f"base_model: {hub}\n" if hub else ""
    return f"""---
{base}tags:
- speculative-decoding
- {kind}
---

# {NAMES[kind]} drafter for {named}

Proposes tokens that the target verifies ([{NAMES[kind]}](https://arxiv.org/abs/{PAPERS[kind]})):
{_sizes(config)}.

## Use

```sh
{_commands(kind, form, hub or "TARGET")}
```

## Training

{_training(provenance)}

## Accept length

{_lengths([*known, *(measured or ())])}
"""


def _sizes(config: Mapping[str, Any]) -> str:
    depth, width, tokens = (config.get(name) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    own = config.get("draft_vocab_size")
    head = "the target's head" if own is None else f"a head of its own over {own} of {tokens} tokens"
    narrow = config.get("target_hidden_size") not in (None, width)
    embedding = "an embedding of its own" if narrow else "the target's embedding"
    return f"{depth} layer{'s' * (depth != 1)} of width {width}, {embedding}, {head}"


def _commands(kind: str, form: DrafterForm, target: str) -> str:
    sglang = (
        f"tlt-server serve --model-path {target} --drafter FOLDER",
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {kind.upper()} "
        "--speculative-draft-model-path FOLDER",
    )
    told = f'{{"method": "{kind}", "model": "FOLDER", "num_speculative_tokens": 3}}'
    vllm = f"vllm serve {target} --speculative-config '{told}'"
    if form is DrafterForm.SGLANG:
        return "\n".join([*sglang, *([vllm] if kind == "eagle3" else [])])
    return vllm if form is DrafterForm.VLLM else f"vllm serve FOLDER    # finds the target by config.json\n{vllm}"


def _training(provenance: Mapping[str, str]) -> str:
    if provenance.get("trained") == "no":
        return "None: its weights are random."
    facts = [f"| {said} | {provenance[name]} |" for name, said in FACTS.items() if provenance.get(name)]
    return "\n".join(["| | |", "|---|---|", *facts]) if facts else "Not known."


def _lengths(known: Measured) -> str:
    if not known:
        return "Not measured."
    depths = max(len(each.accepted) for each in known)
    head = ["measured", "temperature", "tokens a step", *(f"depth {depth}" for depth in range(1, depths + 1))]
    rows = [head, ["---"] * len(head), *(each.row(depths) for each in known)]
    about = "Tokens a step count the target's own; of each depth, the share of the steps that accept its draft."
    return "\n".join([about, "", *(f"| {' | '.join(row)} |" for row in rows)])
