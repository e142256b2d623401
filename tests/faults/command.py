"""`python -m tests.faults.command LOG [STAGE EVENT] -- ARGUMENTS`: trtseek itself, to be killed within a stage.

Dies at the first event (see `recorder`) of STAGE that is not before number EVENT, or at the first of a later stage. LOG
gets how many events each stage had, where the run came to its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from pipeline.stages.graph import NAMES
from tests.faults.recorder import Recorder


class StageRecorder(Recorder):
    """Counts by stage, once the stages run: their fingerprints are made before."""

    def __init__(self, log: Path, stage: str | None, event: int) -> None:
        super().__init__(log, None)
        self.target = NAMES.index(stage) if stage else len(NAMES)
        self.event = event
        self.counts: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()

    def begin(self, stage: str) -> None:
        self.begun[stage] += 1
        super().begin(stage)

    def strike(self) -> None:
        if self.begun[NAMES[0]] < 2 or not self.stage:
            return
        self.counts[self.stage] += 1
        place = NAMES.index(self.stage)
        if place > self.target or (place == self.target and self.counts[self.stage] >= self.event):
            self.write(f"killed in {self.stage} at {self.counts[self.stage]}")
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    import pipeline.progress
    from pipeline.cli.main import _run

    split = sys.argv.index("--")
    log, *target = sys.argv[1:split]
    recorder = StageRecorder(Path(log), target[0] if target else None, int(target[1]) if target else 0)
    pipeline.progress.make_reporter = lambda stream=None: recorder
    recorder.watch()
    code = _run(sys.argv[split + 1 :])
    recorder.write(f"counts {json.dumps(recorder.counts)}")
    sys.exit(code)


if __name__ == "__main__":
    main()
