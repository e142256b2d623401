"""What the GPUs of a parallel model send each other, for `plan`: computed from the model's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.cli.tables import format_bytes, print_table, print_title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.config.case import Case


def describe_exchanges(case: Case) -> list[dict[str, Any]]:
    """Of each kind of exchange, the bytes of one token, all GPUs together; what the engines would not use beside what
    they would. Nothing of one GPU, and of networks that are not ours."""
    if case.config.target.world.foreign:
        return []
    from pipeline.engine.exchanges import plan_exchanges

    exchanges = plan_exchanges(
        case.architecture,
        case.dtype,
        case.parallel.sizes,
        payload=case.build.expert_payload,
        by_plugin=case.build.lowering.moe_all_to_all == "plugin",
    )
    return [
        {
            "exchange": each.what,
            "count": each.count,
            "there_bytes": each.there,
            "back_bytes": each.back,
            "bytes": each.nbytes,
            "used": each.used,
        }
        for each in exchanges
    ]


def print_exchanges(exchanges: Sequence[Mapping[str, Any]]) -> None:
    if not exchanges:
        return
    print_title("sent between GPUs for each token, all together, experts drawn evenly")
    rows = []
    for each in exchanges:
        parts = [each["there_bytes"], *([each["back_bytes"]] if each["back_bytes"] else [])]
        once = " + ".join(format_bytes(round(part)) for part in parts)
        note = "" if each["used"] else ", instead"
        rows.append((each["exchange"], format_bytes(round(each["bytes"])), f"{each['count']} x ({once}){note}"))
    print_table(rows)
