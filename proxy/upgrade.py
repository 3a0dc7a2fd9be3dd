"""Another process takes this one's place (SIGUSR2): the same command line again, with our listening sockets.

Rules
1. The new one is what is on the disk now: another version, another configuration. It says when it serves (`listen.ready`);
   until then, and if it never does, nothing changes here.
2. Both accept for a moment, none is refused: the sockets are the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys

from proxy.clock import Clock
from proxy.listen import FROM, LISTEN, READY, Listeners

log = logging.getLogger("tierline")

READY_SECONDS = 60.0
"""The new process has so long until it serves."""


async def hand_over(listeners: Listeners, clock: Clock) -> bool:
    """Start the next process; True once it serves. False, and why in the log, if it does not: it is gone then."""
    reading, writing = os.pipe()
    environ = {**os.environ, LISTEN: listeners.described(), READY: str(writing), FROM: str(os.getpid())}
    try:
        process = _start(environ, (writing, *listeners.descriptors()))
    except OSError as error:
        log.error("upgrade: the next process cannot be started (%s): this one goes on", error)
        os.close(reading)
        return False
    finally:
        os.close(writing)
    log.warning("upgrade: process %d is starting", process.pid)
    told = asyncio.get_running_loop().run_in_executor(None, _heard, reading)
    try:
        async with clock.timeout_at(clock.now() + READY_SECONDS):
            serves = await asyncio.shield(told)
        why = "ended before it served"
    except TimeoutError:
        serves, why = False, f"did not serve within {READY_SECONDS:g} s"
    if not serves:
        process.kill()  # if it still runs
        code = await asyncio.to_thread(process.wait)
        log.error("upgrade: process %d %s (exit code %d): this one goes on", process.pid, why, code)
    else:
        log.warning("upgrade: process %d serves; this one stops", process.pid)
        process.returncode = 0  # it is not ours to wait for
    return serves


def _start(environ: dict[str, str], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Our own command line once more."""
    return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environ, pass_fds=descriptors)


def _heard(pipe: int) -> bool:
    with open(pipe, "rb", buffering=0) as reading:
        return reading.read(5) == b"ready"
