"""Weight names and shapes per architecture, as two-way data."""

from pipeline.checkpoint.layouts.kinds import Kind, list_kinds, matches_plainly
from pipeline.checkpoint.layouts.layout import LAYOUTS, Layout, layout_for
from pipeline.checkpoint.layouts.rows import Dimension, Mapping, Row

__all__ = ["LAYOUTS", "Dimension", "Kind", "Layout", "Mapping", "Row", "layout_for", "list_kinds", "matches_plainly"]
