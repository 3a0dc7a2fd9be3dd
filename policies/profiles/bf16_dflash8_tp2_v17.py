"""BF16, DFlash n=8, two GPUs, image v17: plateaus at 32 streams.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
"""

from policies.measured import Borrowed, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="bf16-dflash8-tp2-v17",
    title="BF16, DFlash n=8, two GPUs, image v17: plateaus at 32 streams",
    quality=Quality(
        reference=True, kl_bits=0.0, method="reference weights (self-noise 7.6e-4 bits per position)"
    ),
    weights="BF16",
    image="repne/vllm:v17",
    speculation=Speculation(SpecKind.DFLASH, draft_tokens=8, acceptance=((0, 0.231),)),
    tensor_parallel=2,
    window_tokens=262144,
    kv_tokens=854152,
    batched_tokens=32768,
    decode=(
        (1, 0, 96.6),
        (2, 0, 179.3),
        (4, 0, 351.6),
        (8, 0, 606.7),
        (16, 0, 858.9),
        (32, 0, 1170.6),
        (64, 0, 1065.0),
        (128, 0, 1113.1),
        (1, 16384, 102.4),
        (2, 16384, 191.9),
        (4, 16384, 343.9),
        (8, 16384, 584.9),
        (16, 16384, 902.0),
        (32, 16384, 1125.9),
        (1, 32768, 101.9),
        (2, 32768, 189.4),
        (4, 32768, 348.9),
        (8, 32768, 570.2),
        (16, 32768, 849.3),
        (1, 65536, 90.2),
        (2, 65536, 174.9),
        (4, 65536, 327.2),
        (8, 65536, 545.9),
        (1, 131072, 93.1),
        (2, 131072, 167.6),
        (4, 131072, 304.0),
    ),
    decode_source="Exp 16, N=1",
    prefill=(
        (8193, 1.02),
        (16226, 2.06),
        (32298, 4.25),
        (64426, 9.21),
        (128703, 21.37),
    ),
    prefill_source="Exp 16",
    borrowed=(
        Borrowed(Part.WARM, "bf16-dflash8-v13", "latency of BF16 was measured on v13 only"),
        Borrowed(Part.ACCEPTANCE, "bf16-dflash8-v13"),
    ),
)
