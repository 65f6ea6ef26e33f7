"""A plan as an HTML page that stands alone: `gradplan.page`, and `gradplan show --page`."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from train_scripts import plan_for

from gradplan import cli, page
from gradplan.files import is_ours, write_plan
from gradplan.plan import Plan
from gradplan.probes.evidence import Device, Notice, Trial, TuningTrial
from gradplan.verdict import Tuning, Verdict

HOSTILE = "<script>alert('&\"x')</script>"
VOID = {"meta", "link", "br", "hr", "img", "input"}
RESOURCES = {"src", "href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """What stands in a page, and whether every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.resources: list[str] = []
        self.declaration = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_decl(self, decl: str) -> None:
        self.declaration = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.resources += [value or "" for name, value in attrs if name in RESOURCES]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def a_plan(**changes: Any) -> Plan:
    plan = plan_for(("build_model", "build_batch"), 8, 8)
    trials = (
        Trial(micro_batch_size=16, num_micro_batches=2, fits=False, source="measured", reason="out of memory"),
        Trial(micro_batch_size=8, num_micro_batches=2, fits=True, source="measured", required_bytes=2**30),
    )
    evidence = plan.evidence.model_copy(update={"limit_bytes": 2**31, "trials": trials})
    return plan.model_copy(update={"evidence": evidence, **changes})


def tuned(**changes: Any) -> Plan:
    values = {1.0: 0.9, 0.5: 0.95, 2.0: 0.8246813, 4.0: None}
    found = {
        "study": "gradplan",
        "storage": "gradplan.study.log",
        "objective": "validation loss",
        "num_steps": 25,
        "num_real_steps": 100,
        "trials": tuple(TuningTrial(number=n, multiplier=m, value=v) for n, (m, v) in enumerate(values.items())),
        "checks": (),
        "verdict": Verdict(multiplier=2, num_pairs=5, gain=0.05, low=0.01, high=0.09, is_adopted=True),
    }
    return a_plan(tuning=Tuning(**{**found, **changes}), learning_rate_multiplier=2.0, learning_rate=0.2)


def has_plotly() -> bool:
    try:
        import plotly  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.fixture
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)


PLANS = {"untuned": a_plan(), "tuned": tuned(), "all diverged": tuned(trials=())}


# The page


@pytest.mark.parametrize("name", PLANS)
def test_a_page_is_well_formed(name: str) -> None:
    found = Page(page.render(PLANS[name]))
    assert found.declaration == "doctype html"
    assert {"html", "head", "title", "body", "h1", "table"} <= set(found.tags)
    assert found.tags.count("h1") == 1


@pytest.mark.parametrize("name", PLANS)
def test_a_page_loads_nothing_from_elsewhere(name: str) -> None:
    text = page.render(PLANS[name])
    found = Page(text)
    assert found.resources == []
    assert {"link", "img", "iframe", "object", "embed", "base"}.isdisjoint(found.tags)
    own = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "http:" not in own
    assert "https:" not in own
    assert "@import" not in own


def test_a_page_shows_settings_trials_and_the_device() -> None:
    text = Page(page.render(a_plan())).text
    assert all(word in text for word in ("micro-batch", "effective batch", "learning rate", "out of memory", "1.0 GiB"))
    assert "Tuning the learning rate" not in text


def test_a_tuned_page_gives_the_verdict_and_not_the_lowest_loss() -> None:
    text = Page(page.render(tuned())).text
    assert "2 times the rate lowers the validation loss by 0.05 (95 % interval 0.01 to 0.09)" in text
    assert "0.82" not in text


def test_a_plan_always_gives_the_same_page() -> None:
    for plan in PLANS.values():
        assert page.render(plan) == page.render(plan)


def test_another_plan_gives_another_page() -> None:
    assert len({page.render(plan) for plan in PLANS.values()}) == len(PLANS)


@pytest.mark.parametrize("where", ["model", "optimizer", "warning", "device", "objective"])
def test_names_are_text_and_never_markup(where: str) -> None:
    plain, hostile = tuned(), tuned()
    if where == "warning":
        hostile = tuned().model_copy(update={"warnings": (Notice(code="invented", message=HOSTILE),)})
        plain = tuned().model_copy(update={"warnings": (Notice(code="invented", message="harmless"),)})
    elif where == "device":
        evidence = hostile.evidence.model_copy(update={"device": Device(name=HOSTILE, total_bytes=2**31)})
        hostile = hostile.model_copy(update={"evidence": evidence})
    elif where == "objective":
        hostile = tuned(objective=HOSTILE)
    else:
        hostile = hostile.model_copy(update={where: HOSTILE})
    text = page.render(hostile)
    assert HOSTILE not in text
    found = Page(text)
    assert HOSTILE in found.text
    assert found.tags == Page(page.render(plain)).tags


def test_a_name_that_is_no_text_makes_a_page_all_the_same() -> None:
    assert page.is_untouched(page.render(a_plan(model="m\udc80.py")))


# Optuna's plots


@pytest.mark.skipif(not has_plotly(), reason="plotly is not installed")
def test_optunas_plots_are_in_the_page_and_plotly_once() -> None:
    text = page.render(tuned())
    assert re.findall(r'id="(plot-\d)"', text) == ["plot-0", "plot-1"]
    assert len(re.findall(r"plotly\.js v\d", text)) == 1
    assert "0.8246813" in text


@pytest.mark.skipif(not has_plotly(), reason="plotly is not installed")
def test_one_run_that_came_to_its_end_can_be_plotted() -> None:
    trials = (TuningTrial(number=0, multiplier=1, value=None), TuningTrial(number=1, multiplier=0.5, value=1.0))
    assert 'id="plot-1"' in page.render(tuned(trials=trials))


@pytest.mark.parametrize("name", ["untuned", "all diverged"])
def test_without_a_loss_there_is_no_plot(name: str) -> None:
    assert "script" not in Page(page.render(PLANS[name])).tags


@pytest.mark.usefixtures("no_plotly")
def test_without_plotly_the_page_says_what_to_install() -> None:
    found = Page(page.render(tuned()))
    assert "pip install 'gradplan[plots]'" in found.text
    assert "2 times the rate lowers" in found.text
    assert "script" not in found.tags


@pytest.mark.usefixtures("no_plotly")
def test_an_untuned_page_needs_no_plotly() -> None:
    assert "plotly" not in page.render(a_plan())


# The seal, and the command


def test_a_page_carries_a_seal_that_any_change_breaks() -> None:
    text = page.render(a_plan())
    assert page.is_untouched(text)
    assert not page.is_untouched(text.replace("effective batch", "effective catch"))
    assert not page.is_untouched(text + " ")
    assert not page.is_untouched(text.partition("\n")[2])
    assert not page.is_untouched("")


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("def build_model(): ...\n")
    write_plan(a_plan(), "gradplan.json")
    return tmp_path


def show(*args: str) -> Result:
    return CliRunner().invoke(cli.main, ["show", "gradplan.json", *args], prog_name="gradplan")


@pytest.mark.usefixtures("in_a_folder")
def test_the_command_writes_the_page_and_prints_nothing_else() -> None:
    result = show("--page", "plan.html")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "wrote plan.html\n")
    assert Path("plan.html").read_text(encoding="utf-8") == page.render(a_plan())
    assert is_ours("plan.html")


@pytest.mark.usefixtures("in_a_folder")
def test_a_page_that_nobody_changed_is_overwritten() -> None:
    show("--page", "plan.html")
    write_plan(a_plan(optimizer="Lion"), "gradplan.json")
    assert show("--page", "plan.html").exit_code == 0
    assert "Lion" in Path("plan.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("in_a_folder")
def test_a_page_that_was_edited_is_kept_unless_forced() -> None:
    show("--page", "plan.html")
    path = Path("plan.html")
    path.write_text(edited := path.read_text(encoding="utf-8") + "<!-- my notes -->\n", encoding="utf-8")
    result = show("--page", "plan.html")
    assert result.exit_code == 2
    assert "plan.html was edited since gradplan wrote it" in result.stderr
    assert path.read_text(encoding="utf-8") == edited
    assert show("--page", "plan.html", "--force").exit_code == 0
    assert is_ours(path)


@pytest.mark.usefixtures("in_a_folder")
def test_what_to_do_about_a_page_in_the_way_can_be_typed() -> None:
    Path("plan.html").write_text("mine")
    assert "--force" in show("--page", "plan.html").stderr


@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("target", ["gradplan.json", "folder", "nowhere/plan.html"])
def test_a_page_never_replaces_the_plan_or_a_folder(target: str) -> None:
    Path("folder").mkdir()
    before = Path("gradplan.json").read_bytes()
    result = show("--page", target)
    assert result.exit_code == 2
    assert target in result.stderr
    assert Path("gradplan.json").read_bytes() == before


@pytest.mark.usefixtures("in_a_folder")
def test_json_that_was_asked_for_beside_a_page_is_printed_or_refused() -> None:
    result = show("--page", "plan.html", "--json")
    assert result.exit_code == 2 or result.stdout.startswith("{")
