"""pytest on a lane of a planted repository: what runs, what is refused, what is charged to whom, what is written."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.lanes_planted import (
    CATALOGUE,
    HEAD,
    Ended,
    commit,
    fake_gpus,
    fake_tool,
    lanes,
    mark,
    plant,
    run_pytest,
)


def outcomes(ended: Ended) -> dict[str, str]:
    """Outcome by test name in the only run."""
    (run,) = ended.runs
    return {result.test_id.rpartition("::")[2]: result.outcome for result in run.tests}


def test_declare_plan_run_evidence_status(tmp_path: Path) -> None:
    body = "def test_x(lane_evidence):\n    lane_evidence.gate('agreement', 0.01, 0.07)\n"
    text = HEAD + mark("cpu-long", '{"cpu": "cpu"}', 0.5, 'recipe="tiny", gates=["agreement"]') + body
    root = commit(plant(tmp_path, {"tests/test_a.py": text}))
    assert lanes(root, "plan", "--out", "plan.json")[0] == 0
    ended = run_pytest(root, "--lane", "cpu-long", "--hardware", "cpu", "--lanes-plan", "plan.json")
    assert ended.code == 0, ended.output
    assert lanes(root, "verdict", "--plan", "plan.json")[0] == 0
    _, shown, _ = lanes(root, "status")
    assert "tiny" in shown
    assert "agreement 0.01 ≤ 0.07" in shown
    (run,) = ended.runs
    assert run.versions["python"]
    assert run.tests[0].minutes < 1


def test_each_test_runs_exactly_once_over_the_shards(tmp_path: Path) -> None:
    """Fault H2: partition flags were missing in one step, so that each of four shards ran everything."""
    text = HEAD + "import pathlib\ndef note(name): pathlib.Path(f'{name}.ran').open('a').write('x')\n"
    text += "".join(f"def test_{n}(): note({n})\n" for n in range(9))
    text += "class Base:\n    def test_inherited(self): note('inherited')\nclass TestA(Base): pass\n"
    text += "@pytest.mark.parametrize('n', [1, 2])\ndef test_p(n): note(f'p{n}')\n"
    root = plant(tmp_path, {"tests/test_a.py": text})
    for shard in range(1, 5):
        ended = run_pytest(root, "--lane", "cpu", "--shard", f"{shard}/4")
        assert ended.code == 0, ended.output
    ran = Counter({path.stem: len(path.read_text()) for path in root.glob("*.ran")})
    assert ran == Counter([*map(str, range(9)), "inherited", "p1", "p2"])


def test_a_registered_test_that_pytest_does_not_collect_is_an_error(tmp_path: Path) -> None:
    """Fault H1: registered files were green and ran nothing."""
    text = HEAD + mark("cpu-long", '{"cpu": "cpu"}') + "def test_gone(): pass\ndel test_gone\n"
    text += mark("cpu-long", '{"cpu": "cpu"}') + "def test_here(): pass\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu-long")
    assert ended.code == 4
    assert "tests/test_a.py::test_gone is registered and pytest collected nothing of it" in ended.output
    (run,) = ended.runs
    assert (run.exit_status, run.tests) == (4, ())


def test_a_run_in_which_every_test_is_skipped_is_no_success(tmp_path: Path) -> None:
    text = HEAD + "def test_a(): pytest.skip('not today')\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu")
    assert ended.code == 1
    assert "not tested: no test ran" in ended.output
    assert outcomes(ended) == {"test_a": "skipped"}


def test_a_declared_test_that_skips_itself_fails(tmp_path: Path) -> None:
    text = HEAD + mark("cpu-long", '{"cpu": "cpu"}') + "def test_a(): pytest.importorskip('no_such_engine')\n"
    text += mark("cpu-long", '{"cpu": "cpu"}') + "def test_b(): pass\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu-long")
    assert ended.code == 1
    assert outcomes(ended) == {"test_a": "failed", "test_b": "passed"}
    assert "skipped itself on cpu" in ended.output


def test_an_unknown_lane_is_an_error_and_an_empty_one_is_reported(tmp_path: Path) -> None:
    """Fault H11: a suite without tests, or with a misspelled name, ended with 0."""
    root = plant(tmp_path, {"tests/test_a.py": "def test_a(): pass\n"})
    unknown = run_pytest(root, "--lane", "cpu-lnog")
    assert unknown.code == 4
    assert "unknown lane cpu-lnog; known: cpu, cpu-long" in unknown.output
    empty = run_pytest(root, "--lane", "cpu-long")
    assert empty.code == 5
    assert "not tested: lane cpu-long has nothing enabled on cpu" in empty.output
    beyond = run_pytest(root, "--lane", "cpu", "--shard", "2/2")
    assert beyond.code == 5
    assert "shard 2/2" in beyond.output


@pytest.mark.parametrize(
    ("devices", "hardware", "variable", "says"),
    [
        (("NVIDIA A100-SXM4-80GB", 1), "h200", None, "--hardware h200, but this machine has NVIDIA A100-SXM4-80GB"),
        (("NVIDIA H200", 1), "mi300x", None, "--hardware mi300x, but this machine has NVIDIA H200"),
        (("NVIDIA H200", 1), None, "mi300x", "LOCKSTEP_LANES_HARDWARE=mi300x says rocm, but the device is NVIDIA H200"),
        (("", 0), "h200", None, "--hardware h200, but this machine has no GPU"),
    ],
)
def test_a_lane_runs_on_the_named_hardware_or_not_at_all(
    tmp_path: Path, devices: tuple[str, int], hardware: str | None, variable: str | None, says: str
) -> None:
    """Fault H7: a lane named for one GPU ran on another, since runner labels match supersets."""
    text = HEAD + mark("one", '{"cuda": "h200", "rocm": "mi300x"}') + "def test_a(): pass\n"
    root = plant(tmp_path, {"tests/test_a.py": text})
    path = fake_gpus(tmp_path / "bin", *devices)
    more = {} if variable is None else {"LOCKSTEP_LANES_HARDWARE": variable}
    ended = run_pytest(root, "--lane", "one", *(["--hardware", hardware] if hardware else []), PATH=path, **more)
    assert ended.code == 4
    assert says in ended.output
    assert ended.runs == []


def test_evidence_names_the_real_devices(tmp_path: Path) -> None:
    root = plant(
        tmp_path, {"tests/test_a.py": HEAD + mark() + "def test_a(lane_case): assert lane_case.vendor == 'cuda'\n"}
    )
    ended = run_pytest(root, "--lane", "one", PATH=fake_gpus(tmp_path / "bin"))
    assert ended.code == 0, ended.output
    assert "this machine: NVIDIA H200 (nvidia-smi)" in ended.output
    (run,) = ended.runs
    assert (run.hardware, run.devices, run.versions["driver"]) == ("h200", ("NVIDIA H200",), "570.86")


def test_too_few_devices_are_refused(tmp_path: Path) -> None:
    root = plant(tmp_path, {"tests/test_a.py": HEAD + mark("four") + "def test_a(): pass\n"})
    ended = run_pytest(root, "--lane", "four", PATH=fake_gpus(tmp_path / "bin", count=2))
    assert ended.code == 4
    assert "needs 4 × h200, but this machine has 2" in ended.output


def test_a_variable_that_a_test_leaves_is_put_back_and_charged_to_it(tmp_path: Path) -> None:
    """Fault H10: a test passed or failed by the order of files, since another had left a variable."""
    text = HEAD + "def test_leaks(): os.environ['PLANTED'] = '1'; os.environ.pop('KEPT')\n"
    text += "def test_next(): assert 'PLANTED' not in os.environ and os.environ['KEPT'] == 'yes'\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu", KEPT="yes")
    assert ended.code == 1
    assert outcomes(ended) == {"test_leaks": "failed", "test_next": "passed"}
    assert "tests/test_a.py::test_leaks left behind: variable KEPT unset; variable PLANTED set" in ended.output
    (run,) = ended.runs
    assert run.tests[0].left == ("variable KEPT unset", "variable PLANTED set")


def test_what_a_living_fixture_changes_is_its_own_until_it_ends(tmp_path: Path) -> None:
    fixture = "@pytest.fixture(scope='module')\ndef wide():\n    os.environ['WIDE'] = '1'\n    yield\n    {}\n"
    uses = "def test_one(wide): assert os.environ['WIDE']\ndef test_two(wide): assert os.environ['WIDE']\n"
    files = {
        "tests/test_a.py": HEAD + fixture.format("del os.environ['WIDE']") + uses,
        "tests/test_b.py": HEAD + fixture.format("pass") + uses.replace("one", "three").replace("two", "four"),
    }
    ended = run_pytest(plant(tmp_path, files), "--lane", "cpu")
    assert outcomes(ended) == {
        "test_one": "passed",
        "test_two": "passed",
        "test_three": "passed",
        "test_four": "failed",
    }
    assert "test_four left behind: variable WIDE set" in ended.output


def test_the_environment_of_a_case_does_not_reach_the_next(tmp_path: Path) -> None:
    declared = mark(
        "cpu-long", '{"cpu": "cpu"}', more='extra_env={"cpu": {"BACKEND": "a2a"}}, extra_args={"*": ["--x"]}'
    )
    text = (
        HEAD
        + "@pytest.fixture\ndef seen(): yield os.environ.get('BACKEND'); assert os.environ.get('BACKEND') == 'a2a'\n"
    )
    text += declared + "def test_a(seen, lane_case): assert seen == 'a2a' and lane_case.extra_args == ('--x',)\n"
    text += mark("cpu-long", '{"cpu": "cpu"}') + "def test_b(): assert 'BACKEND' not in os.environ\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu-long")
    assert ended.code == 0, ended.output


def test_a_detached_process_is_found_named_charged_and_ended(tmp_path: Path) -> None:
    start = "import subprocess, time\ndef test_starts():\n"
    start += "    subprocess.Popen(['sh', '-c', 'setsid sleep 271 & setsid sleep 272 &'])\n    time.sleep(0.3)\n"
    text = HEAD + start + "def test_next(): pass\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu")
    assert outcomes(ended) == {"test_starts": "failed", "test_next": "passed"}
    (run,) = ended.runs
    assert sorted(text.partition(": ")[2] for text in run.tests[0].left) == ["sleep 271", "sleep 272"]
    time.sleep(0.2)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _sleeps(path)]
    assert left == []


def _sleeps(path: Path) -> bool:
    try:
        return path.read_bytes() in (b"sleep\x00271\x00", b"sleep\x00272\x00")
    except OSError:
        return False


def test_a_process_of_a_living_fixture_may_stay_and_is_charged_once_it_outlives_it(tmp_path: Path) -> None:
    text = HEAD + "import subprocess\n@pytest.fixture(scope='module')\ndef server():\n"
    text += "    process = subprocess.Popen(['sleep', '273'])\n    yield\n    STOP\n"
    text += "def test_a(server): pass\ndef test_b(server): pass\n"
    files = {
        "tests/test_a.py": text.replace("STOP", "process.kill(); process.wait()"),
        "tests/test_b.py": text.replace("STOP", "pass").replace("test_a", "test_c").replace("test_b", "test_d"),
    }
    ended = run_pytest(plant(tmp_path, files), "--lane", "cpu")
    assert outcomes(ended) == {"test_a": "passed", "test_b": "passed", "test_c": "passed", "test_d": "failed"}


def test_gpu_memory_that_a_test_leaves_is_charged_to_it_alone(tmp_path: Path) -> None:
    used = tmp_path / "bin/used"
    text = (
        HEAD + mark() + f"def test_a():\n    open({str(used)!r}, 'w').write('9000')\n" + mark() + "def test_b(): pass\n"
    )
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "one", PATH=fake_gpus(tmp_path / "bin"))
    assert outcomes(ended) == {"test_a": "failed", "test_b": "passed"}
    assert "test_a left behind: 9000 MiB of GPU memory" in ended.output


def test_a_retry_is_recorded_as_a_retry(tmp_path: Path) -> None:
    flaky = "def test_flaky():\n    seen = os.path.exists('seen')\n    open('seen', 'w').close()\n    assert seen\n"
    text = HEAD + mark("cpu-long", '{"cpu": "cpu"}', more="retries=2") + flaky
    text += mark("cpu-long", '{"cpu": "cpu"}', more="retries=1") + "def test_bad(): assert False\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu-long", "-v", "--junitxml=j.xml")
    assert outcomes(ended) == {"test_flaky": "passed", "test_bad": "failed"}
    (run,) = ended.runs
    assert {result.test_id.rpartition("::")[2]: result.num_retries for result in run.tests} == {
        "test_flaky": 1,
        "test_bad": 1,
    }
    assert ended.output.count("RETRY") == 2
    assert "retried 1 times: tests/test_a.py::test_flaky" in ended.output
    assert "test_flaky [cpu]: retried 1 times" in lanes(tmp_path, "debt")[1]


def test_a_retry_that_hangs_ends_by_the_estimate_too(tmp_path: Path) -> None:
    """pytest-timeout sets one timer for all attempts of a test; after it has fired, a retry ran without a limit."""
    catalogue = CATALOGUE.replace(
        '[lanes.cpu-long]\nstage = "cpu"', '[lanes.cpu-long]\nstage = "cpu"\nmin_timeout_s = 1'
    )
    text = (
        HEAD + mark("cpu-long", '{"cpu": "cpu"}', 0.001, "retries=1") + "def test_x(): __import__('time').sleep(60)\n"
    )
    started = time.monotonic()
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}, catalogue), "--lane", "cpu-long")
    assert time.monotonic() - started < 50
    (result,) = ended.runs[0].tests
    assert (result.outcome, result.num_retries) == ("failed", 1)
    assert "Timeout" in result.why


@pytest.mark.parametrize(
    ("decorator", "body", "says"),
    [
        ("@pytest.mark.xfail(reason='someday')\n", "lane_evidence.gate('g', 9, 1)", "failed as its xfail expects"),
        ("@pytest.mark.xfail(run=False)\n", "lane_evidence.gate('g', 0, 1)", "failed as its xfail expects"),
        (
            "",
            "pytest.raises(AssertionError, lane_evidence.gate, 'g', 9, 1)",
            "although its gates did not: g 9 > bound 1",
        ),
    ],
)
def test_an_expected_failure_or_a_swallowed_gate_is_no_success(
    tmp_path: Path, decorator: str, body: str, says: str
) -> None:
    text = HEAD + mark("cpu-long", '{"cpu": "cpu"}', more='gates=["g"]') + decorator
    root = plant(tmp_path, {"tests/test_a.py": f"{text}def test_x(lane_evidence):\n    {body}\n"})
    ended = run_pytest(root, "--lane", "cpu-long")
    assert ended.code == 1, ended.output
    assert outcomes(ended) == {"test_x": "failed"}
    assert says in ended.runs[0].tests[0].why


def test_a_subtest_that_fails_fails_its_test(tmp_path: Path) -> None:
    text = HEAD + "import unittest\nclass TestU(unittest.TestCase):\n    def test_x(self):\n"
    text += "        for n in range(2):\n            with self.subTest(n=n): self.assertEqual(n, 0)\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu")
    assert ended.code == 1
    assert outcomes(ended) == {"test_x": "failed"}
    assert "1 != 0" in ended.runs[0].tests[0].why


def test_an_expected_failure_without_a_mark_is_neither_a_success_nor_a_failure(tmp_path: Path) -> None:
    text = HEAD + "def test_x(): pass\n@pytest.mark.xfail\ndef test_y(): assert 0\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu")
    assert ended.code == 0, ended.output
    assert outcomes(ended) == {"test_x": "passed", "test_y": "skipped"}


def test_a_test_that_hangs_ends_by_its_estimate(tmp_path: Path) -> None:
    slow = mark("cpu-long", '{"cpu": "cpu"}', 0.01) + "def test_hangs():\n    import time; time.sleep(60)\n"
    catalogue = plant(tmp_path, {"tests/test_a.py": HEAD + slow}) / "lanes.toml"
    text = catalogue.read_text().replace("[lanes.cpu-long]", "[lanes.cpu-long]\nmin_timeout_s = 1.0")
    catalogue.write_text(text)
    begun = time.monotonic()
    ended = run_pytest(tmp_path, "--lane", "cpu-long")
    assert time.monotonic() - begun < 30
    assert outcomes(ended) == {"test_hangs": "failed"}
    (run,) = ended.runs
    assert run.tests[0].timeout_s == pytest.approx(0.01 * 60 * 3)


def test_a_test_that_records_not_all_of_its_gates_fails(tmp_path: Path) -> None:
    body = "def test_a(lane_evidence): lane_evidence.gate('reward', 0.8, 0.5, 'at_least')\n"
    text = HEAD + mark("cpu-long", '{"cpu": "cpu"}', more='gates=["agreement", "reward"]') + body
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu-long")
    assert outcomes(ended) == {"test_a": "failed"}
    assert "passed without recording its gates agreement" in ended.output


def test_a_failed_gate_is_in_the_evidence_with_its_value(tmp_path: Path) -> None:
    body = "def test_a(lane_evidence): lane_evidence.gate('agreement', float('nan'), 0.07)\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": HEAD + body}), "--lane", "cpu")
    assert ended.code == 1
    (result,) = ended.runs[0].tests
    assert result.why == "call: lockstep.lanes.recorder.GateFailed: gate agreement nan > bound 0.07"
    (gate,) = result.gates
    assert (gate.name, gate.passed) == ("agreement", False)


def test_outside_a_lane_a_gpu_test_is_skipped_with_the_command_that_runs_it(tmp_path: Path) -> None:
    text = HEAD + mark() + "def test_gpu(): assert False\ndef test_cpu(lane_case): assert lane_case.hardware == 'cpu'\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "-rs", "tests")
    assert ended.code == 0, ended.output
    assert "1 passed, 1 skipped" in ended.output
    assert "for h200: pytest --lane one on such a machine" in ended.output
    assert ended.runs == []


@pytest.mark.parametrize(("option", "value"), [("--hardware", "h200"), ("--shard", "1/4")])
def test_options_that_need_a_lane_say_so(tmp_path: Path, option: str, value: str) -> None:
    """Fault H2 once more: a shard without a lane would run everything, in each of the four."""
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": "def test_a(): pass\n"}), option, value)
    assert ended.code == 4
    assert f"{option} needs --lane" in ended.output


def test_outside_a_lane_a_faulty_mark_stops_no_other_test(tmp_path: Path) -> None:
    text = HEAD + '@pytest.mark.lane("one", hardware="h200")\ndef test_a(): pass\ndef test_b(): pass\n'
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "-rs")
    assert ended.code == 0, ended.output
    assert "1 passed, 1 skipped" in ended.output
    assert "for h200: pytest --lane one on such a machine" in ended.output


def test_a_mark_that_the_source_does_not_show_is_refused(tmp_path: Path) -> None:
    text = HEAD + 'lane = pytest.mark.lane("one", hardware={"cuda": "h200"}, minutes=1, owner="me")\n'
    text += "@lane\ndef test_a(): pass\ndef test_b(): pass\n"
    ended = run_pytest(plant(tmp_path, {"tests/test_a.py": text}), "--lane", "cpu")
    assert ended.code == 4
    assert "tests/test_a.py::test_a has a lane mark that its source does not show" in ended.output


def test_rocm_is_read_from_its_own_tool(tmp_path: Path) -> None:
    script = """case "$*" in
*productname*) echo '{"card0": {"Card Series": "AMD Instinct MI300X", "Card Model": "0x74a1"}}' ;;
*meminfo*) echo '{"card0": {"VRAM Total Used Memory (B)": "1048576"}}' ;;
esac"""
    text = HEAD + mark("one", '{"rocm": "mi300x"}') + "def test_a(lane_case): assert lane_case.hardware == 'mi300x'\n"
    root = plant(tmp_path, {"tests/test_a.py": text})
    ended = run_pytest(root, "--lane", "one", PATH=fake_tool(tmp_path / "bin", "rocm-smi", script))
    assert ended.code == 0, ended.output
    assert ended.runs[0].devices == ("AMD Instinct MI300X",)


def test_a_plugin_that_spreads_tests_over_processes_is_refused(tmp_path: Path) -> None:
    plugin = "def pytest_addoption(parser): parser.addoption('-N', dest='numprocesses', type=int)\n"
    root = plant(tmp_path, {"tests/test_a.py": "def test_a(): pass\n", "spread.py": plugin})
    ended = run_pytest(root, "-p", "spread", "-N", "2", "--lane", "cpu", PYTHONPATH=str(root))
    assert ended.code == 4
    assert "tests run one after the other" in ended.output
