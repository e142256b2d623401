import json

from pipeline.config.json_schema import PATH, render_schema
from pipeline.config.schema import Config


def test_the_committed_copy_is_fresh():
    assert PATH.read_text(encoding="utf-8") == render_schema(), "run: trtseek schema > pipeline/config/schema.json"


def test_every_setting_is_described():
    schema = json.loads(render_schema())
    sections = [schema, *schema["$defs"].values()]
    for section in sections:
        for key, setting in section["properties"].items():
            reference = schema["$defs"].get(setting.get("$ref", "").rpartition("/")[2], {})
            assert setting.get("description") or reference.get("description"), f"{section['title']}.{key}"
            assert section["additionalProperties"] is False
            assert "required" not in section


def test_editors_offer_the_gpus_and_extends():
    schema = json.loads(render_schema())
    assert "A100-80GB" in schema["$defs"]["Target"]["properties"]["gpu"]["enum"]
    assert "extends" in schema["properties"]
    assert set(schema["properties"]) == {"extends", *Config.model_fields}
