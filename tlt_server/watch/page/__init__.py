"""The page at `/tlt/`: static files for any HTTP front. They read the API, and reveal nothing themselves."""

from collections.abc import Mapping
from pathlib import Path

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

FILES: Mapping[str, tuple[Path, str]] = {
    f"/tlt/{'' if file.name == 'index.html' else file.name}": (file, _TYPES[file.suffix])
    for file in sorted(Path(__file__).parent.iterdir())
    if file.suffix in _TYPES
}
"""By path: the file, and its content type."""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a server of another version comes with other files
}
"""Of each answer."""
