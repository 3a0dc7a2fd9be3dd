"""The fleet of `make demo-real`: two real llama-servers with the scripted model.

max_tokens is always set: the scripted model can talk for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.demo.fleet import Fleet
from tests.demo.traffic import EXACTLY, Action, Message, Traffic, tool, user
from tests.real.llama import LlamaServer

WEATHER = tool("get_weather", "Weather in a city", "city", city="string", days="integer")


def llama_fleet() -> Fleet:
    servers = {
        "fp8": LlamaServer(slots=4, window_tokens=4096, threads=1),
        "bf16": LlamaServer(slots=2, window_tokens=8192, threads=1),
    }
    kinds = {"fp8": "counts as KL 0.0055 bits per position", "bf16": "counts as the reference weights"}
    return Fleet(
        command="demo-real",
        starting="two llama-servers",
        about=[
            f"{name:7} llama-server with {server.slots} slots of {server.window_tokens} tokens · {kinds[name]}"
            for name, server in servers.items()
        ],
        servers=servers,
        model="tiny",
        short="tiny",
        more={"fp8": "limits.max_in_flight = 32", "bf16": "limits.max_in_flight = 16"},
        policy="\n[policy.tokens]\nbytes_per_token = 1.1    # the scripted model has a token for each byte\n",
        traffic=LlamaTraffic,
    )


class LlamaTraffic(Traffic):
    """Everything that a mixed day brings, in words that the scripted model knows."""

    model, short = "tiny", "tiny"
    max_tokens = 64
    pause = (0.3, 1.1)

    def acts(self) -> list[tuple[float, Action]]:
        burst = self.burst(8, _says("long"), max_tokens=100)
        # More than the smaller window holds: it can only go to the larger one.
        document = self.one("long prompt", lambda: [user("lorem ipsum " * 370 + "#script:text")])
        # More than any window holds: an honest 400.
        too_long = self.one("over-long prompt", lambda: [user("lorem ipsum " * 9000)], expected="bad_request")
        return [
            (0.05, self.agent),
            (0.10, lambda: self.session("a")),
            (0.15, document),
            (0.25, burst),
            (0.38, too_long),
            (0.45, lambda: self.session("b")),
            (0.50, self.leaving(_says("long"), leave_after=20, max_tokens=3500)),
            (0.60, self.agent),
            (0.70, burst),
            (0.80, lambda: self.session("c")),
            (0.85, document),
        ]

    def small(self) -> list[Action]:
        text = _says("text")
        return [
            self.one("chat", text),
            self.one("no thinking", text, model=self.instruct),
            self.one("not streamed", text, stream=False),
            self.one("emoji", _says("utf8")),
            self.one("exact, by alias", text, model=self.exact),
            self.one("exact, by header", _says("long"), headers=EXACTLY, max_tokens=100),
            self.one("long answer", _says("long"), max_tokens=300),
            self.one("long thinking", _says("ramble"), max_tokens=120),
        ]

    async def agent(self) -> None:
        question = user("What is the weather in Paris?")
        await self.ask_with_tool("agent", [question], "sunny, 21 degrees", tools=[WEATHER])

    async def session(self, name: str, turns: int = 4) -> None:
        """A conversation: each turn brings the ones before along, and stays where they are cached."""
        messages: list[Message] = []
        for turn in range(1, turns + 1):
            messages += _says("text")()
            what = f"session {name}, turn {turn}"
            said = await self.ask(what, messages, headers={"x-session-id": f"demo-{name}"})
            messages = [*messages, {"role": "assistant", "content": said.get("content") or ""}]


def _says(script: str) -> Callable[[], list[Message]]:
    """A prompt that names what the scripted model is to say."""
    return lambda: [user(f"Hello! #script:{script}")]
