"""Keys of TLS, for what we listen on and for what we ask; and what they make of their files.

Rules
1. A context is made of the files as they are now: while loading, to see whether it can be, and again whenever they change.
2. TLS 1.2 is the least, ALPN says http/1.1, and a client's or server's certificate is checked or asked for by one key each.
   Nothing but `insecure_any_certificate` turns a check off.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from proxy.config.policy import Section
from proxy.config.values import CertificateFile, HostName, ReadableFile

if TYPE_CHECKING:
    from proxy.config.sections import Config

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class ListenerTls(Section):
    """Of one of our listeners: TLS if it has a certificate. client_ca: who has to show one signed by it gets in."""

    cert: ReadableFile | None = None
    key: ReadableFile | None = None
    client_ca: CertificateFile | None = None
    minimum_version: Literal["1.2", "1.3"] = "1.2"

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path is not None)

    def context(self) -> ssl.SSLContext:
        """Raises OSError (ssl.SSLError included) for files that do not fit."""
        assert self.cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[self.minimum_version]
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        _present(context, self.cert, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            # Who resumes a session shows no certificate: one that is trusted no longer would get in.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context


class Tls(Section):
    """To one backend: the system's certificates are trusted, and `ca`. cert, key: ours, where it asks for one."""

    ca: CertificateFile | None = None
    cert: ReadableFile | None = None
    key: ReadableFile | None = None
    server_name: HostName | None = None
    insecure_any_certificate: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for path in (self.ca, self.cert, self.key) if path is not None)

    def context(self) -> ssl.SSLContext:
        """Raises OSError (ssl.SSLError included) for files that do not fit."""
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        if self.ca is not None:
            context.load_verify_locations(self.ca)
        if self.cert is not None:
            _present(context, self.cert, self.key)
        if self.insecure_any_certificate:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _present(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """A key that wants a passphrase is refused: nobody is there to be asked."""
    context.load_cert_chain(cert, key, password=lambda: "")


# -- rules between keys ----------------------------------------------------------------------------------------


def listener_files_fit(config: Config) -> Iterator[str]:
    for path, tls in (("server.tls", config.server.tls), ("admin.tls", config.admin.tls)):
        if tls.cert is not None and tls.key is not None:
            yield from _trial(path, tls)
        elif tls != ListenerTls():
            missing = "key" if tls.cert is not None else "cert"
            yield f"{path}.{missing}: missing: a listener with TLS needs tls.cert and tls.key"


def backend_files_fit(config: Config) -> Iterator[str]:
    for index, backend in enumerate(config.backends):
        path, tls = f"backends[{index}].tls", backend.tls
        if backend.url.startswith("http:"):
            if tls != Tls():
                yield f"{path}: the URL is http, so no TLS can be set up: write https, or drop it"
        elif (tls.cert is None) != (tls.key is None):
            missing = "key" if tls.cert is not None else "cert"
            yield f"{path}.{missing}: missing: a certificate and its key go together"
        elif tls.insecure_any_certificate and (tls.ca is not None or tls.server_name is not None):
            yield f"{path}.insecure_any_certificate: true, so ca and server_name would not be looked at: drop them, or it"
        else:
            yield from _trial(path, tls)


def proxies_are_named(config: Config) -> Iterator[str]:
    if config.server.proxy_protocol and not config.server.trusted_proxies:
        yield (
            "server.proxy_protocol: true, but nobody is trusted to say who a client is: name the proxies in "
            "trusted_proxies"
        )


def _trial(path: str, tls: ListenerTls | Tls) -> Iterator[str]:
    try:
        tls.context()
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            yield f"{path}.key: {tls.key} is not the key of {tls.cert}"
        else:
            yield f"{path}: {tls.cert} and {tls.key} are no certificate and key that can be used ({_why(error)})"
    except (OSError, ValueError) as error:
        yield f"{path}: the files cannot be used: {error}"


def _why(error: ssl.SSLError) -> str:
    if error.reason is None:
        return "not PEM, or the key wants a passphrase"
    return error.reason.lower().replace("_", " ")
