"""Prints docs/fields.md:  python -m tlt_server.api.fields > docs/fields.md"""

from tlt_server.api.fields.shown import as_markdown

if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201
