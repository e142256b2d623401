from pipeline.cli.tables import format_bytes, print_fields, print_table


def test_columns_are_aligned_without_trailing_space(capsys):
    print_table([("convert", "cached", ""), ("quantize", "will run", "group_size: 128 → 64")])
    assert capsys.readouterr().out == "  convert   cached\n  quantize  will run  group_size: 128 → 64\n"


def test_records_that_differ_in_a_number_share_a_row(capsys):
    pools = [{"name": f"{kind}_pool_{layer}", "shape": [-1, 2]} for layer in range(3) for kind in "kv"]
    print_fields({"inputs": [{"name": "input_ids", "shape": [-1]}, *pools], "none": None, "weights_bytes": 2048})
    assert capsys.readouterr().out.splitlines() == [
        "inputs",
        "  name                  shape",
        "  input_ids             ?",
        "  k_pool_0 to k_pool_2  ? x 2",
        "  v_pool_0 to v_pool_2  ? x 2",
        "none           -",
        "weights_bytes  2.00 KiB",
    ]


def test_what_a_terminal_would_obey_is_spelled_out(capsys):
    print_fields({"na\x1bme": "a\x1b[2J\nb", "rows": [{"title": "\u202e→"}]})
    assert capsys.readouterr().out == "na\\x1bme  a\\x1b[2J\\nb\nrows\n  title\n  \\u202e\\u2192\n"


def test_bytes():
    assert [format_bytes(n) for n in (0, 1023, 1024, 80 * 2**30)] == ["0 B", "1023 B", "1.00 KiB", "80.00 GiB"]
