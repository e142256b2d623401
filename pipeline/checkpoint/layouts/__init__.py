"""Weight names and shapes per architecture, as two-way data."""

from pipeline.checkpoint.layouts.layout import LAYOUTS, Layout, layout_for
from pipeline.checkpoint.layouts.rows import Dimension, Mapping, Row

__all__ = ["LAYOUTS", "Dimension", "Layout", "Mapping", "Row", "layout_for"]
