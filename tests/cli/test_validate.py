import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.source import BEGIN
from pipeline.errors import CheckpointError, CompatibilityError, ConfigError, QuantizationError, TrtseekError


def test_valid(workplace, invoke):
    first, *notes = invoke("validate", "small.yaml").stdout.splitlines()
    assert first.startswith("small: valid. ")
    assert "LlamaForCausalLM" in first
    assert all(line.startswith("  note: ") for line in notes)


def test_json(workplace, invoke, llama_path):
    document = json.loads(invoke("validate", "small", "--json").stdout)
    assert document["config"]["stages"]["build"]["max_seq_len"] == 128
    config = json.loads((llama_path / "config.json").read_text())
    assert document["model"]["layers"] == config["num_hidden_layers"]
    files = sum(path.stat().st_size for path in llama_path.glob("*.safetensors"))
    assert 0.9 * files < document["model"]["bytes"] < files  # all but the headers


def test_problems_name_their_place(workplace, invoke):
    with pytest.raises(ConfigError, match=r"small.yaml:4: stages.quantize.group_size"):
        (workplace / "configs" / "small.yaml").write_text(
            (workplace / "configs" / "small.yaml").read_text().replace("group_size: 32", "group_size: 33")
        )
        invoke("validate", "small")
    with pytest.raises(CheckpointError, match="elsewhere"):
        invoke("validate", "small", "--set", "stages.quantize.group_size=32", "--set", "model.path=elsewhere")
    with pytest.raises(CompatibilityError, match="SM90"):
        invoke("validate", "small", "--set", "stages.quantize.group_size=32", "--set", "target.gpu=H100")
    assert not (workplace / "out").exists()


def test_another_models_tokenizer_is_told_by_its_tokens(workplace, invoke, llama_path):
    shutil.copytree(llama_path, workplace / "model")
    file = workplace / "model" / "tokenizer.json"
    whole = json.loads(file.read_text())

    def validate(vocabulary):
        file.write_text(json.dumps(whole | {"model": whole["model"] | {"vocab": vocabulary}}))
        return invoke("validate", "small", "--set", "model.path=model").stdout

    known = whole["model"]["vocab"]
    assert "another model's" not in validate(known)
    assert "tokenizer.json has 200 tokens, the model 512: is it another model's?" in validate(
        dict(sorted(known.items(), key=lambda item: item[1])[:200])
    )
    with pytest.raises(CheckpointError, match=r"model/tokenizer.json has token 512, the model's .* ends at 511"):
        validate(known | {f"token {i}": i for i in range(len(known), 513)})
    file.write_text("{}")
    for command in ("validate", "engine"):  # this before it converts
        with pytest.raises(CheckpointError, match=r"model/tokenizer.json: "):
            invoke(command, "small", "--set", "model.path=model")
    assert not Path("out/small/convert").exists()


def test_is_quick(workplace, cpu_seconds):
    # Wider than the half second that benchmarks/commands.py holds it to: tests run beside other tests.
    assert cpu_seconds("-m", "pipeline.cli.main", "validate", "small") < 0.8


@pytest.mark.parametrize(
    ("setting", "kind", "message"),
    [
        ("stages.verify.heldout.files=[texts.txt]", ConfigError, r"heldout.files: texts.txt: there is no such file"),
        ("stages.quantize.calibration.files=[configs]", ConfigError, r"calibration.files: configs: is a folder"),
        ("stages.verify.heldout.files=[pipe]", ConfigError, r"heldout.files: pipe: is no regular file"),
        ("stages.verify.heldout.files=[link]", ConfigError, r"link: is a link to nothing \(nowhere\)"),
        ("stages.verify.heldout.files=[/dev/zero]", ConfigError, r"/dev/zero: is no regular file"),
        ("stages.quantize.calibration.files=[empty.txt]", ConfigError, r"empty.txt is empty"),
        ("stages.quantize.calibration.files=[latin.txt]", ConfigError, r"latin.txt:1: is not UTF-8 \(byte 3: "),
        ("stages.quantize.calibration.files=[wide.jsonl]", ConfigError, r"wide.jsonl:1: holds NUL bytes \(byte 1\)"),
        ("stages.verify.heldout.files=[latin.txt]", ConfigError, r"heldout.files: latin.txt:1: is not UTF-8"),
        ("stages.verify.heldout.files=[text.jsonl]", ConfigError, r"text.jsonl: held-out text is plain text"),
        ("stages.verify.tasks=[text.txt]", ConfigError, r"text.txt:1 is not JSON"),
        ("stages.quantize.sensitivity.file=none", ConfigError, r"sensitivity.file: none: there is no such file"),
        ("target.parallel.tensor=3", CompatibilityError, r"target.parallel: tensor parallel size 3 does not divide"),
        ("model.path=modle", CheckpointError, r"model.path: modle: there is no such folder"),
        ("model.path=link", CheckpointError, r"model.path: link: is a link to nothing \(nowhere\)"),
        ("model.path=model/config.json", CheckpointError, r"model/config.json is a file; the model is the folder"),
    ],
)
def test_what_a_run_would_refuse_is_refused(workplace, invoke, llama_path, setting, kind, message):
    (workplace / "model").symlink_to(llama_path)
    (workplace / "empty.txt").touch()
    (workplace / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (workplace / "link").symlink_to("nowhere")
    os.mkfifo(workplace / "pipe")
    (workplace / "text.jsonl").write_text('{"text": "x"}')
    (workplace / "wide.jsonl").write_text('{"text": "x"}', encoding="utf-16-le")
    with pytest.raises(kind, match=message) as caught:
        invoke("validate", "small", "--set", setting)
    given = setting.partition("=")[2].strip("[]")
    assert f"did you mean {given}?" not in caught.value.hint


def test_what_a_recipe_is_solved_from_is_of_this_model(measured, invoke):
    auto = ("--set", "stages.quantize.recipe=auto", "--set", "stages.quantize.budget.kl=1")
    measure = ("--set", "stages.quantize.sensitivity.file=s.json")
    assert invoke("validate", "small", *auto, *measure).exit_code == 0
    found = json.loads(measured.read_text())
    for content, problem in (
        (json.dumps({"a": 1}), "s.json is no sensitivity.json: it lacks 'bytes'"),
        (json.dumps(found | {"units": found["units"][1:]}), "s.json was measured on another model"),
    ):
        measured.write_text(content)
        with pytest.raises(ConfigError, match=rf"s\.json: stages\.quantize\.sensitivity\.file: {problem}"):
            invoke("validate", "small", *auto, *measure)


def test_a_calibration_file_counts_once(workplace, invoke):
    (workplace / "link.txt").symlink_to("text.txt")
    place = (
        r"small.yaml:4: stages.quantize.calibration.files.1: link.txt would count twice: it is .*small.yaml:4: "
        r"stages.quantize.calibration.files.0$"
    )
    config = workplace / "configs" / "small.yaml"
    config.write_text(config.read_text().replace("files: [text.txt], samples", "files: [text.txt, link.txt], samples"))
    with pytest.raises(ConfigError) as caught:
        invoke("validate", "small")
    assert re.search(place, caught.value.message)
    (workplace / "a.jsonl").write_text('{"question": "why?", "answer": "since"}\n')
    two = "{path: a.jsonl, key: question}, {path: a.jsonl, key: answer}"  # are other texts
    assert invoke("validate", "small", "--set", f"stages.quantize.calibration.files=[{two}]").exit_code == 0


def test_text_that_is_certainly_too_little(workplace, invoke):
    (workplace / "more.txt").write_text("y" * 7)
    (workplace / "text.txt").write_text("x" * 22)
    settings = ("--set", "stages.quantize.calibration.files=[text.txt, more.txt]")
    found = re.escape("there are at most 1 (text.txt: 22 bytes; more.txt: 7 bytes)")
    with pytest.raises(QuantizationError, match="too little .* 2 pieces of 16 tokens are wanted, " + found):
        invoke("validate", "small", *settings)
    (workplace / "text.txt").write_text("x" * 23)
    assert invoke("validate", "small", *settings).exit_code == 0
    # A recipe is solved from what its measuring reads; what it is for may round only.
    auto = ("stages.quantize.recipe=auto", "stages.quantize.budget={size_ratio: 0.9}", "stages.quantize.method=rtn")
    effort = "stages.quantize.sensitivity={samples: %d, length: 16}"
    for samples, refused in ((2, False), (3, True)):
        given = [part for each in (*auto, effort % samples) for part in ("--set", each)]
        many = ("--set", "stages.quantize.calibration.samples=5000")
        with pytest.raises(QuantizationError, match="3 pieces of 16 tokens") if refused else contextlib.nullcontext():
            invoke("validate", "small", *settings, *given, *many)


def test_a_wrong_path_is_told_where_it_was_looked_for(workplace, invoke, llama_path):
    (workplace / "model").symlink_to(llama_path)
    for setting, near in (("model.path=modle", "model"), ("stages.verify.heldout.files=[texts.txt]", "text.txt")):
        with pytest.raises(TrtseekError) as caught:
            invoke("validate", "small", "--set", setting)
        assert caught.value.hint.splitlines()[0] == f"did you mean {near}?"
        assert str(workplace) in caught.value.hint


def test_a_character_that_the_check_cuts_is_no_mistake(workplace, invoke):
    (workplace / "text.txt").write_text("x" + "é" * BEGIN)
    assert invoke("validate", "small").exit_code == 0


def test_chat_transcripts_need_a_template(workplace, invoke, llama_path):
    shutil.copytree(llama_path, workplace / "model")
    (workplace / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    settings = ("--set", "model.path=model", "--set", "stages.quantize.calibration.files=[chats.jsonl]")
    file = workplace / "model" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": "{{ messages }}"}))
    assert invoke("validate", "small", *settings).exit_code == 0
    file.write_text(json.dumps(config | {"chat_template": None}))
    with pytest.raises(QuantizationError, match="the tokenizer has no chat template, which chat transcripts need"):
        invoke("validate", "small", *settings)
    (workplace / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert invoke("validate", "small", *settings).exit_code == 0
    file.unlink()
    with pytest.raises(QuantizationError, match=r"has no tokenizer_config\.json"):
        invoke("validate", "small", *settings)


CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "%s", "content": "why"}]}'


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", '{"body": "x"}', r"a.jsonl:1: there is no key \"text\" \(there is 'body'\)"),
        ("a.jsonl", '\n\n{"conversations": []}', r"a.jsonl:3: there is no key \"text\""),
        ("a.jsonl", '[\n{"text": "x"}\n]', r"a.jsonl:1: is not JSON"),
        ("a.jsonl", '{"text": ""}\n' * 9, r"a.jsonl holds no text"),
        ("a.jsonl", '{"text": "x"}\n{"text": 3}', r'a.jsonl:2: "text" holds no text, but int'),
        ("a.jsonl", '{"text": ' + "7" * 5000 + "}", r"a.jsonl:1: holds a number of 5,000 digits"),
        ("a.txt", "\n \n", r"a.txt holds no text"),
        ("a.json", '[{"text": "x"}]', r"a.json: what a .json file holds is to be told"),
        ("a.jsonl", CHAT % "Bot", r"a.jsonl:1: .*leaves out message 2, of role \"Bot\" \(it knows user\)"),
        ("a.jsonl", CHAT % "tool", r"a.jsonl:1: the model's chat template refuses it: no tools"),
        ("a.jsonl", CHAT % "user", ""),
        ("a.jsonl", '\ufeff{"text": "x"}', ""),
        ("a.jsonl", '{"text": ""}\n{"text": "x"}', ""),
    ],
)
def test_calibration_files_begin_as_their_format_does(workplace, invoke, llama_path, name, content, problem):
    shutil.copytree(llama_path, workplace / "model")
    file = workplace / "model" / "tokenizer_config.json"
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
        "{% elif m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    (workplace / name).write_text(content, encoding="utf-8")
    settings = ("--set", "model.path=model", "--set", f"stages.quantize.calibration.files=[{name}]")
    if not problem:
        assert invoke("validate", "small", *settings).exit_code == 0
        return
    with pytest.raises(QuantizationError, match=problem):
        invoke("validate", "small", *settings)


def test_chats_are_looked_at_without_transformers(workplace, llama_path):
    shutil.copytree(llama_path, workplace / "model")
    (workplace / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (workplace / "a.jsonl").write_text(CHAT % "user")
    code = (
        "import sys; from pipeline.cli.main import cli; "
        "cli(['validate', 'small', '--set', 'model.path=model', '--set', "
        "'stages.quantize.calibration.files=[a.jsonl]'], standalone_mode=False); "
        "print(sorted({'torch', 'transformers', 'jinja2'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["['jinja2']"], done.stderr


def test_rtn_reads_no_calibration_text(workplace, invoke):
    assert invoke(
        "validate", "small", "--set", "stages.quantize.calibration.files=[x]", "--set", "stages.quantize.method=rtn"
    )


def test_a_config_of_another_model(workplace, invoke, llama_path):
    shutil.copytree(llama_path, workplace / "model")
    config = json.loads((workplace / "model/config.json").read_text())
    layers = config["num_hidden_layers"] + 1
    (workplace / "model/config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    for verb in ("validate", "plan"):
        with pytest.raises(CheckpointError, match=rf"model.layers.{layers - 1}\.\S+ is missing"):
            invoke(verb, "small", "--set", "model.path=model")


def test_says_what_this_host_cannot_build(workplace, invoke, monkeypatch):
    setting = ("--set", "target.backend=tensorrt")
    monkeypatch.setattr("pipeline.engine.tensorrt.list_device_sms", list)
    monkeypatch.setattr("pipeline.stages.versions.find_version", lambda name: None)
    assert "has not TensorRT 11" in invoke("validate", "small", *setting).stdout
    monkeypatch.setattr("pipeline.stages.versions.find_version", lambda name: "11.0.0")
    text = invoke("plan", "small", *setting).stdout
    assert "has not a GPU of SM89" in text
    monkeypatch.setattr("pipeline.engine.tensorrt.list_device_sms", lambda: [89])
    assert "this host" not in invoke("validate", "small", *setting).stdout
