"""Attention over a paged KV cache, one implementation for each kind of device; and that of training."""

from lockstep.attention.base import Attention as Attention
from lockstep.attention.base import Heads as Heads
from lockstep.attention.base import StoredKvHeads as StoredKvHeads
from lockstep.attention.contiguous_kv import CONTEXT_CHUNK as CONTEXT_CHUNK
from lockstep.attention.contiguous_kv import Context as Context
from lockstep.attention.contiguous_kv import attend_context as attend_context
from lockstep.attention.contiguous_kv import extend_context as extend_context
from lockstep.attention.contiguous_kv import gather_context as gather_context
from lockstep.attention.kv_dtype import FP8 as FP8
from lockstep.attention.reference import paged_attention as paged_attention
from lockstep.attention.select import describe_attention as describe_attention
from lockstep.attention.select import has_kernel as has_kernel
from lockstep.attention.select import max_page_table_rows as max_page_table_rows
from lockstep.attention.select import pool_dtype as pool_dtype
from lockstep.attention.select import select_attention as select_attention
from lockstep.attention.select import stored_kv_heads as stored_kv_heads
from lockstep.attention.softmax import ScoreModifier as ScoreModifier
from lockstep.attention.tpu import TpuAttention as TpuAttention
from lockstep.attention.tpu_blocks import tpu_generation as tpu_generation
from lockstep.attention.training import AttentionBackend as AttentionBackend
from lockstep.attention.training import CausalAttention as CausalAttention
from lockstep.attention.training import attention_products as attention_products
from lockstep.attention.training import check_backend as check_backend
from lockstep.attention.training import self_attention as self_attention
from lockstep.attention.xla import XlaAttention as XlaAttention
