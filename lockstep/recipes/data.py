"""Where the recipes look for data and models: each has a variable, else it is under ``data`` or ``models``.

Files are those of BytedTsinghua-SIA/DAPO-Math-17k and the AIME sets as jsonl with ``prompt`` (chat messages) and
``label``, and of openai/gsm8k as parquet with ``messages`` and ``label``.
"""

from __future__ import annotations

from lockstep.config.schema import FileTask, RewardConfig

DAPO_MATH_17K = "${DAPO_MATH_17K:-${LOCKSTEP_DATA:-data}/dapo-math-17k/dapo-math-17k.jsonl}"
AIME_2024 = "${AIME_2024:-${LOCKSTEP_DATA:-data}/aime-2024/aime-2024.jsonl}"
AIME_2025 = "${AIME_2025:-${LOCKSTEP_DATA:-data}/aime-2025/aime-2025.jsonl}"
GSM8K_TRAIN = "${GSM8K_TRAIN:-${LOCKSTEP_DATA:-data}/gsm8k/train.parquet}"
GSM8K_TEST = "${GSM8K_TEST:-${LOCKSTEP_DATA:-data}/gsm8k/test.parquet}"

AIME_PROBLEMS = 30
"""Problems of an AIME set."""


def model_folder(variable: str, folder: str) -> str:
    """The path of a model: ``$variable``, else ``folder`` under ``$LOCKSTEP_MODELS`` or ``models``."""
    return f"${{{variable}:-${{LOCKSTEP_MODELS:-models}}/{folder}}}"


def dapo_math(heldout: str = AIME_2024) -> FileTask:
    """DAPO-Math-17k, graded by rules, with an AIME set held out."""
    return FileTask(
        path=DAPO_MATH_17K,
        heldout_path=heldout,
        answer_key="label",
        rewards=(RewardConfig(name="math_verify"),),
    )


def gsm8k() -> FileTask:
    """GSM8K's two splits: chat messages and the final answer."""
    return FileTask(path=GSM8K_TRAIN, heldout_path=GSM8K_TEST, prompt_key="messages", answer_key="label")
