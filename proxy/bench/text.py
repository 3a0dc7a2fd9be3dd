"""Prompts of so many tokens, for a tokenizer that nobody has here.

Rules: plain words; the same seed and name make the same text. How many tokens a word is, is learned from what the
server says of two prompts, and a length that has to be met is corrected by what it says of the first try. What is to
be cold begins with a mark of its own, so that no cache knows more than its first few tokens.
"""

from __future__ import annotations

from random import Random

from proxy.bench.stream import Client, Failed
from proxy.sim.text import WORDS

GUESS = 1.3
"""Tokens a word where the server does not count."""
CLOSE = 0.002
"""Of a length: near enough."""


class Texts:
    """base, per_word: tokens of a prompt of no word, of one more word."""

    def __init__(self, seed: int | str) -> None:
        self.seed = seed
        self.base, self.per_word = 0.0, GUESS
        self.known = False
        self._words: dict[tuple[str, int], int] = {}

    async def learn(self, client: Client) -> None:
        """Ask for two prompts; without reported usage the guess stays."""
        few, many = 32, 256
        heard = [await client.ask(self.words("learn", count)) for count in (few, many)]
        if all(one.prompt for one in heard):
            one, other = float(heard[0].prompt or 0), float(heard[1].prompt or 0)
            if other > one:
                self.per_word = (other - one) / (many - few)
                self.base = one - few * self.per_word
                self.known = True

    def words(self, name: str, count: int) -> str:
        rng = Random(f"{self.seed}:{name}")
        mark = f"{rng.getrandbits(40):010x}"
        return " ".join([mark, *(rng.choice(WORDS) for _ in range(max(1, count)))])

    def about(self, name: str, tokens: int) -> str:
        """As many tokens as is known now."""
        return self.words(name, round((tokens - self.base) / self.per_word))

    async def exact(self, client: Client, name: str, tokens: int) -> str:
        """So many tokens, as the server counts; it has read the text afterwards. Raises `Failed`."""
        count = self._words.get((name, tokens), round((tokens - self.base) / self.per_word))
        text = self.words(name, count)
        for _ in range(4):
            heard = await client.ask(text)
            if heard.prompt is None:
                return text
            off = tokens - heard.prompt
            if abs(off) <= max(2, CLOSE * tokens):
                self._words[name, tokens] = count
                return text
            count += round(off / self.per_word) or (1 if off > 0 else -1)
            text = self.words(name, count)
        raise Failed(
            f"no text of {tokens} tokens could be made: the server counts the same words differently"
        )
