"""`tierline doctor`: ask every backend what may be wrong with it.

Rules: nothing beyond click is imported until it runs. Exit code 1 for a problem, with `--strict` for a warning, too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from proxy.config import Backend
    from proxy.probe import Finding


@click.command()
@click.argument("target", default="config.toml", envvar="TIERLINE_CONFIG")
@click.option("--backend", "names", multiple=True, metavar="NAME", help="Only this one; several times.")
@click.option("--model", metavar="NAME", help="With a URL: which model; the first that it lists by default.")
@click.option("--key", metavar="REFERENCE", help='With a URL: the key, "env:NAME" or "file:PATH".')
@click.option("--insecure", is_flag=True, help="With a URL: accept any certificate.")
@click.option("--timeout", default=10.0, show_default=True, metavar="SECONDS", help="For each question.")
@click.option("--deep", is_flag=True, help="Also a prompt of nearly the whole window: a long prefill.")
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    target: str,
    names: tuple[str, ...],
    model: str | None,
    key: str | None,
    insecure: bool,
    timeout: float,
    deep: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Look for what is wrong with the backends of a configuration, or with the server at a URL: TARGET is either.

    Tool calls and thinking in the text, demanded tools that are not called, usage, cancelling, the window, metrics
    that stand still, keep-alive, token ids, speculation, speed. Costs each backend about thirty small answers.
    """
    from proxy.check import print_probes
    from proxy.clock import LoopClock
    from proxy.config import ConfigError, Pool, backend_at, load
    from proxy.doctor import report
    from proxy.doctor.examine import examine_all

    url = target.startswith(("http://", "https://"))
    try:
        if url:
            backends: tuple[Backend, ...] = (backend_at(target, key, model, insecure=insecure),)
            idle = Pool().idle_seconds
        else:
            config = load(target)
            known = {backend.name: backend for backend in config.backends}
            if unknown := [name for name in names if name not in known]:
                raise click.UsageError(f'no backend is named "{unknown[0]}" (configured: {", ".join(known)})')
            backends = tuple(b for b in config.backends if not names or b.name in names)
            idle = config.pool.idle_seconds
    except ConfigError as error:
        click.echo(str(error), err=True)
        raise SystemExit(2) from None

    async def examined() -> list[Finding]:
        return await examine_all(backends, LoopClock(), timeout, idle, deep=deep)

    findings = asyncio.run(examined())
    if as_json:
        click.echo(report.as_json(findings))
    else:
        print_probes(findings, "Doctor")
        lines = list(report.patch(findings, backends, whole=url))
        if lines:
            click.echo("\n# what would mend it, in the configuration:\n" + "\n".join(lines).rstrip())
    raise SystemExit(report.failed(findings, strict=strict))
