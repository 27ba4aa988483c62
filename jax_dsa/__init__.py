"""DeepSeek Sparse Attention for JAX: attention of every query over a chosen set of keys.

    out = jax_dsa.sparse_attention(q, kv, indices)
    # q [..., S, H, D], kv [..., T, D], indices int32 [..., S, K] -> out [..., S, H, value_dim]

``select_topk`` chooses indices as DeepSeek-V3.2's lightning indexer does; ``indexer_loss`` trains
that indexer.
"""

from jax_dsa.api import (
    EXPORT_DISABLED_CHECKS,
    explain,
    gather_kv,
    merge_partials,
    register,
    sparse_attention,
)
from jax_dsa.indexer import index_scores, indexer_loss, select_topk
from jax_dsa.vjp import checkpoint_policy

__version__ = "0.1.0"

__all__ = [
    "EXPORT_DISABLED_CHECKS",
    "checkpoint_policy",
    "explain",
    "gather_kv",
    "index_scores",
    "indexer_loss",
    "merge_partials",
    "register",
    "select_topk",
    "sparse_attention",
]
