"""`tierline simulate`: the command line.

Rules: the command object is `simulate`; the command line adds it. Nothing beyond click is imported until it runs. Results
go to stdout, progress to stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from policies.simulation import Contest, Fault, Machine, Make, Outcome
    from policies.simulation.compare import Source

SHAPES = ("chat", "agents", "documents", "burst", "mixed")
DEFAULT_FLEET = ("fp8=fp8-mtp3-tp2-v17", "bf16=bf16-dflash8-tp2-v17")
FAULT_SECONDS = 60.0
FACTORS = {"down": 0.0, "slow": 0.25, "collapse": 0.02}


@click.command()
@click.argument("traffic", nargs=-1)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME=PROFILE",
    help="A backend of the fleet; several times. Default: an FP8 and a BF16 one.",
)
@click.option("--times", type=click.IntRange(1, 64), default=1, show_default=True, help="Of each backend.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME|FILE",
    help="Several times. Default: predicted, least_in_flight and clairvoyant. Of a TOML file its [policy].",
)
@click.option(
    "--load",
    "loads",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Percent of capacity; several times. Default: 100.",
)
@click.option(
    "--capacity", type=click.FloatRange(min=0, min_open=True), metavar="RATE", help="Instead of seeking it."
)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Requests a second, instead of --load; several times.",
)
@click.option("--seconds", type=click.FloatRange(min=1), help="Counted after the warm-up.")
@click.option(
    "--fault",
    metavar="KIND:BACKEND[:SECONDS]",
    help="In the middle: down, slow (to a quarter) or collapse (of speculation); 60 s.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write curves there.")
@click.option("--json", "lines", type=click.Path(dir_okay=False, path_type=Path), help="A line an outcome.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print tables for a page.")
def simulate(
    traffic: tuple[str, ...],
    backends: tuple[str, ...],
    times: int,
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    capacity: float | None,
    rates: tuple[float, ...],
    seconds: float | None,
    fault: str | None,
    seed: int,
    html: Path | None,
    lines: Path | None,
    as_markdown: bool,
) -> None:
    """Policies side by side in virtual time.

    TRAFFIC: chat, agents, documents, burst, mixed, or trace files; default: chat. Engines are those of `tierline sim`,
    the decisions those of the gateway.
    """
    from policies.simulation import Contest
    from proxy.simulate.table import print_table

    machines = _machines(backends or DEFAULT_FLEET, times)
    players = _players(policies or ("predicted", "least_in_flight", "clairvoyant"))
    when = _fault(fault, machines)
    found: list[Outcome] = []
    for name in traffic or ("chat",):
        contest = Contest(machines, _source(name), seed, seconds, when)
        mine = _contest(contest, players, loads or (100.0,), rates, capacity)
        found += mine
        title = f"{contest.source.name} on {' + '.join(m.name for m in machines)}"
        if as_markdown:
            from proxy.simulate.table import markdown

            click.echo(f"### {title}\n\n{markdown(mine)}\n")
        else:
            print_table(mine, title)
        _write(found, html, lines)


def _contest(
    contest: Contest,
    players: dict[str, Make | None],
    loads: tuple[float, ...],
    rates: tuple[float, ...],
    capacity: float | None,
) -> list[Outcome]:
    at: list[tuple[float, float | None]] = [(rate, None) for rate in rates]
    if not at:
        if capacity is None:
            capacity = contest.capacity(
                lambda rate, s: click.echo(f"  {rate:.3g} requests/s: goodput {s.goodput:.3f}", err=True)
            )
        click.echo(f"{contest.source.name}: capacity {capacity:.4g} requests/s")
        at = [(capacity * load / 100, load / 100) for load in loads]
    found = []
    for rate, load in at:
        for name, make in players.items():
            outcome = contest.run(name, make, rate, load)
            found.append(outcome)
            click.echo(
                f"  {name} at {rate:.3g} requests/s: goodput {outcome.score.goodput:.3f}, "
                f"{outcome.requests} requests",
                err=True,
            )
    return found


def _machines(backends: tuple[str, ...], times: int) -> tuple[Machine, ...]:
    from policies import profile as profiles
    from policies.simulation import Machine

    machines = []
    for one in backends:
        name, _, profile = one.partition("=")
        if not name or profile not in profiles.names() or profiles.get(profile).quality_only:
            raise click.BadParameter(
                f"{one!r} is not NAME=PROFILE; profiles: {', '.join(profiles.names())}",
                param_hint="--backend",
            )
        machines += [
            Machine(name if times == 1 else f"{name}-{number}", profile) for number in range(1, times + 1)
        ]
    if len({machine.name for machine in machines}) < len(machines):
        raise click.BadParameter("names must differ", param_hint="--backend")
    return tuple(machines)


def _players(names: tuple[str, ...]) -> dict[str, Make | None]:
    """By name; None is the reference."""
    from policies import RANKINGS, PolicyParams
    from policies.simulation import REFERENCE, live

    players: dict[str, Make | None] = {}
    for name in names:
        if name == REFERENCE:
            players[name] = None
        elif name in RANKINGS:
            players[name] = live(PolicyParams(name=name))
        elif name.endswith(".toml"):
            players[Path(name).stem] = _own(name)
        else:
            known = ", ".join([*RANKINGS, REFERENCE])
            raise click.BadParameter(
                f"unknown policy {name!r}; known: {known}, and .toml files", param_hint="--policy"
            )
    return players


def _own(path: str) -> Make:
    """The [policy] of a file."""
    from policies.simulation import live
    from proxy.config import ConfigError, load_policy

    try:
        config = load_policy(path)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--policy") from None
    ranking = config.policy.ranking
    return live(config.policy_params, None if isinstance(ranking, str) else ranking)


def _source(name: str) -> Source:
    from policies.simulation import SHAPES as shapes
    from proxy.simulate.files import BadTrace, read_trace

    if name in shapes:
        return shapes[name]
    path = Path(name)
    if not path.is_file():
        raise click.BadParameter(f"{name!r} is neither a file nor one of {', '.join(SHAPES)}")
    try:
        return read_trace(path)
    except BadTrace as error:
        raise click.BadParameter(f"{name}: {error}") from None


def _fault(text: str | None, machines: tuple[Machine, ...]) -> Fault | None:
    from policies.simulation import Fault, FaultKind

    if text is None:
        return None
    kind, _, rest = text.partition(":")
    name, _, seconds = rest.partition(":")
    try:
        length = float(seconds) if seconds else FAULT_SECONDS
        if not length > 0:
            raise ValueError
        what = FaultKind(kind)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not KIND:BACKEND[:SECONDS]; kinds: {', '.join(FaultKind)}", param_hint="--fault"
        ) from None
    if name not in {machine.name for machine in machines}:
        raise click.BadParameter(
            f"no backend {name!r}; there are {', '.join(m.name for m in machines)}", param_hint="--fault"
        )
    return Fault(what, name, 0.0, length, FACTORS[kind])


def _write(outcomes: list[Outcome], html: Path | None, lines: Path | None) -> None:
    if html is not None:
        from proxy.simulate.picture import page

        html.write_text(page(outcomes, "tierline simulate"), encoding="utf-8")
    if lines is not None:
        import orjson

        from proxy.simulate.table import plain

        lines.write_bytes(b"".join(orjson.dumps(plain(o)) + b"\n" for o in outcomes))
