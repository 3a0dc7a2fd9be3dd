"""FP8, MTP n=3, two GPUs, image v17: the fastest, scales to 128 streams.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
"""

from policies.measured import Borrowed, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="fp8-mtp3-tp2-v17",
    title="FP8, MTP n=3, two GPUs, image v17: the fastest, scales to 128 streams",
    quality=Quality(
        kl_bits=5.5e-3, method="single-prompt teacher-forced KL, bits per position (multi-prompt: 0.230)"
    ),
    weights="FP8 W8A8",
    image="repne/vllm:v17",
    speculation=Speculation(SpecKind.MTP, draft_tokens=3, acceptance=((0, 0.566),)),
    tensor_parallel=2,
    window_tokens=262144,
    kv_tokens=1711960,
    batched_tokens=32768,
    decode=(
        (1, 0, 129.0),
        (2, 0, 250.4),
        (4, 0, 490.6),
        (8, 0, 936.1),
        (16, 0, 1607.7),
        (32, 0, 2153.4),
        (64, 0, 2696.4),
        (128, 0, 2959.7),
        (1, 16384, 130.0),
        (2, 16384, 250.4),
        (4, 16384, 491.5),
        (8, 16384, 898.8),
        (16, 16384, 1371.7),
        (32, 16384, 1883.3),
        (64, 16384, 2278.0),
        (1, 32768, 119.3),
        (2, 32768, 245.3),
        (4, 32768, 468.2),
        (8, 32768, 828.2),
        (16, 32768, 1238.8),
        (32, 32768, 1668.6),
        (1, 65536, 111.7),
        (2, 65536, 218.9),
        (4, 65536, 430.6),
        (8, 65536, 713.3),
        (16, 65536, 984.1),
        (1, 131072, 96.7),
        (2, 131072, 192.1),
        (4, 131072, 368.3),
        (8, 131072, 535.3),
    ),
    decode_source="Exp 17, N=1",
    prefill=(
        (8193, 0.86),
        (16226, 1.74),
        (32298, 3.7),
        (64426, 8.11),
        (128703, 19.25),
    ),
    prefill_source="Exp 17",
    borrowed=(
        Borrowed(Part.WARM, "fp8-mtp3-may5", "latency of FP8 was measured on the May 5 image only"),
        Borrowed(Part.ACCEPTANCE, "fp8-mtp3-v13"),
    ),
)
