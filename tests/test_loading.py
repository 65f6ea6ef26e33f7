"""How a user's file is imported, and how its errors are shown: `gradplan.probes.loading`."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradplan.probes.errors import UsageError, UserCodeError
from gradplan.probes.loading import describe, load_module, user_code


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def failure(text: str) -> UserCodeError:
    with pytest.raises(UserCodeError) as caught:
        load_module(write("model.py", text))
    return caught.value


# Imported as a user expects


def test_the_module_is_registered_and_its_folder_comes_first(folder: Path) -> None:
    module = load_module(write("there/model.py", "here = __name__"))
    assert sys.modules["model"] is module
    assert module.here == "model"
    assert sys.path[0] == str(folder / "there")


def test_it_is_imported_not_run() -> None:
    load_module(write("model.py", "if __name__ == '__main__':\n    raise SystemExit('run')"))


def test_dataclasses_with_postponed_annotations_work() -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass Config:\n    width: Width = 3\nclass Width(int): ..."
    module = load_module(write("model.py", text))
    assert module.Config() == module.Config(3)
    assert typing.get_type_hints(module.Config) == {"width": module.Width}


def test_data_is_found_beside_the_file_and_in_the_working_folder() -> None:
    write("there/beside.txt", "beside")
    write("below.txt", "below")
    text = "from pathlib import Path\nread = (Path(__file__).parent / 'beside.txt').read_text()\n"
    text += "read += open('below.txt').read()"
    assert load_module(write("there/model.py", text)).read == "besidebelow"


def test_files_beside_it_are_imported_whatever_gradplans_own_are_called() -> None:
    for name in ("planner", "probes", "plan", "step"):
        write(f"{name}.py", f"mine = '{name}'")
    write("parts/net.py", "mine = 'parts.net'")
    text = "import plan, planner, probes, step\nfrom parts import net\n"
    text += "mine = [m.mine for m in (plan, planner, probes, step, net)]"
    assert load_module(write("model.py", text)).mine == ["plan", "planner", "probes", "step", "parts.net"]


def test_a_file_beside_it_can_import_it_back() -> None:
    write("data.py", "def size():\n    import model\n    return model.SIZE")
    module = load_module(write("model.py", "import data\nSIZE = 7\nSIZE += 1"))
    assert module.data.size() == 8
    assert sys.modules["model"] is module


def test_it_can_be_imported_back_where_the_working_folder_is_on_the_path_too() -> None:
    sys.path.insert(0, "")  # as with python -m
    module = load_module(write("model.py", "name = __name__"))
    assert (module.name, sys.modules["model"]) == ("model", module)


def test_what_it_prints_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    load_module(write("model.py", "import sys\nprint('one')\nsys.stdout.write('two')\nprint('three', file=sys.stderr)"))
    assert capsys.readouterr() == ("", "one\ntwothree\n")


@pytest.mark.parametrize("stem", ["types", "torch", "gradplan", "random", "antigravity"])
def test_a_file_may_be_named_like_a_library_which_stays(stem: str) -> None:
    library = sys.modules.get(stem)
    module = load_module(write(f"{stem}.py", "import dataclasses\n@dataclasses.dataclass\nclass A:\n    b: 'int' = 1"))
    assert module.A().b == 1
    assert sys.modules.get(stem) is library


@pytest.mark.parametrize("name", ["my model.py", "gpt.v1.py", "2-layers.py", "模型.py", "class.py", "os.path.py"])
def test_any_file_name_will_do(name: str) -> None:
    module = load_module(write(name, "import dataclasses\n@dataclasses.dataclass\nclass A:\n    b: 'int' = 1"))
    assert module.A().b == 1
    assert sys.modules[module.__name__] is module


# One after another in one process


def test_the_next_file_has_siblings_of_its_own() -> None:
    for folder in ("a", "b"):
        write(f"{folder}/data.py", f"where = '{folder}'")
        write(f"{folder}/parts/net.py", f"where = '{folder}'")
        write(f"{folder}/model.py", "import data, parts.net\nwhere = data.where + parts.net.where")
    first, second, third = (load_module(Path(folder, "model.py")) for folder in "aba")
    assert [first.where, second.where, third.where] == ["aa", "bb", "aa"]
    assert [first.__name__, second.__name__] == ["model", "model"]
    assert sys.modules["model"] is third


def test_a_package_of_the_file_before_does_not_hide_a_file_of_its_name() -> None:
    for init in ("a/parts/__init__.py", "b/parts/net.py", "c/parts.py"):  # a package, a folder of files, a file
        write(init, "x = 1")
        load_module(write(f"{init[0]}/model.py", "import parts"))
    assert sys.modules["parts"].x == 1


def test_the_folder_of_the_file_before_is_no_longer_on_the_path(folder: Path) -> None:
    path = list(sys.path)
    load_module(write("a/model.py", ""))
    load_module(write("b/model.py", ""))
    assert sys.path == [str(folder / "b"), *path]


def test_an_edited_file_is_read_again() -> None:
    write("data.py", "x = 1")
    assert load_module(write("model.py", "from data import x\ny = 1")).x == 1
    write("data.py", "x = 'longer'")
    assert load_module(write("model.py", "from data import x\ny = 1")).x == "longer"


def test_a_file_that_was_written_since_is_found(folder: Path) -> None:
    write("model.py", "try:\n    from late import x\nexcept ImportError:\n    x = None")
    assert load_module(Path("model.py")).x is None
    before = folder.stat()
    write("late.py", "x = 1")
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))  # as fast as the clock of the file system is coarse
    assert load_module(Path("model.py")).x == 1


def test_what_the_caller_had_imported_stays_the_same_module(folder: Path) -> None:
    write("data.py", "")
    write("model.py", "import data")
    sys.path.insert(0, str(folder))
    mine, my_model = importlib.import_module("data"), importlib.import_module("model")
    for _ in range(2):
        assert load_module(Path("model.py")) is not my_model
    assert (sys.modules["data"], sys.modules["model"]) == (mine, my_model)


def test_a_library_in_an_environment_inside_the_folder_is_imported_once(folder: Path) -> None:
    write("venv/lib/site-packages/some_library.py", "")
    sys.path.append(str(folder / "venv/lib/site-packages"))
    write("model.py", "import some_library")
    assert load_module(Path("model.py")).some_library is load_module(Path("model.py")).some_library


def test_a_failed_import_leaves_nothing_behind() -> None:
    path, modules = list(sys.path), set(sys.modules)
    write("data.py", "")
    failure("import data\nraise ValueError")
    assert sys.path == path
    assert not {"data", "model"} & (set(sys.modules) - modules)


# Not a Python file


def test_a_missing_file_or_a_folder_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match=r"there is no file model\.py$"):
        load_module(Path("model.py"))
    Path("models").mkdir()
    with pytest.raises(UsageError, match=r"models is a folder; name the file in it"):
        load_module(Path("models"))


@pytest.mark.parametrize("name", ["model.txt", "README.md", "model", "model.ipynb", "model.pt"])
def test_what_does_not_end_in_py_is_not_python(name: str) -> None:
    with pytest.raises(UserCodeError, match=f"{name} is not a Python file"):
        load_module(write(name, "x = 1"))


@pytest.mark.parametrize("content", [b"\x7fELF\x00\x01", b"x = '\xff\xfe'\n", b"# coding: nonsense\n"])
def test_a_binary_file_is_not_valid_python(content: bytes) -> None:
    Path("model.py").write_bytes(content)
    with pytest.raises(UserCodeError, match=r"^model.py(:\d+)? (is not valid Python|failed): "):  # 3.10 for NUL
        load_module(Path("model.py"))


@pytest.mark.parametrize(
    ("text", "line"),
    [("x = 1\ndef f(:\n", 2), ("def f():\n\tx = 1\n        y = 2\n", 3), ("x = (1,\n", 1), ("return 1\n", 1)],
)
def test_a_syntax_error_names_the_line_and_shows_it(text: str, line: int) -> None:
    error = failure(text)
    assert str(error).startswith(f"model.py:{line} is not valid Python: ")
    assert error.details == text.splitlines()[line - 1]


def test_a_syntax_error_in_a_file_beside_it_names_that_file() -> None:
    write("data.py", "\nx = = 1\n")
    error = failure("import data")
    assert str(error).startswith("data.py:2 is not valid Python: ")
    assert error.details == "x = = 1"


def test_a_syntax_error_in_text_that_the_file_evaluates_is_on_the_line_that_does() -> None:
    error = failure("x = 1\neval('1 +')")
    assert str(error).startswith("model.py failed at model.py:2: SyntaxError: ")


# Exceptions


def test_an_exception_is_shown_with_the_line_that_raised_it() -> None:
    error = failure("def f():\n    raise ValueError('nothing\\n  to see')\n\nf()")
    assert str(error) == "model.py failed at model.py:2: ValueError: nothing to see"
    assert isinstance(error.__cause__, ValueError)


def test_its_traceback_has_the_users_frames_only(folder: Path) -> None:
    write("data.py", "def load():\n    return {}['key']")
    details = failure("import data\nx = data.load()").details
    lines = [line.strip() for line in details.splitlines() if line.lstrip().startswith("File ")]
    model, data = folder / "model.py", folder / "data.py"
    assert lines == [f'File "{model}", line 2, in <module>', f'File "{data}", line 2, in load']


def test_frames_of_libraries_are_shown_but_the_message_names_the_users_line() -> None:
    error = failure("import json\n\njson.loads('{')")
    assert str(error).startswith("model.py failed at model.py:3: JSONDecodeError: ")
    assert "decoder.py" in error.details


def test_the_users_folder_may_lie_where_python_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", str(folder.parent))  # /usr and /usr/src/app
    assert " at model.py:2: " in str(failure("import json\njson.loads('{')"))


def test_a_file_outside_the_working_folder_is_named_in_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("there/model.py", "1 / 0").resolve()
    Path("here").mkdir()
    monkeypatch.chdir("here")
    with pytest.raises(UserCodeError, match=f" failed at {path}:1: ZeroDivisionError"):
        load_module(path)


@pytest.mark.parametrize(
    ("statement", "text"),
    [("sys.exit()", "no message"), ("sys.exit(0)", "0"), ("sys.exit('no data')", "no data"), ("quit()", "None")],
)
def test_a_file_that_exits_has_failed(statement: str, text: str) -> None:
    assert str(failure(f"import sys\n{statement}")) == f"model.py failed at model.py:2: SystemExit: {text}"


def test_a_missing_library_is_on_the_line_that_imports_it() -> None:
    error = failure("import sys\nimport not_installed_anywhere")
    assert str(error) == "model.py failed at model.py:2: ModuleNotFoundError: No module named 'not_installed_anywhere'"


def test_a_very_long_message_is_cut() -> None:
    assert len(str(failure("raise ValueError('long ' * 1000)"))) < 500


def test_endless_recursion_is_no_endless_traceback() -> None:
    error = failure("def f():\n    f()\nf()")
    assert str(error).startswith("model.py failed at model.py:2: RecursionError: ")
    assert len(error.details.splitlines()) < 30


def test_ctrl_c_and_gradplans_own_errors_pass_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        load_module(write("model.py", "raise KeyboardInterrupt"))
    with pytest.raises(UsageError, match=r"^mine$"), user_code("build_model()"):
        raise UsageError("mine")


def test_an_error_without_a_frame_of_the_user_is_still_told() -> None:
    assert describe("len() of the dataset", TypeError("no len()")) == (
        "len() of the dataset failed: TypeError: no len()",
        "",
    )


def test_importing_it_does_not_import_torch() -> None:
    write("model.py", "")
    code = "import sys, pathlib, gradplan.probes.loading as l; l.load_module(pathlib.Path('model.py'))"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=True)
