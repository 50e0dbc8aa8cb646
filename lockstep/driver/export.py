"""Export of a checkpoint to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoint.export import export_weights, has_published_names
from lockstep.config.load import load_run_config
from lockstep.driver.folder import TRAINER, no_recipe
from lockstep.metrics.checkpoints import CheckpointError, Checkpoints
from lockstep.metrics.run_folder import CONFIG
from lockstep.model.load import load_model, load_tokenizer, torch_dtype
from lockstep.rollout.vllm_folder import folder_config
from lockstep.train.fsdp import FsdpTrainer


def export_checkpoint(run_dir: Path, out: Path, step: int | None) -> Path:
    """See ``lockstep.loop.export``. Tensors are written in the trainer's dtype, under the names of published
    checkpoints where the family has a table of them, else as transformers saves them."""
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; choose a new folder")
    config = load_run_config(str(run_dir / CONFIG), find_recipe=no_recipe).config
    checkpoints = Checkpoints(run_dir / "checkpoints")
    if step is None:
        latest = checkpoints.latest()
        if latest is None:
            raise CheckpointError(f"{run_dir} has no complete checkpoint to export")
        path = latest[1]
    else:
        problems = checkpoints.problems(step)
        if problems:
            raise CheckpointError(f"checkpoint of step {step}: {'; '.join(problems)}; there are {checkpoints.steps()}")
        path = checkpoints.path(step)
    model = load_model(config.model, torch_dtype(config.trainer.dtype))
    trainer = FsdpTrainer(
        model,
        config.trainer,
        total_optimizer_steps=config.steps * config.algorithm.optimizer_steps_per_batch,
        temperature=config.rollout.temperature,
    )
    trainer.load(path / TRAINER)
    if has_published_names(model):
        export_weights(trainer.weights(), folder_config(model), out)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(out)
    else:
        model.save_pretrained(out)
    tokenizer = load_tokenizer(config.model)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(out)
    return out
