"""FP8, no speculation, two GPUs, the image of May 5: closest to repeatable at temperature 0.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
"""

from policies.measured import Borrowed, Measured, Part, Quality

DATA = Measured(
    name="fp8-nospec-may5",
    title="FP8, no speculation, two GPUs, the image of May 5: closest to repeatable at temperature 0",
    quality=Quality(
        kl_bits=5.5e-3, method="single-prompt teacher-forced KL, bits per position (multi-prompt: 0.230)"
    ),
    weights="FP8 W8A8",
    image="repne/vllm (May 5)",
    tensor_parallel=2,
    window_tokens=134144,
    batched_tokens=32768,
    decode=(
        (8, 0, 573.6),
        (16, 0, 1126.7),
        (32, 0, 1875.5),
        (32, 16384, 1709.2),
        (8, 32768, 521.0),
        (16, 32768, 983.4),
        (32, 32768, 1514.3),
        (16, 65536, 862.0),
        (8, 131072, 431.0),
    ),
    decode_source="Exp 08 X1",
    latency=(
        (8, 0, 120.2, 150.3, 13.85, 0.0),
        (8, 32768, 839.8, 988.7, 14.88, 0.0),
        (8, 131072, 3783.5, 3863.1, 18.37, 0.0),
        (16, 0, 194.8, 245.9, 14.01, 0.0),
        (16, 32768, 1819.2, 1880.4, 16.19, 0.0),
        (16, 65536, 3755.0, 3824.9, 18.36, 0.0),
        (32, 0, 343.0, 389.0, 16.79, 0.0),
        (32, 16384, 2299.6, 2342.6, 18.6, 0.0),
        (32, 32768, 3843.4, 3901.4, 20.89, 0.0),
    ),
    latency_source="Exp 08 X1 means (prefix warm)",
    borrowed=(
        Borrowed(Part.PREFILL, "fp8-mtp3-tp2-v17", "prefill was measured on v17 only"),
        Borrowed(Part.WARM, "fp8-mtp3-may5", "1 to 4 streams; its own rows begin at 8"),
        Borrowed(Part.KV, "fp8-mtp3-may5", "same weights, image and memory share"),
    ),
)
