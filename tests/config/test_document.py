import pytest

from pipeline.config.document import Origin, parse, read_document
from pipeline.errors import ConfigError


def load(text):
    return parse(text, lambda line: Origin("f.yaml", line))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-3", -3),
        ("0x10", 16),
        ("0o17", 15),
        ("010", 10),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2026-11-29", "2026-11-29"),
        ("'1'", "1"),
        ("", None),
        ("~", None),
        ("null", None),
        (".inf", ".inf"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    plain = load(text).plain()
    assert plain == value
    assert type(plain) is type(value)


def test_every_value_knows_its_line():
    document = load("a: 1\nb:\n  c:\n    - x\n    - y\n")
    origins = {".".join(map(str, path)): origin.line for path, origin in document.walk()}
    assert origins == {"": 1, "a": 1, "b": 2, "b.c": 3, "b.c.0": 4, "b.c.1": 5}


def test_an_alias_has_the_line_of_its_use():
    document = load("a: &x {n: 1}\nb: *x\n")
    assert document.plain() == {"a": {"n": 1}, "b": {"n": 1}}
    assert document.value["b"].origin.line == 2


def test_merge_lays_maps_over_each_other_and_replaces_lists():
    merged = load("a: {x: 1, y: [1, 2]}\nb: 1").merge(load("a: {y: [3], z: 4}\nb: {c: 1}"))
    assert merged.plain() == {"a": {"x": 1, "y": [3], "z": 4}, "b": {"c": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: a is given twice, first at f.yaml:1"),
        ("a: 1\nb: [1, 2\nc: 3\n", "f.yaml:3: "),
        ("a: 1\n1: 2\n", "f.yaml:2: a key must be a word"),
        ("a: !!python/object/apply:os.system ['true']", "f.yaml:1: the tag tag:yaml.org,2002:python/object"),
        ("a: !!int x", "f.yaml:1: a: 'x' is not of type int"),
        ("a:\n  b: [c, !!int x]", "f.yaml:2: a.b.1: 'x' is not of type int"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: "),
        ("a: *nowhere", "f.yaml:1: found undefined alias 'nowhere'"),
        ("a: &x [1, *x]", "f.yaml:1: an anchor contains itself"),
        ("a: " + "[" * 5000, "f.yaml:1: is nested too deeply"),
        ("a:\n  b: c\x00", r"f.yaml:2: 'b: c\x00' holds '\x00', a character that no setting may have"),
        ('a:\n  b: ["c\\0"]', r"f.yaml:2: a.b.0: 'c\x00' holds '\x00', a character that no setting may have"),
        (r'a: "\ud800"', r"f.yaml:1: a: '\ud800' holds '\ud800', "),
        (r'a: "\e[31m"', r"f.yaml:1: a: '\x1b[31m' holds '\x1b', "),
        (r'a: {"b\x9b": 1}', r"f.yaml:1: a: 'b\x9b' holds '\x9b', "),
        ("a: 1\nb: \ufffe", "f.yaml:2: special characters are not allowed"),
        ("a: " + "9" * 5000, "f.yaml:1: "),
    ],
)
def test_refuses(text, message):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert caught.value.message.startswith(message)


def test_refuses_a_billion_laughs():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ConfigError, match="aliases repeat their anchors"):
        load("\n".join(lines))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: 1\nb: \xff\n", "f.yaml:2: is not UTF-8"),
        (b"- a\n", "f.yaml:1: must hold a map of settings, not a list"),
        (b"# only a comment\n", "f.yaml:1: must hold a map of settings, not nothing"),
        (b"#" * (1 << 20) + b"##", "f.yaml: is 1048578 bytes long"),
    ],
)
def test_refuses_a_file(tmp_path, data, message):
    (tmp_path / "f.yaml").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_document(tmp_path / "f.yaml", "f.yaml")
    assert caught.value.message.startswith(message)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"f\.yaml: cannot be read: No such file"):
        read_document(tmp_path / "f.yaml", "f.yaml")
