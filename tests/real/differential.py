"""vLLM's tool parsers and ours, on the same texts: where they differ, and who is right.

`python -m tests.real.differential` prints how many come out right, what goes wrong how often, and every difference.
The texts are those of the case files (tests/wire/*.jsonl) in which tool calls are text: no thinking, nothing parsed.
Each has an expectation that was written by hand, and that is the judge of both. The reason why an answer ended is no
parser's business, so theirs are given the right one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.real.llama import make_model
from tests.real.server import Unavailable
from tests.real.vllm_cpu import interpreter
from tests.wire.cases import CASES, Case, Result, as_message, problems, run_whole, squeeze

PARSERS = ("qwen3_xml", "qwen3_coder", "hermes")
WHOLE = 0
STEPS = (1, 12)
"""Tokens that a streamed step brings: one, and many, as speculation does."""
WAYS = [(parser, step) for parser in PARSERS for step in (WHOLE, *STEPS)]
VLLM_FILE = __file__.replace("differential.py", "vllm_parsers.py")


@dataclass(frozen=True)
class Judged:
    """One parser's result on one text. wrong: what is wrong with it, by our word for it; empty: it is right."""

    case: Case
    parser: str
    step: int
    wrong: str
    detail: str
    same: bool
    """As ours."""


def usable(case: Case) -> bool:
    """The model's text alone decides: no thinking, nothing that a server parsed, no demand for a call."""
    if any(delta.get("tool_calls") or delta.get("function_call") for delta in case["chunks"]):
        return False
    message = as_message(case)
    text = message.get("content") or ""
    thinks = message.get("reasoning") or message.get("reasoning_content") or "think>" in text
    free = case["tools"] and case["tool_choice"] in (None, "auto")
    return bool(free and text and not thinks and _encodes(text))


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character: no tokenizer makes it
        return False
    return True


def texts() -> list[Case]:
    return [case for case in CASES if usable(case)]


def compare(cases: list[Case]) -> list[Judged]:
    """Every text through every parser, whole and in steps. Raises Unavailable without vLLM."""
    by_id = {case["id"]: case for case in cases}
    ours = {case["id"]: run_whole(case, as_message(case)) for case in cases}
    return [_judge(by_id[found["id"]], found, ours[found["id"]]) for found in _theirs(cases)]


def ours_wrong(cases: list[Case]) -> list[str]:
    """Ids of texts that we get wrong ourselves."""
    return [case["id"] for case in cases if problems(case, run_whole(case, as_message(case)))]


def _theirs(cases: list[Case]) -> Iterator[dict[str, Any]]:
    wanted = [
        {"id": case["id"], "text": as_message(case)["content"], "tools": case["tools"]} for case in cases
    ]
    job = {"tokenizer": str(make_model()), "parsers": PARSERS, "steps": STEPS, "texts": wanted}
    done = subprocess.run(
        [interpreter(), VLLM_FILE], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"vLLM's parsers ended with {done.returncode}:\n{done.stderr[-2000:]}")
    for line in done.stdout.splitlines():
        yield json.loads(line)


def _judge(case: Case, found: dict[str, Any], ours: Result) -> Judged:
    wanted = case["expect"]
    calls = [{"id": "x", "name": name, "arguments": arguments} for name, arguments in found["calls"]]
    theirs = Result(found["content"], wanted["reasoning_content"] or "", calls, wanted["finish_reason"])
    try:
        wrong = found["error"] or "; ".join(problems(case, theirs))
    except AssertionError as error:  # a key twice
        wrong = str(error)
    same = _meaning(theirs) == _meaning(ours)
    word = _word(case, found, theirs) if wrong else ""
    return Judged(case, found["parser"], found["step"], word, wrong, same)


def _meaning(result: Result) -> Any:
    return squeeze(result.content), [(call["name"], _loaded(call["arguments"])) for call in result.calls]


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def dialect(case: Case) -> str:
    """In what the model wrote its calls."""
    text = as_message(case)["content"]
    if "<function" in text:
        return "XML"
    return "JSON" if "<tool_call>" in text else "no call"


def _word(case: Case, found: dict[str, Any], theirs: Result) -> str:
    """What is wrong, in a few words: the worst of it."""
    if found["error"]:
        return "the parser fails"
    if dialect(case) == ("XML" if found["parser"] == "hermes" else "JSON"):
        return "the other dialect is not read"
    wanted = [(call["name"], call["arguments"]) for call in case["expect"]["tool_calls"]]
    made = [(call["name"], _loaded(call["arguments"])) for call in theirs.calls]
    cut = len(case["expect"].get("incomplete", ()))
    if len(made) > len(wanted) + cut:
        return "a call is made up"
    if len(made) < len(wanted):
        return "a call is lost"
    if cut and any(isinstance(arguments, dict) for _, arguments in made[len(wanted) :]):
        return "a cut call looks whole"
    if any(not isinstance(arguments, dict) for _, arguments in made[: len(wanted)]):
        return "arguments do not decode"
    if [name for name, _ in made[: len(wanted)]] != [name for name, _ in wanted]:
        return "another name"
    if made[: len(wanted)] != wanted:
        return "other arguments"
    return "markup in the text" if "<" in theirs.content else "text is lost or moved"


# -- printing ------------------------------------------------------------------------------------------------


def table(judged: list[Judged]) -> str:
    """Texts that come out right, by the dialect of their calls."""
    rows = [["calls", "texts", *[f"{parser}, {_way(step)}" for parser, step in WAYS]]]
    rows.append(["---"] * len(rows[0]))
    for kind in ("XML", "JSON", "no call"):
        of_kind = [one for one in judged if dialect(one.case) == kind]
        right = Counter((one.parser, one.step) for one in of_kind if not one.wrong)
        count = len({one.case["id"] for one in of_kind})
        rows.append([kind, str(count), *[str(right[way]) for way in WAYS]])
    return _markdown(rows)


def faults(judged: list[Judged]) -> str:
    """What goes wrong, and with how many texts."""
    found = Counter((one.wrong, one.parser, one.step) for one in judged if one.wrong)
    rows = [["what goes wrong", *[f"{parser}, {_way(step)}" for parser, step in WAYS]]]
    rows.append(["---"] * len(rows[0]))
    words = sorted({one.wrong for one in judged if one.wrong})
    rows += [[word, *[str(found[word, parser, step]) for parser, step in WAYS]] for word in words]
    return _markdown(rows)


def differences(judged: list[Judged]) -> list[str]:
    """Each once, with all the ways in which it comes about."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for one in judged:
        if one.wrong or not one.same:
            what = f"{one.wrong}: {one.detail[:160]}" if one.wrong else "not the same, and both are right"
            case = one.case["id"] + " (debatable)" * bool(one.case.get("debatable"))
            lines.setdefault((case, one.case["kind"], what), []).append(f"{one.parser} {_way(one.step)}")
    return [
        f"{case} [{kind}] {what} ({', '.join(ways)})" for (case, kind, what), ways in sorted(lines.items())
    ]


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _way(step: int) -> str:
    return f"streamed by {step}" if step else "whole"


def main() -> int:
    cases = texts()
    try:
        judged = compare(cases)
    except Unavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    print(table(judged), faults(judged), *differences(judged), sep="\n")
    print(f"wrong here: {', '.join(ours_wrong(cases)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
