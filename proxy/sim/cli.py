"""`tierline sim`: a simulated vLLM server, or the check of its model against the study.

Rules: the command object is `sim`; the command line adds it. Nothing beyond click is imported until it runs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from policies.profile import Profile
    from proxy.sim.faults import Fault
    from proxy.sim.server import Options


@click.command()
@click.option("--profile", metavar="NAME", help="Which configuration to be; --list names them. Or a file.")
@click.option("--list", "listing", is_flag=True, help="Name the profiles and stop.")
@click.option("--check", is_flag=True, help="Print model beside study (of one profile, or of all) and stop.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one."
)
@click.option("--admin-port", type=click.IntRange(0, 65535), help="For faults and state; none by default.")
@click.option("--model", default="Qwen3.6-27B", show_default=True, help="The model's name on the wire.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the text.")
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Engine seconds per second: 10 is ten times as fast.",
)
@click.option("--bytes-per-token", type=click.IntRange(1, 4), default=4, show_default=True)
@click.option("--thinking/--no-thinking", default=True, show_default=True, help="Unless a request says so.")
@click.option(
    "--dialect",
    type=click.Choice(["qwen3_xml", "hermes", "xml"]),
    default="qwen3_xml",
    show_default=True,
    help="Tool calls: parsed (qwen3_xml), or raw JSON or XML in the content.",
)
@click.option("--no-tool-parser", is_flag=True, help='Refuse tool_choice "auto", as vLLM without the option.')
@click.option("--no-token-ids", is_flag=True, help="Give none, as servers other than vLLM.")
@click.option(
    "--api-key", envvar="TIERLINE_SIM_KEY", help="From the environment: TIERLINE_SIM_KEY.", hidden=True
)
@click.option(
    "--window", type=click.IntRange(1), metavar="TOKENS", help="max_model_len instead of the profile's."
)
@click.option(
    "--kv-tokens", type=click.IntRange(1), metavar="TOKENS", help="KV cache instead of the profile's."
)
@click.option("--block-tokens", type=click.IntRange(1), default=784, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(1), metavar="N", help="Instead of the profile's.")
@click.option("--old-metric-names", is_flag=True, help="gpu_cache_usage_perc, as before vLLM 0.10.")
@click.option("--script", type=click.Path(exists=True, dir_okay=False), help="JSON list of faults with `at`.")
def sim(
    profile: str | None,
    listing: bool,
    check: bool,
    host: str,
    port: int,
    admin_port: int | None,
    model: str,
    seed: int,
    time_scale: float,
    bytes_per_token: int,
    thinking: bool,
    dialect: str,
    no_tool_parser: bool,
    no_token_ids: bool,
    api_key: str | None,
    window: int | None,
    kv_tokens: int | None,
    block_tokens: int,
    max_num_seqs: int | None,
    old_metric_names: bool,
    script: str | None,
) -> None:
    """Stand in for a vLLM server: its wire, and the speed of a measured configuration."""
    from policies import profile as profiles

    own = _profile(profile) if profile is not None else None
    if listing:
        for name in profiles.names():
            click.echo(f"{name:32} {profiles.get(name).measured.title}")
        return
    if check:
        raise SystemExit(_check([own] if own else [profiles.get(name) for name in profiles.names()]))
    if own is None:
        raise click.UsageError("give --profile NAME, --list or --check")
    if own.quality_only:
        raise click.BadParameter("holds quality figures only", param_hint="--profile")

    from proxy.sim.plan import Dialect
    from proxy.sim.server import Options

    _run(
        Options(
            profile=own,
            model=model,
            host=host,
            port=port,
            admin_port=admin_port,
            seed=seed,
            time_scale=time_scale,
            bytes_per_token=bytes_per_token,
            thinking=thinking,
            dialect=Dialect(dialect),
            tool_parser=not no_tool_parser,
            token_ids=not no_token_ids,
            api_key=api_key,
            window_tokens=window,
            kv_tokens=kv_tokens,
            block_tokens=block_tokens,
            max_num_seqs=max_num_seqs,
            old_metric_names=old_metric_names,
            script=_script(script) if script else (),
        )
    )


def _profile(name: str) -> Profile:
    """A shipped one, or one in a file."""
    from policies import profile as profiles
    from policies.profilefile import BadProfile, read

    if name in profiles.names():
        return profiles.get(name)
    if not name.endswith(".toml"):
        raise click.BadParameter(f"known: {', '.join(profiles.names())}", param_hint="--profile")
    try:
        with open(name, encoding="utf-8") as file:
            return read(file.read())
    except (OSError, UnicodeDecodeError, BadProfile) as problem:
        raise click.BadParameter(f"{name}: {problem}", param_hint="--profile") from None


def _check(chosen: list[Profile]) -> int:
    """Model beside study, one line a cell; 1 if a cell is out of tolerance."""
    from policies.engine.check import check

    click.echo(
        f"{'profile':32}{'measured':14}{'streams':>8}{'context':>9}{'study':>10}{'model':>10}{'error':>8}"
    )
    cells = [cell for one in chosen for cell in check(one)]
    for cell in cells:
        mark = "" if cell.ok else f"  over {cell.tolerance:.0%}"
        click.echo(
            f"{cell.profile:32}{cell.kind:14}{cell.concurrency:8}{cell.context:9}"
            f"{cell.study:10.3f}{cell.model:10.3f}{cell.error:+8.1%}{mark}"
        )
    bad = sum(not cell.ok for cell in cells)
    click.echo(f"{len(cells)} cells, {bad} out of tolerance (tok/s 3 %, TTFT 10 %)")
    return 1 if bad else 0


def _script(path: str) -> tuple[Fault, ...]:
    from proxy.sim.faults import BadFault, read_fault

    with open(path, encoding="utf-8") as file:
        try:
            commands = json.load(file)
            if not isinstance(commands, list):
                raise BadFault("a script is a list of faults")
            return tuple(read_fault(command) for command in commands)
        except ValueError as problem:
            raise click.BadParameter(str(problem), param_hint="--script") from None


def _run(options: Options) -> None:
    import asyncio
    import importlib.util

    run = asyncio.run
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        run = uvloop.run
    try:
        run(_serve(options))
    except OSError as problem:
        click.echo(f"cannot listen: {problem}", err=True)
        raise SystemExit(3) from None


async def _serve(options: Options) -> None:
    import asyncio
    import signal

    from proxy.clock import LoopClock
    from proxy.sim.server import Simulator

    simulator = Simulator(options, LoopClock())
    await simulator.start()
    admin = "" if options.admin_port is None else f", admin on {simulator.admin_url}"
    click.echo(f"{simulator.profile} as {options.model} on {simulator.url}{admin}")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await simulator.close()
