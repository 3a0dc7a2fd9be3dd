"""The whole examination of a backend, and of several side by side.

Rules: what `check --probe` asks comes first; without a model that answers nothing else is tried. The keep-alive is
watched beside the rest, for it takes seconds in which nothing is asked.
"""

from __future__ import annotations

import asyncio

from proxy.check import Probe
from proxy.clock import Clock
from proxy.config import Backend
from proxy.doctor import prompts, speech, tools, wire
from proxy.doctor.patient import Patient
from proxy.probe import Asker, Finding, Unreachable, Verdict, model_of, session

CHECKS = (
    ("long stream", speech.stream),
    ("tools", tools.tools),
    ("cancel", speech.cancel),
    ("window size", prompts.window),
    ("prefix cache", prompts.cache),
    ("history", prompts.history),
    ("distance", wire.distance),
)


async def examine(
    backend: Backend, clock: Clock, seconds: float, idle_seconds: float, *, deep: bool = False
) -> list[Finding]:
    """Everything that is found. seconds: for each question; idle_seconds: how long the gateway keeps connections."""
    async with session(seconds) as asking:
        probe = Probe(backend, asking)
        try:
            findings = await probe.run(continues=False)
            if not any(finding.what == "usage" for finding in findings):
                return findings
            asker = Asker(backend, asking)
            model = await model_of(asker)
        except Unreachable as error:
            what = "answers" if probe.findings else "reachable"
            return [*probe.findings, Finding(backend.name, what, Verdict.PROBLEM, error.detail, error.fix)]
        patient = Patient(backend, asker, clock, model, seconds, idle_seconds, deep, findings)
        watch = asyncio.ensure_future(patient.check("keep-alive", wire.keep_alive))
        for name, look in CHECKS:
            await patient.check(name, look)
        await patient.check("continuation", lambda _: probe.continuation(model))
        await watch
        return patient.findings


async def examine_all(
    backends: tuple[Backend, ...], clock: Clock, seconds: float, idle_seconds: float, *, deep: bool = False
) -> list[Finding]:
    """Side by side, in the order of the backends."""
    found = await asyncio.gather(
        *(examine(backend, clock, seconds, idle_seconds, deep=deep) for backend in backends)
    )
    return [finding for findings in found for finding in findings]
