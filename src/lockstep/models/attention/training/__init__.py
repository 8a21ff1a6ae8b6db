"""Causal self-attention of whole sequences, as training computes it: no cache, and a gradient."""

from lockstep.models.attention.training.backend import AttentionBackend as AttentionBackend
from lockstep.models.attention.training.backend import attention_products as attention_products
from lockstep.models.attention.training.backend import self_attention as self_attention
from lockstep.models.attention.training.causal import CausalAttention as CausalAttention
from lockstep.models.attention.training.causal import HeadArrays as HeadArrays
from lockstep.models.attention.training.context import SplitPositions as SplitPositions
