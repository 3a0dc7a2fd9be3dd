"""The same request, the same tool calls, whatever backend answers: the table in docs/tool-calls.md.

`python -m tests.real.tool_table` starts each backend that can run here, one at a time, puts the gateway in front, asks
for every script of the scripted model, streamed and not, and prints what a client with the openai SDK has in hand.
It fails if a cell is not what it must be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.real.alike import Clients
from tests.real.gateway import GatewayProcess
from tests.real.llama import LlamaServer
from tests.real.llama_cpp_python import LlamaCppPython
from tests.real.server import RealServer, Unavailable
from tests.real.tooltalk import CUT, SCRIPTS, WANTED, Call, Heard, Said, hear, wanted
from tests.real.vllm_cpu import VllmServer

NO_PARSER = 'parser = "none"\nreasoning_parser = "none"'
EVERYWHERE = ("tool", "text_tool", "text_tag")  # llama-server's grammar makes noise of the others


@dataclass(frozen=True)
class Column:
    """One backend. config: lines of its table in the gateway's configuration."""

    title: str
    make: Callable[[], RealServer]
    config: str = ""
    scripts: tuple[str, ...] = SCRIPTS
    llama_cpp: bool = False

    @property
    def parses(self) -> bool:
        """The server reads tool calls itself."""
        return not self.config


COLUMNS = (
    Column("vLLM, qwen3_xml", lambda: VllmServer(parser="qwen3_xml")),
    Column("vLLM, qwen3_coder", lambda: VllmServer(parser="qwen3_coder")),
    Column("vLLM, no parser", lambda: VllmServer(parser=None), NO_PARSER),
    Column("llama-server", LlamaServer, scripts=EVERYWHERE, llama_cpp=True),
    Column("llama-cpp-python", LlamaCppPython, f"{NO_PARSER}\nlimits.window_tokens = 4096", llama_cpp=True),
)

PARSING = {column.title for column in COLUMNS if column.parses}


def ask_all(column: Column) -> dict[str, Heard]:
    """Every script of the column, through a gateway in front of its server. Raises Unavailable."""
    with column.make() as server, through(column, server) as gateway:
        clients = Clients(gateway.url)
        try:
            heard = {
                script: hear(clients.openai, script, llama_cpp=column.llama_cpp) for script in column.scripts
            }
        finally:
            clients.close()
        if gateway.complaints:
            print(f"{column.title}: the gateway says:\n{gateway.complaints}", file=sys.stderr)
        return heard


def through(column: Column, server: RealServer) -> GatewayProcess:
    return GatewayProcess({"it": server}, per_backend={"it": column.config})


# -- printing ------------------------------------------------------------------------------------------------


def table(answers: dict[str, dict[str, Heard]]) -> str:
    """answers: by column's title, then by script."""
    head = ["script", "calls", *answers]
    rows = [[f"`{script}`", _expected(script), *_cells(script, answers)] for script in SCRIPTS]
    return "\n".join(_row(cells) for cells in [head, ["---"] * len(head), *rows])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _expected(script: str) -> str:
    expected = WANTED.get(script)
    return "the call is cut" if expected is None else _calls(expected.calls)


def _cells(script: str, answers: dict[str, dict[str, Heard]]) -> list[str]:
    return [_cell(script, heard[script]) if script in heard else "" for heard in answers.values()]


def _cell(script: str, heard: Heard) -> str:
    expected = WANTED.get(script)
    if heard.same:
        return f"{_said(heard.whole, expected)}, same"
    return f"whole: {_said(heard.whole, expected)}; streamed: {_said(heard.streamed, expected)}"


def _said(said: Said, expected: Said | None) -> str:
    calls = "✓" if expected is not None and said.calls == expected.calls else _calls(said.calls)
    return f"{calls}, {_text(said, expected)}, {said.finish}"


def _text(said: Said, expected: Said | None) -> str:
    if said.clean and expected is not None and expected.content and not said.content:
        return "text lost"
    clean = said.clean and (expected is None or said.content == expected.content)
    return "clean" if clean else repr(said.content)


def _calls(calls: tuple[Call, ...]) -> str:
    return " ".join(f"`{name}({_arguments(arguments)})`" for name, arguments in calls) or "none"


def _arguments(arguments: Any) -> str:
    """Of a call that was cut: the text that came, marked as open."""
    if not isinstance(arguments, dict):
        return f"{arguments}…"
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())


def wrong(answers: dict[str, dict[str, Heard]]) -> list[str]:
    """Cells that are not what they must be. What is left of a cut call is only reported."""
    return [
        f"{title}: {script}"
        for title, heard in answers.items()
        for script, answer in heard.items()
        if script != CUT and answer != wanted(script, parsed=title in PARSING)
    ]


def main() -> int:
    answers: dict[str, dict[str, Heard]] = {}
    for column in COLUMNS:
        print(f"{column.title} …", file=sys.stderr, flush=True)
        try:
            answers[column.title] = ask_all(column)
        except Unavailable as reason:
            print(f"left out: {reason}", file=sys.stderr)
    print(table(answers))
    faults = wrong(answers)
    print(*[f"not as it must be: {fault}" for fault in faults], sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
