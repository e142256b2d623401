"""The content-addressed store of stage outputs."""

from pipeline.workspace import FolderWorkspace, Workspace

__all__ = ["FolderWorkspace", "Workspace"]
