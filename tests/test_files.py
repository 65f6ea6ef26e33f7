"""Files are written whole or not at all, and never over somebody's own work: `gradplan.files`."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradplan import files
from gradplan.files import check_output, is_ours, is_same_file, model_file, write_atomically, write_plan, write_script
from gradplan.plan import Goal, Plan, from_json, is_untouched, make_plan, to_json
from gradplan.probes.errors import GradplanError, UsageError
from gradplan.probes.evidence import Device, Evidence, Recipe, Trial
from gradplan.script import render

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("def build_model(): ...\n")


def a_plan(model: str = "model.py") -> Plan:
    recipe = Recipe(
        model=model,
        names=("build_model", "build_batch"),
        optimizer="AdamW",
        num_parameters=1000,
        base_batch_size=64,
        base_learning_rate=0.001,
    )
    trial = Trial(micro_batch_size=27, num_micro_batches=2, fits=True, source="traced", required_bytes=2**30)
    device = Device(name="NVIDIA GeForce RTX 4090", slug="rtx-4090", total_bytes=24 * 2**30)
    evidence = Evidence(kind="simulated", device=device, limit_bytes=22 * 2**30, trials=(trial,))
    return make_plan(recipe, evidence, Goal(), gradplan_version="0.1.0", torch_version="2.13.0")


def leftovers() -> list[str]:
    return sorted(path.name for path in Path().iterdir() if path.name != "model.py")


# Whose file is it


def test_what_gradplan_wrote_is_its_own_until_somebody_edits_it() -> None:
    write_plan(a_plan(), "gradplan.json")
    write_script(a_plan(), "train.py")
    for path in (Path("gradplan.json"), Path("train.py")):
        assert is_ours(path)
        path.write_text(path.read_text().replace("64", "32", 1))
        assert not is_ours(path)


def test_a_plan_that_was_only_laid_out_anew_is_still_gradplans_own() -> None:
    text = to_json(a_plan())
    assert is_untouched(json.dumps(json.loads(text), sort_keys=True))
    assert is_untouched(text.replace("\n", "\r\n"))


def test_a_script_with_other_line_ends_is_still_gradplans_own() -> None:
    write_script(a_plan(), "train.py")
    path = Path("train.py")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert is_ours(path)


def test_the_last_key_of_a_plan_is_its_hash_and_reading_does_not_need_it() -> None:
    data = json.loads(to_json(a_plan()))
    assert list(data)[-1] == "sha256"
    del data["sha256"]
    assert from_json(json.dumps(data)) == from_json(json.dumps(data | {"sha256": "?"})) == a_plan()


@given(st.text() | st.builds(json.dumps, st.recursive(st.none() | st.integers(), st.lists)))
def test_no_other_text_is_a_plan_of_gradplans_own(text: str) -> None:
    assert not is_untouched(text)


@pytest.mark.parametrize("content", [b"", b"print('mine')\n", b"\xff\xfe\x00", b"[" * 100_000, b"{}", b"null"])
def test_a_foreign_file_is_not_overwritten(content: bytes) -> None:
    Path("train.py").write_bytes(content)
    for write in (write_script, write_plan):
        with pytest.raises(UsageError, match=r"^train\.py is there already, and gradplan did not write it; force"):
            write(a_plan(), "train.py")
        assert Path("train.py").read_bytes() == content


@pytest.mark.parametrize(("write", "name"), [(write_script, "train.py"), (write_plan, "gradplan.json")])
def test_an_edited_file_is_kept_and_called_edited(write: Any, name: str) -> None:
    write(a_plan(), name)
    edited = Path(name).read_text().replace("64", "32", 1)
    Path(name).write_text(edited)
    with pytest.raises(UsageError, match=f"^{name} was edited since gradplan wrote it; --force would") as error:
        check_output(name, force=False, remedy="--force would")
    assert error.value.exit_code == 2
    with pytest.raises(UsageError):
        write(a_plan(), name)
    assert Path(name).read_text() == edited


@pytest.mark.parametrize("write", [write_script, write_plan])
def test_force_overwrites_a_foreign_file(write: Any) -> None:
    Path("out").write_text("mine")
    write(a_plan(), "out", force=True)
    assert is_ours("out")


@pytest.mark.parametrize("write", [write_script, write_plan])
def test_what_gradplan_wrote_is_written_again_without_force(write: Any) -> None:
    write(a_plan(), "out")
    first = Path("out").read_bytes()
    write(a_plan(), "out")
    assert Path("out").read_bytes() == first


def test_a_huge_foreign_file_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = to_json(a_plan())
    Path("out").write_text(text)
    monkeypatch.setattr(files, "MOST_READ_CHARS", len(text) - 10)
    assert not is_ours("out")


# Where a file may be


def refused(path: str | Path, reason: str, force: bool = True) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(UsageError, match=reason) as error:
        check_output(path, force=force)
    assert error.value.exit_code == 2
    assert sorted(Path().rglob("*")) == before


def test_a_free_name_in_a_writable_folder_is_allowed_and_nothing_is_left_there() -> None:
    check_output("train.py", force=False)
    assert leftovers() == []


def test_a_missing_folder_is_named() -> None:
    refused("no/where/train.py", r"^cannot write no/where/train\.py: there is no folder .*no.where$")


def test_a_file_is_no_folder() -> None:
    refused("model.py/train.py", r"^cannot write model\.py/train\.py: in .*model\.py: Not a directory$")


def test_a_folder_is_no_file() -> None:
    refused(".", r"^cannot write \.: it is a folder$")


def test_a_device_is_no_file() -> None:
    refused(os.devnull, "it is not a regular file$")


def test_a_link_to_itself_leads_nowhere() -> None:
    Path("loop").symlink_to("loop")
    refused("loop", "^cannot write loop: ")


def test_a_name_that_the_system_refuses_is_refused_before_any_work() -> None:
    refused("x" * 300, "File name too long")


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_is_refused() -> None:
    Path("locked").mkdir(mode=0o555)
    refused("locked/train.py", r"locked: Permission denied$")


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_a_read_only_file_is_refused() -> None:
    write_plan(a_plan(), "out")
    Path("out").chmod(0o444)
    refused("out", "^cannot write out: it is read-only$")


def test_a_full_or_read_only_disk_is_the_systems_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_read_only(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", is_read_only)
    refused("train.py", "Read-only file system$")


def test_two_names_of_one_file_are_the_same_file() -> None:
    Path("link.py").symlink_to("model.py")
    Path("new-link").symlink_to("new")
    os.link("model.py", "twin.py")
    assert is_same_file("model.py", "twin.py")
    assert is_same_file("model.py", "link.py")
    assert is_same_file("new", "./x/../new")
    assert is_same_file("new", "new-link")
    assert not is_same_file("model.py", "new")
    assert not is_same_file("new", "other")


# Whole or not at all


def test_text_is_written_as_it_is() -> None:
    write_atomically("out", "modèle\nzwei\r\n")
    assert Path("out").read_bytes() == "modèle\nzwei\r\n".encode()
    assert leftovers() == ["out"]


def test_a_new_file_has_the_permissions_of_any_new_file() -> None:
    write_atomically("out", "text")
    Path("plain").touch()
    assert stat.S_IMODE(Path("out").stat().st_mode) == stat.S_IMODE(Path("plain").stat().st_mode)


@pytest.mark.skipif(os.name == "nt", reason="Windows knows read-only and nothing else")
def test_a_file_keeps_its_permissions() -> None:
    Path("out").touch(mode=0o600)
    Path("out").chmod(0o750)
    write_atomically("out", "text")
    assert stat.S_IMODE(Path("out").stat().st_mode) == 0o750


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(exists: bool) -> None:
    Path("folder").mkdir()
    target, link = Path("folder/real.py"), Path("train.py")
    if exists:
        target.write_text("old")
    link.symlink_to("folder/real.py")
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left"), SystemExit(1)])
@pytest.mark.parametrize("exists", [True, False])
def test_what_fails_on_the_way_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, exists: bool
) -> None:
    if exists:
        Path("out").write_text("old")

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(GradplanError if isinstance(error, OSError) else type(error)):
        write_atomically("out", "new")
    assert leftovers() == (["out"] if exists else [])
    assert not exists or Path("out").read_text() == "old"


def test_text_that_cannot_be_encoded_leaves_nothing() -> None:
    with pytest.raises(UnicodeEncodeError):
        write_atomically("out", "x" * 100_000 + "\udcff")
    assert leftovers() == []


def test_what_cannot_be_written_after_all_is_an_error_with_the_systems_reason() -> None:
    with pytest.raises(GradplanError, match=r"^cannot write no/out: No such file or directory$") as error:
        write_atomically("no/out", "text")
    assert error.value.exit_code == 1


# The two files


def test_a_plan_file_is_read_back() -> None:
    write_plan(a_plan(), "gradplan.json")
    assert from_json(Path("gradplan.json").read_text(encoding="utf-8")) == a_plan()


def test_a_script_is_rendered_for_the_place_where_it_is_written() -> None:
    Path("out").mkdir()
    write_script(a_plan("model.py:build_model"), "out/train.py")
    expected = render(a_plan("model.py:build_model"), Path("out/train.py"), Path("model.py"))
    assert Path("out/train.py").read_text(encoding="utf-8") == expected


def test_a_script_needs_the_models_file_in_its_place() -> None:
    with pytest.raises(UsageError, match=r"^there is no file gone\.py: work in the folder"):
        write_script(a_plan("gone.py"), "train.py")
    assert leftovers() == []


@pytest.mark.parametrize("force", [True, False])
def test_a_script_never_overwrites_the_model(force: bool) -> None:
    with pytest.raises(UsageError, match="the model's own file"):
        write_script(a_plan(), "./model.py", force=force)
    assert Path("model.py").read_text() == "def build_model(): ...\n"


@pytest.mark.parametrize(
    ("typed", "file"),
    [
        ("model.py", "model.py"),
        ("a/model.py:build", "a/model.py"),
        ("a:b.py", "a:b.py"),
        ("a.py:b.py", "a.py:b.py"),
        ("a:b", "a:b"),
        ("a.py:", "a.py:"),
    ],
)
def test_the_file_is_what_was_typed_before_a_name(typed: str, file: str) -> None:
    assert model_file(typed) == Path(file)
