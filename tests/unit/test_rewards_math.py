"""Math grading: verdicts, and a time limit that holds from any thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from lockstep.tasks.errors import TaskError
from lockstep.tasks.grader_pool import GradeResult, GraderPool
from lockstep.tasks.math_grader import MathGrader

TOWER = r"\boxed{\frac{5^{5^{5^{5^{5}}}}}{2}}"


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(num_workers=1, timeout_s=20.0)
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("840", r"First \boxed{840}, and so \boxed{840}.", 1.0),  # one answer, not 840840
        ("840", r"\boxed{840} or rather \boxed{841}", 0.0),  # the last box is the answer
        ("841", r"\boxed{840} or rather \boxed{841}", 1.0),
        ("7", r"It is 7, so \boxed{8}. Check: 7", 0.0),  # a box wins over what follows
        ("7", r"\boxed{} 7", 0.0),
        ("x=2", "2", 1.0),
        ("2", "x=2", 1.0),
        # Not symmetric: a relation as reference accepts the interval, an interval does not accept a relation.
        ("1 < x < 2", r"\boxed{(1,2)}", 1.0),
        ("(1,2)", r"\boxed{1 < x < 2}", 0.0),
        ("B", r"\boxed{B}. Option A fails because D holds.", 1.0),
        ("A", r"\boxed{B}. Option A fails.", 0.0),
        ("D", "Both A and D look right, D", 0.0),  # no fallback to stray letters
        ("C", r"The answer is (C).", 1.0),
        ("C", r"\boxed{\text{C}}", 1.0),
        ("C", "c) is close, but Answer: C", 1.0),
        ("A", "The answer is all of them", 0.0),
        ("13", "Answer: $13$", 1.0),
        ("$13$", r"\boxed{13}", 1.0),
        (r"(0,1) \cup (1,2)", r"\boxed{(0,2)}", 0.0),
        (r"(0,1) \cup (1,2)", r"\boxed{(0,1) \cup (1,2)}", 1.0),
        ("[0,1]", r"\boxed{(0,1)}", 0.0),
        (r"\frac{1}{2}", r"so \boxed{0.5}", 1.0),
        ("1234", r"\boxed{1,234}", 1.0),
        ("3", "no idea", 0.0),
        ("3", "", 0.0),
    ],
)
def test_verdicts(grader, gold, text, score):
    assert grader.grade([(gold, text)]) == [GradeResult(score)]


def test_a_reference_that_is_no_mathematics_is_an_error_not_a_wrong_answer(grader):
    [result] = grader.grade([("", "3")])
    assert result.score is None
    assert "reference answer" in str(result.error)


def test_a_hanging_answer_is_cut_off_from_any_thread_and_the_others_get_their_marks():
    grader = MathGrader(num_workers=2, timeout_s=2.0)
    grader.grade([("1", "1"), ("2", "2")])  # both workers are up: only grading is timed below
    results: list[GradeResult] = []
    thread = threading.Thread(target=lambda: results.extend(grader.grade([("3", "3"), ("7", TOWER), ("4", "4")])))
    started = time.monotonic()
    thread.start()
    thread.join(60)
    elapsed_s = time.monotonic() - started
    processes = grader.process_ids
    grader.close()
    assert [result.score for result in results] == [1.0, None, 1.0]
    assert results[1].timed_out
    assert "no verdict within 2 s" in str(results[1].error)
    assert elapsed_s < 20
    assert not any(psutil.pid_exists(process) for process in processes)


def test_threads_share_one_grader(grader):
    results: dict[int, list[GradeResult]] = {}

    def work(i: int) -> None:
        results[i] = grader.grade([(str(i), str(i)), (str(i), str(i + 1))])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: [GradeResult(1.0), GradeResult(0.0)] for i in range(6)}


def test_a_killed_worker_is_replaced(grader):
    assert grader.grade([("1", "1")]) == [GradeResult(1.0)]
    [before] = grader.process_ids
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while grader.process_ids and time.monotonic() < deadline:
        time.sleep(0.01)
    assert grader.grade([("1", "1")]) == [GradeResult(1.0)]
    assert grader.process_ids != [before]


def test_workers_start_when_needed_and_close_ends_them():
    grader = MathGrader(num_workers=2, timeout_s=20.0)
    assert grader.process_ids == []
    grader.grade([("1", "1")])
    [worker] = grader.process_ids
    assert psutil.pid_exists(worker)
    grader.close()
    grader.close()
    assert not psutil.pid_exists(worker)
    with pytest.raises(TaskError, match="closed"):
        grader.grade([("1", "1")])


def test_a_worker_imports_neither_torch_nor_the_configuration():
    modules = "lockstep.tasks.grader_worker, lockstep.tasks.math_rules"
    code = f"import sys, {modules}; print([name for name in ('torch', 'pydantic') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_when_their_parent_is_killed(busy):
    code = (
        "import sys, threading\n"
        "from lockstep.tasks.math_grader import MathGrader\n"
        "g = MathGrader(num_workers=1, timeout_s=2.0)\n"
        "g.grade([('1', '1')])\n"
        "print(g.process_ids[0], flush=True)\n"
        f"g.grade([('7', {TOWER!r})]) if {busy} else sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        if busy:
            time.sleep(0.5)
        parent.kill()
        _, alive = psutil.wait_procs([worker], timeout=15)
        assert not alive


def test_ctrl_c_does_not_reach_the_workers(grader):
    grader.grade([("1", "1")])
    [worker] = grader.process_ids
    os.kill(worker, signal.SIGINT)
    assert grader.grade([("1", "1")]) == [GradeResult(1.0)]
    assert grader.process_ids == [worker]


def test_graded_text_cannot_run_code(tmp_path):
    """Some graders of reasoning-gym hand the answer to eval or to sympy's parse_expr."""
    target = tmp_path / "owned"
    attack = f"__import__('pathlib').Path({str(target)!r}).write_text('x')"
    start = f"__import__('subprocess').run(['touch', {str(target)!r}])"
    entry = {"answer": "1 2", "question": "", "metadata": {"numbers": [1, 2], "target": 3, "source_dataset": "x"}}
    pool = GraderPool("reasoning_gym", 1, 30.0)
    requests = [(name, {}, text, entry) for name in ("spiral_matrix", "countdown") for text in (attack, start)]
    results = pool.grade(requests)
    pool.close()
    assert not target.exists()
    assert all(result.score != 1.0 for result in results)
