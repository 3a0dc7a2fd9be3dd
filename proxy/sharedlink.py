"""The one connection to the server that gateways share limits through: Valkey, or Redis from 7.0.

Rules
1. One call at a time, so that answers need no names and what was asked first is done first. A call that fails or takes too
   long closes the connection: its answer could come later, and be taken for another's.
2. Everything that can go wrong is `Lost`, with words for the operator and no password in them.
3. The client's library is imported here and with the first link: who shares nothing need not have it.
"""

from __future__ import annotations

import hashlib
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from proxy.clock import Clock
from proxy.config import ENCRYPTED, SharedLimits
from proxy.sharedscript import SCRIPT

if TYPE_CHECKING:
    from valkey.asyncio.connection import AbstractConnection

_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()


class Lost(Exception):
    """The call failed, and nobody knows whether it was carried out. slow: it took too long."""

    def __init__(self, message: str, *, slow: bool = False) -> None:
        super().__init__(message)
        self.slow = slow


class Link:
    def __init__(self, settings: SharedLimits, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._connection: AbstractConnection | None = None
        self._prefix = f"{{{settings.prefix}}}"  # in a cluster: all keys on one server

    async def call(self, body: bytes) -> bytes:
        """Run the script. Raises Lost."""
        from valkey.exceptions import NoScriptError, ValkeyError

        seconds = self._settings.timeout
        try:
            async with self._clock.timeout_at(self._clock.now() + seconds):
                try:
                    answer = await self._ask("EVALSHA", _SHA, 1, self._prefix, body)
                except NoScriptError:
                    answer = await self._ask("EVAL", SCRIPT, 1, self._prefix, body)
        except TimeoutError:
            await self.close()
            raise Lost(f"no answer within {seconds:g} s", slow=True) from None
        except (ValkeyError, OSError) as error:
            await self.close()
            raise Lost(str(error) or type(error).__name__) from error
        except BaseException:
            await self.close()
            raise
        assert isinstance(answer, bytes)
        return answer

    async def _ask(self, *command: object) -> object:
        connection = self._connection
        if connection is None:
            connection = self._connection = _connection(self._settings)
        await connection.send_command(*command)
        return await connection.read_response()

    async def close(self) -> None:
        """The next call connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)


def _connection(settings: SharedLimits) -> AbstractConnection:
    """Not connected yet."""
    from valkey.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

    parts = urlsplit(settings.url or "")
    given: dict[str, Any] = {
        "username": settings.username,
        "password": settings.password.reveal() if settings.password is not None else None,
        "socket_timeout": None,  # `Link.call` sees to that
        "client_name": "tierline",
    }
    if parts.scheme == "unix":
        return UnixDomainSocketConnection(path=unquote(parts.path), **given)
    given |= {"host": parts.hostname, "port": parts.port or 6379, "socket_keepalive": True}
    given["db"] = int(parts.path.strip("/") or 0)
    if settings.scheme not in ENCRYPTED:
        return Connection(**given)
    given["ssl_min_version"] = ssl.TLSVersion.TLSv1_2
    given["ssl_check_hostname"] = settings.verify
    given["ssl_cert_reqs"] = "required" if settings.verify else "none"
    return SSLConnection(ssl_ca_certs=settings.ca, **given)
