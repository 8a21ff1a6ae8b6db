"""A run as one HTML file: prompts by steps, differences, curves, two runs side by side."""

from lockstep.report.html.page import make_payload, render_page, write_page

__all__ = ["make_payload", "render_page", "write_page"]
