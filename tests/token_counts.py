"""Makes tests/policies/token_counts.json: what chat requests are made of, and their tokens in a real vocabulary.

    python -m tests.token_counts qwen.tiktoken text='DIR/**/*.md' code='DIR/**/*.py' json='DIR/**/*.json' wide='DIR/*.txt'

Needs tiktoken. The vocabulary is in the package `dashscope` (resources/qwen.tiktoken). No text goes into the file, only
counts of it. The file in the repository was made from README files and manuals; Python, JavaScript and C sources; package
manifests and locks; Chinese news, reviews and interface texts.
"""

from __future__ import annotations

import base64
import glob
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from proxy.wire.errors import Api
from proxy.wire.mix import count_mix
from proxy.wire.request import read_request

ROWS = 250
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def vocabulary(path: str) -> Any:
    import tiktoken  # type: ignore[import-not-found,unused-ignore]

    pairs = (line.split() for line in Path(path).read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    special = {"<|im_start|>": len(ranks) + 1, "<|im_end|>": len(ranks) + 2}
    return tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def body(rng: Random, texts: list[str]) -> tuple[bytes, str]:
    """A chat request of one to seven messages, and what the model reads of it."""
    messages = []
    for turn in range(1 if rng.random() < 0.6 else rng.choice((3, 5, 7))):
        text = rng.choice(texts)
        size = int(10 ** rng.uniform(2.3, 4.7))
        at = rng.randrange(max(1, len(text) - size))
        messages.append({"role": "assistant" if turn % 2 else "user", "content": text[at : at + size]})
    compact = rng.random() < 0.7
    separators = (",", ":") if compact else (", ", ": ")
    ascii_only = not compact and rng.random() < 0.5
    raw = json.dumps({"messages": messages}, ensure_ascii=ascii_only, separators=separators).encode()
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return raw, "".join(turns) + "<|im_start|>assistant\n<think>\n"


def main() -> None:
    tokens, rng = vocabulary(sys.argv[1]), Random(5)
    rows: list[list[object]] = []
    for argument in sys.argv[2:]:
        kind, _, pattern = argument.partition("=")
        paths = [path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()]
        texts = [path.read_text("utf-8", "ignore") for path in paths]
        for _ in range(ROWS):
            raw, text = body(rng, texts)
            counts = count_mix(read_request(Api.CHAT, raw))
            count = len(tokens.encode(text, allowed_special="all"))
            rows.append([kind, [round(value) for value in counts], count])
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    Path("tests/policies/token_counts.json").write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
