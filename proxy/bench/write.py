"""The profile as a file: TOML that `policies.profilefile` reads, one row of a table a line.

Rules: what was not measured stands at the top, as comments; no key, no URL with a secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policies.measured import Measured
from policies.profilefile import table
from proxy.tomltext import toml_lines

_HEADS = {
    "decode": "[streams, context tokens, tokens a second of all streams]",
    "latency": "[streams, context tokens, mean ms to the first token, 99th percentile, ms per token, acceptance]",
    "prefill": "[prompt tokens, seconds to the first token], cold",
}


def text(own: Measured, url: str, notes: Sequence[str] = ()) -> str:
    """notes: what the reader of the file should know."""
    lines = [f"# {url}", *(f"# {' '.join(note.split())}" for note in notes), ""]
    for line in toml_lines(table(own)):
        lines += _rows(line)
    return "\n".join(lines).rstrip() + "\n"


def _rows(line: str) -> Iterator[str]:
    name, _, rest = line.partition(" = ")
    if name not in _HEADS:
        yield line
        return
    yield f"# {_HEADS[name]}"
    yield f"{name} = ["
    yield from (f"    [{row}]," for row in rest.removeprefix("[[").removesuffix("]]").split("], ["))
    yield "]"
