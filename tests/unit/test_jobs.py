"""A configuration becomes a job without losing a number on the way, and the model's sizes come from where it says."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.cluster_schema import EngineLayoutConfig, MegatronConfig, TrainLayoutConfig
from lockstep.config.errors import ConfigError
from lockstep.driver.jobs import job_of
from lockstep.recipes import load_recipe
from lockstep.topology.catalogue import model_shape
from lockstep.topology.records import EngineLayout, TrainLayout, TrainMemory

LAYOUT: dict[str, Any] = {
    "tp": 2,
    "pp": 3,
    "cp": 5,
    "ep": 7,
    "etp": 11,
    "replicate": 13,
    "virtual_stages": 17,
    "first_stage_layers": 4,
    "last_stage_layers": 6,
    "stage_layers": (8, 9),
    "account_for_embedding": True,
    "account_for_loss": True,
    "sequence_parallel": True,
    "cp_comm_type": "a2a",
    "cp_partition": "contiguous",
    "moe_dispatcher": "flex",
    "vocab_divisor": 64,
}
MEGATRON: dict[str, Any] = {
    "implementation": "verl",
    "micro_batch": 3,
    "pad_multiple": 96,
    "fp8": "mxfp8",
    "fp8_param_gather": True,
    "grad_dtype": "bfloat16",
    "moment_dtype": "float8",
    "distributed_optimizer": False,
    "precision_aware_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "optimizer_offload_fraction": 0.4,
    "offload_weights": True,
    "offload_target": "disk",
    "rematerialise_weights": True,
    "stream_optimizer": True,
    "offload_activations": True,
    "recompute": "full",
    "recompute_method": "block",
    "recompute_num_layers": 2,
    "indexer_replay": True,
    "freeze_router": True,
    "deterministic": True,
}
ENGINE: dict[str, Any] = {
    "gpus_per_engine": 19,
    "tp": 2,
    "pp": 3,
    "dp": 5,
    "ep": 7,
    "dp_attention": True,
    "moe_a2a": "mori",
    "memory_fraction": 0.37,
    "kv_cache_dtype": "fp8",
    "max_total_tokens": 4096,
    "speculative": True,
}
NOT_IN_A_JOB = {"freeze_router", "deterministic"}
"""Settings that change no size."""


def test_every_key_has_a_value_that_is_not_its_default() -> None:
    for section, values in ((TrainLayoutConfig, LAYOUT), (MegatronConfig, MEGATRON), (EngineLayoutConfig, ENGINE)):
        assert values.keys() == section.model_fields.keys()
        assert all(section.model_fields[name].default != value for name, value in values.items())


def test_every_size_reaches_the_job() -> None:
    config = load_recipe("deepseek-v4-flash").config
    trainer = config.trainer.model_copy(
        update={"layout": TrainLayoutConfig(**LAYOUT), "megatron": MegatronConfig(**MEGATRON)}
    )
    rollout = config.rollout.model_copy(update={"layout": EngineLayoutConfig(**ENGINE)})
    job = job_of(config.model_copy(update={"trainer": trainer, "rollout": rollout}))
    assert job.train is not None
    assert job.engine is not None
    assert job.batch is not None
    short = {"bfloat16": "bf16", "float8": "fp8"}
    for values, record, kind in ((LAYOUT, job.train, TrainLayout), (ENGINE, job.engine, EngineLayout)):
        assert {name: getattr(record, name) for name in values} == values
        assert values.keys() <= {field.name for field in fields(kind)}
    held = {name: MEGATRON[name] for name in MEGATRON if name in {field.name for field in fields(TrainMemory)}}
    assert {name: getattr(job.memory, name) for name in held} == {n: short.get(v, v) for n, v in held.items()}
    elsewhere = {
        "implementation": job.train.switches.implementation,
        "micro_batch": job.batch.micro_batch,
        "pad_multiple": job.batch.pad_multiple,
        "indexer_replay": job.indexer_replay,
    }
    assert elsewhere == {name: MEGATRON[name] for name in elsewhere}
    assert MEGATRON.keys() == held.keys() | elsewhere.keys() | NOT_IN_A_JOB


def test_the_batch_and_the_shared_settings_reach_the_job() -> None:
    job = job_of(load_recipe("inkling").config)
    assert job.batch is not None
    assert job.engine is not None
    assert (job.batch.num_prompts, job.batch.group_size, job.batch.optimizer_steps) == (32, 8, 4)
    assert job.batch.global_batch == 64
    assert (job.engine.max_running_requests, job.engine.chunked_prefill_tokens) == (64, 8192)
    assert job.engine.custom_all_reduce is False
    assert job.refit_bucket_bytes == 1 << 30
    assert job.environment["engine"]["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] == "1"


def test_a_transport_without_buckets_has_no_bucket_in_the_plan() -> None:
    assert job_of(load_recipe("quickstart").config).refit_bucket_bytes is None


# --- the model's sizes ------------------------------------------------------------------------------------------------

SIZES = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "architectures": ["Qwen3ForCausalLM"],
}


def test_sizes_come_from_the_catalogue_without_a_file() -> None:
    assert job_of(load_recipe("glm-5_2").config).model == model_shape("glm-5_2")


def test_sizes_come_from_the_models_own_file_where_no_catalogue_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    overrides = [f"model.path={tmp_path}", "model.catalogue=none"]
    model = job_of(load_recipe("qwen3-4b", overrides).config).model
    assert (model.num_layers, model.hidden, model.num_kv_heads, model.ffn) == (2, 64, 2, 128)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"model_type": "no_such_architecture"}'])
def test_sizes_that_nothing_tells_are_an_error_with_the_way_out(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        job_of(load_recipe("qwen3-4b", [f"model.path={tmp_path}", "model.catalogue=none"]).config)
    assert all(violation.way_out for violation in refused.value.violations)


def test_a_gguf_file_needs_its_catalogue_name_to_be_planned() -> None:
    with pytest.raises(ConfigError, match=r"model\.catalogue"):
        job_of(load_recipe("quickstart", ["model.catalogue=none"]).config)


def test_a_random_model_is_planned_from_its_own_settings() -> None:
    model = job_of(load_recipe("tiny-qwen3-moe").config).model
    assert (model.num_experts, model.hidden, model.tied_embeddings) == (8, 64, True)
