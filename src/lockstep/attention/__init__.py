"""Attention over paged K/V, one implementation per kind of device."""

from lockstep.attention.base import Attention as Attention
from lockstep.attention.base import Heads as Heads
from lockstep.attention.base import StoredKvHeads as StoredKvHeads
from lockstep.attention.contiguous_kv import Context as Context
from lockstep.attention.contiguous_kv import attend_context as attend_context
from lockstep.attention.contiguous_kv import extend_context as extend_context
from lockstep.attention.contiguous_kv import gather_context as gather_context
from lockstep.attention.quantized_kv import quantise as quantise
from lockstep.attention.quantized_kv import unpack as unpack
from lockstep.attention.reference import paged_attention as paged_attention
from lockstep.attention.select import attention_text as attention_text
from lockstep.attention.select import check_cache_dtype as check_cache_dtype
from lockstep.attention.select import has_kernel as has_kernel
from lockstep.attention.select import select_attention as select_attention
from lockstep.attention.select import stored as stored
from lockstep.attention.softmax import Scores as Scores
from lockstep.attention.tpu import RaggedAttention as RaggedAttention
from lockstep.attention.xla import PlainAttention as PlainAttention
