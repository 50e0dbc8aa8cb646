"""Problems from files: what is accepted, and where the fault is when it is not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.schema import FileTask, PromptConfig, RewardConfig
from lockstep.records import Problem
from lockstep.tasks.build import build_task, prove_gold
from lockstep.tasks.errors import TaskError
from lockstep.tasks.files import read_problems
from lockstep.tasks.prompt import PromptRenderer
from tests.unit.test_prompts import CHATML, make_tokenizer

EXACT = (RewardConfig(name="exact"),)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}]


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def write_parquet(path: Path, rows: list[dict]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def numbered(num: int) -> list[dict]:
    return [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(num)]


def all_problems(task, split) -> list[Problem]:
    return [task.problem(split, i) for i in range(task.num_problems(split))]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_jsonl_and_parquet_give_the_same_task(tmp_path):
    tasks = [
        build_task(FileTask(path=write(tmp_path / f"data.{ext}", numbered(20)), num_heldout=5, rewards=EXACT))
        for ext, write in (("jsonl", write_jsonl), ("parquet", write_parquet))
    ]
    first, second = [[(p.prompt, p.answer) for p in all_problems(task, "train")] for task in tasks]
    assert first == second
    assert len(first) == 15
    assert prove_gold(tasks[0]).num_proved == 20


def test_nested_messages_come_out_of_parquet_as_plain_lists_and_dicts(tmp_path):
    messages = [*CHAT[:1], {"role": "user", "content": "3+4?", "name": "ann"}]
    path = write_parquet(tmp_path / "data.parquet", [{"prompt": messages, "answer": "7", "tags": [[1, 2], [3]]}])
    [problem] = read_problems(Path(path), FileTask(path=path))
    assert problem.prompt == (CHAT[0], messages[1])
    assert problem.row["tags"] == [[1, 2], [3]]
    assert all(type(value) in (list, dict, str) for value in problem.row.values())
    rendered = PromptRenderer(make_tokenizer(CHATML), PromptConfig()).render(problem)
    assert rendered is not None
    assert rendered.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>")


def test_plain_prompts_and_chat_messages_may_be_mixed_and_blank_lines_are_skipped(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "3+4?", "answer": 7}, "", {"prompt": CHAT, "answer": "7"}])
    problems = read_problems(Path(path), FileTask(path=path))
    assert [problem.prompt for problem in problems] == ["3+4?", tuple(CHAT)]
    assert [problem.answer for problem in problems] == ["7", "7"]
    assert [problem.problem_id for problem in problems] == ["data.jsonl/line-1", "data.jsonl/line-3"]


def test_a_file_without_answers_works_and_says_that_nothing_is_proved(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": f"poem {i}"} for i in range(8)])
    task = build_task(FileTask(path=path, answer_key=None, num_heldout=2, rewards=EXACT))
    assert task.score([task.problem("train", 0)], ["A poem"], [True])[0].reward is None
    assert "8 could not be judged" in str(prove_gold(task))


# --- faults, with file and line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "not JSON"),
        ("[1, 2]", "a JSON object is needed, not list"),
        ({"question": "3+4?", "answer": "7"}, r"column\(s\) \['prompt'\] missing; present: \['answer', 'question'\]"),
        ({"prompt": "3+4?"}, r"column\(s\) \['answer'\] missing; present: \['prompt'\]"),
        ({"prompt": "", "answer": "7"}, "'prompt' is blank: ''"),
        ({"prompt": " \n\t", "answer": "7"}, "'prompt' is blank"),
        ({"prompt": [{"role": "user", "content": " \n"}], "answer": "7"}, r"prompt\[0\]: content of the user is blank"),
        ({"prompt": 7, "answer": "7"}, "must be a text or a list of chat messages, not int 7"),
        ({"prompt": [], "answer": "7"}, r"not list \[\]"),
        ({"prompt": ["hi"], "answer": "7"}, r"prompt\[0\] must be an object with role and content, not str 'hi'"),
        ({"prompt": [{"role": "human", "content": "hi"}], "answer": "7"}, r"prompt\[0\]: role must be one of"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "7"}, r"content must be a text, not NoneType"),
        ({"prompt": [*CHAT, CHAT[0]], "answer": "7"}, r"prompt\[2\]: a system message must come first"),
        ({"prompt": [*CHAT, {"role": "assistant", "content": "7"}], "answer": "7"}, "must end with a message of the u"),
        ({"prompt": "3+4?", "answer": None}, "'answer' must be a text or a number, not NoneType None"),
        ({"prompt": "3+4?", "answer": True}, "'answer' must be a text or a number, not bool True"),
        ({"prompt": "3+4?", "answer": ""}, "'answer' is blank: ''"),
        ({"prompt": "3+4?", "answer": " \n"}, "'answer' is blank"),
        ({"prompt": "3+4?", "answer": math.nan}, "'answer' must be a finite number, not nan; leave the row out"),
        ({"prompt": "3+4?", "answer": -math.inf}, "'answer' must be a finite number, not -inf"),
        ('{"prompt": "3+4?", "answer": 1e999}', "'answer' must be a finite number, not inf"),
        ('{"prompt": "3+4?", "answer": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
        ('{"prompt": "3+4?", "answer": "7", "answer": "8"}', r"\['answer'\] more than once"),
        ('{"prompt": "a", "answer": "7", "meta": [{"x": 1, "y": 2, "x": 1}]}', r"\['x'\] more than once"),
        ({"prompt": "3+4?", "answer": ["7"]}, r"not list \['7'\]"),
        ({"prompt": "a \ud83d b", "answer": "7"}, r"'prompt' holds half a surrogate pair, '\\ud83d', at character 2"),
        ({"prompt": "3+4?", "answer": "\ude00"}, r"'answer' holds half a surrogate pair, '\\ude00'"),
        (
            {"prompt": [{"role": "user", "content": "\ud83d"}], "answer": "7"},
            r"prompt\[0\]: content holds half a surrogate pair",
        ),
    ],
)
def test_a_faulty_line_is_named(tmp_path, row, message):
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "1+1?", "answer": "2"}, row])
    with pytest.raises(TaskError, match=rf"data\.jsonl, line 2: .*{message}"):
        read_problems(Path(path), FileTask(path=path))


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (3, "3"), (3.0, "3"), (-3.0, "-3"), (0.0, "0"), (-0.0, "0"), (2.5, "2.5"), (0.1, "0.1"), (1e-7, "0.0000001"),
        (1e20, "1" + "0" * 20), (1.5e16, "15000000000000000"), (2**70, str(2**70)), ("3.0", "3.0"), (" x ", " x "),
    ],
)  # fmt: skip
def test_numbers_are_answers_as_people_write_them_and_texts_stay(tmp_path, value, answer):
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a", "answer": value}])
    assert [problem.answer for problem in read_problems(Path(path), FileTask(path=path))] == [answer]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_answer_keeps_its_value_and_has_no_exponent(value):
    with TemporaryDirectory() as folder:
        path = write_jsonl(Path(folder) / "data.jsonl", [{"prompt": "a", "answer": value}])
        [problem] = read_problems(Path(path), FileTask(path=path))
    assert float(str(problem.answer)) == value
    assert "e" not in str(problem.answer)
    assert not str(problem.answer).endswith(".0")


def test_integers_that_a_table_made_floats_are_judged_as_integers(tmp_path):
    path = write_parquet(tmp_path / "data.parquet", [{"prompt": f"{i}?", "answer": float(i)} for i in range(6)])
    task = build_task(FileTask(path=path, num_heldout=2, rewards=EXACT))
    problem = next(p for p in all_problems(task, "train") + all_problems(task, "heldout") if p.prompt == "3?")
    assert [score.correct for score in task.score([problem] * 2, ["3", "3.0"], [True] * 2)] == [True, False]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_floats_that_are_not_finite_are_refused_in_parquet_with_their_row(tmp_path, value):
    path = write_parquet(tmp_path / "data.parquet", [{"prompt": "a", "answer": 1.0}, {"prompt": "b", "answer": value}])
    with pytest.raises(TaskError, match=rf"data\.parquet, row 1: 'answer' must be a finite number, not {value}"):
        build_task(FileTask(path=path))


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path):
    columns = [pyarrow.array(["a"]), pyarrow.array(["1"]), pyarrow.array(["2"])]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(TaskError, match=r"data\.parquet: column\(s\) \['answer'\] more than once"):
        build_task(FileTask(path=str(tmp_path / "data.parquet")))


def test_many_faulty_lines_are_shown_by_the_first_and_counted(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a"}] * 12)
    with pytest.raises(TaskError) as refused:
        read_problems(Path(path), FileTask(path=path))
    assert [f"line {i}" in str(refused.value) for i in (1, 5, 6)] == [True, True, False]
    assert "and 7 more" in str(refused.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "a", "answer": "1"}\n{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(TaskError, match="line 2: not JSON: 'utf-8' codec"):
        read_problems(tmp_path / "data.jsonl", FileTask(path="x"))


def test_parquet_faults_name_the_columns_and_the_row(tmp_path):
    path = write_parquet(tmp_path / "data.parquet", [{"question": "a", "answer": "1"}])
    with pytest.raises(TaskError, match=r"data\.parquet: column\(s\) \['prompt'\] missing; present: \['answer', 'que"):
        build_task(FileTask(path=path))
    path = write_parquet(tmp_path / "data.parquet", [{"prompt": "a", "answer": "1"}, {"prompt": None, "answer": "1"}])
    with pytest.raises(TaskError, match=r"data\.parquet, row 1: 'prompt' must be a text"):
        build_task(FileTask(path=path))
    (tmp_path / "data.parquet").write_bytes(b"not parquet")
    with pytest.raises(TaskError, match="can't be read as parquet"):
        build_task(FileTask(path=path))


@pytest.mark.parametrize(("name", "message"), [("none.jsonl", "no such file"), ("data.csv", "neither .jsonl nor")])
def test_files_that_cannot_be_read_are_refused(tmp_path, name, message):
    (tmp_path / "data.csv").write_text("prompt,answer\n")
    with pytest.raises(TaskError, match=message):
        build_task(FileTask(path=str(tmp_path / name)))


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(TaskError, match="holds no rows"):
        build_task(FileTask(path=write_jsonl(tmp_path / "data.jsonl", [""])))


# --- splits -----------------------------------------------------------------------------------------------------------


def test_repeated_rows_stay_together_on_one_side_of_the_split(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", numbered(10) * 3)
    task = build_task(FileTask(path=path, num_heldout=4, rewards=EXACT))
    train, heldout = ([p.prompt for p in all_problems(task, split)] for split in ("train", "heldout"))
    assert len(train) == 18
    assert len(set(heldout)) == 4
    assert not set(train) & set(heldout)
    again = build_task(FileTask(path=path, num_heldout=4, rewards=EXACT))
    assert [p.prompt for p in all_problems(again, "heldout")] == heldout


def test_a_held_out_file_is_taken_whole_and_its_prompts_leave_training(tmp_path, caplog):
    train_path = write_jsonl(tmp_path / "train.jsonl", numbered(10))
    heldout_path = write_jsonl(tmp_path / "heldout.jsonl", [*numbered(2), {"prompt": "100+1=", "answer": 101}])
    task = build_task(FileTask(path=train_path, heldout_path=heldout_path, rewards=EXACT))
    assert (task.num_problems("train"), task.num_problems("heldout")) == (8, 3)
    assert "left out 2 of 10 rows" in caplog.text


def test_too_few_rows_to_hold_out_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", numbered(4) * 5)
    with pytest.raises(TaskError, match="has 4 different prompts: too few to hold out 4"):
        build_task(FileTask(path=path, num_heldout=4))


# --- per-row rewards --------------------------------------------------------------------------------------------------


def test_rows_name_their_own_reward(tmp_path):
    rows = [
        {"prompt": "1/2?", "answer": "1/2", "kind": "math_verify"},
        {"prompt": "colour?", "answer": "blue", "kind": "exact"},
        {"prompt": "5+3?", "answer": "8", "kind": None},
        {"prompt": "2+3?", "answer": "5"},
    ]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    task = build_task(
        FileTask(path=path, task_key="kind", num_heldout=1, rewards=(RewardConfig(name="arithmetic", weight=2.0),))
    )
    try:
        problems = sorted(all_problems(task, "train") + all_problems(task, "heldout"), key=lambda p: p.problem_id)
        scores = task.score(problems, [r"\boxed{0.5}", "blue", "is 8", "5"], [True] * 4)
        assert [score.reward for score in scores] == [1.0, 1.0, 2.0, 2.0]
        assert [list(score.parts) for score in scores] == [["math_verify"], ["exact"], ["arithmetic"], ["arithmetic"]]
        assert prove_gold(task).num_proved == 4
    finally:
        task.close()


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "arithmetics", 3])
def test_data_cannot_name_code_to_run(tmp_path, name):
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a", "answer": "1", "kind": name}])
    with pytest.raises(TaskError, match=r"line 1: 'kind' must be null or one of \['arithmetic', 'exact'"):
        build_task(FileTask(path=path, task_key="kind", rewards=EXACT))


def test_a_reward_column_that_no_row_has_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", numbered(3))
    with pytest.raises(TaskError, match=r"column\(s\) \['kind'\] missing; present: \['answer', 'prompt'\]"):
        build_task(FileTask(path=path, task_key="kind", rewards=EXACT))
