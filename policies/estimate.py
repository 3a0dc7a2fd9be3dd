"""How many tokens a prompt has, from its size alone.

Rules: no tokenizer, no text: counts and bytes in, a `ContextEstimate` with true bounds out. Every constant
is a field of `TokenRatio`, an argument: calibration replaces the ratio, never this arithmetic.

Counted: the JSON text of messages, prompt, input, system and tools; the chat template's tokens round each
message and before the first; images. Not counted: audio and video; what the server puts in by itself (a
retrieved document, a stored previous response); tokens that a normaliser adds by lengthening the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from policies.frozen import frozen
from policies.types import ContextEstimate


@frozen
class PromptSizes:
    """What was measured of a request body.

    text_bytes: JSON bytes, as they came, of everything the model reads except tools: the spans of messages,
    prompt, input, system.
    messages: how many. tools_bytes: JSON bytes of the tool declarations. images: how many.
    media_bytes: the part of text_bytes that is base64 payload, or else never rendered: not text.
    words: runs of non-whitespace in the rendered part of text and tools, None if nobody counted. Unicode
    whitespace separates words and is none; keys and brackets of the JSON round the text are no words.
    sequences: independent prompts that the text is split into, as in a list of prompts or embedding inputs.
    """

    text_bytes: int
    messages: int = 0
    tools_bytes: int = 0
    images: int = 0
    media_bytes: int = 0
    words: int | None = None
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """Sizes to tokens: the expected value, and the least and most that any text, image or template gives.

    most_bytes_per_token is the longest token of the vocabulary, written as JSON. In Qwen's it is 128
    spaces; 240 of its tokens are longer than 32 bytes, so a smaller figure would refuse long runs of spaces
    or dashes that fit. fewest_bytes_per_token 1.0 is a tokenizer that gives every byte its own token; none
    does worse. Images: Qwen-VL's default resizing gives 4 to 16384 tokens. Template: start, role and end
    tokens of a message; most_template_tokens is the preamble (default system prompt, instructions for tool
    use, an opened thinking block), once per conversation.
    """

    bytes_per_token: float = 3.6
    fewest_bytes_per_token: float = 1.0
    most_bytes_per_token: float = 128.0
    tokens_per_image: int = 1024
    fewest_tokens_per_image: int = 4
    most_tokens_per_image: int = 16384
    tokens_per_message: int = 5
    most_tokens_per_message: int = 16
    most_template_tokens: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.fewest_bytes_per_token <= self.bytes_per_token <= self.most_bytes_per_token:
            raise ValueError("bytes per token must be positive and ordered: fewest <= expected <= most")
        if not 0 <= self.fewest_tokens_per_image <= self.tokens_per_image <= self.most_tokens_per_image:
            raise ValueError("tokens per image must be ordered: fewest <= expected <= most")
        if not 0 <= self.tokens_per_message <= self.most_tokens_per_message:
            raise ValueError("tokens per message must be ordered: 0 <= expected <= most")
        if self.most_template_tokens < 0:
            raise ValueError("most_template_tokens must not be negative")


def estimate_prompt(sizes: PromptSizes, ratio: TokenRatio) -> ContextEstimate:
    """Bounds and expected value of the prompt's tokens.

    low = (max(text ÷ most bytes per token, words) + images × fewest) ÷ sequences. A true bound twice over: no
    token is longer than the longest, and the vocabularies served here cut text before every word (GPT-2's
    rule and its heirs), so a token never spans two words. A template may add nothing, so it is left out.
    high = text ÷ fewest bytes per token + images × most + messages × most + preamble. JSON text is never
    shorter than the text it encodes, and no token holds less than a byte.
    tokens = text ÷ expected bytes per token + the expected images and messages, kept within the bounds.
    Missing signal: words None leaves the low bound to the bytes, which is weak and still true.
    """
    text = max(0, sizes.text_bytes - sizes.media_bytes) + sizes.tools_bytes
    low = max(ceil(text / ratio.most_bytes_per_token), sizes.words or 0)
    low += sizes.images * ratio.fewest_tokens_per_image
    # A batch meets the window one prompt at a time; its longest holds at least the average.
    low = ceil(low / max(sizes.sequences, 1))
    expected = ceil(text / ratio.bytes_per_token)
    expected += sizes.images * ratio.tokens_per_image + sizes.messages * ratio.tokens_per_message
    high = ceil(text / ratio.fewest_bytes_per_token) + sizes.images * ratio.most_tokens_per_image
    if sizes.messages:
        high += sizes.messages * ratio.most_tokens_per_message + ratio.most_template_tokens
    high = max(low, high)
    return ContextEstimate(tokens=min(max(low, expected), high), low=low, high=high)
