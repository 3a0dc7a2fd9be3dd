"""The way to it: how far it is, how long it keeps a connection, whether its clock is ours.

Rules: a connection of its own for the keep-alive; it is watched a little longer than the gateway keeps one idle.
"""

from __future__ import annotations

import asyncio
import contextlib
from email.utils import parsedate_to_datetime
from statistics import median
from urllib.parse import urlsplit

import aiohttp

from proxy.doctor.patient import Patient
from proxy.probe import Unreachable, Verdict, unreachable

FAR_SECONDS = 0.05
SKEW_SECONDS = 5.0
LONGER = 0.5
"""Seconds beyond `pool.idle_seconds`."""


async def distance(patient: Patient) -> None:
    took, skews = [], []
    for _ in range(5):
        began = patient.clock.now()
        try:
            async with patient.asker.open("GET", patient.backend.health_path) as response:
                await response.read()
                took.append(patient.clock.now() - began)
                with contextlib.suppress(TypeError, ValueError):
                    date = parsedate_to_datetime(response.headers.get("date", ""))
                    skews.append(abs(date.timestamp() - patient.clock.wall()))
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(error) from error
    if median(took) > FAR_SECONDS:
        fix = "every first token waits that long: put the gateway nearer to it"
        patient.tell(
            "distance", Verdict.NOTE, f"{median(took) * 1e3:.0f} ms for a connection and an empty answer", fix
        )
    else:
        patient.tell("distance", Verdict.OK, f"{median(took) * 1e3:.1f} ms for an empty answer")
    if skews and min(skews) > SKEW_SECONDS:
        fix = "set its clock, or its log and the gateway's do not line up"
        patient.tell("clock", Verdict.NOTE, f"{min(skews):.0f} s apart from ours", fix)


async def keep_alive(patient: Patient) -> None:
    limit = patient.idle_seconds + LONGER
    seconds = await _idle(patient, limit)
    if seconds is None:
        patient.tell("keep-alive", Verdict.OK, f"an idle connection stands longer than {limit:g} s")
    elif seconds < patient.idle_seconds:
        wanted = round(max(0.1, seconds * 0.8), 1)
        fix = f"set pool.idle_seconds = {wanted:g}, below what it keeps, or let it keep them longer"
        detail = f"an idle connection is closed after {seconds:.1f} s, and the gateway keeps {patient.idle_seconds:g} s"
        patient.tell("keep-alive", Verdict.WARNING, detail, fix, _pool__idle_seconds=wanted)
    else:
        patient.tell("keep-alive", Verdict.OK, f"an idle connection is closed after {seconds:.1f} s")


async def _idle(patient: Patient, limit: float) -> float | None:
    """Seconds after which an idle connection was closed; None: it was not, up to the limit."""
    parts = urlsplit(patient.backend.url)
    secure = parts.scheme == "https"
    tls = patient.backend.tls.context() if secure else None
    name = (patient.backend.tls.server_name or parts.hostname) if secure else None
    clock = patient.clock
    try:
        async with clock.timeout_at(clock.now() + patient.seconds):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if secure else 80), ssl=tls, server_hostname=name
            )
    except (OSError, TimeoutError) as error:
        raise Unreachable(
            f"no second connection: {error or 'no answer in time'}", "is the number of connections limited?"
        ) from error
    try:
        path = parts.path.rstrip("/") + patient.backend.health_path
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {parts.netloc}\r\n\r\n".encode())
        async with clock.timeout_at(clock.now() + patient.seconds):
            await reader.read(1)
        began = clock.now()
        try:
            async with clock.timeout_at(began + limit):
                while await reader.read(1 << 16):
                    pass
        except TimeoutError:
            return None
        return clock.now() - began
    except (OSError, TimeoutError) as error:
        raise Unreachable("no answer on a connection of its own", "see its log") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
