"""vLLM's own tool parsers, run on texts: whole, and streamed in steps of so many tokens. No engine, no server.

Run by vLLM's interpreter, which has none of our packages (tests/real/differential.py does). stdin: {"tokenizer": folder,
"parsers": [...], "steps": [...], "texts": [{"id", "text", "tools"}]}; stdout: a JSON line for each result, {"id",
"parser", "step" (0: whole), "content", "calls": [[name, arguments]], "error"}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    # What is imported and what the parsers log goes to stderr; stdout is for results.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    job = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    for name in job["parsers"]:
        make = ToolParserManager.get_tool_parser(name)
        for text in job["texts"]:
            request = ChatCompletionRequest(
                model="m", messages=[{"role": "user", "content": "x"}], tools=text["tools"]
            )
            for step in (0, *job["steps"]):
                found = {
                    "id": text["id"],
                    "parser": name,
                    "step": step,
                    "content": "",
                    "calls": [],
                    "error": None,
                }
                try:
                    parser = make(tokenizer, request.tools)
                    if step:
                        _stream(parser, tokenizer, request, text["text"], step, found)
                    else:
                        _whole(parser, request, text["text"], found)
                except Exception as error:  # a parser's failure is a result
                    found["error"] = f"{type(error).__name__}: {error}"
                print(json.dumps(found), file=out, flush=True)


def _whole(parser: Any, request: Any, text: str, found: dict[str, Any]) -> None:
    answer = parser.extract_tool_calls(text, request=request)
    found["content"] = answer.content or ""
    found["calls"] = [[call.function.name, call.function.arguments] for call in answer.tool_calls]


def _stream(parser: Any, tokenizer: Any, request: Any, text: str, step: int, found: dict[str, Any]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    before, before_ids = "", []
    for start in range(0, len(ids), step):
        now_ids = ids[: start + step]
        now = tokenizer.decode(now_ids, skip_special_tokens=False)
        while now.endswith("\N{REPLACEMENT CHARACTER}"):  # a server's detokenizer waits for whole characters
            now = now[:-1]
        added = ids[len(before_ids) : start + step]
        delta = parser.extract_tool_calls_streaming(
            before, now, now[len(before) :], before_ids, now_ids, added, request
        )
        _note(delta, found)
        before, before_ids = now, now_ids
    finish = getattr(parser, "finish_streaming", None)
    if finish is not None:
        _note(finish(), found)


def _note(delta: Any, found: dict[str, Any]) -> None:
    """One delta, put together as a client does: by index."""
    if delta is None:
        return
    found["content"] += delta.content or ""
    for part in delta.tool_calls or ():
        calls = found["calls"]
        while len(calls) <= part.index:
            calls.append([None, ""])
        if part.function is not None:
            calls[part.index][0] = part.function.name or calls[part.index][0]
            calls[part.index][1] += part.function.arguments or ""


if __name__ == "__main__":
    main()
