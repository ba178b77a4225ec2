"""How a response was sampled, as its meta_info says it: by which seed, and which tokens by which weights."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from tlt_server.api.rollouts.seeds import seed_of
from tlt_server.engine.decode.crediting import KEY
from tlt_server.engine.weights.state import Stamp

Span = dict[str, Any]


def add_versions_to_meta_info(meta_info: dict[str, Any], state: Any) -> None:
    """Adds the `seed`, and turns the stamps of new tokens into spans over all tokens so far: `weight_versions` and
    `drafter_versions`.

    `weight_versions` is SGLang 0.5.23's field, with our count of publications beside the trainer's version. It is about
    the target alone: a trainer that drops samples of several versions must not drop those that saw a new drafter.

    meta_info: of one answer, or of one event of a streamed one; completed in place. Spans are of the whole response in
        both: `[start, end)` counts its tokens from 0.
    state: upstream's `ReqState`. The stamps are taken out of it: streams would cut the spans like tokens.
    """
    meta_info["seed"] = seed_of(state)
    new = state.customized_info_accumulated.pop(KEY, [])
    meta_info.pop(KEY, None)
    stamps: list[Stamp] = [stamp for stamp in new if stamp is not None]
    spans: dict[str, list[Span]] = state.__dict__.setdefault("version_spans", {KEY: [], "drafter_versions": []})
    of_target = (
        {"version": stamp.weight_version, "target_version": stamp.target_version, "partial": stamp.partial}
        for stamp in stamps
    )
    _extend(spans[KEY], of_target)
    drafters = (stamp.drafter_version for stamp in stamps)
    _extend(spans["drafter_versions"], ({"version": each} for each in drafters if each is not None))
    meta_info |= {key: [dict(span) for span in found] for key, found in spans.items() if found}


def _extend(spans: list[Span], values: Iterable[Span]) -> None:
    """Appends tokens to spans, one value a token; a span ends where the value changes."""
    for value, run in groupby(values):
        count = sum(1 for _ in run)
        end = spans[-1]["end"] if spans else 0
        if spans and spans[-1].items() >= value.items():
            spans[-1]["end"] += count
        else:
            spans.append(value | {"start": end, "end": end + count})
