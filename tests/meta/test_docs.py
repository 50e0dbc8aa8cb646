"""The documents say what is: links resolve, commands parse, configurations load, and quoted output is what the code
prints. Nothing is run that trains."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.core
import typer.main

from lockstep.cli import app
from lockstep.config.errors import ConfigError
from lockstep.driver.rows import step_line
from lockstep.recipes import find_recipe, load_recipe, recipe_names

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
UsageError: Any = typer.BadParameter.__base__  # click's, or that of the copy of click inside newer typer
ROW_KEYS = {
    "reward": "reward/mean",
    "correct": "accuracy/mean",
    "form": "format/mean",
    "sampled": "throughput/generated_tokens_per_s",
    "trained": "throughput/trained_tokens_per_s",
    "refit": "time/refit_s",
}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block in a language ("" for none)."""
    return [(page, body) for page, text in TEXTS.items() for name, body in FENCE.findall(text) if name == language]


def shell_commands() -> list[tuple[str, str]]:
    """(page, command) of every line of the shell blocks, without comments."""
    lines = [(page, line) for page, body in blocks("sh") for line in body.splitlines()]
    return [(page, line) for page, line in lines if shlex.split(line, comments=True)]


LOCKSTEP_COMMANDS = [(page, line) for page, line in shell_commands() if line.startswith("lockstep ")]


def parse(arguments: list[str], command: Any = None) -> Any:
    """The context of a command line, parsed as the program does, without running the command."""
    command = command or typer.main.get_command(app)
    context = command.make_context(command.name, list(arguments))
    if isinstance(command, typer.core.TyperGroup) and (rest := [*context._protected_args, *context.args]):
        _, inner, rest = command.resolve_command(context, rest)
        assert inner is not None
        return parse(rest, inner)
    return context


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_documents_with_commands() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/quickstart.md"} <= TEXTS.keys()
    assert len(LOCKSTEP_COMMANDS) > 15


@pytest.mark.parametrize("page", TEXTS)
def test_links_within_the_repository_resolve(page: str) -> None:
    broken: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", TEXTS[page])):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        there = path.resolve().is_relative_to(ROOT) and path.exists()
        if not there or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", TEXTS)
def test_every_page_is_reached_from_the_readme(page: str) -> None:
    assert page == "README.md" or f"]({page}" in TEXTS["README.md"]


@pytest.mark.parametrize(("page", "line"), LOCKSTEP_COMMANDS)
def test_a_quoted_command_parses(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(line, comments=True)
    for argument in arguments:
        if argument.startswith("runs/"):
            Path(argument).mkdir(parents=True)  # commands that read a run want its folder to exist
    context = parse(arguments)
    recipe = context.params.get("recipe")
    assert recipe is None or recipe in recipe_names() or recipe.endswith(".toml")


def test_the_parser_of_these_tests_refuses_what_the_program_refuses() -> None:
    for wrong in (["train"], ["trian", "quickstart"], ["train", "quickstart", "--no-such"], ["recipes", "shwo", "x"]):
        with pytest.raises(UsageError):
            parse(wrong)


@pytest.mark.parametrize(("page", "line"), [(p, line) for p, line in LOCKSTEP_COMMANDS if "--set " in line])
def test_quoted_overrides_load_or_are_refused_as_the_page_says(page: str, line: str) -> None:
    context = parse(shlex.split(line, comments=True)[1:])
    recipe = context.params["recipe"]
    base = "quickstart" if recipe.endswith(".toml") else recipe
    following = TEXTS[page].split(f"{line}\n```\n", 1)
    shown = FENCE.match(following[1].lstrip()) if len(following) == 2 else None
    if shown and shown.group(2).startswith("configuration of"):
        with pytest.raises(ConfigError) as refused:
            load_recipe(base, context.params["overrides"])
        assert str(refused.value).strip() == shown.group(2).strip()
    else:
        load_recipe(base, context.params["overrides"])


@pytest.mark.parametrize(("page", "text"), [b for b in blocks("toml") if b[1].startswith(("extends", "#"))])
def test_a_quoted_file_loads_or_is_refused_with_the_quoted_text(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(text, encoding="utf-8")
    if not text.startswith("# refused"):
        assert load_recipe("my.toml").config.name == tomllib.loads(text)["name"]
        return
    with pytest.raises(ConfigError) as refused:
        load_recipe("my.toml")
    assert f"```\n{refused.value}\n```" in TEXTS[page]


def test_every_quoted_toml_is_valid() -> None:
    for _, text in blocks("toml"):
        tomllib.loads(text)


def test_quoted_python_compiles_and_the_quoted_recipe_is_a_valid_configuration(tmp_path: Path) -> None:
    for page, text in blocks("python"):
        compile(text, page, "exec")
    (text,) = [text for page, text in blocks("python") if page == "docs/write-a-recipe.md"]
    module = load_module(write(tmp_path / "quoted_recipe.py", text))
    try:
        assert "subtraction" in recipe_names()
        assert load_recipe("subtraction").config == module.subtraction() == find_recipe("subtraction")
    finally:
        from lockstep import recipes

        recipes._recipes.pop("subtraction")


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page, body in blocks("") for line in body.splitlines() if re.match(r"step \d+/\d+ ·", line)],
)
def test_a_quoted_step_line_is_what_the_code_prints(page: str, line: str) -> None:
    step, *pieces = line.split(" · ")
    number, num_steps = step.removeprefix("step ").split("/")
    row: dict[str, int | float | str | bool] = {"step": int(number)}
    for piece in pieces:
        name, _, rest = piece.partition(" ")
        if name in ROW_KEYS:
            row[ROW_KEYS[name]] = float(rest.split()[0])
            if claims := re.search(r", (\d+) claims? held", rest):
                row["refit/claims_held"] = int(claims[1])
        elif "(bound " in piece:
            row |= {"verdict/status": name, "agreement/bound": float(rest[len("(bound ") : -1])}
        elif rest == "s":
            row["time/step_s"] = float(name)
        else:
            row |= {"agreement/metric": name, f"agreement/{name}": float(rest)}
    assert re.sub(r"\[/?[a-z ]+\]", "", step_line(row, int(num_steps))) == line


def test_paths_named_in_shell_blocks_exist() -> None:
    named = [word for _, line in shell_commands() for word in shlex.split(line, comments=True)]
    missing = [word for word in named if word.startswith(("tests/", "tools/")) and not (ROOT / word).exists()]
    assert not missing


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    inline = [name for text in TEXTS.values() for name in re.findall(r"`make ([a-z-]+)`", text)]
    shell = [shlex.split(line, comments=True)[1] for _, line in shell_commands() if line.startswith("make ")]
    assert set(inline + shell) <= targets


def test_make_bench_runs_every_benchmark_that_needs_no_gpu() -> None:
    (listed,) = re.findall(r"for name in ([a-z_ ]+); do", (ROOT / "Makefile").read_text())
    commands = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '"__main__"' in path.read_text()}
    assert set(listed.split()) == {name for name in commands if not name.endswith(("_gpu", "_side"))}


def test_the_configuration_page_is_what_the_schema_says() -> None:
    reference = load_module(ROOT / "tools" / "config_reference.py")
    assert TEXTS["docs/configuration.md"] == reference.render(), "run: .venv/bin/python tools/config_reference.py"


def test_every_key_of_the_configuration_page_has_a_description() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", TEXTS["docs/configuration.md"], re.MULTILINE)
    assert len(rows) > 100
    assert [key for key, description in rows if not description.strip()] == []


def test_every_dependency_has_its_reason_and_no_other_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tables = TEXTS["docs/dependencies.md"].split("## To develop")
    for text, declared in zip(tables, (project["dependencies"], project["optional-dependencies"]["dev"]), strict=True):
        first_cells = re.findall(r"^\| ([a-z][\w, -]*) \| (?!what for)", text, re.MULTILINE)
        explained = {name for cell in first_cells for name in cell.split(", ")}
        assert explained == {re.split(r"[<>=\[]", requirement)[0] for requirement in declared}


def test_tests_named_as_guards_against_faults_exist() -> None:
    rows = re.findall(r"^\| ([A-I]\d+) \| (.*) \|$", TEXTS["docs/faults.md"], re.MULTILINE)
    assert len(rows) > 40
    guards = [(fault, re.findall(r"\]\(\.\./(tests/[^)]*)\) `(\w+)`", text)) for fault, text in rows]
    assert [fault for fault, named in guards if not named] == []
    pairs = [(fault, path, name) for fault, named in guards for path, name in named]
    assert len(pairs) > len(rows), "some faults have several guards, of which each is looked at"
    assert [p for p in pairs if f"def test_{p[2]}(" not in (ROOT / p[1]).read_text(encoding="utf-8")] == []


def test_fault_ids_cited_in_tests_are_listed() -> None:
    listed = set(re.findall(r"^\| ([A-I]\d+) \|", TEXTS["docs/faults.md"], re.MULTILINE))
    cited: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for phrase in re.findall(
            r"(?<!\w)\(([A-I]\d{1,2}(?:, [A-I]\d{1,2})*)[:)]|Faults? ([A-I]\d+(?: and [A-I]\d+)*)", text
        ):
            cited |= set(re.findall(r"[A-I]\d+", " ".join(phrase)))
    assert len(cited) > 15
    assert cited <= listed


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def load_module(path: Path) -> ModuleType:
    """Import a file that is not part of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
