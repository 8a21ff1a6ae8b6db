"""Attention over paged K/V, one implementation per kind of device."""

from lockstep.kernels.reference import paged_attention as paged_attention
