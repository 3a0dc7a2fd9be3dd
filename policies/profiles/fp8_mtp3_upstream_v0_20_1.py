"""FP8, MTP n=3, two GPUs, upstream image: the fallback, 5-14 % slower at short context.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
Acceptance: means of the latency rows at 0 and 131072.
"""

from policies.measured import Borrowed, Limit, LimitKind, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="fp8-mtp3-upstream-v0.20.1",
    title="FP8, MTP n=3, two GPUs, upstream image: the fallback, 5-14 % slower at short context",
    quality=Quality(
        kl_bits=5.5e-3, method="single-prompt teacher-forced KL, bits per position (multi-prompt: 0.230)"
    ),
    weights="FP8 W8A8",
    image="vllm/vllm-openai:v0.20.1-cu129-ubuntu2404",
    speculation=Speculation(SpecKind.MTP, draft_tokens=3, acceptance=((0, 0.499), (131072, 0.493))),
    tensor_parallel=2,
    window_tokens=134144,
    batched_tokens=8192,
    decode=(
        (1, 0, 112.3),
        (2, 0, 197.0),
        (4, 0, 413.8),
        (1, 131072, 98.96),
        (2, 131072, 183.93),
        (4, 131072, 345.0),
    ),
    decode_source="Exp 04, N=1",
    latency=(
        (1, 0, 68.7, 73.5, 8.845, 0.516),
        (1, 131072, 766.8, 767.4, 9.774, 0.447),
        (2, 0, 395.1, 1301.6, 9.82, 0.488),
        (2, 131072, 1104.4, 1413.2, 10.357, 0.437),
        (4, 0, 156.0, 378.3, 9.561, 0.494),
        (4, 131072, 2050.4, 3251.0, 11.056, 0.595),
    ),
    latency_source="Exp 04 (prefix warm)",
    borrowed=(
        Borrowed(Part.PREFILL, "fp8-mtp3-tp2-v17", "prefill was measured on v17 only"),
        Borrowed(Part.KV, "fp8-mtp3-may5", "same weights and memory share"),
        Borrowed(Part.BATCH, "derived", "vLLM's default for a large card; the launch line names none"),
    ),
    limits=(
        Limit(
            LimitKind.TOOL_CHOICE_REQUIRED,
            "breaks 50-70 % of calls: the model writes XML; use auto or no thinking",
        ),
    ),
)
