"""AdamW in bf16 with Kahan summation."""

from __future__ import annotations

from zero2all.base.plugins import LAYOUTS, register
from zero2all.optim.optimizers.adamw_bf16 import AdamWBF16Plugin


@register("optimizer", "adamw-bf16-kahan", supports=(*LAYOUTS, "cpu_offload", "checkpoint_state"))
class AdamWBF16KahanPlugin(AdamWBF16Plugin):
    """The same as adamw-bf16, but the rounding error of each weight is kept, in 2 bytes more."""

    rounding = "kahan"
    compensation_bytes = 2
