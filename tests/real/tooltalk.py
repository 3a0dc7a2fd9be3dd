"""The scripted model's ways of calling tools, asked for through the openai SDK, and what must come of each.

Rules
1. The SDK judges: a stream counts as what its own accumulation makes of it, an answer as what it parses.
2. Every script is asked for twice, streamed and whole. Arguments that do not decode stay text: a call that was cut.
3. White space around the content does not count: servers differ in it, and no client cares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import openai
from openai.types.chat import ChatCompletion

MARKUP = re.compile(r"</?\s*(tool_call|function|parameter|think)\b|<\|")
MAX_TOKENS = 100


def _function(name: str, required: Iterable[str] = (), **properties: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}}
    if required:
        schema["required"] = [*required]
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    _function("get_weather", ["city"], city="string", days="integer"),
    _function("get_time", ["zone"], zone="string"),
    _function("list_files"),
]

Call = tuple[str, Any]
"""Name, and the arguments: decoded, or as text where they do not decode."""


@dataclass(frozen=True)
class Said:
    """What a client has in hand in the end."""

    calls: tuple[Call, ...]
    content: str
    finish: str | None

    @property
    def clean(self) -> bool:
        return MARKUP.search(self.content) is None


def weather(city: str, **more: Any) -> Call:
    return "get_weather", {"city": city, **more}


def _calls(*calls: Call, content: str = "") -> Said:
    return Said(calls, content, "tool_calls")


WANTED: dict[str, Said] = {
    "tool": _calls(weather("Paris", days=3)),
    "text_tool": _calls(weather("Oslo"), content="Let me look that up."),
    "text_tag": _calls(weather("Riga"), content="I would write"),
    "two_tools": _calls(weather("Lisbon"), ("get_time", {"zone": "Europe/Lisbon"})),
    "bare_function": _calls(weather("Rome")),
    "think_tool": Said((), "done now", "stop"),
    "no_end_think": _calls(weather("Wien")),
    "no_args": _calls(("list_files", {})),
}
"""cut_tool is not here: what is left of a call that the model ended in the middle depends on the server's parser."""
CUT = "cut_tool"
SCRIPTS = (*WANTED, CUT)


@dataclass(frozen=True)
class Heard:
    """One script's answer, both ways."""

    whole: Said
    streamed: Said

    @property
    def same(self) -> bool:
        return self.whole == self.streamed


PARSED = {
    "think_tool": Heard(Said((), "", "stop"), WANTED["think_tool"]),
    "no_end_think": Heard(WANTED["no_end_think"], replace(WANTED["no_end_think"], content="END")),
}
"""What vLLM's parsers leave of two answers. Not streaming they take the mention for a call and lose the text behind
it, and the word that the model wrote behind its call; streaming, they send that word as text."""


def wanted(script: str, *, parsed: bool) -> Heard:
    """parsed: by vLLM."""
    plain = Heard(WANTED[script], WANTED[script])
    return PARSED.get(script, plain) if parsed else plain


def hear(client: openai.OpenAI, script: str, *, llama_cpp: bool = False) -> Heard:
    """llama_cpp: two_tools has a spelling of its own there (tests/real/tiny_model.py, PHASE)."""
    name = "two_tools_text" if llama_cpp and script == "two_tools" else script
    question: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"hi #script:{name}"}],
        "tools": TOOLS,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**question)
    with client.chat.completions.stream(**question) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot
    return Heard(said(whole), said(streamed))


def said(answer: ChatCompletion) -> Said:
    """AssertionError where a client could not use what came."""
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    assert all(call.type == "function" and call.id for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    found = tuple((call.function.name, _decoded(call.function.arguments)) for call in calls)
    return Said(found, (choice.message.content or "").strip(), choice.finish_reason)


def _decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def assert_cut_safely(heard: Heard) -> None:
    """Of cut_tool: no markup, nothing made up. What may be there is the call, as far as it came, or whole where the
    gateway read the text itself, which ended by itself."""
    for one in (heard.whole, heard.streamed):
        assert one.clean
        for name, arguments in one.calls:
            assert name == "get_weather"
            assert arguments in ({"city": "Berlin"}, {}) or isinstance(arguments, str)
            assert one.finish == ("length" if isinstance(arguments, str) else "tool_calls")
