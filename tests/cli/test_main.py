import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

import pipeline
from pipeline import errors
from pipeline.cli import main
from pipeline.errors import ConfigError, TrtseekError


@pytest.fixture
def raising(monkeypatch):
    """Makes `trtseek schema` raise."""

    def set_error(error):
        def fail():
            raise error

        monkeypatch.setattr("pipeline.config.json_schema.render_schema", fail)

    return set_error


def test_help_names_every_verb_and_imports_nothing_heavy():
    child = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pipeline.cli.main", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in child.stderr.splitlines() if "import time:" in line}
    assert "click" in imported
    assert not imported & {"torch", "transformers", "tensorrt_rtx", "numpy", "pydantic", "rich", "yaml", "blake3"}
    assert all(f"\n  {verb} " in child.stdout for verb in main.VERBS)


def test_help_is_quick(cpu_seconds):
    assert cpu_seconds("-m", "pipeline.cli.main", "--help") < 0.2


def test_version(capsys):
    assert main._run(["--version"]) == 0
    assert capsys.readouterr().out == f"trtseek {pipeline.__version__}\n"


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TrtseekError)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_is_one_block_and_its_own_code(raising, capsys, kind):
    raising(kind("a.yaml:3: stages.build: wrong\nand more", hint="do this"))
    assert main._run(["schema"]) == kind.exit_code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "error: a.yaml:3: stages.build: wrong\n       and more\n hint: do this\n"


def test_exit_codes_differ():
    assert len({kind.exit_code for kind in KINDS}) == len(KINDS)


def test_error_is_red_only_on_a_terminal(raising, monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    raising(ConfigError("wrong", hint="mend it"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    main._run(["schema"])
    assert "\x1b[31m" in sys.stderr.getvalue()


def test_bug_keeps_its_traceback_and_asks_for_a_report(raising, capsys):
    raising(RuntimeError("surprise"))
    assert main._run(["schema"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "RuntimeError: surprise" in err
    assert "Please report it" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", ""],
        ["validate", "/"],
        ["explain", "", "build"],
        ["validate", "a" * 5000],
        ["inspect", "a" * 5000],
        ["plan", "small", "--set", "model.path=" + "a" * 5000],
        ["engine", "small", "--set", "output=/proc/x"],
        ["status", "small", "--set", "output=/proc/x", "--digests"],
        ["engine", "small", "--set", "store=/proc/x"],
        ["engine", "small", "--set", "output=configs/small.yaml"],
        ["engine", "small", "--set", "output=" + "a" * 5000],
    ],
)
def test_no_path_is_a_bug(workplace, toy_stages, capsys, arguments):
    code = main._run(arguments)
    err = capsys.readouterr().err
    assert code != 70 and "Traceback" not in err
    assert code == 0 or "error: " in err


def test_read_only_verbs_need_no_place_to_write_digests(workplace, toy_stages):
    assert main._run(["plan", "small", "--set", "output=/proc/x"]) == 0
    assert main._run(["status", "small", "--set", "output=/proc/x"]) == 0


def test_interrupts_leave_no_traceback(tmp_path):
    """Threads of a library that outlive the command, as torch's do, are waited for by Python: ^C ends that too."""
    script = (
        "import threading, time, pipeline.cli.main as main, pipeline.config.json_schema as s\n"
        "def wait():\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    print('ready', flush=True); time.sleep(60)\n"
        "s.render_schema = wait\n"
        "main.main(['schema'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.stderr.readline() == "\n"  # after the ^C that a terminal shows
        assert child.stderr.readline().startswith("interrupted")
        while child.poll() is None:
            child.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert child.stderr.read() == ""
    assert child.returncode == -signal.SIGINT


def test_a_background_job_s_ignored_interrupt_stays_ignored():
    script = (
        "import os, signal, pipeline.cli.main as main, pipeline.config.json_schema as s\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "s.render_schema = lambda: os.kill(os.getpid(), signal.SIGINT) or 'whole'\n"
        "main.main(['schema'])\n"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout.strip(), child.stderr) == (0, "whole", "")


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("schema", "interrupted\n"),
        ("engine", "interrupted; the same command goes on where this one stopped\n"),
    ],
)
def test_interrupt(capsys, monkeypatch, verb, words):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.config.json_schema.render_schema", interrupt)
    monkeypatch.setattr("pipeline.cli.engine.read_config", interrupt)
    assert main._run([verb, *(["small"] if verb == "engine" else [])]) == 130
    assert capsys.readouterr().err.lstrip() == words


def test_an_interrupt_that_an_extension_module_made_an_error_of(capsys, monkeypatch):
    def interrupt(*_, **__):
        with contextlib.suppress(KeyboardInterrupt):
            main._interrupt(signal.SIGINT, None)
        raise ImportError("numpy._core.umath failed to import")

    monkeypatch.setattr(main, "_interrupts", [])
    monkeypatch.setattr("pipeline.config.json_schema.render_schema", interrupt)
    assert main._run(["schema"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "arguments", [["engin"], ["engine"], ["engine", "a", "--until"], ["validate", "a", "--from", "b"]]
)
def test_wrong_usage(capsys, arguments):
    assert main._run(arguments) == 2
    assert "Error: " in capsys.readouterr().err


def test_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", "schema"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (child.returncode, child.stderr) == (141, b"")


def test_sigterm_ends_a_run_as_an_exception_does(tmp_path):
    script = (
        "import sys, time, pipeline.cli.main as main, pipeline.config.json_schema as s\n"
        "def wait():\n"
        "    try:\n"
        "        print('ready', flush=True); time.sleep(60)\n"
        "    finally:\n"
        "        print('cleaned', flush=True)\n"
        "s.render_schema = wait\n"
        "main.main(['schema'])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.communicate()[0] == "cleaned\n"
    assert child.returncode == 143


def test_a_full_disk_behind_the_output_is_no_bug():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "pipeline.cli.main", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr.startswith("error: the output cannot be written: No space left on device")
