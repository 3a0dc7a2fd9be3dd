"""The page's files, and the headers that keep it to itself.

Rules: what is served is the list of `static/` as it was at the start; a path that is not in it does not exist, whatever it
spells. Nothing inline, nothing from elsewhere: the policy below says so to the browser. Nothing secret is in these
files: they open without a key.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from aiohttp import web

STATIC = Path(__file__).parent / "static"
ROOT = "/ui"
API = "/ui/api"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Page:
    """Serves `static/`. A file is read when it is first asked for, by a thread, and kept."""

    def __init__(self, folder: Path = STATIC) -> None:
        found = [path for path in folder.rglob("*") if path.is_file() and path.suffix in _KINDS]
        self._files = {f"{ROOT}/{path.relative_to(folder).as_posix()}": path for path in sorted(found)}
        self._files[f"{ROOT}/"] = folder / "index.html"
        self._read: dict[Path, tuple[bytes, str]] = {}

    @property
    def paths(self) -> frozenset[str]:
        """All that opens without a key."""
        return frozenset({ROOT, *self._files})

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get(ROOT, self._root)
        for path in self._files:
            app.router.add_get(path, self._file)

    async def _root(self, request: web.Request) -> web.StreamResponse:
        """Addresses in the page are relative to its folder; so is this one, whatever stands in front."""
        return web.Response(status=308, headers={**HEADERS, "Location": "ui/"})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = self._files[request.path]
        if path not in self._read:
            body = await asyncio.to_thread(path.read_bytes)
            self._read[path] = body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        body, tag = self._read[path]
        headers = {**HEADERS, "ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers={**headers, "Content-Type": _KINDS[path.suffix]})
