"""Cross-field rules: each refuses what it should, by key, and lets the settings that agree through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.algorithm_checks import RULES
from lockstep.config.checks import check
from lockstep.config.errors import ConfigError
from lockstep.config.gate_checks import bounds_for
from lockstep.config.keys import walk
from lockstep.config.schema import PATH_KEYS, ArithmeticTask, BoundConfig, GateConfig, GgufModel, RunConfig
from lockstep.config.toml_text import dotted
from lockstep.config.tree import document_tree, merge, plain_values, section_tree

BASE = RunConfig(
    name="base",
    steps=20,
    model=GgufModel(package="some-weights"),
    task=ArithmeticTask(),
    gate=GateConfig(bounds=(BoundConfig(bound=0.05, evidence="test"),)),
)


def config_with(changes: dict[str, Any]) -> RunConfig:
    """The base configuration with dotted keys changed; valid for the schema, whatever the rules say."""
    nested: dict[str, Any] = {}
    for key, value in changes.items():
        node = nested
        *above, last = key.split(".")
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    tree = merge(section_tree(BASE, "base"), document_tree(nested, lambda _: "test", Path()))
    return RunConfig.model_validate_json(json.dumps(plain_values(tree)))


A, C = "algorithm", "algorithm.corrections"
TEACHER = {"teacher.source": "path", "teacher.path": "/t"}
TWO = {f"{A}.optimizer_steps_per_batch": 2}
DISTILL = {f"{A}.advantage": "distill", **TEACHER}
FILE = {"task.kind": "file", "task.path": "/d.jsonl"}
APART = {"rollout.process": "separate"}
CORRECT = {"gate.action": "correct", "gate.correction.weight": "tis"}


def a_bound(**fields: Any) -> dict[str, Any]:
    return {"bound": 0.1, "evidence": "test", **fields}


FP8 = {"rollout.quantisation": "fp8", "gate.bounds": [a_bound(quantisation="fp8")]}
UE8M0 = {"rollout.quantisation": "fp8_ue8m0", "gate.bounds": [a_bound(quantisation="fp8_ue8m0")]}

VLLM = {"rollout.engine": "vllm"}
SGLANG = {"rollout.engine": "sglang", "rollout.process": "separate"}
MEGATRON = {"trainer.backend": "megatron"}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("settings_belong_to_the_engine", VLLM | {"rollout.fast_path": "off"}, "rollout.fast_path"),
    ("settings_belong_to_the_engine", {"rollout.vllm.kv_cache_bytes": 2_000_000}, "rollout.vllm.kv_cache_bytes"),
    ("settings_belong_to_the_engine", {"rollout.vllm.enforce_eager": False}, "rollout.vllm.enforce_eager"),
    ("vllm_owns_its_weights", VLLM | {"refit.transport": "shared"}, "refit.transport"),
    *[
        ("vllm_engine_args_are_harmless", VLLM | {f"rollout.vllm.engine_args.{name}": 2}, "rollout.vllm.engine_args")
        for name in ("quantization", "tensor_parallel_size", "logprobs_mode", "speculative_config", "no_such_argument")
    ],
    ("vllm_has_its_own_head", VLLM | {"head_dtype": "float32"}, "head_dtype"),
    ("vllm_samples_at_the_temperature", VLLM | {"rollout.temperature": 3.0}, "rollout.temperature"),
    ("vllm_samples_at_the_temperature", VLLM | {"rollout.temperature": 0.001}, "rollout.temperature"),
    ("a_prompt_and_an_answer_fit_vllm", VLLM | {"rollout.vllm.max_model_len": 256}, "rollout.vllm.max_model_len"),
    ("a_bound_fits_the_run", {"gate.bounds": []}, "gate.bounds"),
    ("a_bound_fits_the_run", {"gate.bounds": [a_bound(dtype="float32")]}, "gate.bounds"),
    ("a_bound_fits_the_run", {"rollout.dtype": "float32", "gate.bounds": [a_bound(dtype="bfloat16")]}, "gate.bounds"),
    ("a_bound_fits_the_run", {"device": "cpu", "gate.bounds": [a_bound(hardware="cuda")]}, "gate.bounds"),
    ("a_bound_fits_the_run", {"gate.bounds": [a_bound(evidence=" ")]}, "gate.bounds"),
    ("a_bound_fits_the_run", {"rollout.quantisation": "fp8"}, "gate.bounds"),
    ("a_bound_fits_the_run", {"gate.bounds": [a_bound(quantisation="fp8")]}, "gate.bounds"),
    ("bounds_do_not_overlap", FP8 | {"gate.bounds": 2 * [a_bound(quantisation="fp8")]}, "gate.bounds"),
    ("bounds_do_not_overlap", {"gate.bounds": [a_bound(), a_bound(hardware="cuda")]}, "gate.bounds"),
    ("bounds_do_not_overlap", {"gate.bounds": [a_bound(dtype="bfloat16"), a_bound(hardware="cpu")]}, "gate.bounds"),
    ("gate_correction_goes_with_correct", {"gate.action": "correct"}, "gate.correction"),
    ("gate_correction_goes_with_correct", {"gate.correction.weight": "tis"}, "gate.correction"),
    ("gate_correction_goes_with_correct", CORRECT | {f"{C}.weight": "tis"}, "gate.correction"),
    (
        "gate_correction_goes_with_correct",
        {"gate.action": "correct", "gate.correction.reject": ["mis"], "gate.correction.bypass": True},
        "gate.correction.bypass",
    ),
    ("bypass_excludes_weights", CORRECT | {"gate.correction.bypass": True}, "gate.correction.bypass"),
    ("correction_bounds_are_ranges", CORRECT | {"gate.correction.weight_low": 3.0}, "gate.correction.weight_low"),
    ("correction_settings_are_read", CORRECT | {"gate.correction.mis_low": 0.25}, "gate.correction.mis_low"),
    ("hysteresis_can_fail", {"gate.breaches": 9}, "gate.breaches"),
    ("hysteresis_can_fail", {"gate.baseline_steps": 0, "gate.drift_factor": 2.0}, "gate.drift_factor"),
    *[
        ("group_baseline_needs_a_group", {f"{A}.group_size": 1, f"{A}.advantage": name}, f"{A}.group_size")
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
    ],
    ("gamma_belongs_to_reinforce_pp", {f"{A}.gamma": 0.9}, f"{A}.gamma"),
    ("steps_divide_the_batch", {f"{A}.optimizer_steps_per_batch": 3}, f"{A}.optimizer_steps_per_batch"),
    ("distillation_has_one_teacher", {f"{A}.advantage": "distill"}, "teacher"),
    ("distillation_has_one_teacher", TEACHER, "teacher"),
    ("distillation_ignores_rewards", {**DISTILL, f"{A}.abstain_patience": 9}, f"{A}.abstain_patience"),
    (
        "distillation_ignores_rewards",
        DISTILL | {f"{A}.dynamic_sampling.enabled": True},
        f"{A}.dynamic_sampling.enabled",
    ),
    (
        "distillation_ignores_rewards",
        DISTILL | {f"{A}.overlong.factor": 1.0, f"{A}.overlong.buffer_tokens": 4},
        f"{A}.overlong.factor",
    ),
    (
        "distillation_ignores_rewards",
        DISTILL | {f"{A}.truncated": "penalise", f"{A}.truncated_penalty": 1.0},
        f"{A}.truncated",
    ),
    (
        "distillation_ignores_rewards",
        DISTILL | {f"{A}.kl.place": "reward", f"{A}.kl.estimator": "k1", f"{A}.kl.coefficient": 0.1},
        f"{A}.kl.place",
    ),
    ("training_samples_the_whole_distribution", {"rollout.top_k": 50}, "rollout.top_k"),
    ("training_samples_the_whole_distribution", {"rollout.top_p": 0.8}, "rollout.top_p"),
    ("training_samples_the_whole_distribution", DISTILL | {"rollout.min_p": 0.1}, "rollout.min_p"),
    ("stop_strings_are_not_empty", {"rollout.stop_strings": ["\n", ""]}, "rollout.stop_strings"),
    (
        "dynamic_sampling_needs_groups",
        {f"{A}.dynamic_sampling.enabled": True, f"{A}.group_size": 1, f"{A}.advantage": "reinforce_pp"},
        f"{A}.dynamic_sampling.enabled",
    ),
    (
        "dynamic_sampling_needs_groups",
        {f"{A}.dynamic_sampling.max_refill_rounds": 9},
        f"{A}.dynamic_sampling.max_refill_rounds",
    ),
    ("truncation_penalty_goes_with_penalise", {f"{A}.truncated": "penalise"}, f"{A}.truncated"),
    ("truncation_penalty_goes_with_penalise", {f"{A}.truncated_penalty": 1.0}, f"{A}.truncated_penalty"),
    ("overlong_buffer_fits", {f"{A}.overlong.factor": 1.0}, f"{A}.overlong.factor"),
    ("overlong_buffer_fits", {f"{A}.overlong.buffer_tokens": 8}, f"{A}.overlong.buffer_tokens"),
    (
        "overlong_buffer_fits",
        {f"{A}.overlong.factor": 1.0, f"{A}.overlong.buffer_tokens": 256},
        f"{A}.overlong.buffer_tokens",
    ),
    ("length_norm_goes_with_token_sum_norm", {f"{A}.aggregation": "token_sum_norm"}, f"{A}.length_norm"),
    ("length_norm_goes_with_token_sum_norm", {f"{A}.length_norm": 64}, f"{A}.length_norm"),
    ("gspo_is_a_sequence_loss", {f"{A}.loss": "gspo"}, f"{A}.aggregation"),
    *[
        ("dual_clip_belongs_to_ppo_clip", {f"{A}.loss": loss, f"{A}.dual_clip": 3.0}, f"{A}.dual_clip")
        for loss in ("gspo", "cispo", "reinforce")
    ],
    *[
        ("clipping_needs_a_second_step", {f"{A}.{name}": value}, f"{A}.{name}")
        for name, value in (("clip_low", 0.1), ("clip_high", 0.28), ("dual_clip", 3.0))
    ],
    ("clip_range_is_a_range", {f"{A}.clip_low": 1.0}, f"{A}.clip_low"),
    ("clip_range_is_a_range", {f"{A}.loss": "reinforce", f"{A}.clip_high": 0.3}, f"{A}.clip_high"),
    ("kl_is_on_or_off", {f"{A}.kl.place": "loss"}, f"{A}.kl.place"),
    ("kl_is_on_or_off", {f"{A}.kl.coefficient": 0.1}, f"{A}.kl.coefficient"),
    ("kl_is_on_or_off", {f"{A}.kl.estimator": "k2"}, f"{A}.kl.estimator"),
    ("kl_is_on_or_off", {"reference.source": "path", "reference.path": "/r"}, "reference"),
    (
        "kl_estimator_fits_its_place",
        {f"{A}.kl.place": "loss", f"{A}.kl.coefficient": 0.1, f"{A}.kl.estimator": "k1"},
        f"{A}.kl.estimator",
    ),
    (
        "kl_estimator_fits_its_place",
        {f"{A}.kl.place": "reward", f"{A}.kl.coefficient": 0.1, f"{A}.kl.estimator": "k3"},
        f"{A}.kl.estimator",
    ),
    ("bypass_excludes_weights", {f"{C}.bypass": True, f"{C}.weight": "tis"}, f"{C}.bypass"),
    ("correction_bounds_are_ranges", {f"{C}.weight": "tis", f"{C}.weight_low": 2.0}, f"{C}.weight_low"),
    ("correction_bounds_are_ranges", {f"{C}.reject": ["mis"], f"{C}.mis_low": 3.0}, f"{C}.mis_low"),
    ("correction_bounds_are_ranges", {f"{C}.reject": ["veto"], f"{C}.veto": 0.0}, f"{C}.veto"),
    ("correction_settings_are_read", {f"{C}.weight_high": 3.0}, f"{C}.weight_high"),
    ("correction_settings_are_read", {f"{C}.icepop_high": 3.0}, f"{C}.icepop_high"),
    ("correction_settings_are_read", {f"{C}.veto": 1e-3}, f"{C}.veto"),
    ("correction_settings_are_read", {f"{C}.denominator": "fixed"}, f"{C}.denominator"),
    ("correction_settings_are_read", {f"{C}.reject": ["mis", "mis"]}, f"{C}.reject"),
    ("schedule_fits_the_run", {"trainer.warmup_steps": 20}, "trainer.warmup_steps"),
    (
        "schedule_fits_the_run",
        {"trainer.schedule": "linear", "trainer.decay_start_step": 20},
        "trainer.decay_start_step",
    ),
    ("schedule_fits_the_run", {"trainer.decay_start_step": 5}, "trainer.decay_start_step"),
    ("schedule_fits_the_run", {"trainer.final_ratio": 0.5}, "trainer.final_ratio"),
    (
        "schedule_fits_the_run",
        {"trainer.schedule": "cosine", "trainer.warmup_steps": 6, "trainer.decay_start_step": 5},
        "trainer.decay_start_step",
    ),
    (
        "masters_are_not_coarser",
        {"trainer.dtype": "float32", "trainer.master_dtype": "bfloat16"},
        "trainer.master_dtype",
    ),
    ("replayed_routes_are_recorded", {"trainer.routing_replay": True}, "trainer.routing_replay"),
    ("shared_weights_have_one_dtype", {"refit.transport": "shared", "rollout.dtype": "float32"}, "refit.transport"),
    ("the_torch_engine_is_not_finer", {"rollout.dtype": "float32"}, "rollout.dtype"),
    ("quantised_weights_are_copies", FP8 | {"refit.transport": "shared"}, "refit.transport"),
    (
        "quantised_weights_are_copies",
        {"rollout.quantisation": "mxfp4_experts", "gate.bounds": [a_bound(quantisation="mxfp4_experts")]} | VLLM,
        "rollout.quantisation",
    ),
    ("vllm_serves_fp8_in_bfloat16", FP8 | VLLM | {"rollout.dtype": "float32"}, "rollout.dtype"),
    ("vllm_serves_fp8_in_bfloat16", UE8M0 | VLLM | {"rollout.dtype": "float32"}, "rollout.dtype"),
    ("transport_reaches_the_engine", APART | {"refit.transport": "local"}, "refit.transport"),
    ("transport_reaches_the_engine", APART | {"refit.transport": "shared"}, "refit.transport"),
    ("transport_reaches_the_engine", {"refit.transport": "shm"}, "refit.transport"),
    ("transport_reaches_the_engine", {"refit.transport": "cuda_ipc"}, "refit.transport"),
    ("disk_has_its_folder", {"refit.transport": "disk"}, "refit.folder"),
    ("disk_has_its_folder", APART | {"refit.folder": "/f"}, "refit.folder"),
    ("buckets_have_a_transport", {"refit.bucket_bytes": 4096}, "refit.bucket_bytes"),
    ("buckets_have_a_transport", {"refit.timeout_s": 5.0}, "refit.timeout_s"),
    ("an_interpreter_has_a_process", {"rollout.python": "/p"}, "rollout.python"),
    ("supervised_settings_need_steps", {"supervised.batch_size": 8}, "supervised.batch_size"),
    ("gguf_has_one_source", {"model.path": "/m.gguf"}, "model.path"),
    ("gguf_has_one_source", {"model.package": None}, "model.path"),
    ("gguf_has_one_source", {f"{A}.advantage": "distill", "teacher.source": "gguf"}, "teacher.path"),
    ("raw_prompts_have_no_chat_settings", {"prompt.format": "raw", "prompt.thinking": False}, "prompt.thinking"),
    ("raw_prompts_have_no_chat_settings", {"prompt.format": "raw", "prompt.system": "Hi."}, "prompt.system"),
    (
        "raw_prompts_have_no_chat_settings",
        {"prompt.system": "Hi.", "prompt.template_default_system": False},
        "prompt.template_default_system",
    ),
    ("rewards_are_known", {"task.rewards": []}, "task.rewards"),
    ("rewards_are_known", {"task.rewards": [{"name": "arithmetik"}]}, "task.rewards"),
    ("rewards_are_known", {"task.rewards": [{"name": "my.module:"}]}, "task.rewards"),
    ("rewards_are_known", {"task.rewards": [{"name": "exact"}, {"name": "exact"}]}, "task.rewards"),
    ("rewards_have_metrics_of_their_own", {"task.rewards": [{"name": "a.b:c"}, {"name": "a_b:C"}]}, "task.rewards"),
    (
        "rewards_have_metrics_of_their_own",
        {"task.rewards": [{"name": "math_verify"}, {"name": "math:verify"}]},
        "task.rewards",
    ),
    ("reward_weights_count", {"task.rewards": [{"name": "exact", "weight": 0.0}]}, "task.rewards"),
    ("reward_weights_count", {"task.rewards": [{"name": "exact"}, {"name": "m:f", "weight": 0}]}, "task.rewards"),
    ("arithmetic_has_problems", {"task.min_operand": 21}, "task.min_operand"),
    ("arithmetic_has_problems", {"task.num_heldout": 400}, "task.num_heldout"),
    ("arithmetic_has_problems", {"task.operations": []}, "task.operations"),
    ("arithmetic_has_problems", {"task.template": "What is {a}?"}, "task.template"),
    ("arithmetic_has_problems", {"task.template": "{a} and {b} and {c}"}, "task.template"),
    ("arithmetic_has_problems", {"task.template": "{a} {b", "task.operations": ["+"]}, "task.template"),
    ("arithmetic_has_problems", {"task.template": "{a}+{b}=", "task.operations": ["+", "-"]}, "task.template"),
    ("stop_bonus_needs_its_reward", {"task.rewards": [{"name": "exact"}], "task.stop_bonus": 0.5}, "task.stop_bonus"),
    ("file_task_is_consistent", FILE | {"task.heldout_path": "/h", "task.num_heldout": 8}, "task.num_heldout"),
    ("file_task_is_consistent", FILE | {"task.answer_key": None}, "task.answer_key"),
    ("evaluation_fits_the_heldout_problems", {"eval.num_problems": 65}, "eval.num_problems"),
    ("settings_belong_to_the_trainer", {"trainer.layout.tp": 2}, "trainer.layout.tp"),
    ("settings_belong_to_the_trainer", {"trainer.megatron.recompute": "full"}, "trainer.megatron.recompute"),
    ("settings_belong_to_the_trainer", MEGATRON | {"trainer.layout.replicate": 2}, "trainer.layout.replicate"),
    (
        "settings_belong_to_the_trainer",
        MEGATRON | {"trainer.gradient_checkpointing": True},
        "trainer.gradient_checkpointing",
    ),
    ("settings_belong_to_the_trainer", MEGATRON | {"trainer.packing": "shared_prompt"}, "trainer.packing"),
    ("layout_belongs_to_the_engine", {"rollout.layout.tp": 2}, "rollout.layout.tp"),
    ("layout_belongs_to_the_engine", {"rollout.layout.memory_fraction": 0.5}, "rollout.layout.memory_fraction"),
    ("layout_belongs_to_the_engine", VLLM | {"rollout.layout.dp_attention": True}, "rollout.layout.dp_attention"),
    (
        "layout_belongs_to_the_engine",
        VLLM | {"rollout.sglang.engine_args.page_size": 64},
        "rollout.sglang.engine_args",
    ),
    (
        "one_process_has_one_value",
        {"environment.trainer.NCCL_ALGO": "Ring", "environment.engine.NCCL_ALGO": "Tree"},
        "environment.engine.NCCL_ALGO",
    ),
    (
        "shared_memory_is_not_expandable",
        APART | {"refit.transport": "cuda_ipc", "environment.trainer.PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        "environment.trainer.PYTORCH_ALLOC_CONF",
    ),
    ("sglang_has_processes_of_its_own", {"rollout.engine": "sglang"}, "rollout.process"),
    (
        "sglang_engine_args_are_harmless",
        SGLANG | {"rollout.sglang.engine_args.quantization": "fp8"},
        "rollout.sglang.engine_args",
    ),
    ("vllm_sizes_its_cache_once", VLLM | {"rollout.layout.memory_fraction": 0.5}, "rollout.layout.memory_fraction"),
    ("vllm_has_no_expert_size_of_its_own", VLLM | {"rollout.layout.ep": 2}, "rollout.layout.ep"),
    ("devices_are_the_trainers_or_the_engines", {"cluster.rollout_gpus": 4}, "cluster.rollout_gpus"),
    ("devices_are_the_trainers_or_the_engines", {"cluster.colocated": False}, "cluster.rollout_gpus"),
    (
        "devices_are_the_trainers_or_the_engines",
        {"cluster.colocated": False, "cluster.rollout_gpus": 8, "cluster.nodes": 8},
        "cluster.rollout_gpus",
    ),
    ("a_kind_of_hardware_has_its_device", {"cluster.hardware": "h200", "device": "cpu"}, "device"),
    ("a_kind_of_hardware_has_its_device", {"cluster.hardware": "cpu", "device": "cuda"}, "device"),
    (
        "a_budget_of_tokens_has_a_choice",
        {"trainer.packing": "single", "trainer.micro_batch_tokens": 77},
        "trainer.micro_batch_tokens",
    ),
    ("kept_mtp_layers_survive_a_cut", {"prepare.keep_mtp": True}, "prepare.keep_mtp"),
    ("high_precision_is_beside_quantised_weights", {"prepare.high_precision": ["gate"]}, "prepare.high_precision"),
    (
        "high_precision_is_beside_quantised_weights",
        FP8 | {"prepare.high_precision": ["gate"], "prepare.quantisation": "none"},
        "prepare.high_precision",
    ),
    (
        "high_precision_is_beside_quantised_weights",
        FP8 | {"prepare.high_precision": ["gate"]},
        "prepare.high_precision",
    ),
    ("prepared_weights_are_what_a_refit_brings", FP8 | {"prepare.quantisation": "fp8_ue8m0"}, "prepare.quantisation"),
]

ALLOWED: list[dict[str, Any]] = [
    VLLM | {"rollout.vllm.max_model_len": 257, "rollout.vllm.enforce_eager": False, "rollout.record_routes": True},
    VLLM | {"rollout.vllm.engine_args.block_size": 32, "rollout.vllm.engine_args.compilation_config.mode": 0},
    {},
    {f"{A}.group_size": 1, f"{A}.advantage": "reinforce_pp", f"{A}.gamma": 0.9},
    {f"{A}.optimizer_steps_per_batch": 4, "trainer.warmup_steps": 79},
    DISTILL | {f"{A}.group_size": 1},
    {f"{A}.dynamic_sampling.enabled": True, f"{A}.dynamic_sampling.max_refill_rounds": 9},
    {f"{A}.truncated": "penalise", f"{A}.truncated_penalty": 1.0},
    {f"{A}.overlong.factor": 1.0, f"{A}.overlong.buffer_tokens": 255},
    {f"{A}.advantage": "dr_grpo", f"{A}.aggregation": "token_sum_norm", f"{A}.length_norm": 64},
    {f"{A}.advantage": "dr_grpo"},
    TWO | {f"{A}.loss": "gspo", f"{A}.aggregation": "seq_mean_token_mean", f"{A}.clip_low": 3e-4},
    TWO | {f"{A}.dual_clip": 3.0, f"{A}.clip_high": 0.28},
    {f"{C}.bypass": True, f"{A}.clip_high": 0.28},
    {"trainer.routing_replay": True, "rollout.record_routes": True},
    {"rollout.record_routes": True},
    {f"{A}.kl.place": "reward", f"{A}.kl.coefficient": 0.1, f"{A}.kl.estimator": "k1"},
    {f"{A}.kl.place": "loss", f"{A}.kl.coefficient": 0.1, "reference.source": "path", "reference.path": "/r"},
    {f"{C}.bypass": True, f"{C}.reject": ["mis", "veto"], f"{C}.mis_low": 0.25, f"{C}.denominator": "fixed"},
    {f"{C}.weight": "tis_seq", f"{C}.weight_high": 3.0, f"{C}.reject": ["icepop", "geometric"]},
    {"trainer.schedule": "linear", "trainer.warmup_steps": 5, "trainer.decay_start_step": 5},
    {"trainer.schedule": "linear", "trainer.warmup_steps": 5},
    {"refit.transport": "shared"},
    APART | {"refit.bucket_bytes": 4096, "refit.timeout_s": 5.0, "rollout.python": "/p"},
    APART | {"refit.transport": "disk", "refit.folder": "/f"},
    {"refit.transport": "disk", "refit.folder": "/f", "refit.bucket_bytes": 4096},
    {"trainer.master_dtype": "bfloat16"},
    {"supervised.steps": 3, "supervised.batch_size": 8},
    {"model.package": None, "model.path": "/m.gguf"},
    {"prompt.format": "raw", "prompt.suffix": " ", "prompt.add_bos": "never"},
    {"task.rewards": [{"name": "my.rewards:shout"}, {"name": "exact", "weight": 0.5}]},
    {"task.rewards": [{"name": "exact"}], "task.stop_bonus": 0.0},
    DISTILL | {f"{A}.idle_patience": 9},
    {"task.operations": ["+", "-", "*"], "task.num_heldout": 1199},
    {"task.template": "{a} plus {b}?"},
    FILE | {"task.heldout_path": "/h", "eval.num_problems": 1000},
    FILE | {"task.answer_key": None, "task.rewards": [{"name": "m:f"}]},
    CORRECT,
    CORRECT | {"gate.correction.weight_high": 5.0, f"{C}.weight": "tis"},
    {"gate.action": "warn", "gate.breaches": 3, "gate.window": 3, "gate.baseline_steps": 0},
    {"gate.bounds": [a_bound(hardware="cuda"), a_bound(hardware="cpu"), a_bound(metric="k3")]},
    {"gate.bounds": [a_bound(dtype="bfloat16"), a_bound(dtype="float32"), a_bound(dtype="bfloat16/float32")]},
    VLLM | {"gate.bounds": [a_bound(dtype="bfloat16/float32")], "rollout.dtype": "float32"},
    {"gate.bounds": [a_bound(dtype="float32/bfloat16")], "trainer.dtype": "float32"},
    {"gate.bounds": [a_bound(), a_bound(quantisation="fp8"), a_bound(quantisation="fp8_ue8m0")]},
    FP8,
    FP8 | VLLM,
    UE8M0 | VLLM,
    {"device": "cuda", "gate.bounds": [a_bound(hardware="cuda", shown=True)]},
    {"trainer.layout.replicate": 2, "cluster.nodes": 4},
    MEGATRON | {"trainer.layout.tp": 2, "trainer.megatron.recompute": "full", "trainer.packing": "padded"},
    VLLM | {"rollout.vllm.kv_cache_bytes": None, "rollout.layout.memory_fraction": 0.5},
    VLLM | {"rollout.layout.ep": 8, "rollout.layout.tp": 4, "rollout.layout.dp": 2},
    SGLANG | {"rollout.layout.dp_attention": True, "rollout.sglang.engine_args.page_size": 64},
    SGLANG | MEGATRON | {"rollout.quantisation": "fp8", "gate.bounds": [a_bound(quantisation="fp8")]},
    {"cluster.colocated": False, "cluster.rollout_gpus": 7, "cluster.nodes": 8},
    APART | {"environment.trainer.NCCL_ALGO": "Ring", "environment.engine.NCCL_ALGO": "Tree"},
    {"prepare.keep_mtp": True, "prepare.keep_layers": 4},
    {"cluster.hardware": "cpu", "device": "cpu"},
    {"cluster.hardware": "mi355x", "device": "cuda"},
    {"trainer.packing": "single"},
    {"trainer.packing": "padded", "trainer.micro_batch_tokens": 77},
    SGLANG | MEGATRON | {"trainer.packing": "single", "trainer.micro_batch_tokens": 77},
    {"prepare.high_precision": ["gate"], "prepare.quantisation": "fp8"},
    FP8 | {"prepare.quantisation": "none"},
]


@pytest.mark.parametrize(("rule", "changes", "key"), REFUSED)
def test_rule_refuses_and_names_the_key(rule: str, changes: dict[str, Any], key: str) -> None:
    config = config_with(changes)
    by_name = {function.__name__: function for function in RULES}
    violations = list(by_name[rule](config))
    assert key in [v.key for v in violations]
    assert all(v.message and v.way_out for v in violations)
    assert set(violations) <= set(check(config))


@pytest.mark.parametrize("changes", ALLOWED)
def test_settings_that_agree_pass_all_rules(changes: dict[str, Any]) -> None:
    assert check(config_with(changes)) == []


def test_a_way_out_gives_the_default_as_a_file_would_have_it() -> None:
    changes = {"trainer.layout.sequence_parallel": True, "trainer.layout.stage_layers": [1, 1]}
    changes |= {"trainer.layout.etp": 2, "trainer.layout.cp_comm_type": "p2p", "rollout.fast_path": "off"}
    violations = {v.key: v.way_out for v in check(config_with(VLLM | changes))}
    defaults = {key: violations[key].partition("at its default (")[2].partition("), or")[0] for key in changes}
    assert defaults == {
        "trainer.layout.sequence_parallel": "false",
        "trainer.layout.stage_layers": "[]",
        "trainer.layout.etp": "none",
        "trainer.layout.cp_comm_type": "none",
        "rollout.fast_path": '"auto"',
    }


def test_every_rule_has_a_case_and_a_reason() -> None:
    assert {rule for rule, _, _ in REFUSED} == {function.__name__ for function in RULES}
    assert all(function.__doc__ for function in RULES)


def test_bounds_are_chosen_by_device_and_dtypes_and_a_run_without_one_is_refused() -> None:
    bounds = [
        a_bound(hardware="cpu", dtype="bfloat16"),
        a_bound(hardware="cuda", dtype="bfloat16", bound=0.2),
        a_bound(dtype="bfloat16/float32", bound=0.3),
        a_bound(hardware="cpu", metric="k3", bound=0.4),
    ]
    both = config_with({"gate.bounds": bounds})
    assert [b.bound for b in bounds_for(both, "cpu")] == [0.1, 0.4]
    assert [b.bound for b in bounds_for(both, "cuda")] == [0.2]
    mixed = config_with({"gate.bounds": bounds, "rollout.dtype": "float32"})
    assert [b.bound for b in bounds_for(mixed, "cuda")] == [0.3]
    fp8 = config_with({"gate.bounds": [*bounds, a_bound(quantisation="fp8", bound=0.5)], "rollout.quantisation": "fp8"})
    assert [b.bound for b in bounds_for(fp8, "cpu")] == [0.5]
    unbounded = config_with({"gate.bounds": bounds, "rollout.quantisation": "fp8_ue8m0"})
    with pytest.raises(ConfigError, match=r"no bound for cpu in bfloat16 .* quantised fp8_ue8m0; given: "):
        bounds_for(unbounded, "cpu")
    with pytest.raises(ConfigError, match=r"no bound for cuda in bfloat16 .*given: abs_diff/mean on cpu in any"):
        bounds_for(config_with({"gate.bounds": [a_bound(hardware="cpu")]}), "cuda")


def test_divisibility_message_has_both_numbers_and_the_valid_values() -> None:
    (violation,) = check(config_with({"algorithm.num_prompts": 12, "algorithm.optimizer_steps_per_batch": 5}))
    assert "12" in violation.message
    assert "5" in violation.message
    assert "1, 2, 3, 4, 6, 12" in violation.way_out


def test_rewards_with_one_metric_are_both_named_and_others_pass() -> None:
    apart = {"task.rewards": [{"name": "exact"}, {"name": "a.b:c"}, {"name": "a.b:d"}]}
    assert check(config_with(apart)) == []
    (violation,) = check(config_with({"task.rewards": [{"name": "a.b:c"}, {"name": "a_b:c"}]}))
    assert violation.message == '"a.b:c" and "a_b:c" would both be the metric part_a_b_c'


def test_all_violations_are_found_at_once() -> None:
    changes = {"rollout.top_k": 5, "algorithm.gamma": 0.5, "eval.num_problems": 99}
    assert {v.key for v in check(config_with(changes))} == set(changes)


def test_keys_named_by_violations_exist() -> None:
    known = {dotted(key.path) for key in walk()}
    tables = ("environment.trainer", "environment.engine")  # free ones: any variable is a key
    for _, changes, _ in REFUSED:
        for violation in check(config_with(changes)):
            named = {violation.key, *violation.also}
            assert {key for key in named if key.rpartition(".")[0] not in tables} <= known


def test_path_keys_are_all_the_keys_that_name_files() -> None:
    paths = {dotted(k.path) for k in walk() if k.path[-1].endswith("path") and k.path[-1] != "fast_path"}
    assert paths | {"rollout.python", "refit.folder", "prepare.target"} == PATH_KEYS


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("speculative_config", "starts a drafter, whose weights no refit brings"),
        ("enable_lora", "makes room for adapters"),
    ],
)
def test_an_engine_with_weights_that_no_refit_brings_is_refused_for_that_reason(name: str, why: str) -> None:
    config = config_with(VLLM | {f"rollout.vllm.engine_args.{name}": 1})
    assert any(f"{name} {why}" in violation.message for violation in check(config))
