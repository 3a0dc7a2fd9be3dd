"""Whether prompts are what they are taken for: the window, the cache of prefixes, thinking in earlier messages.

Rules: a prompt of nearly the whole window is asked only when that is wanted (`deep`): it costs a prefill of as many
tokens.
"""

from __future__ import annotations

from proxy.doctor.patient import CHAT, Patient
from proxy.probe import Verdict, models_of, prompt_tokens_of
from proxy.wire.errors import is_context_overflow, read_error

WORD = "word "
LONG_SECONDS = 600.0
BLOCKS = 1800
"""Words of a prompt that fills more than two cache blocks of any size in use (784 tokens)."""


async def window(patient: Patient) -> None:
    listed = models_of((await patient.ask("GET", "/v1/models")).body)
    reported = listed.get(patient.model)
    if reported is None:
        return  # told already
    kv = (await patient.metrics()).kv_tokens
    used = min(reported, patient.backend.limits.window_tokens or reported)
    if kv is not None and kv < used:
        fix = f"set limits.window_tokens = {kv}, or give it more memory"
        detail = f"{used} tokens, but its KV cache holds {kv}"
        patient.tell("window size", Verdict.WARNING, detail, fix, limits__window_tokens=kv)
        return
    per_word = await _tokens_per_word(patient)
    if per_word is None:
        return
    words = int(reported * 1.1 / per_word) + 64
    answer = await patient.ask("POST", CHAT, _body(WORD * words, 1))
    if answer.status == 200:
        detail = f"a prompt longer than its {reported} tokens is answered: cut, or is the window larger?"
        fix = "find out which: an answer to a part of the prompt is a wrong answer"
        patient.tell("window size", Verdict.PROBLEM, detail, fix)
        return
    error = read_error(answer.status, answer.kind, answer.body)
    if not is_context_overflow(error):
        fix = "the gateway tries a larger window only for errors that it takes for an overflow"
        patient.tell(
            "window size",
            Verdict.WARNING,
            f"a prompt that is too long answers {answer.status}: {answer.quote()}",
            fix,
        )
        return
    if patient.deep:
        body = _body(WORD * int(reported * 0.97 / per_word), 1)
        nearly = await patient.ask("POST", CHAT, body, seconds=LONG_SECONDS)
        if nearly.status != 200:
            detail = (
                f"{reported} tokens, but a prompt of 97 % of them answers {nearly.status}: {nearly.quote()}"
            )
            patient.tell("window size", Verdict.PROBLEM, detail, "set limits.window_tokens to what it takes")
            return
    how = "97 % of it is taken, what is longer refused" if patient.deep else "what is longer is refused"
    patient.tell("window size", Verdict.OK, f"{reported} tokens: {how}")


async def _tokens_per_word(patient: Patient) -> float | None:
    counts = []
    for words in (50, 550):
        answer = await patient.ask("POST", CHAT, _body(WORD * words, 1))
        counts.append(prompt_tokens_of(answer.body) if answer.status == 200 else None)
    few, many = counts
    return (many - few) / 500 if few is not None and many is not None and many > few else None


def _body(text: str, tokens: int) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}


async def cache(patient: Patient) -> None:
    """The same long prompt twice: the second should find most of it."""
    found = []
    text = f"{patient.clock.wall()} " + WORD * BLOCKS
    for _ in range(2):
        before = await patient.metrics()
        said = await patient.chat(text, 1, seconds=4 * patient.seconds)
        details = said.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if cached is None and before.prefix_hits is not None:
            cached = ((await patient.metrics()).prefix_hits or 0.0) - before.prefix_hits
        found.append(cached)
    if found[1] is None:
        patient.tell("prefix cache", Verdict.OK, "not told")
    elif found[1] > 0:
        patient.tell("prefix cache", Verdict.OK, f"{found[1]:.0f} tokens found again")
    else:
        fix = "start it with prefix caching (vLLM: --enable-prefix-caching): each turn now costs all turns before it"
        patient.tell("prefix cache", Verdict.WARNING, "a prompt that was just read is read anew", fix)


async def history(patient: Patient) -> None:
    """Under which name does it read the thinking of a turn that is still going on (a tool was called)?"""
    if patient.backend.history_reasoning is not None:
        return
    sizes: dict[str, int | None] = {}
    for name in ("", "reasoning", "reasoning_content"):
        call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
        turn = {
            "role": "assistant",
            "content": "",
            "tool_calls": [call],
            **({name: WORD * 50} if name else {}),
        }
        messages = [
            {"role": "user", "content": "ping"},
            turn,
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        ]
        answer = await patient.ask("POST", CHAT, {"messages": messages, "max_tokens": 1})
        sizes[name] = prompt_tokens_of(answer.body) if answer.status == 200 else None
    without = sizes.pop("")
    if without is None:
        return
    read = [name for name, size in sizes.items() if size is not None and size > without + 20]
    if len(read) == 1:
        fix = f'set history_reasoning = "{read[0]}": clients spell it otherwise'
        detail = f"thinking in earlier messages is read as {read[0]} only"
        patient.tell("history", Verdict.NOTE, detail, fix, history_reasoning=read[0])
    else:
        patient.tell("history", Verdict.OK, "read under both names" if read else "thinking is not read")
