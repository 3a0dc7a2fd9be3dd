"""The keys of `[limits.shared]`: the server through which gateways share limits. Rules: as in `sections`."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from proxy.config.policy import Section
from proxy.config.values import CertificateFile, Name, Seconds, SecretRef, broken

SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")
ENCRYPTED = ("valkeys", "rediss")


def _url(value: object) -> object:
    if not isinstance(value, str) or value.partition("://")[0] not in SCHEMES:
        raise broken('expected "valkey://HOST:PORT", "valkeys://HOST:PORT" (TLS) or "unix:///PATH"')
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise broken("the host or port of this URL cannot be read") from None
    if "@" in parts.netloc:
        raise broken('credentials do not belong into a URL: use password = "env:NAME"')
    if parts.query or parts.fragment:
        raise broken("this URL has no query and no fragment")
    if parts.scheme == "unix":
        if host or len(parts.path) < 2:
            raise broken('expected the path of a socket: "unix:///run/valkey.sock"')
    elif not host:
        raise broken("this URL has no host")
    elif parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise broken('behind the host comes the number of a database, such as "valkey://HOST/0"')
    return value


class SharedLimits(Section):
    """Where gateways share their limits. url: None: each has its own. timeout: for one round trip."""

    url: Annotated[str, BeforeValidator(_url)] | None = None
    on_failure: Literal["open", "closed", "local"] = "local"
    timeout: Seconds = 0.5
    prefix: Name = "tierline"
    username: str | None = None
    password: SecretRef | None = None
    ca: CertificateFile | None = None
    verify: bool = True

    @property
    def scheme(self) -> str:
        return (self.url or "").partition("://")[0]


class SharedSection(Section):
    """What holds for all limits."""

    shared: SharedLimits = SharedLimits()
