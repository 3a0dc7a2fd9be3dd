"""Hours under faults: does every request come to an end that can be explained, and does nothing grow?

    python -m tests.soak --minutes 20 --load 0.8 --fault-every 5

Two `tierline sim` servers and `tierline serve`, each a process of its own; this process is the clients. `--load`: share of
the backends' places that is asked for at once. Every few seconds something breaks, by lot: streams are reset, hang or
lie, an engine stalls or dies, a process is killed, stopped, or refuses; some clients leave or read slowly. Texts are known
before (a simulator answers the same prompt with the same words): each answer is compared with what it must be.

A request is explained when the client saw, and its record says, one of: the whole answer; a true beginning of it and an
in-band error; an HTTP error in the API's shape; that the client left. Errors only while something was broken. Unexplained:
a part given as the whole, a connection cut without a word, a hang, a 500 of ours, a record that is missing or tells
otherwise. At the end every count is zero, descriptors are back, and memory is as it was after the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

import aiohttp

from tests.ports import free_port
from tests.real.gateway import GatewayProcess
from tests.sim.process import SimServer

PLACES = 8
"""Of each backend."""
HANG = 60.0
"""Seconds after which a client takes a request for hung: beyond every limit of CONFIG."""
TOTAL = 45.0
AFTERMATH = TOTAL + 15.0
"""Seconds for which a fault may explain an error: until what it hit has run into its longest limit."""
PAGE = os.sysconf("SC_PAGE_SIZE")
CONFIG = f"""
[timeouts]
connect = 2.0
first_token = 8.0
gap = 3.0
total = {TOTAL}
keepalive_after = 2.0
keepalive_interval = 1.0
[policy.gate]
wait_seconds = 10.0
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
PROMPTS = tuple(
    f"#sim tokens={tokens} think={think} calls={calls}"
    for tokens, think, calls in (
        (20, 0, 0),
        (60, 0, 0),
        (200, 0, 0),
        (500, 0, 0),
        (80, 60, 0),
        (200, 200, 0),
        (40, 0, 1),
        (40, 80, 2),
    )
)
FAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("reset", {"after_tokens": 0, "count": 3}),
    ("reset", {"after_tokens": 5, "count": 3}),
    ("reset", {"after_tokens": 60, "count": 3}),
    ("hang", {"after_tokens": 0, "count": 2}),
    ("hang", {"after_tokens": 20, "count": 2}),
    ("malformed", {"after_tokens": 10, "count": 2}),
    ("truncated", {"after_tokens": 10, "count": 2}),
    ("abort", {"after_tokens": 10, "count": 2}),
    ("status", {"status": 429, "count": 4}),
    ("status", {"status": 500, "count": 4}),
    ("status", {"status": 503, "count": 8}),
    ("stall", {"seconds": 4.0}),
    ("slow", {"value": 0.2, "seconds": 4.0}),
    ("health", {"seconds": 3.0}),
    ("metrics", {"seconds": 4.0}),
    ("refuse", {"seconds": 4.0}),
    ("die", {"seconds": 4.0}),
    ("kill -9", {}),
    ("SIGSTOP", {}),
)


@dataclass(slots=True)
class Answer:
    """As a client joins it."""

    thinking: str = ""
    text: str = ""
    arguments: str = ""
    finish: str | None = None

    def begins(self, whole: Answer) -> bool:
        mine, full = (self.thinking, self.text, self.arguments), (whole.thinking, whole.text, whole.arguments)
        return all(b.startswith(a) for a, b in zip(mine, full, strict=True))

    def add(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", ()):
            self.take(choice.get("delta") or choice.get("message") or {})
            self.finish = choice.get("finish_reason") or self.finish

    def take(self, delta: dict[str, Any]) -> None:
        self.thinking += delta.get("reasoning") or ""
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            self.arguments += call["function"].get("arguments") or ""


@dataclass(slots=True)
class Seen:
    """What a client saw. end: whole, in_band, error, left, or something that must not be. at: when it ended."""

    end: str
    status: int = 0
    at: float = 0.0
    detail: str = ""


@dataclass
class Book:
    """What the clients saw beside what the records say, matched by request id and then forgotten."""

    seen: dict[str, Seen] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    paused: list[float] = field(default_factory=list)
    """When this process went on after it had stood still: whatever is measured against a clock means nothing then."""

    def saw(self, id: str, seen: Seen) -> None:
        self.seen[id] = seen
        self._match(id)

    def record(self, record: dict[str, Any]) -> None:
        self.told[record["request_id"]] = record
        self._match(record["request_id"])

    def _match(self, id: str) -> None:
        if id in self.seen and id in self.told:
            seen, record = self.seen.pop(id), self.told.pop(id)
            self.ends[
                f"{seen.end}: {record['outcome']}" + (f" {seen.status}" if seen.end == "error" else "")
            ] += 1
            if any(seen.at - HANG - 5 <= at <= seen.at + 5 for at in self.paused):
                self.ends["not judged: the machine stood still"] += 1
            elif (why := self._unexplained(seen, record)) is not None:
                self.wrong.append(f"{id}: {why}; client: {seen}; record: {_short(record)}")

    def _unexplained(self, seen: Seen, record: dict[str, Any]) -> str | None:
        outcome = record["outcome"]
        if outcome == "internal":
            return "a fault of ours"
        if seen.end == "whole":
            return None if outcome == "ok" else "whole for the client alone"
        if seen.end == "left":  # it may have left a moment too late, or what it left was broken already
            return None
        if seen.end not in ("in_band", "error"):
            return "no end that may be"
        if outcome in ("ok", "cancelled", "bad_request", "unauthorized"):
            return "an error for the client alone"
        if seen.end == "error" and record["status"] != seen.status:
            return "another status"
        if not any(seen.at - AFTERMATH <= at <= seen.at for at, _ in self.faults):
            return "nothing was broken"
        return None


def _short(record: dict[str, Any]) -> str:
    keys = (
        "outcome",
        "status",
        "error",
        "backend",
        "attempts",
        "finish_reason",
        "e2e_seconds",
        "queue_wait_seconds",
    )
    return json.dumps({key: record.get(key) for key in keys})


class Soak:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rng, self.book = options, Random(options.seed), Book()
        self.over, self.ended = False, 0.0
        self.wholes: dict[str, Answer] = {}
        self.samples: list[tuple[float, int, int]] = []  # seconds, RSS in MiB, descriptors
        self._count = 0

    async def run(self) -> int:
        with ExitStack() as stack:
            self.ports = [free_port(), free_port()]
            self.sims = [
                stack.enter_context(
                    SimServer(
                        profile,
                        name="tiny",
                        port=free_port(),
                        options=("--admin-port", str(port), "--max-num-seqs", str(PLACES), "--seed", "7"),
                    )
                )
                for profile, port in zip(
                    ("fp8-mtp3-tp2-v17", "bf16-dflash8-tp2-v17"), self.ports, strict=True
                )
            ]
            per = f"limits.max_in_flight = {PLACES}"
            backends = dict(zip("ab", self.sims, strict=True))
            self.gateway = stack.enter_context(
                GatewayProcess(
                    backends, config=CONFIG + self.options.config, per_backend={"a": per, "b": per}
                )
            )
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self.session:
                await self._learn()
                await asyncio.sleep(6.0)  # idle connections are retired
                self.at_rest = self._sample()
                await self._work()
            return await self._report()

    async def _learn(self) -> None:
        """What each prompt is answered with, from the simulators themselves and through the gateway."""
        for prompt in PROMPTS:
            answers = []
            for url in (self.sims[0].url, self.sims[1].url, self.gateway.url):
                async with self.session.post(
                    url + "/v1/chat/completions", json=_body(prompt, False)
                ) as response:
                    text = await response.text()
                    assert response.status == 200, (url, text)
                    answers.append(Answer())
                    answers[-1].add(json.loads(text))
            assert answers[0] == answers[1] == answers[2], (prompt, answers)
            self.wholes[prompt] = answers[0]

    async def _work(self) -> None:
        workers = max(1, round(self.options.load * PLACES * 2))
        self.started = time.monotonic()
        tasks = [asyncio.create_task(self._client()) for _ in range(workers)]
        beat = asyncio.create_task(self._beat())
        breaks, watch = asyncio.create_task(self._break()), asyncio.create_task(self._watch())
        await asyncio.sleep(self.options.minutes * 60)
        self.over = True
        await asyncio.gather(*tasks, breaks)
        self.ended = time.monotonic()
        await watch
        beat.cancel()

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.5)
            if time.monotonic() - before > 3.0:
                self.book.paused.append(time.monotonic())

    # -- clients --------------------------------------------------------------------------------------------------------

    async def _client(self) -> None:
        while not self.over:
            self._count += 1
            id, prompt = f"soak-{self._count}", self.rng.choice(PROMPTS)
            try:
                async with asyncio.timeout(HANG):
                    seen = await self._ask(id, prompt)
            except TimeoutError:
                seen = Seen("hang")
            except aiohttp.ClientPayloadError as error:
                seen = Seen("cut without a word", detail=str(error))
            except aiohttp.ClientError as error:
                seen = Seen("no answer at all", detail=repr(error))
            seen.at = time.monotonic()
            self.book.saw(id, seen)
            pause = 0.5 if seen.status in (429, 502, 503, 504) else 0.0
            await asyncio.sleep(pause + self.rng.expovariate(20.0))

    async def _ask(self, id: str, prompt: str) -> Seen:
        stream, whole, lot = self.rng.random() < 0.75, self.wholes[prompt], self.rng.random()
        leaves = self.rng.randrange(30) if lot < 0.1 else None
        slow = 0.1 < lot < 0.13
        headers = {"x-request-id": id}
        url = self.gateway.url + "/v1/chat/completions"
        async with self.session.post(url, json=_body(prompt, stream), headers=headers) as response:
            if leaves is not None and (not stream or leaves == 0):
                response.close()
                return Seen("left", response.status)
            if response.status != 200:
                return _error(response.status, await response.read())
            answer = Answer()
            if not stream:
                answer.add(await response.json())
                return Seen("whole" if answer == whole else "another answer", 200)
            done = False
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if leaves is not None and (leaves := leaves - 1) == 0:
                    response.close()
                    return Seen("left", 200)
                if slow:
                    await asyncio.sleep(0.05)
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    honest = answer.begins(whole) and answer.finish is None and not done
                    return Seen(
                        "in_band" if honest else "an error behind a lie", 200, detail=str(event["error"])
                    )
                answer.add(event)
            if not done:
                return Seen("an end without an end", 200)
            return Seen("whole" if answer == whole else "a part given as the whole", 200)

    # -- faults ---------------------------------------------------------------------------------------------------------

    async def _break(self) -> None:
        if not self.options.fault_every:
            return
        turn = 0
        running: set[asyncio.Task[None]] = set()
        while not self.over:
            await asyncio.sleep(self.options.fault_every)
            kind, more = self.rng.choice(FAULTS)
            number, turn = turn % 2, turn + 1
            self.book.faults.append((time.monotonic(), kind))
            task = asyncio.create_task(self._fault(number, kind, more))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def _fault(self, number: int, kind: str, more: dict[str, Any]) -> None:
        sim = self.sims[number]
        assert sim.child is not None
        process = sim.child.process
        if kind == "kill -9":
            process.kill()
            await asyncio.to_thread(process.wait)
            await asyncio.sleep(2.0)
            sim.start()
        elif kind == "SIGSTOP":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(4.0)
            process.send_signal(signal.SIGCONT)
        else:
            url = f"http://127.0.0.1:{self.ports[number]}/faults"
            try:
                async with (
                    asyncio.timeout(6),
                    self.session.post(url, json={"fault": kind, **more}) as response,
                ):
                    assert response.status == 200, await response.text()
            except (aiohttp.ClientError, TimeoutError):
                pass  # it is stopped or being started
        self.book.faults.append((time.monotonic(), f"end of {kind}"))

    # -- figures --------------------------------------------------------------------------------------------------------

    def _sample(self) -> tuple[int, int]:
        assert self.gateway.child is not None
        pid = self.gateway.child.process.pid
        with open(f"/proc/{pid}/statm") as file:
            pages = int(file.read().split()[1])
        return pages * PAGE >> 20, len(os.listdir(f"/proc/{pid}/fd"))

    async def _watch(self) -> None:
        """Memory and descriptors, and the records as they are written."""
        with self.gateway._records_file.open("rb") as file:
            next_sample, rest = 0.0, b""
            while not self.ended or (self.book.seen and time.monotonic() < self.ended + 10):
                rest += await asyncio.to_thread(file.read)
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    record = json.loads(line)
                    if record["request_id"].startswith("soak-"):
                        self.book.record(record)
                now = time.monotonic() - self.started
                if now >= next_sample:
                    next_sample = now + 10.0
                    self.samples.append((now, *self._sample()))
                await asyncio.sleep(0.5)

    async def _at_rest(self) -> dict[str, dict[str, int]]:
        """What is left of each backend, once nothing is, or after 20 s."""
        end = time.monotonic() + 20
        while True:
            await asyncio.sleep(1.0)
            backends = await asyncio.to_thread(self.gateway.backends)
            keys = ("in_flight", "in_flight_tokens", "connections")
            left = {n: {key: backend[key] for key in keys} for n, backend in backends.items()}
            left = {name: figures for name, figures in left.items() if any(figures.values())}
            if not left or time.monotonic() > end:
                return left

    async def _report(self) -> int:
        book, bad = self.book, list(self.book.wrong)
        bad += [f"{id}: no record; client: {seen}" for id, seen in book.seen.items()]
        bad += [f"{id}: nobody asked; record: {_short(record)}" for id, record in book.told.items()]
        for name, left in (await self._at_rest()).items():
            bad.append(f"{name} has not come to rest: {left}")
        rss, descriptors = self._sample()
        quarter = [s for s in self.samples if self.samples[-1][0] * 0.25 <= s[0] <= self.samples[-1][0] * 0.5]
        last = [s for s in self.samples if s[0] >= self.samples[-1][0] * 0.75]
        grown = median(s[1] for s in last) - median(s[1] for s in quarter or last)
        if descriptors > self.at_rest[1] + 2:
            bad.append(f"descriptors: {self.at_rest[1]} before, {descriptors} after")
        if grown > 16:
            bad.append(f"memory: {grown} MiB more in the last quarter than in the second")
        if complaints := [
            line for line in self.gateway.complaints.splitlines() if "Traceback" in line or " ERROR " in line
        ]:
            bad.append(f"the log has errors: {complaints[:3]}")
        total = sum(book.ends.values())
        kinds = Counter(kind for _, kind in book.faults if not kind.startswith("end of"))
        print(
            f"{total} requests in {self.options.minutes:g} min, {sum(kinds.values())} faults: {dict(kinds)}"
        )
        for end, count in book.ends.most_common():
            print(f"  {count:7}  {count / total:6.2%}  {end}")
        print(
            f"RSS MiB: {self.at_rest[0]} at rest before, {median(s[1] for s in quarter or last):.0f} in the second quarter, "
            f"{median(s[1] for s in last):.0f} in the last, {rss} after"
        )
        print(
            f"descriptors: {self.at_rest[1]} at rest before, {max(s[2] for s in self.samples)} at most, {descriptors} after"
        )
        print(f"stood still: {len(book.paused)} times; unexplained: {len(bad)}")
        for line in bad[:40]:
            print(f"  {line}")
        return 1 if bad else 0


def _body(prompt: str, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "tools": [TOOL],
    }
    return body | ({"stream": True} if stream else {})


def _error(status: int, body: bytes) -> Seen:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return Seen("an error in no shape", status, detail=repr(body[:200]))
    return Seen("error", status, detail=message)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Requests under faults, for as long as told."
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--load", type=float, default=0.8, help="share of the places that is asked for at once"
    )
    parser.add_argument("--fault-every", type=float, default=5.0, help="seconds; 0: nothing breaks")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--config", default="", help="more of the gateway's configuration")
    sys.exit(asyncio.run(Soak(parser.parse_args()).run()))


if __name__ == "__main__":
    main()
