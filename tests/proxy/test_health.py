"""Polling: what each kind of server tells, what is done without its paths, and that nothing ends a poller."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from proxy.clock import LoopClock
from proxy.config import loads
from proxy.health import ASK_AGAIN_ROUNDS, MAX_BODY_BYTES, HealthPoller, read_models, read_props
from proxy.wire.promtext import EngineMetrics
from tests.captures import LLAMA_CPP_PYTHON, LLAMA_SERVER, VLLM, load, notes
from tests.fake_clock import FakeClock


class Sink:
    def __init__(self) -> None:
        self.probes: list[tuple[bool, str]] = []
        self.metrics: list[EngineMetrics] = []
        self.found: list[tuple[int | None, str | None]] = []
        self.probed = asyncio.Event()
        self.runs = False
        self.due: float | None = None
        self.trials: list[tuple[bool, str]] = []

    def polled(self, name: str, metrics: EngineMetrics, now: float) -> None:
        self.metrics.append(metrics)

    def probe(self, name: str, ok: bool, detail: str, now: float) -> None:
        self.probes.append((ok, detail))
        self.probed.set()

    def discovered(self, name: str, window_tokens: int | None, served_model: str | None) -> None:
        self.found.append((window_tokens, served_model))

    def tls(self, name: str) -> bool:
        return True

    def busy(self, name: str) -> bool:
        return self.runs

    def trial_due(self, name: str) -> float | None:
        return self.due

    def tried(self, name: str, ok: bool, detail: str, now: float) -> None:
        self.trials.append((ok, detail))

    def model(self, name: str) -> str | None:
        return "tiny"


class Server:
    """Answers of a path: (status, body), or a coroutine function; others are 404."""

    def __init__(self, pages: dict[str, object]) -> None:
        self.pages = pages
        self.asked: Counter[str] = Counter()
        self.headers: list[web.BaseRequest] = []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked[request.path] += 1
        self.headers.append(request)
        page = self.pages.get(request.path, (404, b'{"detail":"Not Found"}'))
        if callable(page):
            return await page(request)
        status, body = page
        return web.Response(status=status, body=body)


VLLM_PAGES = {
    "/health": (200, b""),
    "/metrics": (200, notes(VLLM, "metrics_under_load").encode()),
    "/v1/models": (200, load(VLLM, "get_v1_models").body),
}
LLAMA_PAGES = {
    "/health": (200, load(LLAMA_SERVER, "get_health").body),
    "/metrics": (200, load(LLAMA_SERVER, "get_metrics").body),
    "/v1/models": (200, load(LLAMA_SERVER, "get_v1_models").body),
}
PYTHON_PAGES = {"/v1/models": (200, load(LLAMA_CPP_PYTHON, "get_v1_models").body)}


@pytest.fixture
async def watched():
    """A server of these pages, watched: (server, sink, one round)."""
    cleanups = []

    async def make(pages, *, clock=None, extra: str = "", path: str = "", down: bool = False):
        server = Server(pages)
        test_server = RawTestServer(server.handle, host="127.0.0.1")
        await test_server.start_server()
        url = f"http://127.0.0.1:{test_server.port}{path}"
        if down:
            await test_server.close()
        else:
            cleanups.append(test_server.close)
        config = loads(
            f'[[backends]]\nname = "b"\nurl = "{url}"\nquality.reference = true\n{extra}\n[models.tiny]\n',
            {"KEY": "sk-1"},
        )
        sink = Sink()
        poller = HealthPoller(config, clock or LoopClock(), sink)
        # The fixture runs rounds itself: `start` makes the session, and the first task is ours to await.
        started = []
        poller._run = lambda watch: started.append(watch) or asyncio.sleep(0)  # type: ignore[method-assign]
        poller.start()
        cleanups.append(poller.stop)
        return server, sink, started[0].round

    yield make
    for cleanup in reversed(cleanups):
        await cleanup()


async def test_vllm_is_probed_polled_and_asked_for_its_window_once(watched):
    server, sink, poll = await watched(VLLM_PAGES)
    for _ in range(3):
        await poll()
    assert sink.probes == [(True, "status 200")] * 3
    assert [(m.running, m.waiting, m.kv_tokens) for m in sink.metrics] == [(4, 2, 2097152)] * 3
    assert sink.found == [(4096, "tiny")]
    assert server.asked == {"/health": 3, "/metrics": 3, "/v1/models": 1}


async def test_llama_server_is_understood_too(watched):
    _, sink, poll = await watched(LLAMA_PAGES)
    await poll()
    assert sink.probes == [(True, "status 200")]
    assert (sink.metrics[0].running, sink.metrics[0].waiting) == (0, 0)
    assert sink.found == [(4096, "tiny")]


async def test_a_server_without_health_or_metrics_is_probed_by_its_models(watched):
    server, sink, poll = await watched(PYTHON_PAGES)
    for _ in range(3):
        await poll()
    assert sink.probes == [(True, "status 200")] * 3
    assert sink.metrics == []
    assert sink.found == [(None, "tiny")]
    assert (server.asked["/health"], server.asked["/metrics"]) == (1, 1)


async def test_a_server_that_only_has_models_is_not_asked_for_them_while_it_answers_one_of_ours(watched):
    """llama-cpp-python ends a running stream when anybody asks for its models."""
    server, sink, poll = await watched(dict(PYTHON_PAGES))
    await poll()
    asked = server.asked["/v1/models"]
    sink.runs = True
    await poll()
    await poll()
    assert server.asked["/v1/models"] == asked
    assert sink.probes == [(True, "status 200"), (True, "status 404"), (True, "status 404")]
    server.pages["/health"] = (503, b"")
    await poll()
    assert sink.probes[-1] == (False, "status 503")
    sink.runs = False
    server.pages["/health"] = (404, b"")
    await poll()
    assert server.asked["/v1/models"] > asked


async def test_absent_paths_are_asked_for_again_now_and_then(watched):
    server, sink, poll = await watched(dict(PYTHON_PAGES))
    await poll()
    server.pages.update(VLLM_PAGES)
    for _ in range(ASK_AGAIN_ROUNDS):
        await poll()
    assert server.asked["/health"] == 2
    assert sink.metrics[-1].running == 4


async def test_llama_server_started_without_metrics_answers_501_and_works(watched):
    error = b'{"error":{"code":501,"message":"This server does not support metrics endpoint","type":"x"}}'
    server, sink, poll = await watched({**LLAMA_PAGES, "/metrics": (501, error)})
    await poll()
    await poll()
    assert sink.probes[-1] == (True, "status 200")
    assert sink.metrics == []
    assert server.asked["/metrics"] == 1


async def test_the_window_is_in_props_when_models_does_not_say_it(watched):
    pages = {**LLAMA_PAGES, "/v1/models": PYTHON_PAGES["/v1/models"]}
    pages["/props"] = (200, load(LLAMA_SERVER, "get_props").body)
    _, sink, poll = await watched(pages)
    await poll()
    assert sink.found == [(4096, "tiny")]


async def test_a_dying_engine_fails_the_probe_and_is_asked_for_nothing_more(watched):
    server, sink, poll = await watched({**VLLM_PAGES, "/health": (503, b"")})
    await poll()
    assert sink.probes == [(False, "status 503")]
    assert server.asked == {"/health": 1}


async def test_a_backend_that_comes_back_is_asked_again_what_it_serves(watched):
    server, sink, poll = await watched(dict(VLLM_PAGES))
    await poll()
    server.pages["/health"] = (503, b"")
    await poll()
    server.pages["/health"] = (200, b"")
    server.pages["/v1/models"] = (200, b'{"data":[{"id":"other","max_model_len":8192}]}')
    await poll()
    assert sink.found == [(4096, "tiny"), (8192, "other")]


async def test_a_backend_that_is_down_fails_the_probe_and_its_address_is_not_told(watched):
    _, sink, poll = await watched(VLLM_PAGES, down=True)
    await poll()
    assert sink.probes == [(False, "cannot connect (Connection refused)")]


async def test_a_backend_that_does_not_answer_in_time_fails_the_probe(watched):
    clock, asked, release = FakeClock(), asyncio.Event(), asyncio.Event()

    async def stall(request: web.BaseRequest) -> web.StreamResponse:
        asked.set()
        await release.wait()
        return web.Response()

    _, sink, poll = await watched({"/health": stall}, clock=clock)
    task = asyncio.ensure_future(poll())
    await asyncio.wait_for(asked.wait(), 5)
    clock.advance(1.9)
    await asyncio.sleep(0)
    assert not task.done()
    clock.advance(0.2)
    await asyncio.wait_for(task, 5)
    assert sink.probes == [(False, "no answer within 2 s")]
    assert clock.pending == 0
    release.set()


async def test_redirects_are_not_followed(watched):
    async def away(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": "/v1/models"})

    server, sink, poll = await watched({"/health": away, **PYTHON_PAGES})
    await poll()
    assert sink.probes == [(False, "status 302")]
    assert server.asked == {"/health": 1}


async def test_the_backends_own_key_and_path_prefix_are_used(watched):
    pages = {f"/api{path}": page for path, page in VLLM_PAGES.items()}
    server, sink, poll = await watched(pages, extra='key = "env:KEY"', path="/api")
    await poll()
    assert sink.found == [(4096, "tiny")]
    assert {request.headers["Authorization"] for request in server.headers} == {"Bearer sk-1"}


async def test_a_refused_key_fails_the_probe_and_says_so(watched):
    _, sink, poll = await watched({"/health": (401, b'{"error":"Unauthorized"}')})
    await poll()
    assert sink.probes == [(False, "status 401")]


async def test_a_page_that_is_not_metrics_says_nothing_about_load(watched):
    _, sink, poll = await watched({**VLLM_PAGES, "/metrics": (200, b"<html>hello</html>")})
    await poll()
    assert sink.metrics == []


async def test_a_body_without_end_is_bounded(watched):
    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"vllm:num_requests_running 3\n")
        try:
            while True:
                await response.write(b"#" * (1 << 20))
        except (ConnectionError, RuntimeError):
            return response

    _, sink, poll = await watched({**VLLM_PAGES, "/metrics": endless})
    await poll()
    assert sink.metrics[0].running == 3
    assert MAX_BODY_BYTES == 4 << 20


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"data":[]}', b'{"data":[7]}', b'{"data":{"id":"x"}}', b"null"]
)
async def test_models_that_are_no_list_are_survived(watched, body):
    _, sink, poll = await watched({**VLLM_PAGES, "/v1/models": (200, body)})
    await poll()
    assert sink.found == []
    assert sink.probes == [(True, "status 200")]


@pytest.mark.parametrize(
    ("entry", "model", "expected"),
    [
        ('{"id":"a","max_model_len":10},{"id":"b","max_model_len":20}', None, (10, "a")),
        ('{"id":"a","max_model_len":10},{"id":"b","max_model_len":20}', "b", (20, "b")),
        ('{"id":"a","max_model_len":10}', "absent", (10, "a")),
        ('{"id":"a","max_model_len":null,"meta":{"n_ctx":30}}', None, (30, "a")),
        ('{"id":"a","max_model_len":"10"}', None, (None, "a")),
        ('{"id":"a","max_model_len":-1}', None, (None, "a")),
        ('{"id":"a","max_model_len":true}', None, (None, "a")),
        ('{"id":5,"max_model_len":10}', None, (10, None)),
        ('{"id":"a","meta":null}', None, (None, "a")),
    ],
)
def test_window_and_name_are_read_as_the_server_says_them(entry, model, expected):
    assert read_models(f'{{"data":[{entry}]}}'.encode(), model) == expected


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"default_generation_settings":5}'])
def test_props_that_say_nothing_are_survived(body):
    assert read_props(body) is None


class Ticking(FakeClock):
    """Tells when a round is over and the next one is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.between = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.between.set()
        await super().sleep(seconds)

    async def round_over(self) -> None:
        await asyncio.wait_for(self.between.wait(), 5)
        self.between.clear()


# -- trials


TRIAL = {"model": "tiny", "prompt": "1", "max_tokens": 1}


@pytest.mark.parametrize(
    ("status", "extra", "good"),
    [(200, "", True), (400, "", True), (404, "", True), (422, "", True), (429, "", True)]
    + [(500, "", False), (503, "", False), (401, "", True), (401, 'key = "env:KEY"', False)],
)
async def test_a_backend_in_doubt_is_asked_for_one_token(watched, status, extra, good):
    asked = []

    async def completions(request):
        asked.append(await request.json())
        return web.Response(status=status, body=b"{}")

    _, sink, poll = await watched(VLLM_PAGES | {"/v1/completions": completions}, extra=extra)
    await poll()
    assert asked == []
    sink.due = 5.0
    await poll()
    assert asked == [TRIAL]
    assert sink.trials == [(good, f"status {status}")]


async def test_a_trial_has_its_own_time(watched):
    clock = FakeClock()
    arrived = asyncio.Event()

    async def silent(request):
        arrived.set()
        await asyncio.Event().wait()

    _, sink, poll = await watched(VLLM_PAGES | {"/v1/completions": silent}, clock=clock)
    sink.due = 7.5
    task = asyncio.ensure_future(poll())
    await arrived.wait()
    clock.advance(7.4)
    await asyncio.sleep(0)
    assert not task.done()
    clock.advance(0.2)
    await task
    assert sink.trials == [(False, "no answer within 7.5 s")]


async def test_who_fails_the_probe_gets_no_trial(watched):
    server, sink, poll = await watched(VLLM_PAGES | {"/health": (503, b"")})
    sink.due = 5.0
    await poll()
    assert (sink.trials, server.asked["/v1/completions"]) == ([], 0)


async def test_rounds_go_on_at_the_interval_until_stopped_whatever_the_sink_does(caplog):
    server, clock = Server(VLLM_PAGES), Ticking()
    test_server = RawTestServer(server.handle, host="127.0.0.1")
    await test_server.start_server()

    class Faulty(Sink):
        def polled(self, name: str, metrics: EngineMetrics, now: float) -> None:
            raise RuntimeError("a fault of ours")

    sink = Faulty()
    config = loads(f'[[backends]]\nname = "b"\nurl = "http://127.0.0.1:{test_server.port}"\n[models.tiny]\n')
    poller = HealthPoller(config, clock, sink)
    poller.start()
    for count in (1, 2, 3):
        await clock.round_over()
        assert len(sink.probes) == count
        clock.advance(0.85 * config.health.interval)
        await asyncio.sleep(0)
        assert len(sink.probes) == count
        clock.advance(0.3 * config.health.interval)
    await poller.stop()
    await poller.stop()
    assert clock.pending == 0
    assert caplog.text.count("polling backend b failed inside the gateway") == 3
    await test_server.close()
