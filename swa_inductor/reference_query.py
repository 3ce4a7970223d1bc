"""What attention does to q in front and to its output behind: the meaning, and the checks of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from swa_inductor.errors import require
from swa_inductor.reference_rope import check_norm, check_rope, rms_norm, rotate, within


class Query(NamedTuple):
    """RMSNorm and RoPE of q, inverse RoPE of the output, as api.attention explains them; all absent by default.

    The tensors are nodes of a graph in a lowering.
    """

    q_norm_weight: Any = None
    rope: Any = None
    q_norm_eps: float | None = None
    rope_interleaved: bool = True
    inverse_rope: bool = False

    def check(self, q: Tensor, v_dim: Any) -> None:
        """The arguments, for q [T, H, head_dim] and values of `v_dim`."""
        check_norm("q_norm", q, self.q_norm_weight, self.q_norm_eps)
        require(self.rope is not None or not self.inverse_rope, "rope", None, "a table with inverse_rope")
        dims = {"head_dim": q.shape[-1], **({"v_head_dim": v_dim} if self.inverse_rope else {})}
        check_rope(self.rope, q, self.rope_interleaved, **dims)

    def around(
        self, attend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, state_ids: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) = attend(q, state_ids) with norm and RoPE of q in front and inverse RoPE behind.

        fp32, or fp64 of fp64; nothing is rounded in between. A row beyond the table becomes a padded row.
        """
        if self.q_norm_eps is not None:
            q = rms_norm(q, self.q_norm_weight, self.q_norm_eps)
        if self.rope is None:
            return attend(q, state_ids)
        q = rotate(q, positions, self.rope, self.rope_interleaved)
        out, lse = attend(q, within(self.rope, state_ids, positions))
        return (rotate(out, positions, self.rope, self.rope_interleaved, True) if self.inverse_rope else out), lse


PLAIN = Query()
"""Neither norm nor RoPE."""
