"""`tierline gate`: take the tests, print what came of them, keep it in a file that a tier may demand.

Rules: nothing beyond click is imported until it runs. Exit code 1 when a test failed; the file is written all the same.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import click

from proxy.bench.cli import Numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.gatefile import GateResult, Outcome
    from proxy.config import Backend
    from proxy.proving.agree import Agreement

MOST_NEEDLE = 131072
NEEDLE_SHARE = 0.8
"""Of the window: the text with the needle, unless it is told."""
SMALL_WINDOW = 8192
"""Where the window is not reported."""


@click.command()
@click.argument("url")
@click.option("--model", metavar="NAME", help="Which model; the first that it lists by default.")
@click.option("--key", metavar="REFERENCE", help='The key, by reference: "env:NAME" or "file:PATH".')
@click.option("--needle", type=Numbers(0), metavar="N", help="Tokens of the text with the needle; 0: none.")
@click.option("--reference", metavar="URL", help="A server to compare with, at temperature 0.")
@click.option("--reference-model", metavar="NAME", help="Its model; the first that it lists by default.")
@click.option("--reference-key", metavar="REFERENCE", help="Its key, by reference.")
@click.option("--agree", type=click.FloatRange(0, 1), metavar="SHARE", help="Equal share to pass.")
@click.option("--patience", default=120.0, show_default=True, metavar="SECONDS", help="For each answer.")
@click.option("--out", metavar="FILE", help="Where to keep what was found, for backends[].gate.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--insecure", is_flag=True, help="Accept any certificate.")
def gate(
    url: str,
    model: str | None,
    key: str | None,
    needle: tuple[int, ...] | None,
    reference: str | None,
    reference_model: str | None,
    reference_key: str | None,
    agree: float | None,
    patience: float,
    out: str | None,
    as_json: bool,
    insecure: bool,
) -> None:
    """Test whether the answers of the server at URL, or a gateway, are right.

    Fibonacci numbers five times over, a tool call, a word from two turns ago, 47 x 83, a number in a long text; with
    --reference also how far its greedy answers are those of another server.
    """
    from pathlib import Path

    from policies.gatefile import table
    from proxy.config import ConfigError, backend_at
    from proxy.probe import Unreachable

    if agree is not None and reference is None:
        raise click.UsageError("--agree takes a --reference to agree with")
    try:
        backend = backend_at(url, key, model, insecure=insecure)
        other = (
            None
            if reference is None
            else backend_at(reference, reference_key, reference_model, insecure=insecure)
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None

    def told(outcome: Outcome) -> None:
        if not as_json:
            click.echo(f"{'passed' if outcome.passed else 'FAILED'}  {outcome.name}: {outcome.detail}")

    try:
        result, agreement = asyncio.run(
            _take(backend, other, needle[0] if needle else None, agree, patience, told)
        )
    except Unreachable as error:
        click.echo(f"{error.detail}; {error.fix}", err=True)
        raise SystemExit(1) from None
    found = table(result, {"agreement": _plain(agreement)})
    text = json.dumps(found, indent=2, ensure_ascii=False)
    if as_json:
        click.echo(text)
    if out is not None:
        Path(out).write_text(text + "\n", "utf-8")
        if not as_json:
            click.echo(f'written to {out}: gate = "{out}" in [[backends]] reads it')
    raise SystemExit(not result.passed)


def _plain(agreement: Agreement | None) -> dict[str, object] | None:
    if agreement is None:
        return None
    return {"unit": agreement.unit, "equal": agreement.equal, "diverged": list(agreement.diverged)}


async def _take(
    backend: Backend,
    other: Backend | None,
    needle: int | None,
    agree: float | None,
    seconds: float,
    told: Callable[[Outcome], None],
) -> tuple[GateResult, Agreement | None]:
    """Raises `Unreachable` where the server, or the reference, is not there at all."""
    from policies.gatefile import GateResult, Outcome
    from proxy.clock import LoopClock
    from proxy.doctor.patient import Patient
    from proxy.probe import Asker, model_of, models_of, session
    from proxy.proving.agree import compare
    from proxy.proving.tasks import gates, take

    clock = LoopClock()
    async with session(seconds) as asking:

        async def patient_of(backend: Backend) -> Patient:
            asker = Asker(backend, asking)
            return Patient(backend, asker, clock, await model_of(asker), seconds, 0.0)

        patient = await patient_of(backend)
        if needle is None:
            listed = models_of((await patient.ask("GET", "/v1/models")).body)
            needle = min(MOST_NEEDLE, int(NEEDLE_SHARE * (listed.get(patient.model) or SMALL_WINDOW)))
        outcomes = await take(patient, gates(needle), told)
        agreement = None
        if other is not None:
            agreement = await compare(patient, await patient_of(other))
            outcomes.append(Outcome("agreement", agreement.equal >= (agree or 0.0), str(agreement)))
            told(outcomes[-1])
        return GateResult(backend.url, patient.model, clock.wall(), tuple(outcomes)), agreement
