"""Capacity and layout, chosen from agreed numbers before anything is compiled."""
