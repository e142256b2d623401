import contextlib
import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, GateError, StoreError
from pipeline.stages.executor import Executor
from tests.stages.toys import COPY, LINK, STAGES, STEPS, UPPER, make_config, read_log, read_tree

ALL = [*(f"copy {step}" for step in range(STEPS)), "upper", "link"]


class Notes:
    def __init__(self):
        self.lines = []
        self.outcomes = {}

    def begin(self, stage):
        self.stage = stage

    def end(self, outcome):
        self.outcomes[self.stage] = outcome.split(",")[0].split(" in ")[0]

    def start(self, item, total, unit):
        pass

    def advance(self, amount):
        pass

    def note(self, message):
        self.lines.append(f"{self.stage}: {message}")


def run(config, stages=STAGES, **options):
    """(what work was done, what was reported) of one run."""
    before, notes = len(read_log(config)), Notes()
    Executor(config, stages, notes).run(**options)
    return read_log(config)[before:], notes


def states(config, stages=STAGES, **options):
    return [(plan.stage, plan.state) for plan in Executor(config, stages).plan(**options)]


def reasons(config, stages=STAGES, **options):
    return {plan.stage: plan.reasons for plan in Executor(config, stages).plan(**options)}


def test_second_run_makes_nothing_and_changes_no_file(tmp_path):
    config = make_config(tmp_path)
    assert run(config)[0] == ALL
    before = {path: path.stat().st_mtime_ns for path in config.output.rglob("*")}
    work, notes = run(config)
    assert work == []
    assert notes.outcomes == {"copy": "cached", "upper": "cached", "link": "cached"}
    # run.json says "cached" now; nothing but it and its folder changed.
    changed = {path for path in config.output.rglob("*") if path.stat().st_mtime_ns != before.get(path)}
    assert changed <= {config.output / "toy", config.output / "toy" / "run.json"}
    assert states(config) == [("copy", "cached"), ("upper", "cached"), ("link", "cached")]


def test_output_folder_shows_the_run_by_relative_links(tmp_path):
    config = make_config(tmp_path)
    run(config)
    moved = tmp_path / "elsewhere"
    config.output.rename(moved)
    assert (moved / "toy" / "upper" / "upper.txt").read_text().startswith("5 SHARDS")
    assert not os.readlink(moved / "toy" / "upper").startswith("/")
    document = json.loads((moved / "toy" / "run.json").read_text())
    assert {name: entry["state"] for name, entry in document["stages"].items()} == dict.fromkeys(
        ("copy", "upper", "link"), "made"
    )


def test_plan_explains_each_part_of_a_fingerprint(tmp_path):
    config = make_config(tmp_path, upper={"group": {"size": 128}})
    assert reasons(config) == {stage: ["not made yet"] for stage in ("copy", "upper", "link")}
    run(config)
    config.settings["upper"] = {"group": {"size": 64}, "clip": True}
    assert reasons(config) == {
        "copy": [],
        "upper": ["clip: unset → true", "group.size: 128 → 64"],
        "link": ["upper changed"],
    }
    config.settings["upper"] = {"group": {"size": 128}}
    config.settings["target"] = "sm89"
    assert reasons(config)["link"] == ["target: sm80 → sm89"]
    config.source.write_text("other")
    assert reasons(config)["copy"] == ["text: source.txt changed"]
    newer = dataclasses.replace(COPY, version=2, libraries=("no-such-library",))
    config.source.write_text("hello")
    assert reasons(config, (newer, UPPER, LINK))["copy"] == [
        "this version of trtseek makes it differently (1 → 2)",
        f"library click: {__import__('importlib.metadata').metadata.version('click')} → absent",
    ]


def test_plan_agrees_with_run(tmp_path):
    config = make_config(tmp_path)
    run(config)
    config.settings["upper"] = {"suffix": "!"}
    planned = [stage for stage, state in states(config) if state == "run"]
    assert planned == ["upper", "link"] == run(config)[0]
    config.settings.clear()  # back to what was made first
    assert states(config) == [("copy", "cached"), ("upper", "cached"), ("link", "cached")]
    assert run(config)[0] == []
    assert (config.output / "toy" / "upper" / "upper.txt").read_text().endswith("{'suffix': ''}")


def test_plan_makes_nothing(tmp_path):
    config = make_config(tmp_path)
    states(config)
    assert read_log(config) == []
    assert [path.name for path in config.output.rglob("*") if path.is_file()] == ["digests.jsonl"]


def test_until_stops_after_and_from_does_not_run_before(tmp_path):
    config = make_config(tmp_path)
    assert states(config, until="copy") == [("copy", "run"), ("upper", "skipped"), ("link", "skipped")]
    assert run(config, until="copy")[0] == ALL[:STEPS]
    assert sorted(path.name for path in (config.output / "toy").iterdir()) == ["copy", "run.json"]
    assert states(config, start="link") == [("copy", "cached"), ("upper", "skipped"), ("link", "run")]
    with pytest.raises(StoreError, match=r"^upper is not in the store; --from link does not make it"):
        run(config, start="link")
    assert run(config, start="upper")[0] == ["upper", "link"]
    assert run(config, start="link")[0] == []


def test_until_leaves_later_links_of_the_same_config(tmp_path):
    config = make_config(tmp_path)
    run(config)
    run(config, until="copy")
    assert (config.output / "toy" / "link").is_symlink()
    shown = (config.output / "toy" / "link").resolve()
    other = make_config(tmp_path, copy={"suffix": "other"})
    run(other, until="copy")  # of another config too: the run is not about it
    assert (config.output / "toy" / "link").resolve() == shown


@pytest.fixture
def refuse_writing(monkeypatch):
    """Makes drafts of the named kind fail as on a folder that is for reading only (tests may run as root)."""

    def refuse(kind):
        for name in ("write_text", "symlink_to"):
            original = getattr(Path, name)

            def method(path, *arguments, original=original, **options):
                if path.name.startswith(kind):
                    raise PermissionError(errno.EACCES, "Permission denied", str(path))
                return original(path, *arguments, **options)

            monkeypatch.setattr(Path, name, method)

    return refuse


def test_what_is_cached_and_shown_needs_no_writing(tmp_path, refuse_writing):
    config = make_config(tmp_path)
    run(config)
    refuse_writing(".run.json-")
    work, notes = run(config)
    assert work == []
    assert notes.outcomes == {"copy": "cached", "upper": "cached", "link": "cached"}
    assert f"copy: not recorded as cached: {config.run_folder} is not writable for this user" in notes.lines


def test_what_cannot_be_shown_is_no_stage_that_failed(tmp_path, refuse_writing):
    config = make_config(tmp_path)
    run(config)
    (config.run_folder / "upper").unlink()
    refuse_writing(".link-")
    notes = Notes()
    with pytest.raises(StoreError) as caught:
        Executor(config, STAGES, notes).run()
    assert caught.value.message.startswith(f"{config.run_folder} is not writable for this user; upper is in {tmp_path}")
    assert notes.outcomes["upper"] == "cached"
    assert notes.outcomes["copy"] == "cached"


@pytest.mark.parametrize(("finished", "said"), [(True, "shows what another run made"), (False, "is taken away by")])
def test_of_two_runs_of_one_name_the_one_that_is_not_shown_says_so(tmp_path, finished, said):
    """Another with other settings comes while the last stage of the first is made, and goes or is at its first one."""
    other = make_config(tmp_path, copy={"suffix": "other"})

    def fail(context):
        raise GateError("not yet")

    def run_slowly(context):
        with contextlib.nullcontext() if finished else pytest.raises(GateError):
            run(other, STAGES if finished else [dataclasses.replace(COPY, run=fail), UPPER, LINK])
        LINK.run(context)

    config = make_config(tmp_path)
    slow = dataclasses.replace(LINK, name="slow", run=run_slowly)
    with pytest.raises(StoreError) as caught:
        run(config, [COPY, UPPER, slow])
    assert caught.value.message.startswith(f"{config.run_folder / 'copy'} {said}")
    others = {(config.run_folder / "copy").resolve()}
    (mine,) = {path for path in (config.store_folder / "copy").iterdir() if (path / "artifact.json").exists()} - others
    assert caught.value.message.endswith(f"this one's copy is in {mine}")
    work, _ = run(config, [COPY, UPPER, slow])
    assert work == []


def test_force_makes_again_only_what_is_named_when_the_bytes_come_out_the_same(tmp_path):
    config = make_config(tmp_path)
    run(config)
    assert states(config, force=["copy"]) == [("copy", "run"), ("upper", "cached"), ("link", "cached")]
    assert run(config, force=["copy"])[0] == ALL[:STEPS]
    assert run(config, force=["upper", "link"])[0] == ["upper", "link"]


def test_what_read_an_irreproducible_output_is_made_again_with_it(tmp_path):
    config = make_config(tmp_path)

    def run_random(context):
        (context.workspace.path / "engine.txt").write_bytes(os.urandom(8).hex().encode())

    engine = dataclasses.replace(UPPER, run=run_random, reproducible=False)
    stages = (COPY, engine, LINK)
    run(config, stages)
    assert run(config, stages)[0] == []
    assert states(config, stages, force=["upper"])[1:] == [("upper", "run"), ("link", "run")]
    assert run(config, stages, force=["upper"])[0] == ["link"]
    folder = config.output / "toy"
    assert (folder / "link" / "upper.txt").read_text() == (folder / "upper" / "engine.txt").read_text()


def test_options_that_contradict_are_refused(tmp_path):
    executor = Executor(make_config(tmp_path), STAGES)
    with pytest.raises(ConfigError, match="no stage 'uper'") as error:
        executor.run(until="uper")
    assert "did you mean upper" in error.value.hint
    with pytest.raises(ConfigError, match="--from link comes after --until copy"):
        executor.run(start="link", until="copy")
    with pytest.raises(ConfigError, match="--force: link is outside"):
        executor.run(until="copy", force=["link"])


@pytest.mark.parametrize("damage", ["truncate", "change", "delete", "marker", "marker edited"])
def test_damaged_artifact_is_found_said_and_made_again(tmp_path, damage):
    config = make_config(tmp_path)
    run(config)
    good = read_tree(config.output / "toy" / "copy")
    shard = config.output / "toy" / "copy" / "shards" / "3.txt"
    marker = config.output / "toy" / "copy" / "artifact.json"
    shard.chmod(0o644)
    if damage == "truncate":
        os.truncate(shard, 10)
    elif damage == "change":
        shard.write_bytes(b"X" + shard.read_bytes()[1:])
    elif damage == "delete":
        shard.unlink()
    elif damage == "marker":
        marker.write_bytes(marker.read_bytes()[:100])
    else:
        marker.write_text(marker.read_text().replace("summary.txt", "summary.TXT"))
    (plan, *_) = Executor(config, STAGES).plan()
    assert plan.state == "run"
    assert plan.reasons[0].startswith("damaged: ")
    assert ("3.txt" in plan.reasons[0]) == (not damage.startswith("marker"))
    work, notes = run(config)
    assert work == ALL[:STEPS]  # the bytes are the same again, so nothing after it needs to run
    assert any("copy: runs: damaged: " in line for line in notes.lines)
    assert read_tree(config.output / "toy" / "copy") == good


def test_touched_artifact_is_digested_not_remade(tmp_path):
    config = make_config(tmp_path)
    run(config)
    os.utime(config.output / "toy" / "copy" / "shards" / "3.txt", (1e9, 1e9))
    assert run(config)[0] == []


def test_full_check_finds_what_kept_its_size_and_time(tmp_path):
    config = make_config(tmp_path)
    run(config)
    shard = config.output / "toy" / "copy" / "shards" / "3.txt"
    status = shard.stat()
    shard.chmod(0o644)
    shard.write_bytes(b"X" + shard.read_bytes()[1:])
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    executor = Executor(config, STAGES)
    (plan, *_) = executor.plan()
    assert plan.state == "cached"
    finding = executor.store.find("copy", plan.fingerprint, full=True)
    assert finding.artifact is None
    assert "3.txt was changed" in finding.reason


def test_failed_stage_keeps_its_report_and_leaves_no_link_to_anything_older(tmp_path):
    config = make_config(tmp_path)
    run(config)

    def run_gate(context):
        (context.workspace.path / "report.txt").write_text("layer 3 is the worst")
        raise GateError("layer 3: 0.5 > 0.1")

    failing = (COPY, dataclasses.replace(UPPER, version=2, run=run_gate), LINK)
    with pytest.raises(GateError):
        run(config, failing)
    folder = config.output / "toy"
    assert sorted(path.name for path in folder.iterdir()) == ["copy", "run.json", "upper.failed"]
    assert (folder / "upper.failed" / "report.txt").read_text() == "layer 3 is the worst"
    assert reasons(config, failing)["upper"] == ["the last run failed here"]
    run(config)
    assert sorted(path.name for path in folder.iterdir()) == ["copy", "link", "run.json", "upper"]


def test_foreign_file_in_a_links_place_is_left_alone(tmp_path):
    config = make_config(tmp_path)
    (config.output / "toy" / "upper").mkdir(parents=True)
    with pytest.raises(StoreError, match="toy/upper is in the way"):
        run(config)
    assert (config.output / "toy" / "upper").is_dir()


def test_missing_source_is_named_before_any_work(tmp_path):
    config = make_config(tmp_path)
    config.source.unlink()
    with pytest.raises(ConfigError, match=r"copy: text: .*source.txt does not exist"):
        run(config)
    assert read_log(config) == []


def test_stage_that_does_not_apply_is_left_out(tmp_path):
    config = make_config(tmp_path)
    run(config)
    off = (COPY, dataclasses.replace(UPPER, applies=lambda _: False), LINK)
    assert states(config, off) == [("copy", "cached"), ("upper", "skipped"), ("link", "run")]
    assert reasons(config, off)["link"] == ["no longer reads upper"]
    assert run(config, off)[0] == ["link"]
    assert sorted(path.name for path in (config.output / "toy").iterdir()) == ["copy", "link", "run.json"]


def test_large_unread_source_is_not_read_by_plan(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    monkeypatch.setattr("pipeline.stages.fingerprint.READ_AT_ONCE", 3)
    assert states(config) == [("copy", "undetermined"), ("upper", "undetermined"), ("link", "undetermined")]
    assert reasons(config)["copy"] == ["5 B of its source were never read; a run reads them first"]
    run(config)
    assert states(config) == [("copy", "cached"), ("upper", "cached"), ("link", "cached")]


def test_hard_links_are_not_digested_again(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    run(config, until="upper")
    digested = []
    real = __import__("pipeline.workspace").workspace.digest_file
    monkeypatch.setattr(
        "pipeline.workspace.digest_file", lambda path, **how: digested.append(path) or real(path, **how)
    )
    run(config)
    assert digested == []
    store = Executor(config, STAGES).store
    (link,) = (plan for plan in Executor(config, STAGES).plan() if plan.stage == "link")
    assert store.find("link", link.fingerprint, full=True).artifact is not None
    assert (config.output / "toy/link/copy.txt").samefile(config.output / "toy/copy/summary.txt")
