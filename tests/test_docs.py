"""docs/ names everything that can be asked of Tierline or that it can answer.

Elsewhere: links and commands in the pages (test_pages.py), keys and defaults (proxy/test_config.py), metrics and their
labels (proxy/test_metrics.py), exit codes (proxy/test_cli.py), what routing can do (policies/test_routing_page.py),
options, faults and profiles of `tierline sim` (sim/test_cli.py).
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from types import ModuleType

import click
import pytest

from policies import Drop, DropReason
from proxy import classify, cli, endpoints
from proxy.adminapi.routes import METRICS, ROUTES
from proxy.errors import ChargedBy, Ending, Hedged, Outcome
from proxy.metrics import BACKEND_STATES
from proxy.record import Record, line
from proxy.tracecontext import begin
from proxy.wire import errors as wire_errors

ROOT = Path(__file__).parent.parent
DOCS = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
SOURCES = [path for top in ("proxy", "policies") for path in sorted((ROOT / top).rglob("*.py"))]


def rows(page: str, columns: int) -> list[list[str]]:
    """The table rows of a page that have that many columns; heads and rules left out."""
    found = []
    for text in DOCS[page].splitlines():
        cells = [cell.strip() for cell in text.strip("|").split(" | ")] if text.startswith("| ") else []
        if len(cells) == columns and not set(cells[0]) <= {"-", " "}:
            found.append(cells)
    return found


def words(cell: str) -> list[str]:
    """What stands in `code` in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def source_text() -> str:
    return "\n".join(path.read_text("utf-8") for path in SOURCES if "sim" not in path.parts)


def test_every_page_is_in_the_index() -> None:
    missing = [name for name in DOCS if name != "README.md" and f"]({name})" not in DOCS["README.md"]]
    assert missing == []


# -- errors ----------------------------------------------------------------------------------------------------

# The simulated vLLM makes vLLM's errors, not ours.
ERROR_MAKERS: tuple[ModuleType, ...] = tuple(
    import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for path in SOURCES
    if "sim" not in path.parts
    and re.search(r"ProxyError\(|ErrorInfo\(|Fault\(|ApiError\(", path.read_text("utf-8"))
)
# Codes that come from a backend, or from a call that is looked at itself; and a fault's, which is its outcome.
PASSED_ON = {"info.code", "error.code", "refused.code", "code", "_word(code)"}
POSITION = {"ErrorInfo": 3, "ApiError": 2, "_error": 2, "refusal": 2}  # of the code, where it has no name


def calls(module: ModuleType) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node


def code_of(name: str, call: ast.Call) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == "code":
            return keyword.value
    place = POSITION.get(name)
    return call.args[place] if place is not None and len(call.args) > place else None


def values(module: ModuleType, node: ast.expr) -> set[str | None]:
    """What an expression can be: constants, the module's own, and either side of a condition."""
    if isinstance(node, ast.IfExp):
        return values(module, node.body) | values(module, node.orelse)
    if isinstance(node, ast.Constant):
        assert node.value is None or isinstance(node.value, str)
        return {node.value}
    source = ast.unparse(node)
    if source in PASSED_ON:
        return set()
    if source == "fault.outcome.value":
        return fault_codes()
    assert isinstance(node, ast.Name), f"{module.__name__}:{node.lineno}: which codes can `{source}` be?"
    value = getattr(module, node.id)
    assert isinstance(value, str)
    return {value}


def fault_codes() -> set[str | None]:
    """Outcomes that a broken attempt can have; those of error events keep the code of the event."""
    source = source_text()
    pairs = re.findall(r"\(\s*FaultKind\.(\w+),\s*Outcome\.(\w+)", source)
    assert len(pairs) > 5
    return {Outcome[outcome].value for kind, outcome in pairs}


def made_errors() -> set[str | None]:
    found: set[str | None] = set()
    for module in ERROR_MAKERS:
        for name, call in calls(module):
            code = code_of(name, call)
            if code is not None:
                found |= values(module, code)
    return found


def documented_errors() -> dict[str | None, list[list[str]]]:
    out: dict[str | None, list[list[str]]] = {}
    for row in rows("errors.md", 5)[1:]:
        out.setdefault(None if row[0] == "null" else words(row[0])[0], []).append(row)
    return out


def test_every_error_code_of_ours_is_documented_and_no_other() -> None:
    admins = set(words(DOCS["errors.md"].partition("On the admin listener:")[2].partition("\n\n")[0]))
    assert made_errors() == set(documented_errors()) | admins


def test_errors_are_documented_with_their_status_and_outcome() -> None:
    table = documented_errors()
    seen = 0
    for module in ERROR_MAKERS:
        for name, call in calls(module):
            if name != "ProxyError" or not isinstance(call.args[1], ast.Constant):
                continue
            code = code_of(name, call)
            outcome = Outcome[ast.unparse(call.args[0]).removeprefix("Outcome.")].value
            for value in values(module, code) if code is not None else {None}:
                seen += 1
                found = {(row[1], word) for row in table[value] for word in words(row[2])}
                # An answer of a kind that the stream forbids has no code of its own.
                assert (str(call.args[1].value), outcome) in found or outcome == "upstream_malformed", (
                    value,
                    found,
                )
    assert seen > 10


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_documented_with_what_the_client_should_do(outcome: Outcome) -> None:
    table = [word for row in rows("errors.md", 5) for word in words(row[2])]
    prose = DOCS["errors.md"].partition("Two outcomes have no error:")[2].partition("\n\n")[0]
    assert outcome in table or outcome in words(prose)


def test_what_errors_md_says_of_types_is_so() -> None:
    said = dict(re.findall(r"`(\w+)` \((\w+)\)", DOCS["errors.md"].partition("## Codes")[0]))
    assert said.pop("server_error") == "5xx"
    assert {wire_errors.openai_type(int(status)): status for status in said.values()} == said


# -- records ---------------------------------------------------------------------------------------------------


def record(**fields: object) -> Record:
    made = Record("r", "chat", "/v1/chat/completions", 10.0, 0.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def bare() -> dict[str, object]:
    """The line of a request of which nothing is known."""
    made = record()
    return json.loads(line(made, made.close(11.0)))


def full() -> dict[str, object]:
    made = record(
        **dict.fromkeys(
            ("model", "target", "tier_asked", "tier", "backend", "reason", "tenant", "key", "client"), "x"
        ),
        **dict.fromkeys(("session_hash", "conversation", "policy", "finish_reason", "error"), "x"),
        **dict.fromkeys(("prompt_tokens_error", "predicted_wait", "predicted_ttft", "predicted_tpot"), 0.5),
        **dict.fromkeys(("reserved_tokens", "charged_tokens", "cached_tokens_estimate"), 5),
        limit="key.tokens_per_minute",
        trace=begin((), (), 1.0, Random(1)),
        charged_by=ChargedBy.USAGE,
        decisions=[{}],
        **dict.fromkeys(("prompt_tokens_estimate", "prompt_tokens_low", "prompt_tokens_high"), 5),
        in_flight=3,
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 5),
        **dict.fromkeys(("body_read_at", "admitted_at", "dispatched_at", "first_delta_at"), 10.5),
        **dict.fromkeys(("last_delta_at", "last_upstream_at", "finished_at"), 11.0),
        stream=True,
        outcome=Outcome.OK,
        status=200,
        drops=(Drop("b", DropReason.FULL),),
        continuation=Ending.WHOLE,
        hedge=Hedged.WON,
    )
    made.gaps.add(0.5)
    return json.loads(line(made, made.close(12.0)))


TYPES: dict[str, type] = {
    "string": str,
    "int": int,
    "float": float,
    "bool": bool,
    "object": dict,
    "array": list,
}


def test_every_field_of_a_record_is_documented_with_its_type_and_when_it_is_null() -> None:
    table = {words(row[0])[0]: row for row in rows("records.md", 4)[1:]}
    assert list(table) == list(bare()), "the same keys in the same order"
    empty = bare()
    for key, value in full().items():
        _, kind, _, null_when = table[key]
        assert type(value) is TYPES[kind], key
        assert (empty[key] is not None) == null_when.startswith("never"), f"{key}: null when {null_when}?"


def test_the_examples_read_fields_that_records_have() -> None:
    keys = set(bare())
    examples = re.findall(r"```sh\n(jq .*?)```", DOCS["records.md"], re.DOTALL)
    assert len(examples) > 8
    for example in examples:
        program = example.replace("records.jsonl", "")
        used = set(re.findall(r"\.([a-z]\w*)", program)) - {"key", "value"}
        assert used, example
        assert used <= keys, used - keys


# -- endpoints, headers, the command line -----------------------------------------------------------------------


def listed(title: str) -> str:
    """A section of docs/behavior.md."""
    return DOCS["behavior.md"].partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_endpoint_is_documented_and_no_other() -> None:
    served = {*endpoints.RELAYED, *endpoints.PUBLIC, endpoints.MODELS, f"{endpoints.MODELS}/{{id}}"}
    served.add(endpoints.RESPONSES_PREFIX + "{id}")
    table = [text.split(" | ") for text in listed("Endpoints").splitlines() if text.startswith("| `")]
    assert {path for cells in table for path in words(cells[0])} == served
    for cells in table:
        for path in words(cells[0]):
            methods = endpoints.find(path.replace("{id}", "resp_1"))
            for method in methods[1] if methods is not None else ("GET",):
                assert method in cells[1], path


def test_every_endpoint_of_the_admin_listener_is_documented_and_no_other() -> None:
    served = {(route.path, route.method) for route in (*ROUTES, METRICS)} | {("/openapi.json", "GET")}
    table = [
        text.split(" | ") for text in listed("The admin listener").splitlines() if text.startswith("| `")
    ]
    assert {(path, cells[1]) for cells in table for path in words(cells[0])} == served


def test_every_state_of_a_backend_is_documented() -> None:
    for state in BACKEND_STATES:
        assert f"`{state}`" in listed("The admin listener")
        assert f"`{state}`" in DOCS["metrics.md"]


def test_every_header_of_ours_is_documented() -> None:
    text = source_text()
    ours = set(re.findall(r"\bx-(?:tierline|quality|tool)-[a-z]+(?:-[a-z]+)*", text))
    read = set(re.findall(r'request\.headers\.get(?:all)?\(\s*"([a-z0-9-]+)"', text))
    assert {"x-tierline-reason", "x-quality-tier"} <= ours
    assert {"x-request-id", "content-encoding"} <= read
    assert {"x-session-id"} <= set(classify.SESSION_HEADERS)
    table = set(words(listed("Headers"))) | {"expect"}  # it has one value of interest
    body_only = {"content-type"}
    assert (ours | read | set(classify.SESSION_HEADERS)) - body_only - table == set()


def leaves(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from leaves(child, f"{path} {name}")
    else:
        yield path, command


def test_every_command_is_documented_and_no_other() -> None:
    said = [words(row[0])[0] for row in rows("cli.md", 2)[1:]]
    assert sorted(said) == sorted(path for path, _ in leaves(cli.main, "tierline"))


@pytest.mark.parametrize(
    ("path", "command"),
    [
        x
        for x in leaves(cli.main, "tierline")
        if x[0] not in ("tierline sim", "tierline simulate", "tierline report")
    ],
)
def test_every_option_is_documented_with_its_command_and_default(path: str, command: click.Command) -> None:
    table = {word.split()[0]: row for row in rows("cli.md", 4)[1:] for word in words(row[0])}
    for option in command.params:
        if isinstance(option, click.Argument):
            assert option.name is not None
            assert option.name.upper() in command.get_usage(click.Context(command))
            continue
        assert isinstance(option, click.Option)
        for name in option.opts:
            assert name in table, f"{path} {name}"
            _, of, default, meaning = table[name]
            assert path.removeprefix("tierline ") in words(of), f"{path} {name}"
            said = (
                "off"
                if option.is_flag
                else f"{option.default:g}"
                if isinstance(option.default, float)
                else option.default
                if isinstance(option.default, str)
                else "none"
            )
            assert default.strip("`") == said, f"{path} {name}"
            if option.envvar:
                assert f"`{option.envvar}`" in meaning


def test_every_environment_variable_is_documented() -> None:
    read = set(
        re.findall(r"\bTIERLINE_[A-Z_]+\b", source_text() + (ROOT / "proxy/sim/cli.py").read_text("utf-8"))
    )
    assert {"TIERLINE_CONFIG", "TIERLINE_SIM_KEY"} <= read
    assert [name for name in read if not any(f"`{name}`" in text for text in DOCS.values())] == []
    for_tests = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for_tests |= set(re.findall(r'environ(?:\.get\(|\[)"(TIERLINE_[A-Z_]+)"', path.read_text("utf-8")))
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert [name for name in for_tests - read if f"`{name}`" not in contributing] == []
