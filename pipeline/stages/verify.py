"""verify: the gates. A failed one stops the pipeline and leaves the report in `verify.failed`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.stages.graph import Stage, StageContext

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.schema import Config

RECORD, SUMMARY = "verify.json", "verify.txt"


def _parameters(config: Config) -> Mapping[str, Any]:
    return {"gates": config.stages.verify.gates.model_dump(mode="json")}


def _run(context: StageContext) -> None:
    from pipeline.evaluation.gates import enforce
    from pipeline.evaluation.verification import judge

    result = judge(context.inputs["prove"].path, context.config.stages.verify.gates)
    folder = context.workspace.path
    (folder / RECORD).write_text(json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / SUMMARY).write_text(result.summarize(), encoding="utf-8")
    for gate in result.gates:
        context.progress.note(gate.describe())
    enforce(result.gates, str(context.config.run_folder / "verify.failed" / SUMMARY))


STAGE = Stage(name="verify", version=6, run=_run, inputs=("prove",), parameters=_parameters)
