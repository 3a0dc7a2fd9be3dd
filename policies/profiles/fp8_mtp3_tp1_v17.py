"""FP8, MTP n=3, one GPU, image v17: the whole context on one card.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
"""

from policies.measured import Borrowed, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="fp8-mtp3-tp1-v17",
    title="FP8, MTP n=3, one GPU, image v17: the whole context on one card",
    quality=Quality(
        kl_bits=5.5e-3, method="single-prompt teacher-forced KL, bits per position (multi-prompt: 0.230)"
    ),
    weights="FP8 W8A8",
    image="repne/vllm:v17",
    speculation=Speculation(SpecKind.MTP, draft_tokens=3, acceptance=((0, 0.566),)),
    tensor_parallel=1,
    window_tokens=262144,
    kv_tokens=621350,
    batched_tokens=32768,
    decode=(
        (1, 0, 91.5),
        (2, 0, 181.4),
        (4, 0, 356.2),
        (8, 0, 652.8),
        (16, 0, 1097.3),
        (32, 0, 1636.1),
        (64, 0, 2061.8),
        (128, 0, 2043.7),
        (1, 16384, 86.8),
        (2, 16384, 169.8),
        (4, 16384, 332.9),
        (8, 16384, 581.7),
        (16, 16384, 946.4),
        (32, 16384, 1344.1),
        (1, 32768, 83.2),
        (2, 32768, 165.0),
        (4, 32768, 310.8),
        (8, 32768, 527.8),
        (16, 32768, 850.3),
        (1, 65536, 75.0),
        (2, 65536, 148.8),
        (4, 65536, 277.3),
        (8, 65536, 465.0),
        (1, 131072, 62.1),
        (2, 131072, 121.4),
        (4, 131072, 239.5),
    ),
    decode_source="Exp 19, N=1",
    prefill=(
        (8193, 0.99),
        (16226, 2.05),
        (32298, 5.17),
        (64426, 11.84),
        (128703, 30.05),
    ),
    prefill_source="Exp 19",
    borrowed=(
        Borrowed(Part.WARM, "fp8-mtp3-may5", "measured on two GPUs; one is slower by an unknown factor"),
        Borrowed(Part.ACCEPTANCE, "fp8-mtp3-v13"),
    ),
)
