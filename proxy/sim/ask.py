"""A request, read and refused as vLLM would.

Rules: pure. `read` gives an `Ask` or raises `Refused` with vLLM's status and body. Fields that the simulator
does not model are ignored, as are unknown ones.

The last line `#sim key=value …` in the last user message (or prompt) steers the answer: `tokens` (of content),
`think` (of reasoning), `calls` (how many tool calls; 0 for none), `text` (the content itself, `_` for a space).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

Json = dict[str, object]

_STEER = re.compile(r"#sim((?: +\w+=\S+)+)")
_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty")
_INTEGERS = ("max_tokens", "max_completion_tokens", "n", "seed", "min_tokens", "top_logprobs", "top_k")
_BOOLEANS = (
    "stream",
    "ignore_eos",
    "return_token_ids",
    "parallel_tool_calls",
    "continue_final_message",
    "add_generation_prompt",
)


class Refused(Exception):
    """An error answer."""

    def __init__(self, status: int, body: Json) -> None:
        super().__init__(str(body))
        self.status = status
        self.body = body


def error(message: str, kind: str, param: str | None, code: int) -> Json:
    """vLLM's envelope: `code` is the HTTP status as a number."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refuse(message: str, param: str | None = None, value: object = None) -> Refused:
    if param is not None:
        message += f" (parameter={param}" + (f", value={value})" if value is not None else ")")
    return Refused(400, error(message, "BadRequestError", param, 400))


def invalid(kind: str, loc: str, message: str, rest: str) -> Refused:
    text = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{loc}', 'msg': '{message}', {rest}}}"
    return Refused(400, error(text, "Bad Request", loc, 400))


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    schema: object


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked for. `prompt` is the rendered text; `choice` is vLLM's tool_choice mode or "named"."""

    chat: bool
    prompt: bytes
    max_tokens: int | None
    prompt_ids: tuple[int, ...] = ()  # where the prompt came as ids
    stream: bool = False
    usage: bool = False
    continuous: bool = False
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    token_ids: bool = False
    logprobs: int | None = None
    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    named: str | None = None
    answered: bool = False  # the last message is a tool's result
    goes_on: bool = False  # the last message is the beginning of the answer
    thinking: bool = False
    schema: object = None
    steer: dict[str, str] = field(default_factory=dict)


def parse(raw: bytes, content_type: str) -> Json:
    """The body as an object."""
    if content_type.split(";")[0].strip().lower() != "application/json":
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refused(400, error(text, "Bad Request", None, 400))
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as e:
        rest = f"'input': '<dict of 0 items>', 'ctx': {{'error': '{e.msg}'}}"
        raise invalid("json_invalid", f"body.{e.pos}", "JSON decode error", rest) from None
    except UnicodeDecodeError:
        raise Refused(400, error("There was an error parsing the body", "Bad Request", None, 400)) from None
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", message, f"'input': {body!r}")
    return body


def read(
    body: Json,
    model: str,
    *,
    chat: bool,
    thinking: bool,
    window: int,
    tool_parser: bool,
    decode: Callable[[list[int]], bytes],
) -> Ask:
    """Check in vLLM's order: types, model, options, template, lengths are left to `fit`. decode: of a prompt of ids."""
    _check_types(body, "messages" if chat else "prompt")
    check_model(body, model)
    stream, options = bool(body.get("stream")), body.get("stream_options")
    options = options if isinstance(options, dict) else None
    if options is not None and not stream:
        raise refuse("Stream options can only be defined when `stream=True`.", "stream_options")
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        value = float(temperature)
        raise refuse(f"temperature must be non-negative, got {value}.", "temperature", value)
    limit = body.get("max_completion_tokens", body.get("max_tokens", None if chat else 16))
    if isinstance(limit, int) and limit > window:
        message = f"max_tokens={limit} cannot be greater than max_model_len={window}."
        raise refuse(f"{message} Please request fewer output tokens.", "max_tokens", limit)
    if isinstance(limit, int) and limit < 1:
        raise refuse(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    tools, choice, named = _tools(body, tool_parser) if chat else ((), "none", None)
    thinks = chat and _thinks(body, thinking)
    prompt, last, answered = _chat_prompt(body, model, thinks) if chat else _text_prompt(body, decode)
    return Ask(
        chat=chat,
        prompt=prompt,
        max_tokens=limit if isinstance(limit, int) else None,
        prompt_ids=() if chat else prompt_ids(body),
        stream=stream,
        usage=bool(options and options.get("include_usage")),
        continuous=bool(options and options.get("continuous_usage_stats")),
        n=max(1, _integer(body, "n") or 1),
        seed=_integer(body, "seed"),
        stop=_stops(body.get("stop")),
        ignore_eos=bool(body.get("ignore_eos")),
        min_tokens=_integer(body, "min_tokens") or 0,
        token_ids=bool(body.get("return_token_ids")),
        logprobs=(_integer(body, "top_logprobs") or 0) if chat and body.get("logprobs") else None,
        tools=tools,
        choice=choice,
        named=named,
        answered=answered,
        goes_on=chat and goes_on(body),
        thinking=thinks,
        schema=_schema(body),
        steer=steering(last),
    )


def steering(text: str) -> dict[str, str]:
    """What the last `#sim` line in `text` says."""
    found = _STEER.findall(text)
    return dict(pair.split("=", 1) for pair in found[-1].split()) if found else {}


def fit(tokens: int, window: int) -> None:
    """Refuse a prompt that leaves no room for output; vLLM stops counting at the first token too many."""
    if tokens >= window:
        message = (
            f"This model's maximum context length is {window} tokens. However, your prompt contains at least "
            f"{window + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            "the length of the input prompt."
        )
        raise refuse(message, "input_tokens", window + 1)


def check_model(body: Json, model: str) -> None:
    asked = body.get("model")
    if asked not in (None, model):
        message = f"The model `{asked}` does not exist. Valid aliases: {model}."
        raise Refused(404, error(message, "NotFoundError", "model", 404))


def _no_ids(ids: list[int]) -> bytes:
    """/tokenize takes text only; whoever sends it numbers gets those of them that are characters."""
    return bytes(id for id in ids if id < 256)


def render(body: Json, model: str, thinking: bool) -> bytes:
    """The prompt of /tokenize: text as it is, messages through the template."""
    if isinstance(body.get("messages"), list):
        return _chat_prompt(body, model, _thinks(body, thinking))[0]
    return _text_prompt(body, _no_ids)[0]


def _check_types(body: Json, needed: str) -> None:
    if needed not in body:
        raise invalid(
            "missing", f"body.{needed}", "Field required", f"'input': '<dict of {len(body)} items>'"
        )
    for name in _NUMBERS + _INTEGERS:
        value = body.get(name)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            continue
        kind, word = ("float", "number") if name in _NUMBERS else ("int", "integer")
        message = f"Input should be a valid {word}, unable to parse string as {'an' if kind == 'int' else 'a'} {word}"
        raise invalid(f"{kind}_parsing", f"body.{name}", message, f"'input': {value!r}")
    for name in _BOOLEANS:
        if not isinstance(body.get(name), bool | None):
            message = "Input should be a valid boolean, unable to interpret input"
            raise invalid("bool_parsing", f"body.{name}", message, f"'input': {body[name]!r}")
    if needed == "messages" and not isinstance(body["messages"], list):
        message = "Input should be a valid list"
        raise invalid("list_type", "body.messages", message, f"'input': {body['messages']!r}")


def _tools(body: Json, parser: bool) -> tuple[tuple[Tool, ...], str, str | None]:
    listed, choice = body.get("tools"), body.get("tool_choice")
    if not isinstance(listed, list) or not listed:
        if choice not in (None, "none"):
            raise refuse("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return (), "none", None
    functions = [t.get("function") for t in listed if isinstance(t, dict)]
    tools = tuple(Tool(str(f.get("name")), f.get("parameters")) for f in functions if isinstance(f, dict))
    if isinstance(choice, dict):
        function = choice.get("function")
        return tools, "named", str(function.get("name")) if isinstance(function, dict) else None
    mode = str(choice or "auto")
    if mode == "auto" and not parser:
        raise refuse('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    return tools, mode, None


def _thinks(body: Json, default: bool) -> bool:
    extra = body.get("chat_template_kwargs")
    asked = extra.get("enable_thinking") if isinstance(extra, dict) else None
    return asked if isinstance(asked, bool) else default


def goes_on(body: Json) -> bool:
    """The last message is to be continued. vLLM refuses to begin an answer behind it as well."""
    wanted = bool(body.get("continue_final_message"))
    if wanted and body.get("add_generation_prompt", True):
        message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise invalid("value_error", "body", f"Value error, {message}", "'input': '<dict of items>'")
    return wanted


def _chat_prompt(body: Json, model: str, thinking: bool) -> tuple[bytes, str, bool]:
    """(prompt, last user text, whether a tool's result comes last)."""
    messages = [m for m in _list(body.get("messages")) if isinstance(m, dict)]
    if not messages:
        raise refuse("Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = []
    if body.get("tools"):
        parts.append(f"<|im_start|>system\n# Tools\n{json.dumps(body['tools'])}<|im_end|>\n")
    last = ""
    begun = messages.pop() if goes_on(body) and len(messages) > 1 else None
    for message in messages:
        role, text = str(message.get("role")), _content(message.get("content"), model)
        if message.get("tool_calls"):
            text += f"\n<tool_call>{json.dumps(message['tool_calls'])}</tool_call>"
        if role == "user":
            last = text
        parts.append(f"<|im_start|>{role}\n{text}<|im_end|>\n")
    parts.append("<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n"))
    if begun is not None:  # as this model writes it
        thought = str(begun.get("reasoning") or begun.get("reasoning_content") or "")
        parts.append((f"{thought}</think>" if thought else "") + _content(begun.get("content"), model))
    return "".join(parts).encode("utf-8", "replace"), last, messages[-1].get("role") == "tool"


def _content(content: object, model: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in _list(content):
        if not isinstance(part, dict):
            continue
        if str(part.get("type")).startswith(("image", "video", "audio", "input_audio")):
            raise refuse(f"{model} is not a multimodal model")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def prompt_ids(body: Json) -> tuple[int, ...]:
    """A prompt that came as ids."""
    return tuple(part for part in _list(body.get("prompt")) if isinstance(part, int))


def _text_prompt(body: Json, decode: Callable[[list[int]], bytes]) -> tuple[bytes, str, bool]:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        if ids := prompt_ids(body):
            raw = decode(list(ids))
            return raw, "", False
        prompt = "".join(map(str, prompt))
    text = str(prompt)
    return text.encode("utf-8", "replace"), text, False


def _schema(body: Json) -> object:
    wanted = body.get("response_format")
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") == "json_object":
        return {"type": "object"}
    inner = wanted.get("json_schema")
    return inner.get("schema") if isinstance(inner, dict) else None


def _stops(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(s for s in _list(value) if isinstance(s, str))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _integer(body: Json, name: str) -> int | None:
    value = body.get(name)
    return int(value) if isinstance(value, int | float) else None
