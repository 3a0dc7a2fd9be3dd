"""One data module per measured configuration; literals only, no logic. `MEASURED` lists them by name."""

from __future__ import annotations

from policies.measured import Measured
from policies.profiles import (
    bf16_dflash8_tp1_v17,
    bf16_dflash8_tp2_v17,
    bf16_dflash8_upstream_v0_20_1,
    bf16_dflash8_v13,
    fp8_mtp3_may5,
    fp8_mtp3_tp1_v17,
    fp8_mtp3_tp2_v17,
    fp8_mtp3_upstream_v0_20_1,
    fp8_mtp3_v13,
    fp8_mtp5_may5,
    fp8_nospec_may5,
    gguf_q8,
    nvfp4_mtp3_upstream_v0_20_1,
)

MEASURED: dict[str, Measured] = {
    module.DATA.name: module.DATA
    for module in (
        fp8_mtp3_may5,
        fp8_mtp3_v13,
        fp8_mtp3_tp2_v17,
        fp8_mtp3_tp1_v17,
        fp8_mtp5_may5,
        fp8_nospec_may5,
        fp8_mtp3_upstream_v0_20_1,
        bf16_dflash8_v13,
        bf16_dflash8_tp2_v17,
        bf16_dflash8_tp1_v17,
        bf16_dflash8_upstream_v0_20_1,
        nvfp4_mtp3_upstream_v0_20_1,
        gguf_q8,
    )
}
