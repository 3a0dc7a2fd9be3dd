"""Text without a model: a byte tokenizer, prose, and values that fit a JSON schema.

Rules: the same seed gives the same text, on every machine. A token is up to `width` bytes of UTF-8, and its id
says which: ids of one-byte tokens are the bytes themselves, longer ones follow in order of length.
"""

from __future__ import annotations

from random import Random

WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "for", "was", "on", "are", "as", "with", "they",
    "at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were",
    "when", "we", "there", "can", "an", "your", "which", "their", "said", "if", "do", "will", "each",
    "about", "how", "up", "out", "them", "then", "she", "many", "some", "so", "these", "would", "other",
    "into", "has", "more", "her", "two", "like", "him", "see", "time", "could", "no", "make", "than",
    "first", "been", "its", "who", "now", "people", "my", "made", "over", "did", "down", "only", "way",
    "find", "use", "may", "water", "long", "little", "very", "after", "words", "called", "just", "where",
    "most", "know",
)  # fmt: skip


class Tokenizer:
    def __init__(self, width: int) -> None:
        self.width = width
        self._starts = [0, 0]
        for length in range(1, width + 1):
            self._starts.append(self._starts[length] + 256**length)

    def count(self, size: int) -> int:
        """Tokens of so many bytes."""
        return -(-size // self.width)

    def encode(self, data: bytes) -> list[int]:
        pieces = (data[i : i + self.width] for i in range(0, len(data), self.width))
        return [self._starts[len(piece)] + int.from_bytes(piece, "big") for piece in pieces]

    def decode(self, ids: list[int]) -> bytes:
        return b"".join(self._bytes(id) for id in ids)

    def end_id(self) -> int:
        """The id of the end token, which no bytes have."""
        return self._starts[-1]

    def _bytes(self, id: int) -> bytes:
        for length in range(1, self.width + 1):
            if self._starts[length] <= id < self._starts[length + 1]:
                return (id - self._starts[length]).to_bytes(length, "big")
        return b""


def prose(rng: Random, size: int) -> str:
    """Words of exactly `size` bytes, all ASCII."""
    parts: list[str] = []
    length = 0
    while length < size:
        word = " " + rng.choice(WORDS)
        parts.append(word)
        length += len(word)
    return "".join(parts)[:size]


def example(schema: object, rng: Random, depth: int = 0) -> object:
    """A value that fits a plain JSON schema; keywords beyond type, enum, const and their like are not read."""
    if not isinstance(schema, dict) or depth > 8:
        return {}
    if "const" in schema:
        return schema["const"]
    options = schema.get("enum")
    if isinstance(options, list) and options:
        return rng.choice(options)
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        if isinstance(choices, list) and choices:
            return example(choices[0], rng, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0] if kind else "string"
    match kind:
        case "object":
            fields = schema.get("properties")
            fields = fields if isinstance(fields, dict) else {}
            return {name: example(inner, rng, depth + 1) for name, inner in fields.items()}
        case "array":
            return [example(schema.get("items", {"type": "string"}), rng, depth + 1)]
        case "integer":
            low = schema.get("minimum", 1)
            return (low if isinstance(low, int) else 1) + rng.randrange(9)
        case "number":
            return rng.randrange(1, 1000) / 8
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return rng.choice(WORDS)
