"""`tierline replay` and `tierline explain`: the command lines.

Rules: nothing beyond click is imported until one of them runs. Results go to stdout, problems to stderr. What is exact and
what is modelled is said with every figure.
"""

from __future__ import annotations

import http.client
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from proxy.config import Config
    from proxy.replay.choices import Choices
    from proxy.replay.records import Recorded

SHOWN = 20
FAILED, USAGE = 1, 2

config_option = click.option(
    "-c",
    "--config",
    "path",
    default="config.toml",
    envvar="TIERLINE_CONFIG",
    show_default=True,
    show_envvar=True,
    metavar="FILE",
    help="The configuration.",
)


@click.command()
@click.argument("records", type=click.Path(path_type=Path))
@config_option
@click.option(
    "--policy",
    "candidate",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML with the [policy] and [tiers] to try. Without: the configuration's own, made again.",
)
@click.option("--gate", is_flag=True, help="Exit with 1 when the candidate is worse by more than the margin.")
@click.option("--margin", default=5.0, show_default=True, metavar="PERCENT", help="Of what was there before.")
@click.option("--decisions-only", is_flag=True, help="Do not model outcomes.")
def replay(
    records: Path, path: str, candidate: Path | None, gate: bool, margin: float, decisions_only: bool
) -> None:
    """Recorded traffic under another policy.

    RECORDS: a file of records; with telemetry.decisions on, each decision is made again from what it was made from.
    Outcomes are modelled: the same arrivals on simulated engines, under both policies.
    """
    from policies.router import Router
    from proxy.replay.choices import replay as made_again
    from proxy.replay.records import BadRecords, read_records

    old = _load(path)
    new = old if candidate is None else _candidate(path, candidate)
    try:
        found = read_records(records)
    except BadRecords as error:
        _fail(str(error))
    tiers = {name: tier for name in new.tiers if (tier := new.tier(name)) is not None}
    router = Router(new.policy_params.router, new.policy.ranking)
    choices = made_again(found, router, tiers if candidate is not None else None)
    _print_choices(found, choices, new, same=candidate is None)
    worse = []
    if candidate is None:
        if gate and choices.same < choices.decisions:
            worse.append(f"{choices.decisions - choices.same} decisions are not the recorded ones")
    else:
        worse = _compare(found, old, new, choices, margin, decisions_only)
    for line in worse:
        click.echo(f"worse: {line}", err=True)
    if gate and worse:
        sys.exit(FAILED)


def _print_choices(records: list[Recorded], choices: Choices, config: Config, *, same: bool) -> None:
    policies = sorted({record.policy for record in records if record.policy})
    click.echo(f"{len(records)} records, decided by policy {', '.join(policies) or 'unknown'}")
    if not choices.decisions:
        click.echo("no decisions in them: telemetry.decisions was off; nothing can be made again")
        return
    click.echo(
        f"{choices.decisions} decisions made again by policy {config.policy_digest}: {choices.same} the same, "
        f"{len(choices.moved)} on another backend"
    )
    for moved in choices.moved[:SHOWN]:
        click.echo(
            f"  {moved.request_id}: {moved.was or 'none'} → {moved.now or 'none'}; first token predicted "
            f"{_seconds(moved.ttft_was)} → {_seconds(moved.ttft_now)}, end {_seconds(moved.finish_was)} → "
            f"{_seconds(moved.finish_now)}"
        )
    if len(choices.moved) > SHOWN:
        click.echo(f"  … and {len(choices.moved) - SHOWN} more")
    if not same:
        click.echo(
            "exact for the state that the recorded policy brought about; predicted cost of these choices "
            f"{choices.cost_was:.1f} s → {choices.cost_now:.1f} s"
        )


def _compare(
    records: list[Recorded],
    old: Config,
    new: Config,
    choices: Choices,
    margin: float,
    decisions_only: bool,
) -> list[str]:
    """What got worse by more than the margin, by the model; where there is none, by the predictions."""
    from proxy.replay.model import CannotModel, run, traffic

    most = 1.0 + margin / 100
    if decisions_only:
        return _by_cost(choices, most)
    try:
        before, after = run(traffic(records, old), old), run(traffic(records, new), new)
    except CannotModel as error:
        click.echo(f"outcomes are not modelled: {error}")
        return _by_cost(choices, most)
    click.echo("modelled outcomes (simulated engines, recorded arrivals; not what happened):")
    click.echo(
        f"  {'':10} {'goodput':>9} {'TTFT p50':>9} {'p95':>9} {'TPOT p95':>9} {'cached':>8} {'shed':>6}"
    )
    for name, score in (("recorded", before), ("candidate", after)):
        click.echo(
            f"  {name:10} {score.goodput:9.3f} {_seconds(score.ttft50):>9} {_seconds(score.ttft95):>9} "
            f"{score.tpot95 * 1e3:6.1f} ms {score.cached:8.0%} {score.shed_once:6}"
        )
    worse = []
    if after.goodput * most < before.goodput:
        worse.append(f"goodput {before.goodput:.3f} → {after.goodput:.3f}")
    if after.ttft95 > before.ttft95 * most + 0.01:
        worse.append(f"p95 time to first token {_seconds(before.ttft95)} → {_seconds(after.ttft95)}")
    if after.tpot95 > before.tpot95 * most + 0.0005:
        worse.append(f"p95 time per token {before.tpot95 * 1e3:.1f} → {after.tpot95 * 1e3:.1f} ms")
    if after.violations > before.violations:
        worse.append(f"tier violations {before.violations} → {after.violations}")
    return worse


def _by_cost(choices: Choices, most: float) -> list[str]:
    if choices.cost_now > choices.cost_was * most:
        return [f"predicted cost {choices.cost_was:.1f} s → {choices.cost_now:.1f} s"]
    return []


@click.command()
@click.argument("request_id")
@config_option
@click.option(
    "--records",
    type=click.Path(path_type=Path),
    help="Look there, instead of asking the running gateway's admin listener.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def explain(request_id: str, path: str, records: Path | None, as_json: bool) -> None:
    """Why a request went where it went.

    Every backend, the reason why it was left out or the terms of its score. REQUEST_ID: as in x-request-id.
    """
    from proxy.explain import lines

    story = _from_file(request_id, records, _load(path)) if records is not None else _asked(request_id, path)
    if as_json:
        click.echo(json.dumps(story, indent=2, ensure_ascii=False))
        return
    for line in lines(story):
        click.echo(line)


def _from_file(request_id: str, path: Path, config: Config) -> dict[str, object]:
    from policies.router import Router
    from proxy.explain import Story, explained
    from proxy.replay.records import BadRecords, read_records

    try:
        found = [record for record in read_records(path) if record.request_id == request_id]
    except BadRecords as error:
        _fail(str(error))
    if not found:
        _fail(f"{path} has no record of {request_id}")
    record = found[-1]
    if not record.traces:
        _fail(f"the record of {request_id} has no decisions: telemetry.decisions was off")
    traces = record.traces
    if record.policy == config.policy_digest:  # made again, for the terms of its scores
        router = Router(config.policy_params.router, config.policy.ranking)
        traces = tuple(trace.scored(router) for trace in traces)
    waited = record.raw.get("queue_wait_seconds") or 0.0
    return explained(request_id, Story(record.policy or "", waited, traces))


def _asked(request_id: str, path: str) -> dict[str, object]:
    config = _load(path)
    admin = config.admin
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)
    headers = {"Authorization": f"Bearer {admin.key.reveal()}"} if admin.key is not None else {}
    try:
        connection = http.client.HTTPConnection(host, admin.port, timeout=10)
        connection.request("GET", f"/admin/explain/{request_id}", headers=headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        _fail(f"the admin listener on {host}:{admin.port} does not answer: {error}")
    if response.status != 200:
        _fail(str(answer.get("error", {}).get("message", response.status)))
    assert isinstance(answer, dict)
    return answer


def _load(path: str) -> Config:
    from proxy.config import ConfigError, load

    try:
        return load(path)
    except ConfigError as error:
        _fail(str(error))


def _candidate(path: str, candidate: Path) -> Config:
    """The configuration with the candidate's [policy] and [tiers] in place of its own."""
    from proxy.config import ConfigError, load_with

    try:
        return load_with(path, candidate)
    except ConfigError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(USAGE)


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g} s"
