"""The tables of formats and methods, against what makes them."""

from __future__ import annotations

from pipeline.quantization import catalog, formats, methods


def test_every_method_and_format_has_its_row_in_both_tables() -> None:
    assert methods.CHOOSERS.keys() == catalog.METHODS.keys()
    assert formats.FORMATS.keys() == catalog.FORMATS.keys() == {row.format for row in catalog.METHODS.values()}


def test_a_method_of_the_scale_only_makes_the_same_format_and_rounds_to_nearest() -> None:
    for row in catalog.METHODS.values():
        if row.scale_only is not None:
            other = catalog.METHODS[row.scale_only]
            assert (other.format, other.scales, other.moments) == (row.format, row.scales, False)


def test_the_name_of_several_formats() -> None:
    assert catalog.name_algo(["int4", "int4"]) == "W4A16_AWQ"
    assert catalog.name_algo(["fp8_rows"]) == "FP8_PER_CHANNEL"
    assert catalog.name_algo(["int4", "fp8", "int4"]) == "MIXED_PRECISION"
