"""INT8 GGUF under llama.cpp: quality only; nobody measured its speed.

Source: the public study "Qwen3.6-27B on RTX PRO 6000 Blackwell", quality probe.
"""

from policies.measured import Measured, Quality

DATA = Measured(
    name="gguf-q8",
    title="INT8 GGUF under llama.cpp: a quality probe",
    quality=Quality(kl_nats=0.0018, method="llama.cpp's own KL, nats: not comparable with the others' bits"),
    weights="INT8 GGUF (Q8_0)",
)
