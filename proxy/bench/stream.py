"""One streamed completion, and when its tokens came.

Rules: one time is taken a read, before anything is parsed. Tokens are counted by reported usage: with every event
where the server does that (`continuous_usage_stats`), else each delta counts for the mean of the answer's; without
any usage a delta counts for one token, and `Client.counts` says so. A server that refuses a field is asked without it
from then on.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import orjson

from proxy.clock import Clock
from proxy.probe import Asker, printable, unreachable
from proxy.wire.errors import read_error, read_event_error
from proxy.wire.sse import Splitter, fields

PATH = "/v1/completions"


class Failed(Exception):
    """The server did not answer; the text says what it did."""


@dataclass(slots=True, eq=False)
class Heard:
    """sent, first: seconds on the clock. times, counts: when something came, tokens (or deltas) by then. usage: tokens of
    the answer, prompt and cached: of the prompt; None where not told. ended: by itself."""

    sent: float = 0.0
    first: float | None = None
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    counted: bool = False
    usage: int | None = None
    prompt: int | None = None
    cached: int | None = None
    ended: bool = False

    def came(self, now: float, tokens: int | None) -> None:
        """A delta; tokens: all so far, where the event says."""
        if self.first is None:
            self.first = now
        if tokens is not None and not self.counted:
            self.counted = True
            self.counts = [tokens] * len(self.counts)  # what came before it spoke, all at once at the most
        count = tokens if tokens is not None else (self.counts[-1] if self.counts else 0) + (not self.counted)
        self.times.append(now)
        self.counts.append(count)

    def tokens(self, after: float, until: float) -> float:
        """Tokens that came in between."""
        low, high = bisect_right(self.times, after), bisect_right(self.times, until)
        before = self.counts[low - 1] if low else 0
        so_many = (self.counts[high - 1] if high else 0) - before
        if self.counted or self.usage is None or not self.counts[-1]:
            return float(so_many)
        return so_many * self.usage / self.counts[-1]


class Client:
    """Asks one model of one server."""

    def __init__(self, asker: Asker, clock: Clock, model: str) -> None:
        self.asker = asker
        self.clock = clock
        self.model = model
        self.without: list[str] = []
        """Fields that the server refused."""
        self.counts = "usage"
        """How its tokens are counted: with every event (`each event`), by the answer's usage, or by deltas."""

    def body(self, prompt: str, tokens: int) -> bytes:
        asked: dict[str, object] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        for name in self.without:
            if name == "continuous_usage_stats":
                asked["stream_options"] = {"include_usage": True}
            else:
                asked.pop(name, None)
        return orjson.dumps(asked)

    async def settle(self) -> Heard:
        """A first small request: which fields the server takes, and how it counts. Raises `Failed`."""
        for name in ("continuous_usage_stats", "ignore_eos", "stream_options", None):
            try:
                heard = await self.stream(self.body("Once upon a time", 16))
                break
            except Failed:
                if name is None:
                    raise
                self.without.append(name)
        else:
            raise AssertionError
        self.counts = "each event" if heard.counted else "usage" if heard.usage is not None else "deltas"
        return heard

    async def stream(
        self, body: bytes, heard: Heard | None = None, told: Callable[[Heard], None] | None = None
    ) -> Heard:
        """Ask and listen to the end. heard: filled as it comes; told: with each read that had tokens. Raises `Failed`."""
        heard = heard or Heard()
        heard.sent = self.clock.now()
        try:
            async with self.asker.open("POST", PATH, body) as response:
                if response.status != 200:
                    raw = await response.content.read(1 << 16)
                    error = read_error(response.status, response.content_type, raw)
                    raise Failed(f"{PATH} answers {response.status}: {printable(error.message)}")
                await self._listen(response, heard, told)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Failed(unreachable(error).detail) from error
        return heard

    async def _listen(
        self, response: aiohttp.ClientResponse, heard: Heard, told: Callable[[Heard], None] | None
    ) -> None:
        splitter = Splitter()
        async for data in response.content.iter_any():
            now = self.clock.now()
            news = False
            for event in splitter.feed(data):
                said = fields(event)[1]
                if said is not None and said != b"[DONE]":
                    news |= _note(orjson.loads(said), heard, now)
            if news and told is not None:
                told(heard)
        heard.ended = True

    async def ask(self, prompt: str, tokens: int = 1) -> Heard:
        """One request by itself, to its end."""
        heard = await self.stream(self.body(prompt, tokens))
        if heard.first is None:
            raise Failed("the answer has no token")
        return heard


def _note(event: object, heard: Heard, now: float) -> bool:
    """What an event says; True if it brought tokens."""
    error = read_event_error(event)
    if error is not None:
        raise Failed(f"the stream says: {printable(error.message)}")
    if not isinstance(event, dict):
        return False
    usage = event.get("usage")
    total = None
    if isinstance(usage, dict):
        total = _count(usage.get("completion_tokens"))
        heard.prompt = _count(usage.get("prompt_tokens")) or heard.prompt
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            heard.cached = _count(details.get("cached_tokens"))
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        heard.usage = total if total is not None else heard.usage
        return False
    text = choices[0].get("text") if isinstance(choices[0], dict) else None
    before = heard.counts[-1] if heard.counted and heard.counts else 0
    if text or (total or 0) > before:
        last = bool(choices[0].get("finish_reason"))
        if last and not heard.counted and heard.counts:
            # Servers that count only at the end may do it in the last delta.
            heard.usage, total = total if total is not None else heard.usage, None
        heard.came(now, total)
        return True
    return False


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


async def together(jobs: list[asyncio.Task[Heard]], over: asyncio.Event) -> None:
    """Wait until `over`, or all have ended; the others are cancelled. Raises the first failure."""
    watch = asyncio.ensure_future(over.wait())
    try:
        left = set(jobs)
        while left and not over.is_set():
            done, _ = await asyncio.wait({*left, watch}, return_when=asyncio.FIRST_COMPLETED)
            left -= {job for job in done if job is not watch}
            for job in done:
                if job is not watch and job.exception() is not None:
                    raise job.exception() or AssertionError
    finally:
        for job in [*jobs, watch]:
            job.cancel()
        await asyncio.gather(*jobs, watch, return_exceptions=True)
