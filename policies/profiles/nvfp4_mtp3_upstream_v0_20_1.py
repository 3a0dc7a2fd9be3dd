"""NVFP4, MTP n=3, two GPUs, upstream image: disqualified, broken at 244k.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
Acceptance: one-stream latency rows, mean of three at 131072.
"""

from policies.measured import Borrowed, Limit, LimitKind, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="nvfp4-mtp3-upstream-v0.20.1",
    title="NVFP4, MTP n=3, two GPUs, upstream image: disqualified, broken at 244k",
    quality=Quality(kl_bits=0.299, method="single-prompt teacher-forced KL, bits per position (395 x noise)"),
    weights="NVFP4",
    image="vllm/vllm-openai:v0.20.1-cu129-ubuntu2404",
    speculation=Speculation(
        SpecKind.MTP, draft_tokens=3, acceptance=((0, 0.527), (32000, 0.544), (131072, 0.53))
    ),
    tensor_parallel=2,
    window_tokens=262144,
    batched_tokens=8192,
    decode=(
        (1, 0, 109.4),
        (2, 0, 206.8),
        (4, 0, 416.6),
        (1, 32000, 101.2),
        (2, 32000, 178.5),
        (4, 32000, 277.0),
        (1, 131072, 55.1),
        (2, 131072, 105.6),
        (4, 131072, 7.0),
        (1, 250000, 1.42),
        (2, 250000, 0.03),
    ),
    decode_source="Exp 03, N=3 means",
    latency=(
        (1, 0, 144.7, 149.4, 9.04, 0.527),
        (1, 32000, 2956.2, 2957.2, 8.82, 0.544),
        (1, 131072, 18649.8, 18649.8, 8.91, 0.714),
        (2, 131072, 28678.2, 37888.0, 15.05, 0.468),
        (4, 131072, 38871.8, 57615.4, 320.9, 0.407),
    ),
    latency_source="Exp 03 means (prefix cold)",
    latency_cold=True,
    borrowed=(
        Borrowed(Part.WARM, "fp8-mtp3-upstream-v0.20.1", "its own latency was measured with a cold prefix"),
        Borrowed(Part.KV, "fp8-mtp3-tp2-v17", "a lower bound: NVFP4 weights are smaller"),
        Borrowed(Part.BATCH, "derived", "vLLM's default for a large card; the launch line names none"),
    ),
    limits=(
        Limit(
            LimitKind.BROKEN_BEYOND,
            "1.4 tok/s at 244k; 4 streams break at 128k already",
            context_tokens=131072,
        ),
        Limit(
            LimitKind.TOOL_CHOICE_REQUIRED,
            "breaks 50-70 % of calls: the model writes XML; use auto or no thinking",
        ),
    ),
    disqualified=True,
)
