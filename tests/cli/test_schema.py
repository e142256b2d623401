from pipeline.config.json_schema import PATH


def test_prints_the_committed_schema(invoke):
    assert invoke("schema").stdout == PATH.read_text(encoding="utf-8")
