"""`tierline bench`: measure a server, or a gateway, and write the profile.

Rules: nothing beyond click is imported until it runs. Progress goes to stderr, the table of what was found to stdout.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from policies.profile import Profile
    from proxy.bench.matrix import Found, Plan, Told
    from proxy.config import Backend


class Numbers(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """`1,2,4` or `0,4k,128k`: k is 1024."""

    name = "N,N…"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        found = []
        for part in str(value).split(","):
            number = part.strip().lower()
            factor = 1024 if number.endswith("k") else 1
            number = number.removesuffix("k")
            if not number.isdecimal() or int(number) * factor < self.least:
                self.fail(f"{part!r} is no whole number, {self.least} or more (4k is 4096)", param, ctx)
            found.append(int(number) * factor)
        return tuple(dict.fromkeys(found))


@click.command()
@click.argument("url")
@click.option("--model", metavar="NAME", help="Which model; the first that it lists by default.")
@click.option("--key", metavar="REFERENCE", help='The key, by reference: "env:NAME" or "file:PATH".')
@click.option("--concurrency", type=Numbers(1), metavar="N,N…", help="Streams at once.")
@click.option("--context", type=Numbers(0), metavar="N,N…", help="Tokens that each stream holds; 4k is 4096.")
@click.option("--prefill", type=Numbers(1), metavar="N,N…", help="Lengths of cold prompts.")
@click.option("--tokens", type=click.IntRange(20), metavar="N", help="Of each stream, counted.")
@click.option("--rounds", type=click.IntRange(1), metavar="N", help="Of each point; medians are kept.")
@click.option("--quick", is_flag=True, help="A small matrix, one round: minutes instead of an hour.")
@click.option("--seed", metavar="SEED", help="Of the prompts' text; another one each time by default.")
@click.option("--like", metavar="PROFILE", help="A profile for what cannot be measured, such as quality.")
@click.option("--out", metavar="FILE", help="Where to write the profile; its name is the file's.")
@click.option("--insecure", is_flag=True, help="Accept any certificate.")
def bench(
    url: str,
    model: str | None,
    key: str | None,
    concurrency: tuple[int, ...] | None,
    context: tuple[int, ...] | None,
    prefill: tuple[int, ...] | None,
    tokens: int | None,
    rounds: int | None,
    quick: bool,
    seed: str | None,
    like: str | None,
    out: str | None,
    insecure: bool,
) -> None:
    """Measure the server at URL, or a gateway, and write what was found as a profile.

    Aggregate tokens a second and warm first tokens for each number of streams and context, and cold first tokens by
    prompt length: the study's matrix. A backend with `profile = "FILE.toml"` is predicted by it.
    """
    from proxy.bench.matrix import Plan
    from proxy.config import ConfigError, backend_at

    usual = Plan((1, 4, 16), (0, 16384), (8192, 16384), tokens=200, rounds=1) if quick else Plan()
    plan = Plan(
        concurrency or usual.concurrency,
        context or usual.contexts,
        prefill or usual.prompts,
        tokens or usual.tokens,
        rounds or usual.rounds,
    )
    try:
        backend = backend_at(url, key, model, insecure=insecure)
        profile = _like(like)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    raise SystemExit(_run(backend, plan, seed, profile, out))


def _like(name: str | None) -> Profile | None:
    """A shipped profile, or one in a file."""
    from proxy.config import read_profile

    return read_profile(name) if name is not None else None


def _run(backend: Backend, plan: Plan, seed: str | None, like: Profile | None, out: str | None) -> int:
    import asyncio
    import secrets
    from datetime import UTC, datetime
    from pathlib import Path

    from proxy.bench.matrix import measured
    from proxy.bench.stream import Failed
    from proxy.probe import Unreachable

    try:
        with progress(plan.points) as told:
            found = asyncio.run(_measure(backend, plan, seed or secrets.token_hex(8), told))
    except (Failed, Unreachable) as error:
        click.echo(f"{backend.url}: {error}", err=True)
        return 1
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    _table(found)
    if not found.whole:
        click.echo(
            "too little was measured for a profile: it takes a decode cell and a cold prompt", err=True
        )
        return 1
    today = datetime.now(UTC).date().isoformat()
    rounds = f"{plan.rounds} round{'s' if plan.rounds > 1 else ''} of {plan.tokens} tokens"
    name = Path(out).stem if out is not None else "measured"
    own = measured(found, name, f"tierline bench, {today}, {rounds}", like)
    if out is not None:
        from proxy.bench.write import text

        Path(out).write_text(text(own, backend.url, found.notes), "utf-8")
        click.echo(f'written to {out}: profile = "{out}" in [[backends]] takes it')
    return 0


async def _measure(backend: Backend, plan: Plan, seed: str, told: Told) -> Found:
    from proxy.bench.matrix import run
    from proxy.bench.stream import Client
    from proxy.clock import LoopClock
    from proxy.probe import Asker, model_of, session

    async with session() as asking:
        asker = Asker(backend, asking)
        return await run(Client(asker, LoopClock(), await model_of(asker)), plan, seed, told)


class progress:
    """Says each point on stderr as it is found; with a bar where that is a terminal."""

    def __init__(self, points: int) -> None:
        self._points = points

    def __enter__(self) -> Told:
        from rich.console import Console
        from rich.progress import Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True, markup=False, highlight=False)
        self._bar = Progress(
            *Progress.get_default_columns()[:2],
            TextColumn("{task.completed:.0f} of {task.total:.0f}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar.start()
        task = self._bar.add_task("measuring", total=self._points)

        def told(text: str, left: int) -> None:
            if console.is_terminal:
                console.print(text)
                self._bar.update(task, completed=self._points - left)
            else:
                click.echo(f"[{self._points - left}/{self._points}] {text}", err=True)
                sys.stderr.flush()

        return told

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _table(found: Found) -> None:
    """Tokens a second by streams and context; below, cold prompts."""
    from rich.console import Console
    from rich.table import Table

    contexts = sorted({cell.context for cell in found.cells})
    table = Table(title="tokens/s (warm first token, ms)", title_justify="left")
    table.add_column("streams", justify="right")
    for context in contexts:
        table.add_column(f"{context}", justify="right")
    cells = {(cell.streams, cell.context): cell for cell in found.cells}
    for streams in sorted({cell.streams for cell in found.cells}):
        row = [cells.get((streams, context)) for context in contexts]
        table.add_row(
            f"{streams}", *("" if one is None else f"{one.rate:.1f} ({one.ttft * 1e3:.0f})" for one in row)
        )
    console = Console(markup=False, highlight=False)
    if found.cells:
        console.print(table)
    if found.prefill:
        table = Table(title="cold prompts", title_justify="left")
        for column in ("tokens", "first token, s", "tokens/s"):
            table.add_column(column, justify="right")
        for tokens, seconds in found.prefill:
            table.add_row(f"{tokens}", f"{seconds:.2f}", f"{tokens / seconds:.0f}")
        console.print(table)
