"""Meshes, and putting host data onto them without a cross-host comparison."""

from lockstep.placement.lazy_weight import LazyWeight, view
from lockstep.placement.mesh import (
    COMPUTE_AXES,
    MESH_AXES,
    PARAMETER_AXES,
    data_shards,
    fsdp_spans_hosts,
    fsdp_warning,
    make_mesh,
    mesh_of,
)
from lockstep.placement.place import host_rows, place, place_local, place_tree

__all__ = [
    "COMPUTE_AXES",
    "MESH_AXES",
    "PARAMETER_AXES",
    "LazyWeight",
    "data_shards",
    "fsdp_spans_hosts",
    "fsdp_warning",
    "host_rows",
    "make_mesh",
    "mesh_of",
    "place",
    "place_local",
    "place_tree",
    "view",
]
