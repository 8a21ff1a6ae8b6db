"""Causal self-attention of whole sequences, as training computes it: no cache, and a gradient."""

from lockstep.attention.training.backend import AttentionBackend as AttentionBackend
from lockstep.attention.training.backend import attention_products as attention_products
from lockstep.attention.training.backend import check_backend as check_backend
from lockstep.attention.training.backend import self_attention as self_attention
from lockstep.attention.training.causal import CausalAttention as CausalAttention
