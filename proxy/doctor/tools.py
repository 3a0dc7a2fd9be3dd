"""Whether tool calls come as tool calls, and whether a demanded one comes at all.

Rules: with `auto` a model may answer in words, so only markup in the text is a finding. `required` is asked several
times, each with another prompt, for what breaks it breaks a share of requests.
"""

from __future__ import annotations

import json
import re

from proxy.doctor.patient import Patient, Said
from proxy.probe import Verdict
from proxy.wire.errors import read_error

PROMPTS = ("Paris", "Oslo", "Lima", "Cairo", "Quito", "Seoul", "Hanoi", "Accra")
TOKENS = 512
MARKUP = re.compile(r"</?tool_call>|<function=|<parameter=|<\|tool|\[TOOL_CALLS\]|\"arguments\"\s*:")
QUIET = {"enable_thinking": False}


def _tool(name: str, what: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {
        "type": "function",
        "function": {"name": name, "description": what, "parameters": parameters},
    }


TOOLS = [_tool("get_weather", "The weather of a city."), _tool("get_time", "The local time of a city.")]


async def tools(patient: Patient) -> None:
    if patient.backend.parser == "none":
        return  # every call is read by the gateway; `check` sees whether tools are rendered
    if not await _auto(patient):
        return
    if patient.backend.enforces_choice:
        patient.tell("required", Verdict.OK, "seen to by the gateway")
        return
    wrong = [one for one in [await _demanded(patient, city, "required") for city in PROMPTS] if one]
    fix = 'set tool_choice = "auto_enforced": the gateway sees to it'
    if wrong:
        detail = f'tool_choice "required": {len(wrong)} of {len(PROMPTS)} went wrong: {wrong[0]}'
        patient.tell("required", Verdict.PROBLEM, detail, fix, tool_choice="auto_enforced")
        return
    patient.tell("required", Verdict.OK, f"{len(PROMPTS)} of {len(PROMPTS)}")
    one = await _demanded(patient, PROMPTS[0], "get_time")
    if one:
        patient.tell(
            "named", Verdict.PROBLEM, f"a named tool_choice: {one}", fix, tool_choice="auto_enforced"
        )
    else:
        patient.tell("named", Verdict.OK, "the named tool is called")


async def _ask(patient: Patient, city: str, choice: object, stream: bool) -> Said:
    text = f"What is the weather in {city} now? Use the tool."
    ask = patient.stream if stream else patient.chat
    return await ask(text, TOKENS, tools=TOOLS, tool_choice=choice, chat_template_kwargs=QUIET)


async def _auto(patient: Patient) -> bool:
    """True if the server reads calls by itself."""
    fix = 'start it with a tool parser (vLLM: --enable-auto-tool-choice --tool-call-parser), or set parser = "none"'
    for stream in (True, False):
        said = await _ask(patient, PROMPTS[0], "auto", stream)
        if said.status != 200:
            quote = read_error(said.status, "application/json", said.body).message
            detail = f'tool_choice "auto" answers {said.status}: {quote}'
            patient.tell("tools", Verdict.PROBLEM, detail, fix, parser="none")
            return False
        if MARKUP.search(said.content):
            how = "streamed" if stream else "not streamed"
            detail = f"a tool call comes as text ({how}): {said.content.strip()[:60]!r}"
            patient.tell("tools", Verdict.PROBLEM, detail, fix, parser="none")
            return False
    patient.tell("tools", Verdict.OK, "no markup in the text")
    return True


async def _demanded(patient: Patient, city: str, choice: str) -> str:
    """What is wrong with the answer to a demanded call; empty: nothing."""
    asked: object = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    said = await _ask(patient, city, asked, stream=True)
    if said.status != 200:
        return f"it answers {said.status}"
    if not said.calls:
        return "no call" + (", but markup in the text" if MARKUP.search(said.content) else "")
    name, arguments = said.calls[0]
    if name not in (("get_weather", "get_time") if choice == "required" else (choice,)):
        return f"a call of {name!r}"
    try:
        value = json.loads(arguments)
    except ValueError:
        return "arguments that are no JSON"
    return "" if isinstance(value, dict) else "arguments that are no object"
