"""The request side: history that would make a backend refuse the conversation for ever is put right.

Rules: messages that are sound stay the same objects, and a sound list comes back as the very list. What is
changed is counted by kind. Nothing is thrown away that the model could use: arguments that are no object become
one with the text in it, a tool message without its call becomes what the user says. `arguments` leave as JSON text
of an object, integers of any size kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from proxy.wire.coerce import Tool, Toolset
from proxy.wire.toolargs import unwrap

Message = dict[str, Any]

MAX_MENDED = 128 * 1024
"""Characters of unsound arguments in one conversation that are read for what they mean; more are only quoted."""


@dataclass(slots=True)
class HistoryRepairs:
    """How many of each were repaired.

    arguments: no JSON object, doubly encoded, empty or null. ids: missing ids of calls or of tool messages.
    types: a call's type missing, or an empty list of calls. orphans: tool messages without a call.
    reasoning: the field's spelling.
    """

    arguments: int = 0
    ids: int = 0
    types: int = 0
    orphans: int = 0
    reasoning: int = 0

    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def repair_history(
    messages: Sequence[Any], tools: Toolset, new_id: Callable[[], str], *, reasoning: str | None = None
) -> tuple[Sequence[Any], HistoryRepairs]:
    """The messages as a backend can take them. `reasoning`: the field name it reads, None leaves both spellings."""
    repairs, out = HistoryRepairs(), []
    mend = _Mender(tools)
    open_ids: list[str] = []  # of calls that no tool message answered yet
    for message in messages:
        if not isinstance(message, dict):
            out.append(message)
            continue
        role = message.get("role")
        if role == "assistant":
            message = _spell_reasoning(message, reasoning, repairs)
            message = _repair_calls(message, mend, new_id, repairs)
            calls = message.get("tool_calls")
            open_ids = _ids(calls) if isinstance(calls, list) else []
        elif role == "tool":
            message = _repair_result(message, open_ids, repairs)
        elif role == "user":
            open_ids = []
        out.append(message)
    return (out, repairs) if repairs.total() else (messages, repairs)


def _ids(calls: list[Any]) -> list[str]:
    found = [call.get("id") for call in calls if isinstance(call, dict)]
    return [identifier for identifier in found if isinstance(identifier, str)]


def _spell_reasoning(message: Message, wanted: str | None, repairs: HistoryRepairs) -> Message:
    """Thinking under the name the backend reads; nothing is overwritten."""
    if wanted is None:
        return message
    other = "reasoning" if wanted == "reasoning_content" else "reasoning_content"
    if not isinstance(message.get(other), str) or message.get(wanted):
        return message
    repairs.reasoning += 1
    changed = {key: value for key, value in message.items() if key != other}
    changed[wanted] = message[other]
    return changed


def _repair_calls(
    message: Message, mend: _Mender, new_id: Callable[[], str], repairs: HistoryRepairs
) -> Message:
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if calls == []:
        repairs.types += 1  # servers refuse an empty list
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list):
        return message
    repaired = [_repair_call(call, mend, new_id, repairs) for call in calls]
    if all(new is old for new, old in zip(repaired, calls, strict=True)):
        return message
    return {**message, "tool_calls": repaired}


def _repair_call(call: Any, mend: _Mender, new_id: Callable[[], str], repairs: HistoryRepairs) -> Any:
    """One call of the history: an id, a type, a name, and arguments that decode to an object."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function, changed = call["function"], dict(call)
    if not isinstance(call.get("id"), str) or not call["id"]:
        repairs.ids += 1
        changed["id"] = new_id()
    if call.get("type") != "function":
        repairs.types += 1
        changed["type"] = "function"
    arguments = mend(function.get("arguments"), str(function.get("name") or ""))
    if arguments != function.get("arguments"):
        repairs.arguments += 1
        changed["function"] = {**function, "arguments": arguments}
    return changed if changed != call else call


def repair_arguments(arguments: Any, name: str, tools: Toolset, room: int = MAX_MENDED) -> str:
    """JSON text of an object: the given text if it is that, else what it means, else an object that quotes it. room:
    characters that may be read for what they mean."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    if arguments is None:
        return "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if is_object(text):
        return text
    if len(text) <= room:
        tool = tools.by_name.get(name) or Tool(name, None)
        found = unwrap(text, tool, tools)
        if found is not None and is_object(found):
            return found
    return json.dumps({"arguments": text}, ensure_ascii=False)


class _Mender:
    """`repair_arguments` for the calls of one conversation: what is unsound is read up to a limit, for nobody may keep
    the gateway busy with it."""

    def __init__(self, tools: Toolset) -> None:
        self._tools = tools
        self._room = MAX_MENDED

    def __call__(self, arguments: Any, name: str) -> str:
        text = repair_arguments(arguments, name, self._tools, self._room)
        if text != arguments and isinstance(arguments, str | list):
            self._room -= len(text)
        return text


def is_object(text: str) -> bool:
    """Whether a text is sound JSON of an object (no NaN, which servers refuse)."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(
            json.loads(text, parse_constant=_refuse, parse_int=_number, parse_float=_number), dict
        )
    except (ValueError, RecursionError):
        return False


def _refuse(word: str) -> None:
    raise ValueError(word)


def _number(word: str) -> str:
    return word  # only its place counts, and int() refuses very long ones


def _repair_result(message: Message, open_ids: list[str], repairs: HistoryRepairs) -> Message:
    """A tool message: its call's id (by order where it has none), or, without a call, what the user says."""
    given = message.get("tool_call_id")
    if isinstance(given, str) and given in open_ids:
        open_ids.remove(given)
        return message
    if open_ids:
        repairs.ids += 1
        return {**message, "tool_call_id": open_ids.pop(0)}
    repairs.orphans += 1
    kept = {key: value for key, value in message.items() if key not in ("tool_call_id", "name", "role")}
    return {"role": "user", **kept}
