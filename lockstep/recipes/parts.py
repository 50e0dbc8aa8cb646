"""What the cluster recipes share: where data and models are looked for, the trainer's common settings, a bound.

Each file has a variable of its own, else it lies under ``data`` or ``models``. Files are those of
BytedTsinghua-SIA/DAPO-Math-17k and the AIME sets as jsonl with ``prompt`` (chat messages) and ``label``, and of
openai/gsm8k as parquet with ``messages`` and ``label``.
"""

from __future__ import annotations

from typing import Any

from lockstep.config.cluster_schema import MegatronConfig, TrainLayoutConfig
from lockstep.config.schema import BoundConfig, FileTask, RewardConfig, TrainerConfig
from lockstep.config.section import Quantisation
from lockstep.recipes.evidence import SLIME_CI_BF16
from lockstep.recipes.overlays import Changes

DAPO_MATH_17K = "${DAPO_MATH_17K:-${LOCKSTEP_DATA:-data}/dapo-math-17k/dapo-math-17k.jsonl}"
AIME_2024 = "${AIME_2024:-${LOCKSTEP_DATA:-data}/aime-2024/aime-2024.jsonl}"
AIME_2025 = "${AIME_2025:-${LOCKSTEP_DATA:-data}/aime-2025/aime-2025.jsonl}"
GSM8K_TRAIN = "${GSM8K_TRAIN:-${LOCKSTEP_DATA:-data}/gsm8k/train.parquet}"
GSM8K_TEST = "${GSM8K_TEST:-${LOCKSTEP_DATA:-data}/gsm8k/test.parquet}"

ONE_CONNECTION: Changes = {
    "environment.trainer.CUDA_DEVICE_MAX_CONNECTIONS": ("1", "collectives of tensor parallelism must start in order"),
}
NO_NVLS: Changes = {
    "environment.trainer.NCCL_NVLS_ENABLE": ("0", "its buffers are memory that engine and trainer need"),
    "environment.engine.NCCL_NVLS_ENABLE": ("0", "its buffers are memory that engine and trainer need"),
}
DETERMINISTIC: Changes = {
    "trainer.megatron.deterministic": (True, "Megatron takes deterministic kernels"),
    "environment.trainer.NCCL_ALGO": ("Ring", "one order of sums"),
    "environment.trainer.NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", "Transformer Engine takes deterministic kernels"),
    "environment.trainer.CUBLAS_WORKSPACE_CONFIG": (":4096:8", "cuBLAS takes one algorithm"),
}

AIME_PROBLEMS = 30
"""Problems of an AIME set."""


def model_folder(variable: str, folder: str) -> str:
    """The path of a model: ``$variable``, else ``folder`` under ``$LOCKSTEP_MODELS`` or ``models``."""
    return f"${{{variable}:-${{LOCKSTEP_MODELS:-models}}/{folder}}}"


def pruned_from(published: str, num_layers: int) -> Changes:
    """What ``lockstep prepare`` makes of a published folder (a path of ``model_folder``) for a pruned copy."""
    return {
        "prepare.source": (published, "the whole model, as published"),
        "prepare.keep_layers": (num_layers, "the copy that its name says"),
    }


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


def megatron_trainer(*, layout: TrainLayoutConfig, megatron: dict[str, Any], **more: Any) -> TrainerConfig:
    """The trainer that public runs of these models have in common (miles' and slime's scripts): Adam at a constant rate
    of 1e-6, layers recomputed one by one, the trainer away while engines generate. ``megatron``, ``more``: the rest."""
    common = {
        "implementation": "miles",
        "offload_weights": True,
        "recompute": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return TrainerConfig(
        backend="megatron",
        learning_rate=1e-6,
        weight_decay=0.1,
        beta2=0.98,
        layout=layout,
        megatron=MegatronConfig(**{**common, **megatron}),
        **more,
    )


def bf16_bound(quantisation: Quantisation = "none") -> BoundConfig:
    """A bound on a GPU in bf16 for models of which no agreement has been published."""
    return BoundConfig(
        metric="abs_diff/rollout_mean",
        bound=0.1,
        hardware="cuda",
        dtype="bfloat16",
        quantisation=quantisation,
        evidence=SLIME_CI_BF16,
    )
