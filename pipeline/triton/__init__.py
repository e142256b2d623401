"""The Triton model repository: what is emitted, served and queried."""

from pathlib import Path

# The models' own sources, beside this package: what is emitted is built from them.
MODEL_REPO = Path(__file__).parents[2] / "model_repo"
