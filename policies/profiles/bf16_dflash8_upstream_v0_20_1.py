"""BF16, DFlash n=8, two GPUs, upstream image: collapses past 32k.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
Acceptance: means of the latency rows at 0 and 131072.
Nobody measured between 0 and 131072; "collapses past 32k" places the fall between 32768 and 40960.
"""

from policies.measured import Borrowed, Limit, LimitKind, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="bf16-dflash8-upstream-v0.20.1",
    title="BF16, DFlash n=8, two GPUs, upstream image: collapses past 32k",
    quality=Quality(
        reference=True, kl_bits=0.0, method="reference weights (self-noise 7.6e-4 bits per position)"
    ),
    weights="BF16",
    image="vllm/vllm-openai:v0.20.1-cu129-ubuntu2404",
    speculation=Speculation(
        SpecKind.DFLASH, draft_tokens=8, acceptance=((0, 0.223), (32768, 0.223), (40960, 0.0215))
    ),
    tensor_parallel=2,
    window_tokens=134144,
    batched_tokens=8192,
    decode=(
        (1, 0, 85.5),
        (2, 0, 153.9),
        (4, 0, 290.9),
        (1, 131072, 11.7),
        (2, 131072, 22.4),
        (4, 131072, 44.7),
    ),
    decode_source="Exp 05, N=1",
    decode_assumed=(
        (1, 32768, 85.5),
        (2, 32768, 153.9),
        (4, 32768, 290.9),
        (1, 40960, 11.7),
        (2, 40960, 22.4),
        (4, 40960, 44.7),
    ),
    latency=(
        (1, 0, 59.2, 60.6, 11.11, 0.168),
        (1, 131072, 762.0, 762.0, 86.615, 0.0125),
        (2, 0, 452.0, 1139.2, 12.136, 0.234),
        (2, 131072, 1335.4, 1557.1, 90.366, 0.031),
        (4, 0, 181.7, 407.6, 12.561, 0.267),
        (4, 131072, 2209.8, 2668.7, 90.636, 0.021),
    ),
    latency_source="Exp 05 (prefix warm)",
    borrowed=(
        Borrowed(Part.PREFILL, "bf16-dflash8-tp2-v17", "prefill was measured on v17 only"),
        Borrowed(Part.KV, "bf16-dflash8-tp2-v17", "a lower bound: v17 ran with less memory"),
        Borrowed(Part.BATCH, "derived", "vLLM's default for a large card; the launch line names none"),
    ),
    limits=(
        Limit(
            LimitKind.COLLAPSES_BEYOND, "acceptance falls to 1-3 %, 11 -> 90 ms a token", context_tokens=32768
        ),
    ),
)
