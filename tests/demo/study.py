"""The fleet of `make demo`: two simulated vLLM servers, as fast as the study measured them.

Prompts are sized in the simulator's tokens of four bytes. The documents are as long as cells of the study, so that
their cold TTFT can be looked up there (policies/profiles/).
"""

from __future__ import annotations

from functools import partial
from random import Random

from policies import profile as profiles
from proxy.sim.text import prose
from tests.demo.fleet import Fleet
from tests.demo.traffic import EXACTLY, Action, Message, Traffic, tool, user
from tests.sim.process import SimServer

MODEL = "Qwen3.6-27B"
PROFILES = {"fp8": "fp8-mtp3-tp2-v17", "bf16": "bf16-dflash8-tp2-v17"}
TOOLS = [
    tool("read_file", "Read a file of the project", "path", path="string", first_line="integer"),
    tool("run_tests", "Run the tests of a module", "module", module="string"),
]
DOCUMENT_TOKENS, EXACT_DOCUMENT_TOKENS = 32298, 16226  # cells of the study
SYSTEM_TOKENS, FILE_TOKENS = 5000, 1500  # an agent's instructions; what its tool brings


def study_fleet(time_scale: float = 1.0) -> Fleet:
    """time_scale: engine seconds per second."""
    return Fleet(
        command="demo",
        starting="two simulated vLLM servers",
        about=[_pace(time_scale), *map(_about, PROFILES)],
        servers={
            name: SimServer(profile, name=MODEL, options=("--time-scale", f"{time_scale:g}"))
            for name, profile in PROFILES.items()
        },
        model=MODEL,
        short="qwen",
        more={
            "fp8": f'profile = "{PROFILES["fp8"]}"',
            "bf16": f'profile = "{PROFILES["bf16"]}"\n'
            "limits.max_in_flight = 32       # more streams do not make it faster",
        },
        traffic=partial(StudyTraffic, time_scale=time_scale),
    )


def _pace(time_scale: float) -> str:
    pace = f"{time_scale:g} times as fast (and every time below is that much shorter)"
    return (
        "simulated, no GPU: the speeds that a study measured (docs/profiles.md), "
        f"{'in real time' if time_scale == 1 else pace}"
    )


def _about(name: str) -> str:
    """A backend's line above the rows."""
    measured = profiles.get(PROFILES[name]).measured
    quality = measured.quality
    far = "reference weights" if quality.reference else f"KL {quality.kl_bits:g} bits per position"
    return f"{name:7} {measured.title} · {far}"


class StudyTraffic(Traffic):
    """Short chats all the time; agents, documents asked about twice, and a burst among them."""

    model, short = MODEL, "qwen"
    max_tokens = 400

    def __init__(self, base_url: str, time_scale: float = 1.0) -> None:
        super().__init__(base_url)
        self.pause = (0.9 / time_scale, 2.2 / time_scale)
        self._rng = Random(1)

    def acts(self) -> list[tuple[float, Action]]:
        # More words than any window has tokens: an honest 400, and no backend is troubled.
        too_long = self.one("over-long prompt", lambda: [user("a " * 600_000)], expected="bad_request")
        story = [user("Tell me everything. #sim tokens=4000")]
        report = {"x-session-id": "report"}
        return [
            (0.03, lambda: self.agent("a", turns=3)),
            (0.20, lambda: self.document("document", DOCUMENT_TOKENS, report)),
            (0.45, self.burst(10, self._question)),
            (0.55, lambda: self.document("exact doc.", EXACT_DOCUMENT_TOKENS, EXACTLY)),
            (0.62, lambda: self.agent("b", turns=2)),
            (0.70, too_long),
            (0.78, self.leaving(lambda: story, leave_after=40, max_tokens=5000)),
        ]

    def small(self) -> list[Action]:
        chat = self.one("chat", self._question)
        return [
            chat,
            chat,
            self.one("exact, by alias", self._question, model=self.exact),
            self.one("no thinking", self._question, model=self.instruct),
            self.one("not streamed", self._question, stream=False),
            self.one("exact, by header", self._question, headers=EXACTLY),
        ]

    async def agent(self, name: str, turns: int) -> None:
        """Each turn reads a file and brings all before it along; it stays where that is cached. Agents share their
        instructions."""
        rng = Random(name)
        messages: list[Message] = [
            {"role": "system", "content": prose(Random("instructions"), SYSTEM_TOKENS * 4)}
        ]
        headers = {"x-session-id": f"agent {name}"}
        for turn in range(1, turns + 1):
            messages.append(user(prose(rng, 200) + "?"))
            file = prose(rng, FILE_TOKENS * 4)
            messages = await self.ask_with_tool(
                f"agent {name}{turn}", messages, file, tools=TOOLS, headers=headers
            )

    async def document(self, what: str, tokens: int, headers: dict[str, str]) -> None:
        """Two questions about one document: first nobody knows it, then its prefix is cached."""
        rng = Random(what)
        text = prose(rng, tokens * 4)
        for state in ("cold", "warm"):
            await self.ask(f"{what}, {state}", [user(f"{text}\n\n{prose(rng, 80)}?")], headers=headers)

    def _question(self) -> list[Message]:
        return [user(prose(self._rng, self._rng.randrange(80, 400)) + "?")]
