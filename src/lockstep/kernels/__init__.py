"""Attention over paged K/V, one implementation per kind of device."""

from lockstep.kernels.attention import Attention as Attention
from lockstep.kernels.attention import Heads as Heads
from lockstep.kernels.attention import Stored as Stored
from lockstep.kernels.context import Context as Context
from lockstep.kernels.context import attend_context as attend_context
from lockstep.kernels.context import extend_context as extend_context
from lockstep.kernels.context import lay_out_context as lay_out_context
from lockstep.kernels.int8 import quantise as quantise
from lockstep.kernels.int8 import unpack as unpack
from lockstep.kernels.plain import PlainAttention as PlainAttention
from lockstep.kernels.ragged_tpu import RaggedAttention as RaggedAttention
from lockstep.kernels.reference import paged_attention as paged_attention
from lockstep.kernels.select import attention_text as attention_text
from lockstep.kernels.select import check_cache_dtype as check_cache_dtype
from lockstep.kernels.select import has_kernel as has_kernel
from lockstep.kernels.select import select_attention as select_attention
from lockstep.kernels.select import stored as stored
from lockstep.kernels.softmax import Scores as Scores
