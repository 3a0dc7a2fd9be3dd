"""Listening sockets: made here, or received from whoever started us; and the word that we are ready.

Rules
1. A socket that was received is used if it is at the configured address, so that nobody is refused while one process takes
   over from another. Two ways: systemd's (`LISTEN_FDS`, `LISTEN_PID`, names `data` and `admin`; a single one is `data`),
   whose address systemd decides; and ours (`TIERLINE_LISTEN`), from a process that is replaced (`upgrade`).
2. What was received and is not wanted is closed. The variables are taken out of the environment: they are for us alone.
3. `ready` tells systemd (`NOTIFY_SOCKET`, with our process id) and the process that is replaced (`TIERLINE_READY`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

LISTEN, READY, FROM = "TIERLINE_LISTEN", "TIERLINE_READY", "TIERLINE_FROM"
FIRST_FD = 3
"""Of those that systemd passes on."""

Sockets = dict[str, list[socket.socket]]
"""By what they are for: `data`, `admin`."""


class Listeners:
    """Every listening socket of this process, by what it is for."""

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.open: Sockets = {}
        self._given = _from_systemd(environ)
        self._passed_on = {} if self._given else _passed_on(environ)

    async def listen(self, name: str, host: str, port: int, backlog: int) -> list[socket.socket]:
        """Those at this address. Raises OSError when it cannot be had."""
        found = self._given.pop(name, [])
        if not found:
            for sock in self._passed_on.pop(name, []):
                if port in (0, sock.getsockname()[1]):
                    found.append(sock)
                else:
                    sock.close()
        if not found:
            found = await _bind(host, port, backlog)
        self.open[name] = found
        return found

    def close_unused(self) -> None:
        """What was received and nobody asked for."""
        for sockets in (*self._given.values(), *self._passed_on.values()):
            for sock in sockets:
                sock.close()
        self._given, self._passed_on = {}, {}

    def described(self) -> str:
        """For who comes after us: its `TIERLINE_LISTEN`."""
        return ",".join(f"{name}={sock.fileno()}" for name, sockets in self.open.items() for sock in sockets)

    def descriptors(self) -> list[int]:
        return [sock.fileno() for sockets in self.open.values() for sock in sockets]


def ready(environ: MutableMapping[str, str] | None = None) -> None:
    """We serve: told to systemd and to whom we replace. Does nothing where neither is there."""
    environ = os.environ if environ is None else environ
    notify(f"READY=1\nMAINPID={os.getpid()}", environ)
    pipe = environ.pop(READY, None) if _is_parent(environ) else None
    if pipe is not None:
        with contextlib.suppress(OSError):
            os.write(int(pipe), b"ready")
        os.close(int(pipe))
    environ.pop(FROM, None)


def notify(state: str, environ: Mapping[str, str]) -> None:
    """systemd's sd_notify. A service manager that does not listen is none of our problems."""
    address = environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect("\0" + address[1:] if address[0] == "@" else address)
        sock.sendall(state.encode())


def _from_systemd(environ: MutableMapping[str, str]) -> Sockets:
    count, pid, names = (environ.pop(key, "") for key in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"))
    if not count.isdigit() or pid != str(os.getpid()):
        return {}
    called: Sequence[str] = names.split(":") if names else []
    if int(count) == 1 and (not called or called[0] != "admin"):
        called = ["data"]
    return _adopt((called[at] if at < len(called) else "unknown", FIRST_FD + at) for at in range(int(count)))


def _passed_on(environ: MutableMapping[str, str]) -> Sockets:
    text = environ.pop(LISTEN, "")
    if not text or not _is_parent(environ):
        return {}
    pairs = (part.partition("=") for part in text.split(","))
    return _adopt((name, int(fd)) for name, _, fd in pairs)


def _adopt(pairs: Iterable[tuple[str, int]]) -> Sockets:
    found: Sockets = {}
    for name, fd in pairs:
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        sock.setblocking(False)
        found.setdefault(name, []).append(sock)
    return found


def _is_parent(environ: Mapping[str, str]) -> bool:
    """The variables are of who started us, not left over from who started that."""
    return environ.get(FROM) == str(os.getppid())


async def _bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    """At every address of a name, as asyncio's own server would."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in dict.fromkeys(infos):
            sock = socket.socket(family, kind, proto)
            made.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(backlog)
            sock.setblocking(False)
    except OSError:
        for sock in made:
            sock.close()
        raise
    return made
