"""`tierline check`: what is in force, who serves what, and whether the backends are what the config says.

Rules
1. A probe reads little, writes nothing and follows no redirect; it costs a backend one token, two more where it has no
   tool parser, and two where its streams may go on elsewhere.
2. Every problem comes with what to change. A note is worth knowing and fails nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import click
from rich.console import Console
from rich.table import Table

from proxy.abilities import find_out
from proxy.aside import decoded
from proxy.config import Backend, Config, effective, serving
from proxy.probe import (
    Answer,
    Asker,
    Finding,
    Unreachable,
    Verdict,
    broken_stream,
    events_of,
    models_of,
    printable,
    prompt_tokens_of,
    session,
)
from proxy.tomltext import toml_lines
from proxy.wire.promtext import EngineMetrics, read_metrics

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_that_tools_are_rendered",
        "description": "Never call this. It is here to see whether a prompt grows by it.",
        "parameters": {"type": "object", "properties": {"anything": {"type": "string"}}},
    },
}

_NEEDS_PARSER = 'start it with a tool parser (vLLM: --enable-auto-tool-choice --tool-call-parser) and drop parser = "none"'


# -- what is in force ----------------------------------------------------------------------------------------


def print_config(config: Config) -> None:
    """The effective configuration as TOML, masked."""
    for line in toml_lines(effective(config)):
        click.echo(line)


def print_routes(config: Config) -> None:
    """For each public name and tier, the backends that may serve it."""
    table = Table(title="Who may serve what", title_justify="left", caption_justify="left")
    table.add_column("model", overflow="fold")
    table.add_column("default tier")
    for tier in config.tiers:
        table.add_column(tier, overflow="fold")
    for route in config.routes.values():
        cells = [", ".join(serving(config, route.backends, tier)) or "nobody" for tier in config.tiers]
        table.add_row(route.name, route.tier, *cells)
    Console(markup=False, highlight=False).print(table)
    for note in notes(config):
        click.echo(f"note: {note}")


def notes(config: Config) -> Iterator[str]:
    """What is allowed and may still not be meant."""
    used = {name for route in config.routes.values() for name in route.backends}
    for backend in config.backends:
        if backend.name not in used:
            yield f'backend "{backend.name}" serves no model'
        if backend.tls.insecure_any_certificate:
            yield f'backend "{backend.name}" is trusted whatever certificate it shows (tls.insecure_any_certificate = true)'
    if config.server.allow_unauthenticated and not (config.server.keys or config.server.store):
        yield "clients need no key (server.allow_unauthenticated = true)"


# -- probing -------------------------------------------------------------------------------------------------


def probe_all(config: Config, timeout: float) -> list[Finding]:
    """Ask every backend, side by side. timeout: seconds for each request."""

    continues = any(tier.continuation != "off" for tier in config.tiers.values())

    async def gather() -> list[Finding]:
        asked = (probe(backend, timeout, continues=continues) for backend in config.backends)
        found = await asyncio.gather(*asked)
        return [finding for findings in found for finding in findings]

    return asyncio.run(gather())


async def probe(backend: Backend, timeout: float, *, continues: bool = False) -> list[Finding]:
    """Everything there is to learn of one backend; stops where nothing more can be. continues: a tier lets broken streams
    go on elsewhere."""
    async with session(timeout) as asking:
        try:
            return await Probe(backend, asking).run(continues=continues)
        except Unreachable as error:
            return [Finding(backend.name, "reachable", Verdict.PROBLEM, error.detail, error.fix)]


class Probe:
    """One backend being asked. Findings gather in the order of the questions."""

    def __init__(self, backend: Backend, session: aiohttp.ClientSession) -> None:
        self.backend = backend
        self.asker = Asker(backend, session)
        self.findings: list[Finding] = []

    def _tell(self, what: str, verdict: Verdict, detail: str, fix: str = "", **patch: object) -> None:
        """patch: keys of the backend's table that mend it, `__` for a dot."""
        keys = tuple((key.replace("__", "."), value) for key, value in patch.items())
        self.findings.append(Finding(self.backend.name, what, verdict, detail, fix, keys))

    async def run(self, *, continues: bool) -> list[Finding]:
        models = await self.asker.ask("GET", "/v1/models")
        self._tell("reachable", Verdict.OK, self.backend.url)
        if not self._refused(models):
            model = self._model(models)
            await self._health()
            await self._metrics()
            if model is not None:
                await self._usage(model)
                if self.backend.parser == "none" and self.findings[-1].what == "usage":
                    await self._tools(model)
                if continues:
                    await self.continuation(model)
        return self.findings

    def _refused(self, answer: Answer) -> bool:
        """Whether the key is wrong or missing; told if so. Only a chat request proves that it is right: some servers
        list their models to anyone."""
        if answer.status not in (401, 403):
            return False
        key = self.backend.key
        if key is None:
            fix = 'set key = "env:NAME" for this backend'
            self._tell("key", Verdict.PROBLEM, f"it wants a key ({answer.status})", fix)
        else:
            fix = f"put the key that the server was started with into {key.reference}"
            self._tell("key", Verdict.PROBLEM, f"it refuses ours ({answer.status})", fix)
        return True

    def _model(self, answer: Answer) -> str | None:
        """The name to ask for; None when the server does not say which models it has."""
        listed = models_of(answer.body) if answer.status == 200 else {}
        wanted = self.backend.model
        if not listed:
            detail = f"/v1/models answers {answer.status} and lists none: {answer.quote()}"
            fix = f"is {self.backend.url} an OpenAI-compatible server? A path before /v1 belongs into url"
            self._tell("model", Verdict.PROBLEM, detail, fix)
            return wanted
        if wanted is not None and wanted not in listed:
            names = ", ".join(f'"{name}"' for name in listed)
            fix = f"set model to one of {names}" if len(listed) > 1 else f"set model = {names}"
            self._tell(
                "model", Verdict.PROBLEM, f'it has no "{wanted}", but {names}', fix, model=next(iter(listed))
            )
            return None
        name = wanted or next(iter(listed))
        self._tell("model", Verdict.OK, f'"{name}"')
        self._window(listed[name])
        return name

    def _window(self, reported: int | None) -> None:
        configured = self.backend.limits.window_tokens
        if reported is None:
            fix = "" if configured else "set limits.window_tokens, or long prompts are tried in vain"
            self._tell("window", Verdict.NOTE, "not reported", fix)
        elif configured is not None and configured > reported:
            detail = f"{reported} tokens, but limits.window_tokens is {configured}"
            fix = f"set limits.window_tokens = {reported}, or drop it"
            self._tell("window", Verdict.PROBLEM, detail, fix, limits__window_tokens=reported)
        else:
            self._tell("window", Verdict.OK, f"{reported} tokens")

    async def _health(self) -> None:
        path = self.backend.health_path
        answer = await self.asker.ask("GET", path)
        if answer.status == 200:
            self._tell("health", Verdict.OK, path)
        elif answer.status == 404:
            self._tell("health", Verdict.NOTE, f"no {path}: /v1/models is asked in its place")
        else:
            fix = "look into the server's log: it is up, but says that it cannot serve"
            self._tell("health", Verdict.PROBLEM, f"{path} answers {answer.status}", fix)

    async def _metrics(self) -> None:
        path = self.backend.metrics_path
        answer = await self.asker.ask("GET", path)
        load = read_metrics(answer.body) if answer.status == 200 else EngineMetrics()
        if load.running is None:
            why = f"answers {answer.status}" if answer.status != 200 else "tells nothing of running requests"
            fix = "start llama-server with --metrics" if answer.status == 501 else ""
            detail = f"{path} {why}: load is judged by our own requests alone"
            self._tell("metrics", Verdict.NOTE, detail, fix)
            return
        numbers = {"running": load.running, "waiting": load.waiting, "KV tokens": load.kv_tokens}
        known = ", ".join(f"{name} {value}" for name, value in numbers.items() if value is not None)
        self._tell("metrics", Verdict.OK, known)

    async def _usage(self, model: str) -> None:
        """One token, streamed, with usage asked for."""
        request: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": "ping"}],
            "max_tokens": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await self.asker.ask("POST", "/v1/chat/completions", json.dumps(request).encode())
        if self._refused(answer):
            return
        self._tell("key", Verdict.OK, "none is wanted" if self.backend.key is None else "accepted")
        if answer.status != 200 or answer.kind != "text/event-stream":
            detail = (
                f"/v1/chat/completions answers {answer.status} {printable(answer.kind)}: {answer.quote()}"
            )
            self._tell(
                "stream", Verdict.PROBLEM, detail, "the server refuses a plain chat request: see its log"
            )
            return
        wrong = broken_stream(answer.body)
        if wrong is not None:
            self._tell(
                "stream", Verdict.PROBLEM, wrong, "the server fails on a plain chat request: see its log"
            )
            return
        events = list(events_of(answer.body))
        self._tell("stream", Verdict.OK, f"{len(events)} events")
        has_usage = any(isinstance(event, dict) and event.get("usage") for event in events)
        if has_usage == self.backend.stream_usage:
            self._tell("usage", Verdict.OK, "streamed" if has_usage else "not streamed, as configured")
        elif has_usage:
            self._tell(
                "usage",
                Verdict.NOTE,
                "streamed, but stream_usage is false",
                "set stream_usage = true",
                stream_usage=True,
            )
        else:
            fix = "set stream_usage = false: time per output token will be missing from records"
            self._tell("usage", Verdict.PROBLEM, "not streamed, though asked for", fix, stream_usage=False)

    async def continuation(self, model: str) -> None:
        """Whether its broken streams can go on elsewhere. Raises `Unreachable`."""

        async def ask(path: bytes, body: dict[str, object]) -> object:
            answer = await self.asker.ask(
                "POST", path.decode(), json.dumps({**body, "model": model}).encode()
            )
            return decoded(answer.body) if answer.status == 200 else None

        ability = await find_out(ask)
        if ability.exact:
            detail = f"by token, with backends of the same tokenizer ({ability.tokenizer})"
            self._tell("continuation", Verdict.OK, detail)
        elif ability.prefill is not None:
            fix = 'set tiers.NAME.continuation = "text": its texts then go on elsewhere'
            self._tell(
                "continuation", Verdict.NOTE, "by text only: it gives no token ids, or takes none", fix
            )
        else:
            fix = "its streams end with an error where they break; vLLM gives token ids"
            self._tell("continuation", Verdict.NOTE, "it gives no token ids, or takes none", fix)

    async def _tools(self, model: str) -> None:
        """Without a tool parser: are tools still part of the prompt when the server is told to call none?"""
        sizes = []
        for tools in ({}, {"tools": [_TOOL], "tool_choice": "none"}):
            messages = [{"role": "user", "content": "ping"}]
            request = {"model": model, "messages": messages, "max_tokens": 1, **tools}
            answer = await self.asker.ask("POST", "/v1/chat/completions", json.dumps(request).encode())
            if answer.status != 200:
                detail = f"a request {'with' if tools else 'without'} tools answers {answer.status}: {answer.quote()}"
                self._tell("tools", Verdict.PROBLEM, detail, _NEEDS_PARSER)
                return
            sizes.append(prompt_tokens_of(answer.body))
        without, with_tools = sizes
        if without is None or with_tools is None:
            detail = (
                'no prompt_tokens are reported: whether tools are rendered with tool_choice "none" is unknown'
            )
            self._tell("tools", Verdict.NOTE, detail, "ask for a tool through the gateway and see it called")
        elif with_tools > without:
            self._tell(
                "tools", Verdict.OK, f'rendered with tool_choice "none": {with_tools - without} tokens'
            )
        else:
            fix = f"start it without --exclude-tools-when-tool-choice-none; else {_NEEDS_PARSER}"
            self._tell(
                "tools", Verdict.PROBLEM, 'not rendered with tool_choice "none": no tool is ever called', fix
            )


def print_probes(findings: list[Finding], title: str = "Probes") -> bool:
    """A table of what was found, then what to change. True when there is no problem."""
    table = Table(title=title, title_justify="left")
    for column in ("backend", "what", "", "found"):
        table.add_column(column, overflow="fold")
    colours = {Verdict.NOTE: "yellow", Verdict.WARNING: "magenta", Verdict.PROBLEM: "bold red"}
    for finding in findings:
        row = (finding.backend, finding.what, finding.verdict.value, finding.detail)
        table.add_row(*row, style=colours.get(finding.verdict))
    Console(markup=False, highlight=False).print(table)
    for finding in findings:
        if finding.fix:
            click.echo(
                f"{finding.verdict}: {finding.backend}: {finding.what}: {finding.detail}; {finding.fix}"
            )
    return all(finding.verdict is not Verdict.PROBLEM for finding in findings)
