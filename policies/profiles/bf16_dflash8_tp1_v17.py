"""BF16, DFlash n=8, one GPU, image v17 (253952 tokens fit at memory 0.92).

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
"""

from policies.measured import Borrowed, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="bf16-dflash8-tp1-v17",
    title="BF16, DFlash n=8, one GPU, image v17 (253952 tokens fit at memory 0.92)",
    quality=Quality(
        reference=True, kl_bits=0.0, method="reference weights (self-noise 7.6e-4 bits per position)"
    ),
    weights="BF16",
    image="repne/vllm:v17",
    speculation=Speculation(SpecKind.DFLASH, draft_tokens=8, acceptance=((0, 0.231),)),
    tensor_parallel=1,
    window_tokens=131072,
    kv_tokens=134606,
    batched_tokens=32768,
    decode=(
        (1, 0, 55.3),
        (2, 0, 128.0),
        (4, 0, 204.5),
        (8, 0, 383.0),
        (16, 0, 443.8),
        (32, 0, 412.3),
        (64, 0, 425.5),
        (1, 16384, 59.3),
        (2, 16384, 122.6),
        (4, 16384, 224.3),
        (1, 32768, 71.1),
        (2, 32768, 115.1),
        (1, 65536, 53.5),
        (1, 131072, 61.9),
    ),
    decode_source="Exp 18, N=1",
    prefill=(
        (8192, 1.36),
        (16225, 2.79),
        (32297, 5.99),
        (64425, 13.47),
    ),
    prefill_source="Exp 18",
    borrowed=(
        Borrowed(Part.WARM, "bf16-dflash8-v13", "measured on two GPUs; one is slower by an unknown factor"),
        Borrowed(Part.ACCEPTANCE, "bf16-dflash8-v13"),
    ),
)
