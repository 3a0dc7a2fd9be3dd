"""FP8 W8A8, MTP n=3, two GPUs, the image of May 5 (what the study prints as its v13 table).

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
Left out as suspect: 8 and 16 streams at 16384 (equal the 32k cells), 16 at 131072 (equals the BF16 cell).
"""

from policies.measured import Borrowed, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="fp8-mtp3-may5",
    title="FP8 W8A8, MTP n=3, two GPUs, the image of May 5 (what the study prints as its v13 table)",
    quality=Quality(
        kl_bits=5.5e-3, method="single-prompt teacher-forced KL, bits per position (multi-prompt: 0.230)"
    ),
    weights="FP8 W8A8",
    image="repne/vllm (May 5)",
    speculation=Speculation(SpecKind.MTP, draft_tokens=3, acceptance=((0, 0.566),)),
    tensor_parallel=2,
    window_tokens=134144,
    kv_tokens=1846472,
    batched_tokens=32768,
    decode=(
        (1, 0, 117.1),
        (2, 0, 227.2),
        (4, 0, 449.8),
        (8, 0, 875.0),
        (16, 0, 1520.6),
        (32, 0, 2083.7),
        (32, 16384, 1892.3),
        (1, 32768, 119.2),
        (2, 32768, 227.0),
        (4, 32768, 454.5),
        (8, 32768, 795.4),
        (16, 32768, 1186.0),
        (32, 32768, 1656.3),
        (16, 65536, 1047.1),
        (1, 131072, 95.0),
        (2, 131072, 184.9),
        (4, 131072, 350.5),
        (8, 131072, 534.4),
    ),
    decode_source="README best per cell (Exp 06/08)",
    latency=(
        (1, 0, 63.4, 69.7, 7.94, 0.697),
        (1, 32768, 290.1, 291.6, 7.72, 0.584),
        (1, 131072, 782.2, 794.0, 10.05, 0.548),
        (2, 0, 120.9, 174.9, 8.51, 0.565),
        (2, 32768, 404.6, 575.5, 8.42, 0.503),
        (2, 131072, 1041.2, 1415.8, 10.45, 0.475),
        (4, 0, 118.2, 156.8, 8.59, 0.601),
        (4, 32768, 657.2, 1104.7, 8.65, 0.547),
        (4, 131072, 1671.6, 2810.8, 10.92, 0.538),
        (8, 0, 157.4, 250.8, 8.88, 0.53),
        (8, 32768, 1286.9, 2328.0, 9.78, 0.517),
        (8, 131072, 3929.0, 6679.8, 17.67, 0.679),
        (16, 0, 211.0, 316.0, 10.37, 0.504),
        (16, 32768, 2438.4, 4601.8, 14.14, 0.598),
        (16, 65536, 6603.0, 7046.9, 14.5, 0.549),
        (32, 0, 320.4, 478.8, 14.9, 0.525),
        (32, 16384, 6880.3, 8408.0, 17.41, 0.519),
        (32, 32768, 8232.1, 8493.3, 19.02, 0.525),
    ),
    latency_source="Exp 06/08 (prefix warm)",
    borrowed=(Borrowed(Part.PREFILL, "fp8-mtp3-tp2-v17", "prefill was measured on v17 only"),),
)
