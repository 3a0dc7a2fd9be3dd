"""`tierline report` and `tierline records export`: the command lines.

Rules: nothing beyond click is imported until one of them runs. Results go to stdout, problems to stderr.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from proxy.replay.cli import config_option

if TYPE_CHECKING:
    from proxy.config import Config
    from proxy.report.source import Window

FAILED, USAGE = 1, 2
BY = ("backend", "tier", "tenant", "context", "model", "key")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
STEPS = (10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21_600, 86_400)
POINTS = 120
"""Of a curve, at most."""

F = TypeVar("F", bound=Callable[..., Any])


class Dimensions(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """`backend,tier`."""

    name = "NAME,NAME…"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in str(value).split(","))
        wrong = [name for name in names if name not in BY]
        if wrong:
            self.fail(f"{', '.join(wrong)!r}: one or more of {', '.join(BY)}, with commas", param, ctx)
        return tuple(dict.fromkeys(names))


def window_options(command: F) -> F:
    """Which records, and where they are."""
    for option in (
        click.option(
            "--db", type=click.Path(path_type=Path), help="The database. Default: the configuration's."
        ),
        click.option("--to", "until", metavar="WHEN", help="Before then; as --from."),
        click.option("--from", "start", metavar="WHEN", help="Accepted from then on: 2027-01-31T10:00, UTC."),
        click.option(
            "--since", metavar="TIME", help="Of so long: 30m, 24h, 7d. Default: 24h; all: everything."
        ),
        config_option,
    ):
        command = option(command)
    return command


@click.command()
@window_options
@click.option("--by", type=Dimensions(), default="backend", show_default=True, help=f"Of {', '.join(BY)}.")
@click.option("--slowest", type=click.IntRange(0, 1000), default=10, show_default=True, metavar="N")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def report(
    path: str, since: str | None, start: str | None, until: str | None, db: Path | None, by: tuple[str, ...],
    slowest: int, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """What the records of late tell: latencies, goodput, caches, tools, failures, the slowest requests and why.

    SLO and profiles are those of the configuration; with --db alone it is read if it is there.
    """
    from proxy.report.figures import figures
    from proxy.report.promise import Promises
    from proxy.report.scan import Question, scan
    from proxy.report.source import BadStore, extent

    config = _config(path, needed=db is None)
    store = db or _store(config)
    window = _window(since, start, until)
    promises = Promises() if config is None else Promises.of(config)
    try:
        there = extent(store, window)
        if there is None:
            _fail(f"{store}: no records of that time")
        first, last = there.first, there.last
        step = next((one for one in STEPS if (last - first) / one <= POINTS), STEPS[-1])
        begins = first - first % step
        curves = step if html is not None or as_json else None
        question = Question(store, window, by, promises, begins, curves, slowest, (there.low, there.high))
        found = figures(question, scan(question), _length(window, first, last))
    except BadStore as error:
        _fail(str(error))
    title = f"tierline: {found['requests']:,} requests from {_date(first)} to {_date(last)}"
    if html is not None:
        from proxy.report.picture import page

        html.write_text(page(found, title), encoding="utf-8")
        click.echo(f"{html} is written", err=True)
    if as_json:
        import orjson

        out = {"from": first, "to": last, "by": by, **found}
        sys.stdout.buffer.write(orjson.dumps(out, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    elif html is None:
        from proxy.report.table import print_report

        print_report(found, title)


@click.group()
def records() -> None:
    """The database of records."""


@records.command()
@window_options
@click.option("--format", "kind", type=click.Choice(["jsonl", "parquet"]), default="jsonl", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False), help="The file. Default: stdout.")
def export(
    path: str,
    since: str | None,
    start: str | None,
    until: str | None,
    db: Path | None,
    kind: str,
    out: str | None,
) -> None:
    """Records as JSON lines, as telemetry.records writes them, or as Parquet (needs tierline[parquet])."""
    from proxy.report.export import json_lines, parquet
    from proxy.report.source import BadStore
    from proxy.report.source import records as read

    if kind == "parquet" and out is None:
        _fail("--format parquet: say where to, with --out FILE", USAGE)
    store = db or _store(_config(path, needed=True))
    found = read(store, _window(since or (None if start or until else "all"), start, until))
    try:
        if kind == "parquet" and out is not None:
            count = parquet(found, out)
        else:
            with click.open_file(out or "-", "wb") as file:
                count = json_lines(found, file)
    except BadStore as error:
        _fail(str(error))
    except ImportError:
        _fail("--format parquet needs pyarrow: pip install 'tierline[parquet]'", USAGE)
    except BrokenPipeError:  # whoever read had enough
        sys.exit(0)
    click.echo(f"{count} records", err=True)


def _fail(message: str, code: int = FAILED) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)


def _config(path: str, *, needed: bool) -> Config | None:
    from proxy.config import ConfigError, load

    if not needed and not Path(path).is_file():
        return None
    try:
        return load(path)
    except ConfigError as error:
        _fail(str(error), USAGE)


def _store(config: Config | None) -> Path:
    store = None if config is None else config.records_store
    if store is None:
        _fail('telemetry.store: "off": there is no database of records; name one with --db', USAGE)
    return store


def _window(since: str | None, start: str | None, until: str | None) -> Window:
    from proxy.report.source import Window

    if since is not None and start is not None:
        _fail("--since and --from: one of them", USAGE)
    end = None if until is None else _when("--to", until)
    if start is not None:
        return Window(_when("--from", start), end)
    if since == "all":
        return Window(None, end)
    found = re.fullmatch(r"(\d{1,6})([smhd])", (since or "24h").strip())
    if found is None:
        _fail(f"--since: expected a time such as 30m, 24h or 7d, or all, got {since!r}", USAGE)
    last = end if end is not None else datetime.now(UTC).timestamp()
    return Window(last - int(found[1]) * UNITS[found[2]], end)


def _when(option: str, text: str) -> float:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        _fail(f"{option}: expected a time such as 2027-01-31 or 2027-01-31T10:00, got {text!r}", USAGE)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _length(window: Window, first: float, last: float) -> float:
    """Seconds that rates go by: from the first record, or the window's beginning, to the last or its end."""
    begins = first if window.since is None else max(window.since, first)
    ends = last if window.until is None else min(window.until, last)
    return max(ends - begins, 1.0)


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="minutes").replace("+00:00", " UTC")
