"""`check --probe` against scripted backends, and the TOML it prints."""

from __future__ import annotations

import math
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.check import print_probes, probe
from proxy.config import Backend, loads
from proxy.probe import LONGEST_QUOTE, Finding, Verdict
from proxy.tomltext import toml_lines
from tests.captures import LLAMA_CPP_PYTHON, LLAMA_SERVER, SERVERS, VLLM, load
from tests.scripted import (
    Close,
    Raw,
    Received,
    ScriptedBackend,
    Steps,
    black_hole,
    chat_stream,
    closed_port,
    error_json,
    json_answer,
    models_page,
    replay,
    server_tls,
    sse,
    whole,
)
from tests.sim.running import running

TIMEOUT = 5.0  # seconds; no test waits for it


def backend(url: str, extra: str = "", env: dict[str, str] | None = None) -> Backend:
    text = f'[models.m]\n[[backends]]\nname = "b"\nurl = "{url}"\n{extra}\n'
    return loads(text, env or {}).backends[0]


async def findings(url: str, extra: str = "", env: dict[str, str] | None = None) -> dict[str, Finding]:
    found = await probe(backend(url, extra, env), TIMEOUT)
    assert all(finding.backend == "b" for finding in found)
    assert len({finding.what for finding in found}) == len(found)
    return {finding.what: finding for finding in found}


def told(found: dict[str, Finding]) -> dict[str, tuple[str, str]]:
    return {what: (finding.verdict.value, finding.detail) for what, finding in found.items()}


async def test_a_good_backend_has_no_problem() -> None:
    async with ScriptedBackend(model="tiny", window_tokens=4096) as server:
        found = await findings(server.url, 'model = "tiny"\nlimits.window_tokens = 4096')
        assert {what: verdict for what, (verdict, _) in told(found).items()} == dict.fromkeys(
            ["reachable", "model", "window", "health", "metrics", "key", "stream", "usage"], "ok"
        )
        assert found["reachable"].detail == server.url
        assert found["key"].detail == "none is wanted"
        assert found["model"].detail == '"tiny"'
        assert found["window"].detail == "4096 tokens"
        assert found["usage"].detail == "streamed"
        assert found["metrics"].detail.startswith("running ")
        assert not any(finding.fix for finding in found.values())


async def test_the_probe_asks_for_one_token_and_sends_the_key() -> None:
    async with ScriptedBackend(model="tiny") as server:
        await findings(server.url, 'key = "env:K"', {"K": "sk-hunter2"})
        assert [request.path for request in server.requests] == ["/v1/chat/completions"]
        assert [poll.path for poll in server.polls] == ["/v1/models", "/health", "/metrics"]
        for request in (*server.requests, *server.polls):
            assert request.header("authorization") == "Bearer sk-hunter2"
            assert request.header("accept-encoding") == "identity"
        body = server.requests[0].json
        assert (body["model"], body["max_tokens"], body["stream"]) == ("tiny", 1, True)
        assert body["stream_options"] == {"include_usage": True}


async def test_a_backend_behind_a_path_is_asked_there() -> None:
    async with ScriptedBackend() as server:
        server.answer(*[error_json(404, "nothing here")] * 4)
        await findings(server.url + "/gpu/0")
        assert server.requests[0].path == "/gpu/0/v1/models"


def keyed(request: Received) -> Steps:
    if request.header("authorization") == "Bearer right":
        return models_page("tiny", 4096)
    return json_answer({"error": "Unauthorized"}, status=401)


@pytest.mark.parametrize(
    ("extra", "env", "expected", "fix"),
    [
        ("", {}, "it wants a key (401)", 'set key = "env:NAME" for this backend'),
        (
            'key = "env:K"',
            {"K": "wrong"},
            "it refuses ours (401)",
            "put the key that the server was started with into env:K",
        ),
    ],
)
async def test_a_key_that_is_missing_or_wrong_ends_the_probe(
    extra: str, env: dict[str, str], expected: str, fix: str
) -> None:
    async with ScriptedBackend() as server:
        server.pages["/v1/models"] = keyed
        found = await findings(server.url, extra, env)
        assert list(found) == ["reachable", "key"]
        assert (found["key"].verdict, found["key"].detail, found["key"].fix) == (
            Verdict.PROBLEM,
            expected,
            fix,
        )
        assert not server.requests


@pytest.mark.parametrize(
    ("extra", "expected"), [("", "it wants a key (401)"), ('key = "env:K"', "it refuses ours (401)")]
)
async def test_a_key_that_only_chat_asks_for_is_found_too(extra: str, expected: str) -> None:
    """llama-server lists its models to anyone."""
    async with ScriptedBackend() as server:
        server.answer(error_json(401, "Invalid API Key"))
        found = await findings(server.url, extra, {"K": "wrong"})
        assert told(found)["key"] == ("problem", expected)
        assert "stream" not in found


async def test_a_key_that_is_right_is_accepted() -> None:
    async with ScriptedBackend() as server:
        server.pages["/v1/models"] = keyed
        found = await findings(server.url, 'key = "env:K"', {"K": "right"})
        assert told(found)["key"] == ("ok", "accepted")


@pytest.mark.parametrize(
    ("extra", "what", "verdict", "detail", "fix"),
    [
        ('model = "huge"', "model", "problem", 'it has no "huge", but "tiny"', 'set model = "tiny"'),
        (
            "limits.window_tokens = 8192",
            "window",
            "problem",
            "4096 tokens, but limits.window_tokens is 8192",
            "set limits.window_tokens = 4096, or drop it",
        ),
        ("limits.window_tokens = 1024", "window", "ok", "4096 tokens", ""),
        (
            "stream_usage = false",
            "usage",
            "note",
            "streamed, but stream_usage is false",
            "set stream_usage = true",
        ),
    ],
)
async def test_what_the_config_says_is_compared_with_what_the_backend_says(
    extra: str, what: str, verdict: str, detail: str, fix: str
) -> None:
    async with ScriptedBackend(model="tiny", window_tokens=4096) as server:
        finding = (await findings(server.url, extra))[what]
        assert (finding.verdict.value, finding.detail, finding.fix) == (verdict, detail, fix)


async def test_a_wrong_model_name_is_not_asked_for() -> None:
    async with ScriptedBackend() as server:
        server.pages["/v1/models"] = json_answer({"data": [{"id": "a"}, {"id": "b"}, {"no": "id"}, 3]})
        found = await findings(server.url, 'model = "c"')
        assert found["model"].fix == 'set model to one of "a", "b"'
        assert "stream" not in found
        assert not server.requests


@pytest.mark.parametrize(
    ("page", "detail"),
    [
        (error_json(500, "boom"), "/v1/models answers 500 and lists none: boom"),
        (json_answer({"data": []}), "/v1/models answers 200 and lists none: "),
        (json_answer([1]), "/v1/models answers 200 and lists none: "),
        (whole(b"[" * 100_000), "/v1/models answers 200 and lists none: "),
        (whole(b"<html>hi</html>", content_type="text/html"), "/v1/models answers 200 and lists none: "),
        (whole(b"", status=307), "/v1/models answers 307 and lists none: "),
    ],
)
async def test_a_server_that_lists_no_model_is_a_problem(page: Steps, detail: str) -> None:
    async with ScriptedBackend() as server:
        server.pages["/v1/models"] = page
        finding = (await findings(server.url))["model"]
        assert finding.verdict is Verdict.PROBLEM
        assert finding.detail.startswith(detail)
        assert (
            finding.fix == f"is {server.url} an OpenAI-compatible server? A path before /v1 belongs into url"
        )


async def test_a_server_without_health_and_metrics_is_noted_and_fails_nothing() -> None:
    async with ScriptedBackend() as server:
        server.pages["/health"] = server.pages["/metrics"] = error_json(404, "Not Found")
        server.pages["/v1/models"] = json_answer({"data": [{"id": "tiny"}]})
        found = await findings(server.url)
        assert told(found)["health"] == ("note", "no /health: /v1/models is asked in its place")
        assert told(found)["metrics"] == (
            "note",
            "/metrics answers 404: load is judged by our own requests alone",
        )
        assert told(found)["window"] == ("note", "not reported")
        assert found["window"].fix == "set limits.window_tokens, or long prompts are tried in vain"
        assert print_probes(list(found.values()))


async def test_a_server_that_says_it_is_ill_is_a_problem() -> None:
    async with ScriptedBackend() as server:
        server.pages["/health"] = whole(b"", status=503)
        finding = (await findings(server.url))["health"]
        assert (finding.verdict, finding.detail) == (Verdict.PROBLEM, "/health answers 503")


async def test_llama_server_without_metrics_is_told_the_flag() -> None:
    async with ScriptedBackend() as server:
        server.pages["/metrics"] = error_json(501, "This server does not support metrics endpoint.")
        finding = (await findings(server.url))["metrics"]
        assert (finding.verdict, finding.fix) == (Verdict.NOTE, "start llama-server with --metrics")


async def test_metrics_of_something_else_are_noted() -> None:
    async with ScriptedBackend() as server:
        server.pages["/metrics"] = whole(b"process_cpu_seconds_total 3\n", content_type="text/plain")
        detail = "/metrics tells nothing of running requests: load is judged by our own requests alone"
        assert told(await findings(server.url))["metrics"] == ("note", detail)


@pytest.mark.parametrize(
    ("answer", "what", "detail"),
    [
        (chat_stream(usage=None), "usage", "not streamed, though asked for"),
        (sse(), "stream", "the stream is empty"),
        (sse({"error": "no\x1b[31m luck"}), "stream", "the stream says: no [31m luck"),
        (sse({"error": {"message": "engine died"}}), "stream", "the stream says: engine died"),
        (
            error_json(400, "no such model"),
            "stream",
            "/v1/chat/completions answers 400 application/json: no such model",
        ),
    ],
)
async def test_a_stream_that_is_not_what_was_asked_for_is_a_problem(
    answer: Steps, what: str, detail: str
) -> None:
    async with ScriptedBackend() as server:
        server.answer(answer)
        finding = (await findings(server.url))[what]
        assert (finding.verdict, finding.detail) == (Verdict.PROBLEM, detail)
        assert finding.fix


async def test_a_server_that_streams_no_usage_may_be_configured_so() -> None:
    async with ScriptedBackend() as server:
        server.answer(chat_stream(usage=None))
        found = await findings(server.url, "stream_usage = false")
        assert told(found)["usage"] == ("ok", "not streamed, as configured")


async def test_a_servers_words_are_bounded_and_printable() -> None:
    async with ScriptedBackend() as server:
        server.answer(error_json(400, "x\x07\x1b[2J" + "y" * 1000))
        detail = (await findings(server.url))["stream"].detail
        assert detail.isprintable()
        assert len(detail) < LONGEST_QUOTE + 60


# -- without a tool parser -----------------------------------------------------------------------------------

UNPARSED = 'parser = "none"'


def counted(prompt_tokens: int | None) -> Steps:
    """An answer that says how long its prompt was, or does not."""
    usage = {} if prompt_tokens is None else {"usage": {"prompt_tokens": prompt_tokens}}
    return json_answer({"choices": [], **usage})


@pytest.mark.parametrize(
    ("plain", "with_tools", "verdict", "detail", "fix"),
    [
        (counted(9), counted(120), "ok", 'rendered with tool_choice "none": 111 tokens', ""),
        (
            counted(9),
            counted(9),
            "problem",
            'not rendered with tool_choice "none": no tool is ever called',
            "start it without --exclude-tools-when-tool-choice-none; else start it with a tool parser",
        ),
        (
            counted(9),
            error_json(400, "no tools here"),
            "problem",
            "a request with tools answers 400: no tools here",
            "start it with a tool parser",
        ),
        (
            error_json(500, "boom"),
            counted(9),
            "problem",
            "a request without tools answers 500: boom",
            "start it with a tool parser",
        ),
        (counted(None), counted(9), "note", "no prompt_tokens are reported", "ask for a tool"),
        (counted(9), json_answer([1]), "note", "no prompt_tokens are reported", "ask for a tool"),
    ],
)
async def test_a_backend_without_tool_parser_must_still_render_tools(
    plain: Steps, with_tools: Steps, verdict: str, detail: str, fix: str
) -> None:
    async with ScriptedBackend() as server:
        server.answer(chat_stream(), plain, with_tools)
        finding = (await findings(server.url, UNPARSED))["tools"]
        assert finding.verdict.value == verdict
        assert finding.detail.startswith(detail)
        assert finding.fix.startswith(fix)
        assert bool(finding.fix) == bool(fix)


async def test_the_requests_about_tools_differ_in_the_tools_alone_and_cost_a_token_each() -> None:
    async with ScriptedBackend(model="tiny") as server:
        server.answer(chat_stream(), counted(9), counted(120))
        await findings(server.url, UNPARSED)
        plain, with_tools = (request.json for request in server.requests[1:])
        assert plain["max_tokens"] == 1
        assert with_tools["tools"]
        assert with_tools == plain | {"tools": with_tools["tools"], "tool_choice": "none"}


async def test_a_backend_with_a_tool_parser_is_not_asked_about_tools() -> None:
    async with ScriptedBackend() as server:
        assert "tools" not in await findings(server.url)
        assert len(server.requests) == 1


async def test_a_backend_that_does_not_answer_is_not_asked_about_tools() -> None:
    async with ScriptedBackend() as server:
        server.answer(error_json(400, "no such model"))
        assert "tools" not in await findings(server.url, UNPARSED)
        assert len(server.requests) == 1


# -- not reachable -------------------------------------------------------------------------------------------


async def test_a_closed_port_is_said_to_be_one() -> None:
    found = await probe(backend(f"http://127.0.0.1:{closed_port()}"), TIMEOUT)
    assert found == [
        Finding(
            "b",
            "reachable",
            Verdict.PROBLEM,
            "Connection refused",
            "is the server running, and is this its port?",
        )
    ]


async def test_a_host_that_does_not_answer_runs_into_the_limit() -> None:
    with black_hole() as port:
        (finding,) = await probe(backend(f"http://127.0.0.1:{port}"), timeout=0.05)
    assert finding.detail == "no answer in time"
    assert finding.fix == "is the server still loading, or a firewall in between?"


async def test_what_is_not_http_is_said_to_be_so() -> None:
    async with ScriptedBackend() as server:
        server.pages["/v1/models"] = (Raw(b"220 mail.example.org ESMTP\r\n\r\n"), Close())
        (finding,) = (await findings(server.url)).values()
        assert finding.what == "reachable"
        assert finding.fix == "what listens at this address does not speak HTTP as expected"
        assert finding.detail.isprintable()


async def test_a_certificate_that_is_not_trusted_names_tls_ca() -> None:
    context, _ = server_tls()
    async with ScriptedBackend(tls=context) as server:
        (finding,) = (await findings(server.url)).values()
        assert finding.fix == "set tls.ca to the file of the certificate's issuer"


@pytest.mark.parametrize("trust", ["ca", "verify"])
async def test_a_certificate_may_be_trusted_by_its_issuer_or_blindly(
    trust: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    context, authority = server_tls()
    pem = tmp_path_factory.mktemp("tls") / "ca.pem"
    pem.write_bytes(authority)
    async with ScriptedBackend(tls=context) as server:
        found = await findings(
            server.url, f'tls.ca = "{pem}"' if trust == "ca" else "tls.insecure_any_certificate = true"
        )
        assert told(found)["usage"] == ("ok", "streamed")


async def test_https_to_a_plain_port_is_said_to_be_so() -> None:
    async with ScriptedBackend() as server:
        server.greet((Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"), Close()))
        (finding,) = (await findings(server.url.replace("http:", "https:"))).values()
        assert finding.fix == "does the server speak TLS on this port? If not, write http in url"


# -- recorded servers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("server_name", SERVERS)
async def test_the_models_page_of_each_real_server_is_understood(server_name: str) -> None:
    async with ScriptedBackend() as server:
        server.pages["/v1/models"] = replay(load(server_name, "get_v1_models"))
        found = await findings(server.url)
        assert told(found)["model"] == ("ok", '"tiny"')
        window = {VLLM: ("ok", "4096 tokens"), LLAMA_SERVER: ("ok", "4096 tokens")}
        assert told(found)["window"] == window.get(server_name, ("note", "not reported"))


async def test_llama_cpp_pythons_empty_stream_is_understood() -> None:
    async with ScriptedBackend() as server:
        server.answer(replay(load(LLAMA_CPP_PYTHON, "error_context_overflow_stream")))
        assert told(await findings(server.url))["stream"] == ("problem", "the stream is empty")


# -- printing ------------------------------------------------------------------------------------------------


def test_fixes_are_listed_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Finding("a", "reachable", Verdict.OK, "http://h"),
        Finding("a", "window", Verdict.NOTE, "not [red]reported", "set it"),
    ]
    assert print_probes(found)
    out = capsys.readouterr().out
    assert "not [red]reported" in out
    assert out.splitlines()[-1] == "note: a: window: not [red]reported; set it"
    assert not print_probes([*found, Finding("b", "key", Verdict.PROBLEM, "no", "do")])


TOML_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(), TOML_VALUES, max_size=4))
def test_what_is_printed_is_the_same_when_read_as_toml(table: dict[str, object]) -> None:
    assert without_empty(tomllib.loads("\n".join(toml_lines(table)))) == without_empty(table)


def without_empty(value: object) -> object:
    """Empty tables are not printed: they say nothing."""
    if isinstance(value, dict):
        inner = {key: without_empty(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item != {}}
    if isinstance(value, list):
        return [without_empty(item) for item in value]
    return value


def test_what_has_no_value_is_a_comment() -> None:
    assert list(toml_lines({"a": None, "b": {"c": None}})) == [
        "# a is not set",
        "",
        "[b]",
        "# c is not set",
        "",
    ]


def test_numbers_keep_their_kind() -> None:
    text = "\n".join(toml_lines({"f": 1.0, "i": 1, "b": True, "inf": math.inf}))
    assert tomllib.loads(text) == {"f": 1.0, "i": 1, "b": True, "inf": math.inf}


async def test_where_streams_may_go_on_a_backend_is_asked_whether_its_can() -> None:
    async with running() as sim:
        found = await probe(backend(sim.url), TIMEOUT, continues=True)
        assert [(f.what, f.verdict) for f in found][-1] == ("continuation", "ok")
        assert not [f for f in await probe(backend(sim.url), TIMEOUT) if f.what == "continuation"]
    async with ScriptedBackend() as server:
        server.answer(chat_stream(usage=(1, 1)))
        server.answer(json_answer({"detail": "Not Found"}, status=404))
        found = await probe(backend(server.url), TIMEOUT, continues=True)
        assert [(f.what, f.verdict) for f in found][-1] == ("continuation", "note")
        assert "vLLM" in found[-1].fix


async def test_a_backend_whose_streams_go_on_by_text_only_is_noted() -> None:
    async with running(token_ids=False) as sim:
        found = await probe(backend(sim.url), TIMEOUT, continues=True)
    assert (found[-1].what, found[-1].verdict) == ("continuation", "note")
    assert "text" in found[-1].fix
