"""Flags of miles and slime as settings of a job, beside Megatron's and SGLang's own, which they take too.

Sources are files of radixark/miles at 31f1ca96; THUDM/slime at 624b824a has the same names.
"""

from __future__ import annotations

from lockstep.topology import flags_megatron, flags_sglang
from lockstep.topology.launch_flags import Row, choice, integer, text

_ARGUMENTS = "miles/utils/arguments.py"
_CLUSTER = f"{_ARGUMENTS}: add_cluster_arguments"
_TRAIN = f"{_ARGUMENTS}: add_train_arguments"
_ROLLOUT = f"{_ARGUMENTS}: add_rollout_arguments"
_DATA = f"{_ARGUMENTS}: add_data_arguments"
_PAUSES = {"abort": "abort", "retract": "retract", "in_place": "in_place"}

OWN: dict[str, Row] = {
    "--actor-num-nodes": Row("launch.actor_nodes", _CLUSTER, integer),
    "--actor-num-gpus-per-node": Row("launch.actor_gpus_per_node", _CLUSTER, integer),
    "--num-gpus-per-node": Row("launch.gpus_per_node", _CLUSTER, integer),
    "--rollout-num-gpus": Row("launch.rollout_gpus", _CLUSTER, integer),
    "--rollout-num-gpus-per-engine": Row("engine.gpus_per_engine", _CLUSTER, integer),
    "--rollout-external": Row("launch.rollout_external", _CLUSTER),
    "--rollout-external-engine-addrs": Row("launch.rollout_external", _CLUSTER, bool),
    "--colocate": Row("job.colocated", _CLUSTER),
    "--offload": Row("memory.offload_weights", _CLUSTER),
    "--offload-train": Row("memory.offload_weights", _CLUSTER),
    "--no-offload-train": Row("memory.offload_weights", _CLUSTER, present=False),
    "--no-offload-rollout": Row("launch.frees_cache", _CLUSTER, present=False),
    "--offload-train-target": Row("memory.offload_target", _CLUSTER, choice({"cpu": "cpu", "disk": "disk"})),
    "--stream-optimizer-state-to-disk": Row("memory.stream_optimizer", _CLUSTER),
    "--rematerialize-param-from-master-weight": Row("memory.rematerialise_weights", _TRAIN),
    "--train-backend": Row("train.backend", _TRAIN, choice({"megatron": "megatron", "fsdp": "fsdp"})),
    "--dp-replicate-size": Row("train.replicate", "miles/backends/fsdp_utils/arguments.py: FSDPArgs", integer),
    "--gradient-checkpointing": Row(
        "memory.recompute", "miles/backends/fsdp_utils/arguments.py: FSDPArgs", present="full"
    ),
    "--qkv-format": Row("batch.packing", _TRAIN, choice({"thd": True, "bshd": False})),
    "--log-probs-chunk-size": Row("batch.logprob_chunk_tokens", _TRAIN, integer),
    "--allgather-cp": Row("train.cp_partition", _TRAIN, present="contiguous"),
    "--train-env-vars": Row("launch.train_environment", _TRAIN, text),
    "--hf-checkpoint": Row("launch.model", _ROLLOUT, text),
    "--fully-async": Row("job.fully_async", _ROLLOUT),
    "--max-weight-staleness": Row("job.max_staleness", _ROLLOUT, integer),
    "--partial-rollout": Row("job.partial_rollout", _ROLLOUT),
    "--pause-generation-mode": Row("job.pause_mode", _ROLLOUT, choice(_PAUSES)),
    "--rollout-max-prompt-len": Row("batch.prompt_tokens", _ROLLOUT, integer),
    "--rollout-max-response-len": Row("batch.response_tokens", _ROLLOUT, integer),
    "--update-weight-buffer-size": Row("job.refit_bucket_bytes", _ROLLOUT, integer),
    "--rollout-batch-size": Row("batch.num_prompts", _DATA, integer),
    "--n-samples-per-prompt": Row("batch.group_size", _DATA, integer),
    "--num-steps-per-rollout": Row("batch.optimizer_steps", _DATA, integer),
    "--use-dynamic-batch-size": Row("launch.dynamic_batch", _DATA),
    "--max-tokens-per-gpu": Row("batch.max_tokens_per_gpu", _DATA, integer),
    "--log-probs-max-tokens-per-gpu": Row("launch.score_tokens", _DATA, integer),
    "--data-pad-size-multiplier": Row("batch.pad_multiple", _DATA, integer),
    "--use-routing-replay": Row("job.routing_replay", f"{_ARGUMENTS}: add_algo_arguments"),
    "--use-rollout-routing-replay": Row("job.routing_replay", f"{_ARGUMENTS}: add_algo_arguments"),
    "--use-indexer-replay": Row("job.indexer_replay", f"{_ARGUMENTS}: add_algo_arguments"),
    "--use-rollout-indexer-replay": Row("job.indexer_replay", f"{_ARGUMENTS}: add_algo_arguments"),
    "--debug-rollout-only": Row("launch.rollout_only", f"{_ARGUMENTS}: add_debug_arguments"),
    "--debug-train-only": Row("launch.train_only", f"{_ARGUMENTS}: add_debug_arguments"),
}
"""What miles and slime define themselves."""

TRAIN: dict[str, Row] = {**flags_megatron.TRAINER, **flags_sglang.PREFIXED, **OWN}
"""All rows of ``train.py``."""
