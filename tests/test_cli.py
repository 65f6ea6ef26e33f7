"""What the command line prints, writes and ends with, around an invented probe: `gradplan.cli`."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner, Result

import gradplan
from gradplan import cli, files, verbs
from gradplan.plan import Goal, Plan, from_json, make_plan, to_json
from gradplan.probes.errors import DoesNotFitError, GradplanError, UsageError, UserCodeError
from gradplan.probes.evidence import Device, Evidence, Notice, Precision, Recipe, Trial
from gradplan.report import summary, to_text
from gradplan.terminal import MOST_COLUMNS

FILES = ["gradplan.json", "train.py"]


def a_plan(model: str = "model.py", **changes: Any) -> Plan:
    known = {"model": model, "names": ("build_model", "build_batch"), "optimizer": "AdamW"}
    known |= {"num_parameters": 1000, "base_batch_size": 64, "base_learning_rate": 0.001}
    known["notices"] = (Notice(code="invented", message="a thing to know"),)
    trial = Trial(micro_batch_size=27, num_micro_batches=2, fits=True, source="traced", required_bytes=2**30)
    device = Device(name="NVIDIA GeForce RTX 4090", slug="rtx-4090", total_bytes=24 * 2**30)
    evidence = Evidence(kind="simulated", device=device, limit_bytes=22 * 2**30, trials=(trial,))
    recipe = Recipe(**{**known, **changes})
    return make_plan(recipe, evidence, Goal(), gradplan_version="0.1.0", torch_version="2.13.0")


class Probe:
    """Stands in for the verb: it keeps what it was asked, and answers with a plan or an error."""

    def __init__(self) -> None:
        self.answer: Plan | BaseException | None = None
        self.calls: list[dict[str, Any]] = []

    def __call__(self, model: str, *, progress: Any, **settings: Any) -> Plan:
        self.calls.append({"model": model, **settings})
        progress("tracing a micro-batch of 2")
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer or a_plan(model)


@pytest.fixture(autouse=True)
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    Path("model.py").write_text("def build_model(): ...\n")
    stand_in = Probe()
    monkeypatch.setattr(verbs, "probe", stand_in)
    return stand_in


def run(*args: str, **options: Any) -> Result:
    return CliRunner().invoke(cli.main, args, prog_name="gradplan", **options)


def written() -> list[str]:
    return sorted(path.name for path in Path().rglob("*") if path.name != "model.py")


# Success


def test_a_probe_prints_the_table_and_what_to_type_next() -> None:
    result = run("probe", "model.py")
    assert result.exit_code == 0
    end = "wrote gradplan.json and train.py; now type\n\n    python train.py\n\n"
    assert result.stdout == to_text(summary(a_plan())) + end
    assert result.stderr == ""


def test_a_probe_writes_the_plan_and_the_script() -> None:
    run("probe", "model.py")
    assert written() == FILES
    assert from_json(Path("gradplan.json").read_text()) == a_plan()
    assert Path("train.py").read_text().endswith("main()\n")


def test_files_are_written_where_the_options_say() -> None:
    Path("out dir").mkdir()
    result = run("probe", "model.py", "--plan", "out dir/p.json", "--script", "out dir/t.py")
    assert written() == ["out dir", "p.json", "t.py"]
    assert result.stdout.endswith("wrote out dir/p.json and out dir/t.py; now type\n\n    python 'out dir/t.py'\n\n")


def test_a_second_run_overwrites_what_gradplan_wrote() -> None:
    first, second = run("probe", "model.py"), run("probe", "model.py")
    assert (second.exit_code, second.output) == (0, first.output)


def test_without_a_learning_rate_the_next_command_asks_for_one(probe: Probe) -> None:
    probe.answer = a_plan(base_learning_rate=None)
    assert "    python train.py --learning-rate X\n" in run("probe", "model.py").stdout


def test_json_is_the_plan_file_and_nothing_else_on_standard_output() -> None:
    result = run("probe", "model.py", "--json")
    assert result.stdout == to_json(a_plan()) == Path("gradplan.json").read_text()
    assert result.stderr.startswith("note: a thing to know\nwrote gradplan.json and train.py; now type\n")
    assert written() == FILES


def test_json_is_utf8_whatever_the_terminal_speaks() -> None:
    Path("模型.py").touch()
    result = CliRunner(charset="latin-1").invoke(cli.main, ["probe", "模型.py", "--json", "-q"])
    assert result.stdout_bytes == to_json(a_plan("模型.py")).encode()


def test_a_name_that_the_terminal_cannot_show_is_no_crash() -> None:
    Path("模型.py").touch()
    result = CliRunner(charset="latin-1").invoke(cli.main, ["probe", "模型.py"])
    assert result.exit_code == 0
    assert result.stdout_bytes.startswith(rb"\u6a21\u578b.py: 1,000 parameters")


def test_quiet_says_nothing_on_standard_error() -> None:
    result = run("probe", "model.py", "--json", "-q")
    assert (result.stdout, result.stderr) == (to_json(a_plan()), "")


def test_verbose_says_what_is_done_and_what_was_tried() -> None:
    lines = ["tracing a micro-batch of 2", "micro-batch of 27: fits, needs 1.0 GiB (traced)"]
    assert run("probe", "model.py", "-v").stderr.splitlines() == lines


def test_options_reach_the_verb_with_their_units(probe: Probe) -> None:
    run("probe", "model.py")
    options = "--device t4 --memory 8GiB --headroom 2.5 --precision bf16-mixed --effective-batch 256 --base-batch 32"
    options += " --base-lr 1e-4 --world-size 4 --max-micro-batch 16"
    run("probe", "model.py:other", "-v", *options.split())
    usual = {"headroom_percent": 5.0, "precision": "32-true", "world_size": 1}
    nothing = dict.fromkeys(("device", "memory_bytes", "effective_batch", "base_batch", "base_lr", "max_micro_batch"))
    assert probe.calls == [
        {"model": "model.py", **nothing, **usual, "with_levers": False},
        {
            "model": "model.py:other",
            "device": "t4",
            "memory_bytes": 8 * 2**30,
            "headroom_percent": 2.5,
            "precision": "bf16-mixed",
            "effective_batch": 256,
            "base_batch": 32,
            "base_lr": 1e-4,
            "world_size": 4,
            "max_micro_batch": 16,
            "with_levers": True,
        },
    ]


def test_every_precision_can_be_asked_for() -> None:
    for precision in get_args(Precision):
        assert run("probe", "model.py", "--precision", precision).exit_code == 0
    assert run("probe", "model.py", "--precision", "fp8").exit_code == 2


def test_a_model_that_leaves_the_folder_does_not_take_the_files_along(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def leaves(model: str, **_: Any) -> Plan:
        os.chdir(elsewhere)
        return a_plan(model)

    monkeypatch.setattr(verbs, "probe", leaves)
    assert run("probe", "model.py").exit_code == 0
    assert written() == FILES
    assert list(elsewhere.iterdir()) == []


# Wrong usage


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--memory", "12XB", "'12XB' is not a size of memory"),
        ("--memory", "0", "'0' is not a size of memory"),
        ("--memory", "-3", "'-3' is not a size of memory"),
        ("--memory", "0GiB", "'0GiB' is less than one byte"),
        ("--headroom", "100", "'100' is not a headroom"),
        ("--headroom", "-1", "'-1' is not a headroom"),
        ("--headroom", "nan", "'nan' is not a number"),
        ("--headroom", "much", "'much' is not a number"),
        ("--effective-batch", "0", "'0' is not a count"),
        ("--effective-batch", "-3", "'-3' is not a count"),
        ("--base-batch", "1.5", "'1.5' is not a count"),
        ("--world-size", "12XB", "'12XB' is not a count"),
        ("--world-size", "", "'' is not a count"),
        ("--max-micro-batch", "0", "'0' is not a count"),
        ("--max-micro-batch", "1" * 10, "'1111111111' is not a count"),
        ("--base-lr", "0", "'0' is not a learning rate"),
        ("--base-lr", "-1e-3", "'-1e-3' is not a learning rate"),
        ("--base-lr", "inf", "'inf' is not a number"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(probe: Probe, option: str, value: str, problem: str) -> None:
    result = run("probe", "model.py", option, value)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: Invalid value for '{option}': {problem}")
    assert result.stderr.endswith("\ntry 'gradplan probe --help'\n")
    assert (result.stdout, probe.calls, written()) == ("", [], [])


@pytest.mark.parametrize("headroom", ["0", "99.9"])
def test_the_ends_of_the_headroom_are_allowed(headroom: str) -> None:
    assert run("probe", "model.py", "--headroom", headroom).exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prob"], "error: No such command 'prob'"),
        (["probe", "model.py", "--forse"], "error: No such option '--forse'"),
        (["probe"], "error: Missing argument 'MODEL'"),
        (["probe", "model.py", "-q", "-v"], "error: -q and -v exclude each other"),
        (["probe", "model.py", "-v", "-q"], "error: -q and -v exclude each other"),
        (["--nonsense"], "error: No such option '--nonsense'"),
        (["probe", "gone.py"], "error: there is no file gone.py\n"),
        (["probe", "gone.py:model"], "error: there is no file gone.py\n"),
        (["probe", "model.py", "--plan", "out", "--script", "./out"], "error: --plan and --script are the same file\n"),
        (["probe", "model.py", "--force", "--script", "model.py"], "error: --script model.py is the model's own file"),
        (["probe", "model.py:x", "--plan", "./model.py"], "error: --plan ./model.py is the model's own file\n"),
        (["probe", "model.py", "--plan", "no/p.json"], "error: cannot write no/p.json: there is no folder "),
        (["probe", "model.py", "--script", "."], "error: cannot write .: it is a folder\n"),
        (["probe", "mod\udcffel.py"], r"error: the name 'mod\udcffel.py' is not text"),
    ],
)
def test_wrong_usage_is_refused_before_any_work(probe: Probe, args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert (result.stdout, probe.calls, written()) == ("", [], [])


def test_no_command_shows_the_help() -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: gradplan [OPTIONS]")


@pytest.mark.parametrize(("option", "name"), [("--plan", "gradplan.json"), ("--script", "train.py")])
def test_a_foreign_file_is_kept_unless_forced(probe: Probe, option: str, name: str) -> None:
    Path(name).write_text("mine")
    result = run("probe", "model.py")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {name} is there already, and gradplan did not write it; --force overwrites it, "
        f"or {option} PATH writes elsewhere\n"
    )
    assert (probe.calls, written(), Path(name).read_text()) == ([], [name], "mine")
    assert run("probe", "model.py", "--force").exit_code == 0
    assert Path(name).read_text() != "mine"


def test_an_edited_script_is_kept(probe: Probe) -> None:
    run("probe", "model.py")
    with Path("train.py").open("a") as file:
        file.write("# mine\n")
    result = run("probe", "model.py")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: train.py was edited since gradplan wrote it; --force overwrites it, or")
    assert len(probe.calls) == 1
    assert Path("train.py").read_text().endswith("# mine\n")


def test_a_file_that_somebody_puts_there_during_the_work_is_kept(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    def edits(model: str, **_: Any) -> Plan:
        Path("train.py").write_text("mine")
        return a_plan(model)

    monkeypatch.setattr(verbs, "probe", edits)
    assert run("probe", "model.py").exit_code == 2
    assert Path("train.py").read_text() == "mine"


# What fails on the way


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (GradplanError("a file is damaged"), 1),
        (UserCodeError("build_model() failed"), 1),
        (UsageError("no GPU is called 'rtx-9999'; the nearest are rtx-4090"), 2),
        (DoesNotFitError("a micro-batch of 1 needs more. What can make it fit: less"), 3),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"], ["-q"]])
def test_each_kind_of_error_has_its_exit_code_and_leaves_no_file(
    probe: Probe, error: GradplanError, exit_code: int, options: list[str]
) -> None:
    probe.answer = error
    result = run("probe", "model.py", *options)
    assert result.exit_code == exit_code
    assert (result.stdout, result.stderr) == ("", f"error: {error}\n")
    assert written() == []


def test_the_users_lines_stand_above_the_message(probe: Probe) -> None:
    probe.answer = UserCodeError("build_model() failed at model.py:1", '  File "model.py", line 1')
    result = run("probe", "model.py")
    assert result.stderr == '  File "model.py", line 1\nerror: build_model() failed at model.py:1\n'


def test_colour_is_for_terminals_that_want_it(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    probe.answer = UserCodeError("failed", "line 1")
    coloured = "\x1b[2mline 1\x1b[0m\n\x1b[31m\x1b[1merror: \x1b[0mfailed\n"
    assert run("probe", "model.py", color=True).stderr in (coloured, "line 1\nerror: failed\n")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("probe", "model.py", color=True).stderr == "line 1\nerror: failed\n"


def test_a_mistake_of_gradplans_own_is_called_one_and_shows_where(probe: Probe) -> None:
    probe.answer = ZeroDivisionError("division by zero")
    result = run("probe", "model.py")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        "error: this is a mistake in gradplan, not in your code: ZeroDivisionError: division by zero",
        "please report it, with the lines above",
    ]
    assert written() == []


@pytest.mark.parametrize("error", [EOFError("ran out of input"), BrokenPipeError(errno.EPIPE, "a worker died")])
def test_errors_that_click_would_swallow_are_not(probe: Probe, error: Exception) -> None:
    probe.answer = error
    result = run("probe", "model.py")
    assert result.exit_code == 1
    assert "this is a mistake in gradplan" in result.stderr


def test_an_interrupt_ends_quietly_with_130(probe: Probe) -> None:
    probe.answer = KeyboardInterrupt()
    result = run("probe", "model.py")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
    assert written() == []


def test_a_full_disk_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", is_full)
    result = run("probe", "model.py")
    assert result.exit_code == 1
    assert result.stdout == to_text(summary(a_plan()))
    assert result.stderr == "error: cannot write gradplan.json: No space left on device\n"
    assert written() == []


# The other verbs and options


def test_gpus_lists_the_catalogue() -> None:
    result = run("gpus")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["name", "GPU", "memory", "basis"]
    assert len([line for line in lines[1:] if line]) == len(gradplan.gpus())
    assert any(re.match(r"rtx-4090 +NVIDIA GeForce RTX 4090 +2\d\.\d GiB +reported$", line) for line in lines)


def test_gpus_as_json_holds_everything_that_is_known() -> None:
    cards = json.loads(run("gpus", "--json").stdout)
    assert [card["slug"] for card in cards] == [gpu.slug for gpu in gradplan.gpus()]
    assert {"name", "family", "kind", "total_bytes", "nominal_bytes", "basis", "source"} <= cards[0].keys()


def test_version() -> None:
    assert run("--version").output == f"gradplan {gradplan.__version__}\n"


def options_of(command: str) -> set[str]:
    return {name for option in cli.main.commands[command].params for name in option.opts}


def test_only_promised_commands_and_options_exist() -> None:
    assert list(cli.main.commands) == ["probe", "plan", "tune", "script", "show", "init", "gpus"]
    recipe = {"--effective-batch", "--base-batch", "--base-lr", "--world-size", "--max-micro-batch"}
    output = {"--plan", "--force", "--json", "-q", "--quiet"}
    device = {"--device", "--memory", "--headroom", "--precision"}
    runs = {"--trials", "--horizon", "--epochs", "--max-steps", "--device", "--seeds", "--seed"}
    shared = {"--storage", "--study", "--workers"}
    assert options_of("tune") == {"plan_path"} | runs | shared | output
    assert options_of("probe") == {"model", "--script", "--tune", "-v", "--verbose"} | device | recipe | output
    assert options_of("plan") == {"plan_path"} | recipe | output
    assert options_of("script") == {"plan_path", "--script", "--with", "--force"}
    assert options_of("show") == {"plan_path", "--for", "--page", "--force", "--json", "-v", "--verbose"}
    assert options_of("init") == {"path", "--force"}
    assert options_of("gpus") == {"--json"}


def test_the_help_lists_the_commands_in_the_order_in_which_they_are_used() -> None:
    assert re.findall(r"^  (\w+)  +[A-Z]", run("--help").stdout, re.MULTILINE) == list(cli.main.commands)


def test_the_help_names_the_device_that_is_taken_without_one() -> None:
    assert f"else {verbs.DEFAULT_GPU} --memory" in " ".join(run("probe", "--help").stdout.split())


@pytest.mark.parametrize(
    "args", [["-h"], ["--help"], ["probe", "-h"], *([verb, "--help"] for verb in cli.main.commands)]
)
def test_help_is_no_error(args: list[str]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: gradplan")


# As a process of its own


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)


HEAVY = ("torch", "optuna", "pydantic", "rich", "jinja2", "gradplan.plan", "gradplan.verbs")


@pytest.mark.parametrize(
    "code",
    [
        "import gradplan; dir(gradplan); gradplan.__version__",
        "from gradplan.cli import main; main(['--help'], standalone_mode=False)",
        *(f"from gradplan.cli import main; main([{verb!r}, '--help'])" for verb in cli.main.commands),
        "from gradplan.cli import main; main(['--version'])",
        "from gradplan.cli import main; main(['probe', 'model.py', '--memory', '12XB'])",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    report = f"import atexit, sys; atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules]))"
    result = python(f"{report}\n{code}")
    assert "Error" not in result.stderr
    assert result.stdout.endswith("[]\n")


def test_an_unknown_device_is_refused_before_torch_is_imported() -> None:
    code = "from gradplan.cli import main; import sys, atexit; atexit.register(lambda: print('torch' in sys.modules))"
    result = python(f"{code}\nmain(['probe', 'model.py', '--device', 'rtx-4099'])")
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert "rtx-4090" in result.stderr
    assert written() == []


def test_the_module_runs_as_a_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "gradplan", "--version"], capture_output=True, text=True, check=False
    )
    assert result.stdout == f"gradplan {gradplan.__version__}\n"


SLOW_PROBE = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
from gradplan import verbs
from gradplan.cli import main

def probe(model, *, progress, **_):
    print("started", flush=True)
    time.sleep(60)

verbs.probe = probe
main(["probe", "model.py"])
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_ends_a_process_with_130_and_no_traceback() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW_PROBE], stdout=-1, stderr=-1, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"  # what the user's code prints
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout, stderr) == (130, "", "interrupted\n")
    assert written() == []


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
@pytest.mark.parametrize("args", [["gpus"], ["gpus", "--json"], ["--version"]])
def test_a_reader_who_leaves_early_is_no_error(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what is buffered is written again at the exit
    process = subprocess.Popen([sys.executable, "-m", "gradplan", *args], stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(timeout=20)) == ("", 0)
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("args", [["gpus"], ["--version"]])
def test_a_full_standard_output_is_an_error(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "gradplan", *args], stdout=full, stderr=-1, text=True, check=False
        )
    assert result.returncode == 1
    assert result.stderr == "error: cannot write to standard output: No space left on device\n"


# On a terminal


def on_a_terminal(code: str, columns: int, **environment: str) -> str:
    """What a process writes to a terminal of its own."""
    pty, fcntl, struct, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "struct", "termios"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "CI")}
    variables |= {"TERM": "xterm-256color", **environment}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    output = b""
    while chunk := _read(ours):
        output += chunk
    os.close(ours)
    assert process.wait(timeout=20) == 0
    return output.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 2**16)
    except OSError:  # Linux: the other end is closed
        return b""


def probe_that_answers() -> str:
    plan = a_plan(notices=(Notice(code="invented", message="a long thing to know; " * 20),))
    return f"""
import time
from gradplan import verbs
from gradplan.cli import main
from gradplan.plan import from_json

def probe(model, *, progress, **_):
    progress("tracing a micro-batch of 2")
    time.sleep(0.3)
    return from_json({to_json(plan)!r})

verbs.probe = probe
main(["probe", "model.py"])
"""


def test_a_terminal_sees_progress_and_colour_and_is_not_filled_beyond_reading_width() -> None:
    output = on_a_terminal(probe_that_answers(), columns=200)
    assert "tracing a micro-batch of 2" in output
    assert "\x1b[1;36m22, 21, 21\x1b[0m" in output
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    table = plain[plain.index("model.py: 1,000 parameters") :]
    assert MOST_COLUMNS - 20 < max(map(len, table.splitlines())) <= MOST_COLUMNS
    assert "    python train.py\n" in table


def test_nothing_moves_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
    result = python(probe_that_answers())
    assert (result.returncode, result.stderr) == (0, "")


def test_no_color_is_honoured_on_a_terminal() -> None:
    output = on_a_terminal(probe_that_answers(), columns=80, NO_COLOR="1")
    assert "22, 21, 21" in output
    assert re.search(r"\x1b\[[0-9;]*3[0-7]", output) is None
