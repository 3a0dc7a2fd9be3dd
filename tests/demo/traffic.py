"""The demos' clients: an unmodified AsyncOpenAI, and what is asked when.

Rules
1. A plan is data: what happens when. The same seed gives the same half minute.
2. Each request bears an id of ours (`x-request-id`), under which its record is found again; `Job` keeps what a
   record cannot know: what the client was up to, and how it should end.
3. What is asked belongs to a fleet (llama.py, study.py); asking, reading and timing are the same for all.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import openai

Message = dict[str, Any]
Action = Callable[[], Coroutine[Any, Any, None]]
Prompt = Callable[[], list[Message]]
EXACTLY = {"x-quality-tier": "exact"}  # asks for the reference weights, whatever the model's name


@dataclass(frozen=True, slots=True)
class Job:
    """One request, as its client sees it. expected: the outcome that belongs in its record."""

    request_id: str
    what: str
    expected: str = "ok"


class Traffic(ABC):
    """What one fleet's clients do. `jobs` by request id; `in_flight` and `broken` (unexpected errors) as they come.

    model: the public name; its aliases begin with `short`. max_tokens: of an answer, unless said otherwise.
    pause: least and most seconds between two small requests.
    """

    model: str
    short: str
    max_tokens: int
    pause: tuple[float, float]

    def __init__(self, base_url: str) -> None:
        # No retries: a row a request. The key is only there because the SDK wants one.
        self._api = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60)
        self._numbers = itertools.count(1)
        self.jobs: dict[str, Job] = {}
        self.in_flight = 0
        self.broken: list[str] = []

    @property
    def exact(self) -> str:
        """The alias that asks for the reference weights."""
        return f"{self.short}-exact"

    @property
    def instruct(self) -> str:
        """The alias that does not think."""
        return f"{self.short}-instruct"

    async def close(self) -> None:
        await self._api.close()

    # what a fleet says for itself

    @abstractmethod
    def acts(self) -> list[tuple[float, Action]]:
        """What happens once: (share of the time, action)."""

    @abstractmethod
    def small(self) -> list[Action]:
        """What happens all the time, in turn."""

    # one request, and two

    async def ask(
        self,
        what: str,
        messages: list[Message],
        *,
        model: str | None = None,
        max_tokens: int | None = None,
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
                model=model or self.model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=max_tokens or self.max_tokens,
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

    async def ask_with_tool(
        self, what: str, messages: list[Message], result: str, **more: Any
    ) -> list[Message]:
        """A tool call, then an answer from its result; the conversation with both."""
        said = await self.ask(f"{what}: call", messages, tool_choice="auto", **more)
        if not said.get("tool_calls"):
            return [*messages, said]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": result} for call in said["tool_calls"]
        ]
        messages = [*messages, said, *results]
        return [*messages, await self.ask(f"{what}: answer", messages, **more)]

    # actions made of requests

    def one(self, what: str, prompt: Prompt, **more: Any) -> Action:
        """A request, with what `ask` takes."""

        async def act() -> None:
            await self.ask(what, prompt(), **more)

        return act

    def burst(self, count: int, prompt: Prompt, **more: Any) -> Action:
        """So many at once."""

        async def act() -> None:
            each = (self.one(f"burst {number}", prompt, **more) for number in range(1, count + 1))
            await asyncio.gather(*(act() for act in each))

        return act

    def leaving(self, prompt: Prompt, **more: Any) -> Action:
        """The user closes the tab: generation must stop."""
        return self.one("client leaves", prompt, expected="cancelled", **more)

    # when

    def plan(self, seconds: float, rng: Random) -> Iterator[tuple[float, Action]]:
        """What starts when, in order: (seconds from the start, action)."""
        timed = [(share * seconds, action) for share, action in self.acts()]
        small = itertools.cycle(self.small())
        at = 0.0
        while at < seconds:
            timed.append((at, next(small)))
            at += rng.uniform(*self.pause)
        return iter(sorted(timed, key=lambda act: act[0]))

    async def run(self, seconds: float, seed: int = 1) -> None:
        """Half a minute of it: returns when the last answer is in."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for at, action in self.plan(seconds, Random(seed)):
                await asyncio.sleep(max(0.0, start + at - loop.time()))
                tasks.create_task(action())


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(name: str, description: str, required: str, **properties: str) -> dict[str, Any]:
    """A tool in OpenAI's form; the properties by their JSON type."""
    parameters = {
        "type": "object",
        "required": [required],
        "properties": {key: {"type": kind} for key, kind in properties.items()},
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


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
