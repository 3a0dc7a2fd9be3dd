"""Whether it speaks: whole streams at its profile's speed, thinking apart, metrics that move, silence when told.

Rules: one stream of `TOKENS` tells most of it. Speed is judged only against a profile, acceptance against the
profile's or not at all being there; both only from enough tokens.
"""

from __future__ import annotations

import aiohttp
import orjson

from proxy.doctor.patient import CHAT, Patient, Said
from proxy.probe import Verdict, broken_stream, unreachable

TOKENS = 64
SLOW = 0.5
"""Of the profile's tokens a second: below this something is wrong."""
LOST_ACCEPTANCE = 0.3
"""Of the usual acceptance, as `policy.speculation.acceptance_share`."""
NO_ACCEPTANCE = 0.08
"""Of drafted tokens, where nobody knows what is usual."""
FEW_DRAFTS = 40
CANCEL_SECONDS = 3.0


async def stream(patient: Patient) -> None:
    before = await patient.metrics()
    said = await patient.stream("Count from one to a hundred, in words.", TOKENS, ignore_eos=True)
    if said.status == 400:  # it does not know ignore_eos
        said = await patient.stream("Count from one to a hundred, in words.", TOKENS)
    wrong = f"it answers {said.status}" if said.status != 200 else broken_stream(said.body)
    if wrong is not None:
        fix = "see its log; the gateway ends such a stream with an error, or continues it elsewhere"
        patient.tell("long stream", Verdict.PROBLEM, wrong, fix)
        return
    patient.tell("long stream", Verdict.OK, f"{len(said.at)} reads")
    _thinking(patient, said)
    tokens = said.usage.get("completion_tokens")
    _speed(patient, said, tokens if isinstance(tokens, int) else None)
    if before.running is not None:
        await _moved(patient, before.generation_tokens, tokens if isinstance(tokens, int) else 1)
        await _acceptance(patient, before.spec_draft_tokens or 0, before.spec_accepted_tokens or 0)


def _thinking(patient: Patient, said: Said) -> None:
    marked = "</think>" in said.content or said.content.lstrip().startswith("<think>")
    if patient.backend.reasoning_parser == "none":
        if said.reasoning:
            fix = 'set reasoning_parser = "backend"'
            patient.tell(
                "thinking",
                Verdict.NOTE,
                "it tells thinking apart, but reasoning_parser is none",
                fix,
                reasoning_parser="backend",
            )
    elif marked:
        fix = 'set reasoning_parser = "none", or start it with a reasoning parser (vLLM: --reasoning-parser)'
        patient.tell("thinking", Verdict.PROBLEM, "thinking comes as text", fix, reasoning_parser="none")
    else:
        where = "apart from the text" if said.reasoning else "none is seen"
        patient.tell("thinking", Verdict.OK, where)


def _speed(patient: Patient, said: Said, tokens: int | None) -> None:
    if tokens is None or tokens < TOKENS / 2:
        return
    if len(said.at) < 2:
        patient.tell("speed", Verdict.OK, "all of it came at once")
        return
    seconds = said.at[-1] - said.at[0]
    rate = (tokens - tokens / len(said.at)) / seconds if seconds > 0 else float("inf")
    measured = patient.backend.measured
    if measured is None or measured.quality_only:
        patient.tell("speed", Verdict.OK, f"{rate:.0f} tokens/s alone; no profile to compare with")
        return
    usual = measured.stream_rate(1, 0)
    detail = f"{rate:.0f} tokens/s alone; its profile has {usual:.0f}"
    if rate >= SLOW * usual:
        patient.tell("speed", Verdict.OK, detail)
    else:
        fix = "is it busy with others, is the GPU throttled, is it this configuration? If so: tierline bench"
        patient.tell("speed", Verdict.WARNING, detail, fix)


async def _moved(patient: Patient, before: float | None, tokens: int) -> None:
    if before is None:
        return
    moved = await patient.until(lambda now: (now.generation_tokens or 0) >= before + tokens, 1.0)
    if moved is not None:
        patient.tell("counters", Verdict.OK, "they count what is generated")
    else:
        fix = "is metrics_path a cache, or another server's? The gateway then takes it for stuck"
        patient.tell(
            "counters", Verdict.PROBLEM, f"{tokens} tokens were generated, and they stand still", fix
        )


async def _acceptance(patient: Patient, drafted: float, accepted: float) -> None:
    now = await patient.metrics()
    drafts = (now.spec_draft_tokens or 0) - drafted
    if drafts < FEW_DRAFTS:
        return
    share = ((now.spec_accepted_tokens or 0) - accepted) / drafts
    measured = patient.backend.measured
    usual = measured.acceptance() if measured is not None else 0.0
    least = LOST_ACCEPTANCE * usual if usual else NO_ACCEPTANCE
    detail = f"{share:.0%} of drafted tokens" + (f"; its profile has {usual:.0%}" if usual else "")
    if share >= least:
        patient.tell("acceptance", Verdict.OK, detail)
    else:
        fix = "check the drafter and its flags (docs/deployments.md): drafting costs here more than it gives"
        patient.tell("acceptance", Verdict.WARNING, detail, fix)


async def cancel(patient: Patient) -> None:
    """Leave in the middle of an answer: does the engine stop?"""
    before = await patient.metrics()
    if before.running is None:
        patient.tell(
            "cancel", Verdict.NOTE, "not seen: it tells nothing of running requests", "see metrics above"
        )
        return
    body = orjson.dumps(
        {
            "model": patient.model,
            "messages": [{"role": "user", "content": "Tell me a very long story."}],
            "max_tokens": 20000,
            "stream": True,
        }
    )
    try:
        async with patient.asker.open("POST", CHAT, body) as response:
            await response.content.readany()
            ran = await patient.until(lambda now: (now.running or 0) > (before.running or 0), 1.0)
            response.close()
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise unreachable(error) from error
    if ran is None:
        patient.tell("cancel", Verdict.OK, "the answer had ended before it was left")
        return
    began = patient.clock.now()
    least = ran.running or 0
    stopped = await patient.until(lambda now: (now.running or 0) < least, CANCEL_SECONDS)
    if stopped is not None:
        patient.tell("cancel", Verdict.OK, f"it stops within {max(0.0, patient.clock.now() - began):.1f} s")
    else:
        fix = "what stands between? A proxy that buffers keeps it generating for nobody"
        patient.tell("cancel", Verdict.PROBLEM, f"it goes on {CANCEL_SECONDS:g} s after the client left", fix)
