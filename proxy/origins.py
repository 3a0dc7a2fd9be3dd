"""Browsers: what a page of somebody else's may not do with the credentials, or the place in the network, of who looks at it.

Rules
1. A browser says where a page is from (`Origin`), and a page cannot change that. A program that sends none is no page.
2. The admin listener serves its own pages only. Without an admin key it also wants a host of this machine: else a name of
   the attacker's that leads to 127.0.0.1 (DNS rebinding) would make its page one of ours.
3. The data listener, where no key is asked for, serves pages of this machine and of `server.cors_origins`. What is not a web
   page (`app://`, `file://`, null) is a program's, or cannot send JSON without being asked back.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def refused_by_admin(
    method: str,
    origin: str | None,
    site: str | None,
    host: str | None,
    *,
    keyed: bool,
    secure: bool,
    own: str,
) -> str | None:
    """Why a request is not answered; None: it is. site: Sec-Fetch-Site. keyed: an admin key is asked for. secure: it came by
    TLS. own: the address that is listened on."""
    if origin is not None:
        scheme, _, place = origin.partition("://")
        if not host or place.lower() != host.lower() or (secure and scheme != "https"):
            return "A page from elsewhere may not use the admin listener."
    elif method not in ("GET", "HEAD") and site in ("cross-site", "same-site"):
        return "A page from elsewhere may not use the admin listener."
    if not keyed and host and not _is_here(f"//{host}", own):
        return "Without an admin key, ask for this listener as localhost or by its address."
    return None


def refused_by_data(origin: str) -> bool:
    """Whether a page from there may not use a listener that asks for no key."""
    return origin.startswith(("http://", "https://")) and not _is_here(origin, "")


def _is_here(url: str, own: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost") or (own and name == own.lower()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
