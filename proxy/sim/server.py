"""The simulated server: vLLM's endpoints over the engine model, and a second port to make it fail.

Rules: `Simulator` owns the listeners, the engine and the faults; one handler task per request, none per token.
The data port speaks vLLM only; whatever is not vLLM's is on the admin port.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from aiohttp import web

from policies import profile as profiles
from policies.engine import Engine, EngineConfig, Request
from policies.profile import Profile
from proxy.clock import Clock, Timer
from proxy.front import Answer, Server
from proxy.sim import shapes
from proxy.sim.ask import Ask, Json, Refused, check_model, error, fit, parse, read, render
from proxy.sim.drive import Drive
from proxy.sim.exposition import Exposition
from proxy.sim.faults import BadFault, Fault, FaultKind, Faults, read_fault
from proxy.sim.plan import Dialect, Plan, plan
from proxy.sim.reply import ENGINE_DEAD, Choice, Headers, Identity, Reply, StreamReply, WholeReply
from proxy.sim.resume import resumed
from proxy.sim.shapes import Counts
from proxy.sim.text import Tokenizer
from proxy.turnaway import send_continue

log = logging.getLogger("tierline.sim")
JSON = (b"content-type", b"application/json")
PER_REQUEST = (FaultKind.RESET, FaultKind.HANG, FaultKind.MALFORMED, FaultKind.TRUNCATED)
CLOSING = (FaultKind.REFUSE, FaultKind.DIE, FaultKind.ABORT)
DYING_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """profile: its name, or itself. time_scale: engine seconds per second. bytes_per_token: of the tokenizer. None: as the
    profile says."""

    profile: str | Profile
    model: str = "Qwen3.6-27B"
    host: str = "127.0.0.1"
    port: int = 0
    admin_port: int | None = None
    seed: int = 0
    time_scale: float = 1.0
    bytes_per_token: int = 4
    thinking: bool = True
    dialect: Dialect = Dialect.QWEN3_XML
    tool_parser: bool = True
    token_ids: bool = True
    api_key: str | None = None
    window_tokens: int | None = None
    kv_tokens: int | None = None
    block_tokens: int = 784
    max_num_seqs: int | None = None
    old_metric_names: bool = False
    script: tuple[Fault, ...] = ()


class Simulator:
    """`start`, then `url` and `admin_url`; `close` ends every answer."""

    def __init__(self, options: Options, clock: Clock) -> None:
        self.options = options
        self.faults = Faults()
        self._clock = clock
        self._profile = profiles.get(options.profile)
        if self._profile.quality_only:
            raise ValueError(f"profile {self.profile} holds quality figures only: nothing to simulate")
        self._window = options.window_tokens or self._profile.window_tokens
        self._config = EngineConfig(
            kv_tokens=options.kv_tokens or self._profile.kv_tokens,
            max_num_seqs=options.max_num_seqs or self._profile.max_num_seqs,
            batched_tokens=self._profile.measured.batched_tokens,
            block_tokens=options.block_tokens,
        )
        self._tokenizer = Tokenizer(options.bytes_per_token)
        self._replies: set[Reply] = set()
        self._busy: set[object] = set()
        self._timers: list[Timer] = []
        self._opening: asyncio.Task[None] | None = None
        self._count = 0
        self._load = 0
        self._dead = False
        self._frozen: str | None = None
        self._listener: asyncio.Server | None = None
        self._admin: asyncio.Server | None = None
        self._data_side = self._server(self._answer)
        self._admin_side = self._server(self._command)
        self._routes: dict[str, tuple[str, Callable[[Json], bytes | None]]] = {
            "/health": ("GET", lambda _: None),
            "/ping": ("GET", lambda _: None),
            "/version": ("GET", lambda _: shapes.dumps({"version": shapes.VERSION})),
            "/load": ("GET", lambda _: shapes.dumps({"server_load": self._load})),
            "/v1/models": ("GET", lambda _: shapes.models(options.model, self._window, self._created())),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }
        self._boot()

    def _boot(self) -> None:
        """A fresh engine."""
        self._drive = Drive(self._clock, Engine(self._profile, self._config), self.options.time_scale)
        self._exposition = Exposition(self.options.model, self._config, self._window)
        self._dead = False

    # -- listeners

    @property
    def profile(self) -> str:
        return self._profile.name

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self.options.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{self.options.host}:{self.options.admin_port}"

    async def start(self) -> None:
        self._listener, port = await self._listen(self._data_side, self.options.port)
        self.options = replace(self.options, port=port)
        if self.options.admin_port is not None:
            self._admin, admin_port = await self._listen(self._admin_side, self.options.admin_port)
            self.options = replace(self.options, admin_port=admin_port)
        began = self._clock.now()
        for fault in self.options.script:
            self._later(began + fault.at, partial(self.switch_on, replace(fault)))

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for listener in (self._listener, self._admin):
            if listener is not None:
                listener.close()
        for reply in list(self._replies):
            reply.abort()
        self._drive.close()
        for side in (self._data_side, self._admin_side):
            side.pre_shutdown()  # or each idle connection would take the whole second
            await side.shutdown(1.0)

    async def _listen(self, side: Server, port: int) -> tuple[asyncio.Server, int]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(side, self.options.host, port, backlog=4096, reuse_address=True)
        return server, server.sockets[0].getsockname()[1]

    def _server(self, handler: Callable[[web.BaseRequest], object]) -> Server:
        return Server(handler, max_body_bytes=64 << 20, keepalive_timeout=5.0)

    # -- the data port

    async def _answer(self, request: web.BaseRequest) -> Answer:
        answer = Answer(request)
        if self._listener is None:  # a kept connection to a process that is "gone"
            answer.abort()
            return answer
        self._busy.add(request.protocol)
        try:
            await self._answered(request, answer)
        finally:
            self._busy.discard(request.protocol)
        return answer

    async def _answered(self, request: web.BaseRequest, answer: Answer) -> None:
        headers: Headers = [
            (b"server", b"uvicorn"),
            (b"x-request-id", request.headers.get("x-request-id", self._id()).encode("latin-1", "replace")),
        ]
        fault = self.faults.hit(FaultKind.STATUS) if request.path.startswith("/v1/") else None
        try:
            if fault is not None:
                raise Refused(
                    fault.status, error("simulated failure", "InternalServerError", None, fault.status)
                )
            await self._route(request, answer, headers)
        except Refused as refused:
            answer.send(refused.status, [*headers, JSON], shapes.dumps(refused.body))

    async def _route(self, request: web.BaseRequest, answer: Answer, headers: Headers) -> None:
        path, key = request.path, self.options.api_key
        if path == "/metrics":
            kind = (b"content-type", b"text/plain; version=1.0.0; charset=utf-8")
            answer.send(200, [*headers, kind], self._metrics().encode())
            return
        if key and path.startswith("/v1/") and request.headers.get("authorization") != f"Bearer {key}":
            raise Refused(401, {"error": "Unauthorized"})
        generate = path in ("/v1/chat/completions", "/v1/completions")
        method, make = ("POST", None) if generate else self._routes.get(path, (None, None))
        if method is None:
            raise Refused(404, {"detail": "Not Found"})
        if request.method != method:
            headers.append((b"allow", method.encode()))
            raise Refused(405, {"detail": "Method Not Allowed"})
        if path == "/health":
            answer.send(self._health(), headers, b"")
            return
        body: Json = {}
        if method == "POST":
            if "100-continue" in request.headers.get("expect", "").lower():
                send_continue(request)
            body = parse(await request.read(), request.headers.get("content-type", ""))
        if generate:
            await self._generate(body, answer, headers, chat=path == "/v1/chat/completions")
            return
        assert make is not None
        made = make(body)
        answer.send(200, [*headers, JSON] if made else headers, made or b"")

    def _health(self) -> int:
        lie = self.faults.on(FaultKind.HEALTH)
        return lie.status if lie is not None else 503 if self._dead else 200

    def _metrics(self) -> str:
        if self._frozen is not None:
            return self._frozen
        return self._exposition.text(self._drive.stats(), self.options.old_metric_names)

    def _tokenize(self, body: Json) -> bytes:
        if "messages" not in body and "prompt" not in body:
            raise Refused(400, error("1 validation error:\n  prompt is required", "Bad Request", "body", 400))
        check_model(body, self.options.model)
        tokens = self._tokenizer.encode(render(body, self.options.model, self.options.thinking))
        texts = [self._tokenizer.decode([t]).decode("utf-8", "replace") for t in tokens]
        strings = texts if body.get("return_token_strs") else None
        return shapes.dumps(
            {"count": len(tokens), "max_model_len": self._window, "tokens": tokens, "token_strs": strings}
        )

    def _detokenize(self, body: Json) -> bytes:
        tokens = body.get("tokens")
        ids = [t for t in tokens if isinstance(t, int)] if isinstance(tokens, list) else []
        return shapes.dumps({"prompt": self._tokenizer.decode(ids).decode("utf-8", "replace")})

    async def _generate(self, body: Json, answer: Answer, headers: Headers, *, chat: bool) -> None:
        o = self.options
        if not o.token_ids:
            body.pop("return_token_ids", None)
        ask = read(
            body,
            o.model,
            chat=chat,
            thinking=o.thinking,
            window=self._window,
            tool_parser=o.tool_parser,
            decode=self._tokenizer.decode,
        )
        size = len(ask.prompt_ids) or self._tokenizer.count(len(ask.prompt))
        room = min(self._window, self._config.blocks * self._config.block_tokens) - size
        fit(size, size + room)
        if self._dead:
            raise Refused(500, error(ENGINE_DEAD, "InternalServerError", None, 500))
        fault = self._fault_of_this_request()
        if fault is not None and fault.kind is FaultKind.RESET and fault.after_tokens == 0:
            answer.abort()
            return
        prompt_ids = None
        if ask.token_ids:
            prompt_ids = list(ask.prompt_ids) or self._tokenizer.encode(ask.prompt)
        identity = Identity(
            ("chatcmpl-" if chat else "cmpl-") + self._id(), self._created(), o.model, prompt_ids
        )
        kind = StreamReply if ask.stream else WholeReply
        counts = Counts(prompt=max(1, size), block=self._config.block_tokens)
        reply = kind(answer, headers, ask, identity, counts, self._exposition, fault)
        await self._serve(reply, room)

    async def _serve(self, reply: StreamReply | WholeReply, room: int) -> None:
        """From the engine's queue to the last byte; whoever leaves early is cancelled there."""
        drive, ids = self._drive, list[int]()
        blocks = self._blocks(reply.ask.prompt)
        reply.begin()
        self._replies.add(reply)
        self._load += 1
        try:
            for index in range(reply.ask.n):
                made = self._plan(reply.ask, index, room)
                choice = Choice(reply, index, made, self._tokenizer, drive.now())
                reply.choices.append(choice)
                request = Request(reply.counts.prompt, made.tokens, blocks, stream=reply.ask.stream)
                ids.append(drive.submit(request, choice))
            await reply.done
        finally:
            self._load -= 1
            self._replies.discard(reply)
            for id in ids:
                drive.cancel(id)

    def _plan(self, ask: Ask, index: int, room: int) -> Plan:
        dialect = self.options.dialect
        wrong = self.faults.on(FaultKind.DIALECT)
        if wrong is not None:
            dialect = Dialect(wrong.dialect)
        seed, tokenizer = self.options.seed, self._tokenizer
        if (ask.goes_on or not ask.chat) and (
            rest := resumed(ask, seed, room, tokenizer, dialect)
        ) is not None:
            return rest
        if ask.choice == "required" and self._breaks_required(ask):
            dialect = Dialect.XML
        return plan(ask, index, seed, room, tokenizer, dialect)

    def _breaks_required(self, ask: Ask) -> bool:
        """Some requests by their prompt, always the same ones: by a fault, or because the profile does it."""
        fault = self.faults.on(FaultKind.REQUIRED)
        share = fault.value if fault else 0.0 if self._profile.tool_choice_required_works else 0.6
        return blake2b(ask.prompt, digest_size=1, person=b"required").digest()[0] < share * 256

    def _fault_of_this_request(self) -> Fault | None:
        fault = self.faults.hit(*PER_REQUEST)
        if fault is None:
            one = self.faults.on(FaultKind.ABORT)
            fault = self.faults.hit(FaultKind.ABORT) if one and one.after_tokens is not None else None
        return replace(fault) if fault is not None else None

    def _blocks(self, prompt: bytes) -> tuple[int, ...]:
        """Hashes of the prompt's full cache blocks, each over all before it."""
        step = self._config.block_tokens * self.options.bytes_per_token
        hashes, before = [], b""
        for i in range(0, len(prompt) - step + 1, step):
            before = blake2b(before + prompt[i : i + step], digest_size=8).digest()
            hashes.append(int.from_bytes(before, "big"))
        return tuple(hashes)

    def _id(self) -> str:
        self._count += 1
        return blake2b(f"{self.options.seed}:{self._count}".encode(), digest_size=8).hexdigest()

    def _created(self) -> int:
        return int(self._clock.wall())

    # -- faults

    def switch_on(self, fault: Fault) -> None:
        self.faults.active.append(fault)
        log.info("fault %s on", fault.kind)
        self._apply(fault)
        if fault.kind is FaultKind.FLUSH:
            self.faults.remove(fault)
        elif fault.seconds is not None:
            self._later(self._clock.now() + fault.seconds, partial(self.switch_off, fault))

    def switch_off(self, fault: Fault) -> None:
        if self.faults.remove(fault):
            log.info("fault %s off", fault.kind)
            self._undo(fault.kind)

    def _apply(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.REFUSE:
                self._stop_listening()
            case FaultKind.STALL:
                self._drive.change(lambda engine, now: engine.set_speed(0.0, now))
            case FaultKind.SLOW:
                self._drive.change(lambda engine, now: engine.set_speed(fault.value, now))
            case FaultKind.ACCEPTANCE:
                self._drive.change(lambda engine, now: engine.set_acceptance(fault.value, now))
            case FaultKind.FLUSH:
                self._drive.change(lambda engine, now: engine.flush_cache(now))
            case FaultKind.METRICS:
                self._frozen = self._metrics()
            case FaultKind.DIE:
                self._dead = True
                for reply in list(self._replies):
                    reply.die()
                self._later(self._clock.now() + DYING_SECONDS, self._stop_listening_if_dead)
            case FaultKind.ABORT if fault.after_tokens is None:
                for reply in list(self._replies):
                    reply.abort()
                self._stop_listening()

    def _undo(self, kind: FaultKind) -> None:
        match kind:
            case FaultKind.STALL | FaultKind.SLOW:
                self._drive.change(lambda engine, now: engine.set_speed(1.0, now))
            case FaultKind.ACCEPTANCE:
                self._drive.change(lambda engine, now: engine.set_acceptance(None, now))
            case FaultKind.METRICS:
                self._frozen = None
            case FaultKind.DIE:
                self._drive.close()
                self._boot()
        if self._listener is None and not any(fault.kind in CLOSING for fault in self.faults.active):
            self._opening = asyncio.ensure_future(self._reopen())

    async def _reopen(self) -> None:
        self._listener, _ = await self._listen(self._data_side, self.options.port)

    def _later(self, when: float, do: Callable[[], None]) -> None:
        self._timers.append(self._clock.call_at(when, do))

    def _stop_listening(self) -> None:
        """New connections are refused; idle ones end, as those of a process that has gone."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._data_side.connections):
            if connection.transport is not None and connection not in self._busy:
                connection.transport.close()

    def _stop_listening_if_dead(self) -> None:
        if self._dead:
            self._stop_listening()

    # -- the admin port

    async def _command(self, request: web.BaseRequest) -> Answer:
        answer = Answer(request)
        try:
            status, body = 200, await self._commanded(request)
        except (BadFault, json.JSONDecodeError) as problem:
            status, body = 400, {"error": str(problem)}
        answer.send(status, [JSON], shapes.dumps(body))
        return answer

    async def _commanded(self, request: web.BaseRequest) -> Json:
        """GET /state, GET|POST|DELETE /faults (DELETE ?fault=kind for one kind)."""
        if request.path == "/state":
            stats = self._drive.stats()
            return {name: getattr(stats, name) for name in type(stats).__slots__} | {"live": self._drive.live}
        if request.path != "/faults":
            raise BadFault("known: /state, /faults")
        if request.method == "POST":
            self.switch_on(read_fault(json.loads(await request.read())))
        elif request.method == "DELETE":
            kind = request.query.get("fault")
            for fault in [f for f in self.faults.active if kind in (None, f.kind)]:
                self.switch_off(fault)
            if self._opening is not None:
                await self._opening
        return {"faults": [fault.describe() for fault in self.faults.active]}
