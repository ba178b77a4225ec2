"""The table of fields as the docs show it."""

from collections.abc import Iterable, Iterator

from tlt_server.api.fields import vllm
from tlt_server.api.fields.field import NEEDS, REFUSED, Effect, Field
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.native import SAMPLING
from tlt_server.api.fields.routes import EMBEDDING, TABLES, UNSERVED, VLLM_TABLES

HEAD = """# What a request may say

Made from the code: `python -m tlt_server.api.fields > docs/fields.md`.

A request is held against these tables before it is scheduled. A value of a wrong type, out of its range or not finite
is answered 400, with the field's name; whole numbers do where numbers are asked for, null is as good as nothing.

- *honoured*: it changes the sample as it says. Where something is needed and missing, it is refused.
- *no effect on the sample*: it changes what the answer says beside the sample, or how the request is led through.
- *refused with 400*, unless its value asks for nothing: null, false, what is empty, the neutral values named.
- *accepted, named as ignored*: as is every field that nobody knows. The answer names them in `meta_info.ignored`: on
  `/generate` in each response's `meta_info`, elsewhere in a `meta_info` at the top of the answer and of each event;
  `tlt_ignored_fields_total` counts them; the log says each once. With `--strict-fields` (`strict_fields = true`), what
  nobody knows is refused.

A field of another dialect that would change the sample is refused, with the name that it has here.
"""


def as_markdown() -> str:
    """The whole document."""
    parts = [HEAD]
    for table in dict.fromkeys(TABLES.values()):
        routes = [path for path, each in TABLES.items() if each is table]
        paths = ", ".join(f"`{path}`" for path in routes)
        embeds = ": of a server that was started with --is-embedding" if routes[0] in EMBEDDING else ""
        parts.append(f"## {paths}\n\n`{table.name}`{embeds}.\n\n{_rows(table.fields.values())}")
        if any(field.inner is SAMPLING for field in table.fields.values()):
            parts.append(
                f"## sampling_params\n\n`{SAMPLING.name}`, of `/generate`.\n\n{_rows(SAMPLING.fields.values())}"
            )
    parts += _vllms()
    parts.append(f"## Fields of others\n\nIn every table that has no field of the name.\n\n{_rows(FOREIGN.values())}")
    unserved = "".join(f"| `{path}` | {why} |\n" for path, why in UNSERVED.items())
    parts.append(f"## Routes that are not served\n\nAnswered 404.\n\n| route | |\n|---|---|\n{unserved}")
    return "\n".join(parts)


def _vllms() -> Iterator[str]:
    yield "## vLLM's dialect\n\nUnder `--dialect vllm` ([for trainers](trainers.md#vllms-dialect)).\n"
    for table in dict.fromkeys(VLLM_TABLES.values()):
        routes = [path for path, each in VLLM_TABLES.items() if each is table]
        sglangs = TABLES[routes[0]].fields if routes[0] in TABLES else {}
        if rows := [field for field in table.fields.values() if sglangs.get(field.name) is not field]:
            paths = ", ".join(f"`{path}`" for path in routes)
            beside = ", with the fields above and these" if sglangs else ""
            yield f"### {paths}\n\n`{table.name}`{beside}.\n\n{_rows(rows)}"
    for name, of, table in (
        ("sampling_params", "`/inference/v1/generate`", vllm.PARAMS),
        ("structured_outputs", "all three", vllm.STRUCTURED),
    ):
        yield f"### {name}\n\n`{table.name}`, of {of}.\n\n{_rows(table.fields.values())}"


def _rows(fields: Iterable[Field]) -> str:
    order = list(Effect)
    rows = sorted(fields, key=lambda field: (order.index(field.effect), field.name))
    return "| field | | |\n|---|---|---|\n" + "".join(
        f"| `{field.name}` | {field.effect} | {_note(field)} |\n" for field in rows
    )


def _note(field: Field) -> str:
    neutral = ", ".join(str(value).lower() for value in field.neutral)
    said = (
        field.note,
        f"needs {NEEDS[field.needs]}" if field.needs else "",
        f"neutral: {neutral}" if neutral and (field.needs or field.effect is REFUSED) else "",
    )
    return "; ".join(each for each in said if each).replace("|", "\\|")
