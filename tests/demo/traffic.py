"""The demo's clients: an unmodified AsyncOpenAI, asking for everything that a mixed day brings.

Rules
1. `plan` is data: what happens when. The same seed gives the same half minute.
2. Each request bears an id of ours (`x-request-id`), under which its record is found again; `Job` keeps what a
   record cannot know: what the client was up to, and how it should end.
3. max_tokens is always set: the scripted model can talk for ever.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import openai

MODEL = "tiny"
EXACT, INSTRUCT = "tiny-exact", "tiny-instruct"  # aliases: the reference weights only; without thinking

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One request, as its client sees it. expected: the outcome that belongs in its record."""

    request_id: str
    what: str
    expected: str = "ok"


class Clients:
    """What the demo's clients do. `jobs` by request id; `in_flight` and `broken` (unexpected errors) as they come."""

    def __init__(self, base_url: str) -> None:
        # No retries: a row a request. The key is only there because the SDK wants one.
        self._api = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60)
        self._numbers = itertools.count(1)
        self.jobs: dict[str, Job] = {}
        self.in_flight = 0
        self.broken: list[str] = []

    async def close(self) -> None:
        await self._api.close()

    # one request

    async def ask(
        self,
        what: str,
        messages: list[Message],
        *,
        model: str = MODEL,
        max_tokens: int = 64,
        stream: bool = True,
        expected: str = "ok",
        leave_after: int | None = None,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> Message:
        """Ask and read the answer; the assistant's message. leave_after: hang up after so many chunks."""
        job = Job(f"demo-{next(self._numbers):04}", what, expected)
        self.jobs[job.request_id] = job
        self.in_flight += 1
        try:
            answer: Any = await self._api.chat.completions.create(
                model=model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=max_tokens,
                stream=stream,
                extra_headers={"x-request-id": job.request_id, **(headers or {})},
                **more,
            )
            if not stream:
                return _message(answer.choices[0].message)
            return await _read(answer, leave_after)
        except openai.APIError as error:
            if expected == "ok":
                self.broken.append(f"{job.request_id} ({what}): {error}")
            return {"role": "assistant", "content": ""}
        finally:
            self.in_flight -= 1

    # what clients are up to

    async def chat(self) -> None:
        await self.ask("chat", _say("text"))

    async def chat_instruct(self) -> None:
        await self.ask("no thinking", _say("text"), model=INSTRUCT)

    async def chat_whole(self) -> None:
        await self.ask("not streamed", _say("text"), stream=False)

    async def thinking(self) -> None:
        await self.ask("long thinking", _say("ramble"), max_tokens=120)

    async def emoji(self) -> None:
        await self.ask("emoji", _say("utf8"))

    async def long_answer(self) -> None:
        await self.ask("long answer", _say("long"), max_tokens=300)

    async def exact_alias(self) -> None:
        await self.ask("exact, by alias", _say("text"), model=EXACT)

    async def exact_header(self) -> None:
        await self.ask("exact, by header", _say("long"), max_tokens=100, headers={"x-quality-tier": "exact"})

    async def agent(self) -> None:
        """A tool call, then an answer from its result."""
        messages: list[Message] = [{"role": "user", "content": "What is the weather in Paris?"}]
        said = await self.ask("agent: tool call", messages, tools=[WEATHER], tool_choice="auto")
        if not said.get("tool_calls"):
            return
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees"}
            for call in said["tool_calls"]
        ]
        await self.ask("agent: answer", [*messages, said, *results], tools=[WEATHER])

    async def session(self, name: str, turns: int = 4) -> None:
        """A conversation: each turn brings the ones before along, and stays where they are cached."""
        messages: list[Message] = []
        for turn in range(1, turns + 1):
            messages += _say("text")
            what = f"session {name}, turn {turn}"
            said = await self.ask(what, messages, headers={"x-session-id": f"demo-{name}"})
            messages = [*messages, {"role": "assistant", "content": said.get("content") or ""}]

    async def burst(self) -> None:
        await asyncio.gather(*(self.ask(f"burst {i}", _say("long"), max_tokens=100) for i in range(1, 9)))

    async def document(self) -> None:
        """More than the smaller window holds: it can only go to the larger one."""
        await self.ask("long prompt", [_user("lorem ipsum " * 370 + "#script:text")])

    async def too_long(self) -> None:
        """More than any window holds: an honest 400."""
        await self.ask("over-long prompt", [_user("lorem ipsum " * 9000)], expected="bad_request")

    async def leave(self) -> None:
        """The user closes the tab: generation must stop."""
        await self.ask("client leaves", _say("long"), max_tokens=3500, leave_after=20, expected="cancelled")


Action = Callable[[], Awaitable[None]]


def plan(clients: Clients, seconds: float, rng: Random) -> Iterator[tuple[float, Action]]:
    """What starts when, in order: (seconds from the start, action)."""
    acts: list[tuple[float, Action]] = [
        (0.05, clients.agent),
        (0.10, lambda: clients.session("a")),
        (0.15, clients.document),
        (0.25, clients.burst),
        (0.38, clients.too_long),
        (0.45, lambda: clients.session("b")),
        (0.50, clients.leave),
        (0.60, clients.agent),
        (0.70, clients.burst),
        (0.80, lambda: clients.session("c")),
        (0.85, clients.document),
    ]
    timed = [(share * seconds, action) for share, action in acts]
    small: list[Action] = [
        clients.chat,
        clients.chat_instruct,
        clients.chat_whole,
        clients.emoji,
        clients.exact_alias,
        clients.exact_header,
        clients.long_answer,
        clients.thinking,
    ]
    at = 0.0
    for number in itertools.count():
        if at >= seconds:
            break
        timed.append((at, small[number % len(small)]))
        at += rng.uniform(0.3, 1.1)
    return iter(sorted(timed, key=lambda act: act[0]))


async def run(clients: Clients, seconds: float, seed: int = 1) -> None:
    """Half a minute of it: returns when the last answer is in."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for at, action in plan(clients, seconds, Random(seed)):
            await asyncio.sleep(max(0.0, start + at - loop.time()))
            tasks.create_task(_act(action))


async def _act(action: Action) -> None:
    await action()


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _say(script: str) -> list[Message]:
    """A prompt that names what the scripted model is to say."""
    return [_user(f"Hello! #script:{script}")]


def _message(message: Any) -> Message:
    kept: Message = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        kept["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return kept


async def _read(stream: Any, leave_after: int | None) -> Message:
    """Put a streamed message together, as clients do."""
    content = ""
    calls: dict[int, dict[str, Any]] = {}
    seen = 0
    async with stream:
        async for chunk in stream:
            seen += 1
            if leave_after is not None and seen >= leave_after:
                break
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(
                        part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                    )
                    call["id"] = part.id or call["id"]
                    call["function"]["name"] += part.function.name or ""
                    call["function"]["arguments"] += part.function.arguments or ""
    message: Message = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message
