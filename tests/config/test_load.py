import re
from pathlib import Path
from typing import get_args

import pytest

from pipeline.config.explain import list_sections
from pipeline.config.load import find_config, load_config
from pipeline.config.recipe import Format, Method
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.quantization.catalog import FORMATS, METHODS, NONE, WITH_ZEROS

REPOSITORY = Path(__file__).parents[2]
MINIMAL = "model: {path: m}\ntarget: {gpu: L4}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()

    def write(name, text):
        (tmp_path / name).write_text(text)

    return write


def refuse(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


def test_model_and_target_are_enough(folder):
    folder("tiny.yaml", MINIMAL)
    config = load_config("tiny.yaml")
    assert (config.name, config.model.path, config.target.gpu) == ("tiny", Path("m"), "L4")
    assert config.stages.quantize.group_size == 128
    assert [(p.batch, p.length) for p in config.stages.build.profiles] == [(16, 4096)]
    assert config.stages.build.pool_blocks == 1 + 16 * 64


def test_a_file_is_found_in_configs(folder):
    folder("configs/a100.yaml", MINIMAL)
    assert find_config("a100.yaml") == find_config("a100") == Path("configs/a100.yaml")
    folder("a100.yaml", MINIMAL)
    assert find_config("a100.yaml") == Path("a100.yaml")


def test_a_missing_file_lists_configs(folder):
    folder("configs/a.yaml", MINIMAL)
    folder("configs/b.yaml", MINIMAL)
    error = refuse("c.yaml")
    assert "c.yaml" in error.message
    assert error.hint == "configs/ holds\na.yaml\nb.yaml"


def test_a_missing_file_has_a_nearest_name(folder, tmp_path):
    folder("configs/a100-int4.yaml", MINIMAL)
    folder("configs/base.yaml", MINIMAL)
    for wrong in ("a100-int.yaml", "a100-int", "configs/a100_int4.yaml"):
        assert refuse(wrong).hint.splitlines()[0] == "did you mean a100-int4.yaml? configs/ holds"
    assert refuse("").message == "no config is named"
    assert refuse("configs").message == "configs is a folder, where a file is wanted"
    (tmp_path / "configs" / "a100-int4.yaml").unlink()
    (tmp_path / "configs" / "base.yaml").unlink()
    assert str(tmp_path) in refuse("a100").hint


def test_extends_merges_maps_and_replaces_lists(folder):
    folder("one.yaml", "name: one\n" + MINIMAL + "stages: {quantize: {method: rtn, include: [mlp, experts]}}\n")
    folder("two.yaml", "stages: {quantize: {clip: true, include: [mlp]}, build: {max_batch_size: 4}}\n")
    folder("three.yaml", "extends: [one.yaml, two.yaml]\nstages: {build: {max_batch_size: 8}}\n")
    config = load_config("three.yaml")
    quantize = config.stages.quantize
    assert (quantize.method, quantize.clip, quantize.include) == ("rtn", True, ("mlp",))
    assert config.stages.build.max_batch_size == 8
    assert config.name == "three"  # never inherited: two configs would write to one folder


def test_extends_is_relative_to_the_file(folder):
    folder("configs/base.yaml", MINIMAL)
    folder("configs/a.yaml", "extends: base.yaml\n")
    assert load_config("a").target.gpu == "L4"


def test_a_cycle_is_refused_with_its_way(folder):
    folder("a.yaml", "extends: b.yaml\n")
    folder("b.yaml", "extends: a.yaml\n")
    assert refuse("a.yaml").message == "a.yaml: extends itself: a.yaml extends b.yaml extends a.yaml"


def test_files_that_double_are_refused(folder):
    for n in range(12):
        folder(f"{n}.yaml", f"extends: [{n + 1}.yaml, {n + 1}.yaml]\n")
    folder("12.yaml", MINIMAL)
    assert "more than 64 files" in refuse("0.yaml").message


@pytest.mark.parametrize("value", ["missing.yaml", "[missing.yaml]", "."])
def test_a_missing_base_is_named_with_its_line(folder, value):
    folder("a.yaml", f"{MINIMAL}extends: {value}\n")
    name = value.strip("[]")
    what = "is a folder, where a file is wanted" if name == "." else "there is no such file"
    assert refuse("a.yaml").message == f"a.yaml:3: extends: {name}: {what}"


@pytest.mark.parametrize("line", ["extends: r.yaml", "stages: {quantize: {recipe: r.yaml}}"])
def test_what_is_no_file_is_not_suggested(folder, tmp_path, line):
    folder("a.yaml", f"{MINIMAL}{line}\n")
    (tmp_path / "r.yaml").symlink_to("nowhere.yaml")
    error = refuse("a.yaml")
    assert error.message.endswith(": r.yaml: is a link to nothing (nowhere.yaml)")
    assert "did you mean r.yaml" not in error.hint
    assert refuse("r.yaml").message == "r.yaml is a link to nothing (nowhere.yaml)"


def test_extends_must_be_names(folder):
    folder("a.yaml", f"{MINIMAL}extends: [1]\n")
    assert refuse("a.yaml").message == "a.yaml:3: extends: must be a file name or a list of them"


def test_set_overrides_with_yaml_values(folder):
    folder("a.yaml", MINIMAL + "stages: {build: {generation: [{batch: 1, length: 64}, {batch: 2, length: 32}]}}\n")
    config = load_config(
        "a.yaml",
        [
            "target={gpu: a100}",
            "stages.verify.gates.mean_kl=1e-3",
            "stages.quantize.include=[mlp]",
            "stages.build.generation.1.batch=3",
            "name=b",
            "stages.verify.gates.top1_agreement=",
        ],
    )
    assert config.target.gpu == "A100-80GB"
    assert config.stages.verify.gates.mean_kl == 1e-3
    assert config.stages.verify.gates.top1_agreement is None
    assert config.stages.quantize.include == ("mlp",)
    assert [(p.batch, p.length) for p in config.stages.build.generation] == [(1, 64), (3, 32)]
    assert config.name == "b"


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        (
            "stages.build.blocksize=1",
            "stages.build.blocksize: is not a setting",
            "did you mean stages.build.block_size?",
        ),
        (
            "stages.build.max_seq_len=x",
            "stages.build.max_seq_len: must be a whole number, not 'x'",
            "write max_seq_len",
        ),
        ("name", "must be KEY=VALUE", ""),
        ("a..b=1", "must be KEY=VALUE", ""),
        ("extends=a.yaml", "extends can only be set in a file", ""),
        ("stages.build.generation.2.batch=1", "2 is not one of the list's 1 items", ""),
        ("target={gpu: [", "", ""),
    ],
)
def test_a_bad_override_is_quoted(folder, override, message, hint):
    folder("a.yaml", MINIMAL + "stages: {build: {generation: [{batch: 1, length: 64}]}}\n")
    error = refuse("a.yaml", [override])
    assert error.message.startswith(f"--set {override}: {message}")
    assert hint in error.hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("targt: {gpu: L4}", "a.yaml:2: targt: is not a setting", "did you mean target?"),
        ("stages:\n  quantise: {}", "a.yaml:3: stages.quantise: is not a setting", "did you mean stages.quantize?"),
        ("group_size: 64", "a.yaml:2: group_size: is not a setting", "did you mean stages.quantize.group_size?"),
        ("zzz: 64", "a.yaml:2: zzz: is not a setting", "known here: name, model, target, output, store, stages"),
        (
            "stages: {build: {generation: [{batch: 1, lenght: 2, length: 2}]}}",
            "a.yaml:2: stages.build.generation.0.lenght: is not a setting",
            "did you mean stages.build.generation.0.length?",
        ),
        (
            "stages: {quantize: {method: awqq}}",
            "a.yaml:2: stages.quantize.method: must be 'awq', ",
            "did you mean awq?",
        ),
        (
            "stages: {quantize: {clip: yes}}",
            "a.yaml:2: stages.quantize.clip: must be true or false, not 'yes'",
            "only true and false are truth values",
        ),
        ("stages: {quantize: {clip: 1}}", "a.yaml:2: stages.quantize.clip: must be true or false, not 1", ""),
        (
            "stages: {build: {max_seq_len: '64'}}",
            "a.yaml:2: stages.build.max_seq_len: must be a whole number",
            "quotes",
        ),
        ("stages: {build: {max_seq_len: 1.5}}", "a.yaml:2: stages.build.max_seq_len: ", ""),
        ("stages: {build: {max_seq_len: 0}}", "a.yaml:2: stages.build.max_seq_len: must be at least 1, not 0", ""),
        ("stages: {build: {block_size: 48}}", "a.yaml:2: stages.build.block_size: must be 16, 32, 64, 128 or 256", ""),
        (
            "stages:\n  verify:\n",
            "a.yaml:3: stages.verify: must be a map of settings, not an empty value",
            "leave it out",
        ),
        (
            "stages: {quantize: {clip: 'true'}}",
            "a.yaml:2: stages.quantize.clip: must be true or false, not 'true'",
            "write clip without quotes",
        ),
        (
            "stages: {verify: {gates: {mean_kl: .inf}}}",
            "a.yaml:2: stages.verify.gates.mean_kl: must be a number",
            "numbers are finite",
        ),
        (
            "stages: {verify: {gates: {mean_kl: -.NaN}}}",
            "a.yaml:2: stages.verify.gates.mean_kl: must be a number",
            "numbers are finite",
        ),
        (
            "stages: {verify: {gates: {mean_kl: '1e-4'}}}",
            "a.yaml:2: stages.verify.gates.mean_kl: must be a number",
            "write mean_kl without quotes",
        ),
        (
            "stages: {verify: {gates: {mean_kl: a lot}}}",
            "a.yaml:2: stages.verify.gates.mean_kl: must be a number",
            "write mean_kl in digits, as 0.05 or 1e-4",
        ),
        (
            "stages: {quantize: {method: w4a8}}",
            "a.yaml:2: stages.quantize.method: must be 'awq', ",
            "did you mean awq_fp8?",
        ),
        ("stages: {quantize: {method: W8A8}}", "a.yaml:2: stages.quantize.method", "did you mean smoothquant?"),
        ("stages: {quantize: {recipe: {rows: [{pattern: x, method: int4}]}}}", "a.yaml:2: ", "did you mean awq?"),
        (
            "stages: {quantize: {calibration: {length: 1}}}",
            "a.yaml:2: stages.quantize.calibration.length: must be at least 2, not 1",
            "",
        ),
        ("name: ../evil", "a.yaml:2: name: must match", ""),
        ("name: store", "name store is taken", ""),
        ("name: a\nstore: out/a/b", "store out/a/b is within out/a", ""),
    ],
)
def test_errors_name_file_line_key_and_nearest(folder, text, message, hint):
    folder("a.yaml", f"model: {{path: m}}\n{text}\ntarget: {{gpu: L4}}\n")
    error = refuse("a.yaml")
    assert error.message.removeprefix("a.yaml:1: ").startswith(message)
    assert hint in error.hint


# Every key that is a path, and a setting of it that leaves it empty.
PATHS = {
    "model.path": "model: {path: ''}",
    "output": "output: ' '",
    "store": "store: ''",
    "stages.quantize.calibration.files.0.path": "stages: {quantize: {calibration: {files: ['']}}}",
    "stages.quantize.sensitivity.file": "stages: {quantize: {sensitivity: {file: ''}}}",
    "stages.verify.heldout.files.0": "stages: {verify: {heldout: {files: ['']}}}",
    "stages.verify.tasks.0": "stages: {verify: {tasks: ['']}}",
}


def list_paths(section):
    for name, field in section.model_fields.items():
        inner = str(field.annotation)
        at = f"{name}.0" if inner.startswith("tuple") else name
        if re.search(r"\bPath\b", inner):
            yield at
        for child in list_sections(field.annotation):
            yield from (f"{at}.{path}" for path in list_paths(child))


def test_no_path_is_empty(folder):
    assert sorted(list_paths(Config)) == sorted(PATHS)
    for key, text in {**PATHS, "stages.quantize.recipe": "stages: {quantize: {recipe: ''}}"}.items():
        folder("a.yaml", f"target: {{gpu: L4}}\n{text}\n" + ("" if "model" in text else "model: {path: m}\n"))
        error = refuse("a.yaml")
        assert error.message == f"a.yaml:2: {key}: is empty"
        assert "name a file or folder" in error.hint and "the current folder is written ." in error.hint
    folder("a.yaml", "target: {gpu: L4}\nmodel:\n  path:\nextends: ['']\n")
    assert refuse("a.yaml").message == "a.yaml:4: extends: is empty"
    folder("a.yaml", "target: {gpu: L4}\nmodel:\n  path:\n")
    assert refuse("a.yaml").message == "a.yaml:3: model.path: is empty"
    folder("a.yaml", "target: {gpu: L4}\nmodel: {path: .}\nstore:\n")
    assert load_config("a.yaml").store is None


def test_an_unknown_gpu_is_placed_and_the_nearest_are_named(folder):
    folder("a.yaml", "model: {path: m}\ntarget:\n  gpu: A100-48GB\n")
    error = refuse("a.yaml")
    assert error.message == "a.yaml:3: target.gpu: no GPU is called 'A100-48GB'"
    assert "A100-40GB" in error.hint


def test_what_is_missing_is_named(folder):
    folder("a.yaml", "target: {}\n")
    lines = refuse("a.yaml").message.splitlines()
    assert lines == ["a.yaml:1: model: is missing", "a.yaml:1: target.gpu: is missing"]


def test_an_error_from_an_extended_file_names_that_file(folder):
    folder("base.yaml", MINIMAL + "stages:\n  build:\n    max_batch_size: -1\n")
    folder("a.yaml", "extends: base.yaml\nstages: {build: {max_num_tokens: 64}}\n")
    assert refuse("a.yaml").message == "base.yaml:5: stages.build.max_batch_size: must be at least 1, not -1"


def test_all_problems_are_reported_at_once_each_with_its_hint(folder):
    folder("a.yaml", MINIMAL + "stages: {build: {moe: dens, blocksize: 1}}\n")
    error = refuse("a.yaml")
    assert error.hint == ""
    assert error.message.splitlines() == [
        "a.yaml:3: stages.build.moe: must be 'dense' or 'gather', not 'dens' (did you mean dense?)",
        "a.yaml:3: stages.build.blocksize: is not a setting (did you mean stages.build.block_size?)",
    ]


def test_a_config_knows_where_each_key_was_set(folder):
    folder("base.yaml", MINIMAL)
    folder("a.yaml", "extends: base.yaml\nstages: {build: {max_seq_len: 64}}\n")
    config = load_config("a.yaml", ["stages.build.max_batch_size=2"])
    assert config.locate("target.gpu") == "base.yaml:2: target.gpu"
    assert config.locate("stages.build.max_seq_len") == "a.yaml:2: stages.build.max_seq_len"
    assert config.locate("stages.build.max_batch_size") == (
        "--set stages.build.max_batch_size=2: stages.build.max_batch_size"
    )
    assert config.locate("stages.build.moe") == "stages.build.moe"  # a default


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_loads_and_has_the_modeline(file, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    first = file.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=../pipeline/config/schema.json"
    assert (file.parent / first.partition("$schema=")[2]).is_file()
    if file.name == "base.yaml":  # only to be extended: it names no model
        error = refuse(file)
        assert error.message.endswith("names no model and no target: it is there for others to extend")
    else:
        assert load_config(file.name).name == file.stem


def test_a_missing_base_has_a_nearest_name_and_a_place(folder, tmp_path):
    folder("configs/base.yaml", MINIMAL)
    folder("configs/mine.yaml", "extends: bse.yaml\n")
    error = refuse("mine")
    assert error.message == "configs/mine.yaml:1: extends: bse.yaml: there is no such file"
    assert error.hint.startswith("did you mean base.yaml? ")
    assert str(tmp_path / "configs") in error.hint


def test_a_base_is_said_to_be_one(folder):
    folder("configs/base.yaml", "output: out\n")
    folder("configs/a.yaml", "extends: base.yaml\n" + MINIMAL)
    folder("configs/b.yaml", "extends: [other.yaml, base.yaml]\n" + MINIMAL)
    folder("configs/c.yaml", "extends: database.yaml\n" + MINIMAL)
    error = refuse("base")
    assert error.message == "configs/base.yaml: names no model and no target: it is there for others to extend"
    assert error.hint.startswith("a.yaml, b.yaml do")
    folder("configs/alone.yaml", "output: out\n")
    assert "alone.yaml:1: model: is missing" in refuse("alone").message


def test_a_file_name_that_is_no_name(folder):
    folder("my config.yaml", MINIMAL)
    error = refuse("my config.yaml")
    assert "name: must match" in error.message
    assert error.hint.startswith("set name: ")
    folder("my config.yaml", "name: mine\n" + MINIMAL)
    assert load_config("my config.yaml").name == "mine"


def test_calibration_files_are_paths_or_say_more(folder):
    folder("c.yaml", MINIMAL + "stages: {quantize: {calibration: {files: [a.txt, {path: b.jsonl, weight: 2}]}}}\n")
    plain, weighted = load_config("c.yaml").stages.quantize.calibration.files
    assert (plain.path, plain.format, plain.weight) == (Path("a.txt"), "auto", None)
    assert (weighted.path, weighted.key, weighted.weight) == (Path("b.jsonl"), None, 2)
    folder("c.yaml", MINIMAL + "stages: {quantize: {calibration: {files: [{path: b.jsonl, wieght: 2}]}}}\n")
    error = refuse("c.yaml")
    assert error.message == "c.yaml:3: stages.quantize.calibration.files.0.wieght: is not a setting"
    assert error.hint == "did you mean stages.quantize.calibration.files.0.weight?"
    folder("c.yaml", MINIMAL + "stages: {quantize: {calibration: {files: [3]}}}\n")
    assert "c.yaml:3: stages.quantize.calibration.files.0: must be a map of settings, not 3" in refuse("c.yaml").message


RECIPE = """\
rows:
  - {pattern: "*.attention.dense", method: int8, reason: "by hand"}
  - {pattern: "*.mlp.*", method: rtn, group_size: 64}
"""


def test_a_recipe_is_a_file_a_word_or_rows(folder):
    folder("r.yaml", RECIPE)
    folder("a.yaml", MINIMAL + "stages: {quantize: {recipe: r.yaml}}\n")
    rules = load_config("a.yaml").stages.quantize.rules
    assert [(r.pattern, r.method, r.group_size) for r in rules.recipe] == [
        ("*.attention.dense", "int8", None),
        ("*.mlp.*", "rtn", 64),
    ]
    folder("r.yaml", RECIPE.replace("rows:\n", ""))
    assert load_config("a.yaml").stages.quantize.rules == rules
    inline = "stages: {quantize: {recipe: [{pattern: x, method: none}]}}\n"
    folder("b.yaml", "extends: a.yaml\n" + inline)
    assert [row.pattern for row in load_config("b.yaml").stages.quantize.recipe.rows] == ["x"]
    config = load_config("b.yaml", ["stages.quantize.recipe=auto", "stages.quantize.budget.size_ratio=0.4"])
    assert config.stages.quantize.recipe.auto and not config.stages.quantize.recipe.rows
    assert (config.stages.quantize.budget.goal.kind, config.stages.quantize.budget.goal.limit) == ("size_ratio", 0.4)
    assert load_config("a.yaml", ["stages.quantize.recipe.auto=true"]).stages.quantize.recipe.auto


def test_mistakes_in_a_recipe_have_its_own_lines(folder):
    folder("a.yaml", MINIMAL + "stages: {quantize: {recipe: r.yaml}}\n")
    folder("r.yaml", RECIPE.replace("int8", "int9"))
    error = refuse("a.yaml")
    assert error.message.startswith("r.yaml:2: stages.quantize.recipe.rows.0.method: must be 'awq', ")
    assert error.hint == "did you mean int8?"
    folder("r.yaml", RECIPE.replace("group_size", "group"))
    assert "r.yaml:3: stages.quantize.recipe.rows.1.group: is not a setting" in refuse("a.yaml").message
    folder("r.yaml", "# by hand\n- {pattern: x, method: none}\n- {pattern: y, methd: none}\n")
    assert "r.yaml:3: stages.quantize.recipe.rows.1.methd: is not a setting" in refuse("a.yaml").message
    folder("r.yaml", "rows\n")
    assert refuse("a.yaml").message == "r.yaml:1: must hold rows, not the value 'rows'"
    for empty in ("", "# by hand\n", "{}", "[]", "rows: []"):
        folder("r.yaml", empty)
        assert refuse("a.yaml").message == "r.yaml:1: holds no rows"
    error = refuse("a.yaml", ["stages.quantize.recipe=rr.yaml"])
    assert (
        error.message == "--set stages.quantize.recipe=rr.yaml: stages.quantize.recipe: rr.yaml: there is no such file"
    )
    assert error.hint.startswith("did you mean r.yaml?")
    assert "must be a file, auto or a list of rows, not 3" in refuse("a.yaml", ["stages.quantize.recipe=3"]).message


@pytest.mark.parametrize("method", ["int8", "fp8_blocks", "none"])
def test_a_row_of_a_format_without_groups_has_no_group_size(folder, method):
    folder("a.yaml", MINIMAL + "stages: {quantize: {recipe: r.yaml}}\n")
    folder("r.yaml", RECIPE.replace("method: rtn", f"method: {method}"))
    error = refuse("a.yaml")
    assert error.message == f"r.yaml:3: stages.quantize.recipe.rows.1.group_size: method {method} has no groups"
    assert error.hint == "leave group_size out"


@pytest.mark.parametrize("budget", ["{}", "{kl: 0.1, size_ratio: 0.4}", "{size_ratio: 1.5}", "{kl: 0}"])
def test_a_budget_is_one_of_three(folder, budget):
    folder("a.yaml", MINIMAL + f"stages: {{quantize: {{recipe: auto, budget: {budget}}}}}\n")
    assert "a.yaml:3: stages.quantize.budget" in refuse("a.yaml").message


def test_every_method_and_format_can_be_named():
    assert set(get_args(Method)) == {*METHODS, NONE} - set(WITH_ZEROS.values())
    assert set(get_args(Format)) == {name for name, row in FORMATS.items() if not row.zeros}
