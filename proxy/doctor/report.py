"""What was found, for people, for programs, and as keys to paste.

Rules: a patch is TOML. Keys of a backend that the configuration has are to be put into its table; a backend that was
named by its URL gets a whole table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from proxy.config import Backend
from proxy.probe import Finding, Verdict
from proxy.tomltext import toml_lines


def as_json(findings: list[Finding]) -> str:
    return json.dumps(
        [
            {
                "backend": finding.backend,
                "what": finding.what,
                "severity": finding.verdict.value,
                "detail": finding.detail,
                "fix": finding.fix,
                "patch": {key.removeprefix("_"): value for key, value in finding.patch},
            }
            for finding in findings
        ],
        indent=2,
        ensure_ascii=False,
    )


def patch(findings: list[Finding], backends: tuple[Backend, ...], *, whole: bool) -> Iterator[str]:
    """whole: tables with name and url, for backends that no configuration has yet."""
    of_all = {key.removeprefix("_"): v for f in findings for key, v in f.patch if key.startswith("_")}
    for backend in backends:
        mine = [f for f in findings if f.backend == backend.name]
        keys = {key: value for f in mine for key, value in f.patch if not key.startswith("_")}
        if not keys:
            continue
        yield "[[backends]]"
        if whole:
            yield from _pairs({"name": "NAME", "url": backend.url})
        else:
            yield from _pairs({"name": backend.name})
        yield from _pairs(keys)
        yield ""
    sections: dict[str, dict[str, object]] = {}
    for key, value in of_all.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    yield from toml_lines(sections)


def _pairs(keys: dict[str, object]) -> Iterator[str]:
    for key, value in keys.items():
        yield key + next(iter(toml_lines({"x": value})))[1:]


def failed(findings: list[Finding], *, strict: bool) -> bool:
    """Whether there is a problem; strict: or a warning."""
    bad = {Verdict.PROBLEM, Verdict.WARNING} if strict else {Verdict.PROBLEM}
    return any(finding.verdict in bad for finding in findings)
