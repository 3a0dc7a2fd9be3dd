"""FP8, MTP n=5, two GPUs, the image of May 5: ahead at 1 to 4 streams, behind from 8.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell"; experiments named by each table.
"""

from policies.measured import Borrowed, Measured, Part, Quality, SpecKind, Speculation

DATA = Measured(
    name="fp8-mtp5-may5",
    title="FP8, MTP n=5, two GPUs, the image of May 5: ahead at 1 to 4 streams, behind from 8",
    quality=Quality(
        kl_bits=5.5e-3, method="single-prompt teacher-forced KL, bits per position (multi-prompt: 0.230)"
    ),
    weights="FP8 W8A8",
    image="repne/vllm (May 5)",
    speculation=Speculation(SpecKind.MTP, draft_tokens=5, acceptance=((0, 0.443),)),
    tensor_parallel=2,
    window_tokens=134144,
    batched_tokens=32768,
    decode=(
        (1, 0, 119.9),
        (2, 0, 234.4),
        (4, 0, 462.5),
        (8, 0, 865.8),
        (16, 0, 1329.7),
        (32, 0, 1726.5),
        (1, 131072, 101.2),
        (8, 131072, 529.65),
    ),
    decode_source="README MTP=3 vs MTP=5",
    borrowed=(
        Borrowed(Part.PREFILL, "fp8-mtp3-tp2-v17", "prefill was measured on v17 only"),
        Borrowed(Part.WARM, "fp8-mtp3-may5"),
        Borrowed(Part.KV, "fp8-mtp3-may5", "same weights, image and memory share"),
        Borrowed(Part.ACCEPTANCE, "derived", "0.566 of 3 as a chain is 0.74 a token, which gives 0.443 of 5"),
    ),
)
