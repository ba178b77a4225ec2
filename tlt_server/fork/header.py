"""The line that tells a reader of a changed file that we changed it (Apache License 2.0, section 4b)."""

import re
from collections.abc import Sequence

# PEP 263: Python looks for an encoding in the first two lines only.
_CODING = re.compile(rb"[ \t\f]*#.*?coding[:=][ \t]*[-\w.]+")


def mark(source: bytes, changed_by: Sequence[str]) -> bytes:
    """Put a comment that names `changed_by` above a Python file, below its shebang and its encoding line."""
    lines = source.splitlines(keepends=True)
    top = 1 if lines and lines[0].startswith(b"#!") else 0
    top += 1 if len(lines) > top and _CODING.match(lines[top]) else 0
    note = f"# Modified by tlt-server ({', '.join(changed_by)}): not the file that the SGLang team published.\n"
    return b"".join([*lines[:top], note.encode(), *lines[top:]])
