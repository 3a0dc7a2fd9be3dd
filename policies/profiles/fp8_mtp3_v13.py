"""FP8 W8A8, MTP n=3, two GPUs, image v13: the recommended configuration.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
"""

from policies.measured import Borrowed, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="fp8-mtp3-v13",
    title="FP8 W8A8, MTP n=3, two GPUs, image v13: the recommended configuration",
    quality=Quality(
        kl_bits=5.5e-3, method="single-prompt teacher-forced KL, bits per position (multi-prompt: 0.230)"
    ),
    weights="FP8 W8A8",
    image="repne/vllm:v13",
    speculation=Speculation(SpecKind.MTP, draft_tokens=3, acceptance=((0, 0.566),)),
    tensor_parallel=2,
    window_tokens=134144,
    kv_tokens=1846472,
    batched_tokens=32768,
    decode=(
        (1, 0, 93.6),
        (2, 0, 194.5),
        (4, 0, 387.3),
        (8, 0, 759.6),
        (16, 0, 1482.9),
        (32, 0, 2145.1),
        (1, 16384, 97.6),
        (2, 16384, 191.6),
        (4, 16384, 385.1),
        (8, 16384, 754.5),
        (16, 16384, 1375.0),
        (32, 16384, 1797.8),
        (1, 32768, 97.8),
        (2, 32768, 194.8),
        (4, 32768, 378.7),
        (8, 32768, 727.9),
        (16, 32768, 1219.0),
        (32, 32768, 1581.8),
        (1, 65536, 93.6),
        (2, 65536, 185.6),
        (4, 65536, 365.0),
        (8, 65536, 685.1),
        (16, 65536, 1009.3),
        (32, 65536, 1210.9),
        (1, 131072, 84.7),
        (2, 131072, 169.1),
        (4, 131072, 325.2),
        (8, 131072, 549.9),
        (16, 131072, 710.0),
        (32, 131072, 917.7),
    ),
    decode_source="Exp 09 B, N=4",
    borrowed=(
        Borrowed(Part.PREFILL, "fp8-mtp3-tp2-v17", "prefill was measured on v17 only"),
        Borrowed(Part.WARM, "fp8-mtp3-may5", "latency of FP8 was measured on the May 5 image only"),
    ),
)
