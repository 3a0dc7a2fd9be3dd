"""The command line: `tierline`, and `python -m proxy`.

Rules
1. Only click is imported at the top (`proxy.keycommands` and the other command lines import no more): `--help` answers at
   once. The gateway, aiohttp and rich are imported by the command that needs them.
2. Results go to stdout, problems and logs to stderr. Secrets go nowhere: never read from argv, never printed.
3. Exit codes mean something (`Exit`); docs/configuration.md lists them.
"""

from __future__ import annotations

import errno
import platform
import socket
import sys
from enum import IntEnum
from typing import TYPE_CHECKING

import click

from proxy import __version__
from proxy.admincommands import admin
from proxy.bench.cli import bench
from proxy.doctor.cli import doctor
from proxy.keycommands import keys
from proxy.logs import set_up_logging
from proxy.proving.cli import gate
from proxy.replay.cli import explain, replay
from proxy.report.cli import records, report
from proxy.sim.cli import sim
from proxy.simulate.cli import simulate
from proxy.top.cli import top

if TYPE_CHECKING:
    from proxy.config import Config


class Exit(IntEnum):
    """Exit codes of every command. Closed."""

    OK = 0  # done, or stopped as asked
    FAILED = 1  # failed while running; a probe found a problem
    CONFIG = 2  # the config or the command line cannot be used
    BIND = 3  # a listener's address cannot be had


# What binding a listener fails with; any other OSError is a failure of its own.
BIND_ERRORS = frozenset(
    {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT}
)

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


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 failed while running, 2 config or usage, 3 cannot bind.",
)
def main() -> None:
    """A gateway that sends each request to the vLLM backend that answers soonest at the quality asked for."""


@main.command()
@config_option
def serve(path: str) -> None:
    """Run the gateway until SIGTERM or Ctrl-C. SIGHUP reads the policy again."""
    config = _load(path)
    set_up_logging(config.telemetry.log_level, config.telemetry.log_format)
    from proxy.kept import with_kept
    from proxy.keystore import StoreError
    from proxy.serve import run

    try:
        code = run(with_kept(config))
    except ChildProcessError as error:
        click.echo(str(error), err=True)
        code = Exit.FAILED
    except StoreError as error:
        click.echo(str(error), err=True)
        code = Exit.CONFIG
    except OSError as error:
        if error.errno not in BIND_ERRORS and not isinstance(error, socket.gaierror):
            raise
        click.echo(f"cannot listen: {error.strerror or error}", err=True)
        code = Exit.BIND
    sys.exit(code)


@main.command()
@config_option
@click.option("--probe", is_flag=True, help="Also ask each backend: model, window, key, usage.")
@click.option("--timeout", default=10.0, show_default=True, metavar="SECONDS", help="Limit for each probe.")
def check(path: str, probe: bool, timeout: float) -> None:
    """Validate a configuration and print what is in force.

    Every default is filled in, every secret masked. Then, for each model, who may serve each tier.
    All problems of the file are listed at once.
    """
    config = _load(path)
    from proxy.check import print_config, print_probes, print_routes, probe_all

    print_config(config)
    print_routes(config)
    if probe and not print_probes(probe_all(config, timeout)):
        sys.exit(Exit.FAILED)


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"tierline {__version__} (Python {platform.python_version()}, {platform.system()})")


def _load(path: str) -> Config:
    from proxy.config import ConfigError, load

    try:
        return load(path)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(Exit.CONFIG)


main.add_command(admin)
main.add_command(keys)
main.add_command(bench)
main.add_command(doctor)
main.add_command(gate)
main.add_command(sim)
main.add_command(replay)
main.add_command(explain)
main.add_command(simulate)
main.add_command(top)
main.add_command(report)
main.add_command(records)
