"""launch.sh: how a package is started in NVIDIA's image."""

from __future__ import annotations

import shlex
from pathlib import Path

SCRIPT = "launch.sh"


def write_launch(package: Path, body: Path, **values: object) -> Path:
    """Writes the script `body`, which reads `values` as variables: `ranks`, and what else the flavour's own wants."""
    head = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())
    script = package / SCRIPT
    script.write_text(f"#!/usr/bin/env bash\n{head}\n{body.read_text(encoding='utf-8')}", encoding="utf-8")
    script.chmod(0o755)
    return script
