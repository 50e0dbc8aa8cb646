"""vLLM's engine arguments as settings of an engine. Sources are files of vLLM 0.32.0."""

from __future__ import annotations

from lockstep.topology.launch_flags import Row, choice, integer, number, optional, text

_PARALLEL = "vllm/config/parallel.py: ParallelConfig"
_CACHE = "vllm/config/cache.py: CacheConfig"
_SCHEDULER = "vllm/config/scheduler.py: SchedulerConfig"
_MODEL = "vllm/config/model.py: ModelConfig"
_KV_CACHE = {"auto": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
_KV_CACHE |= {"fp8_ds_mla": "fp8", "fp8_inc": "fp8"}
_QUANTISATION = {"fp8": "fp8", "mxfp4": "mxfp4_experts"}

SERVER: dict[str, Row] = {
    "--model": Row("launch.model", f"{_MODEL}.model", text),
    "--tensor-parallel-size": Row("engine.tp", f"{_PARALLEL}.tensor_parallel_size", integer, aliases=("-tp",)),
    "--pipeline-parallel-size": Row("engine.pp", f"{_PARALLEL}.pipeline_parallel_size", integer, aliases=("-pp",)),
    "--data-parallel-size": Row("engine.dp", f"{_PARALLEL}.data_parallel_size", integer, aliases=("-dp",)),
    "--data-parallel-size-local": Row(
        "launch.dp_local", f"{_PARALLEL}.data_parallel_size_local", integer, aliases=("-dpl",)
    ),
    "--enable-expert-parallel": Row("launch.expert_parallel", f"{_PARALLEL}.enable_expert_parallel", aliases=("-ep",)),
    "--prefill-context-parallel-size": Row(
        "engine.prefill_cp", f"{_PARALLEL}.prefill_context_parallel_size", integer, aliases=("-pcp",)
    ),
    "--decode-context-parallel-size": Row(
        "engine.decode_cp", f"{_PARALLEL}.decode_context_parallel_size", integer, aliases=("-dcp",)
    ),
    "--all2all-backend": Row("engine.moe_a2a", f"{_PARALLEL}.all2all_backend", text),
    "--enable-eplb": Row("engine.expert_balancer", f"{_PARALLEL}.enable_eplb"),
    "--enable-elastic-ep": Row("engine.elastic_ep", f"{_PARALLEL}.enable_elastic_ep"),
    "--nnodes": Row("job.nodes", f"{_PARALLEL}.nnodes", integer, aliases=("-n",)),
    "--disable-custom-all-reduce": Row(
        "engine.custom_all_reduce", f"{_PARALLEL}.disable_custom_all_reduce", present=False
    ),
    "--gpu-memory-utilization": Row("engine.memory_fraction", f"{_CACHE}.gpu_memory_utilization", number),
    "--kv-cache-memory-bytes": Row("engine.kv_cache_bytes", f"{_CACHE}.kv_cache_memory_bytes", integer),
    "--kv-cache-dtype": Row("engine.kv_cache_dtype", f"{_CACHE}.cache_dtype", choice(_KV_CACHE)),
    "--block-size": Row("engine.page_tokens", f"{_CACHE}.block_size", integer),
    "--max-num-seqs": Row("engine.max_running_requests", f"{_SCHEDULER}.max_num_seqs", integer),
    "--max-num-batched-tokens": Row("engine.chunked_prefill_tokens", f"{_SCHEDULER}.max_num_batched_tokens", integer),
    "--quantization": Row(
        "engine.quantisation", f"{_MODEL}.quantization", optional(choice(_QUANTISATION)), aliases=("-q",)
    ),
    "--enforce-eager": Row("engine.cuda_graphs", f"{_MODEL}.enforce_eager", present=False),
    "--speculative-config": Row(
        "engine.speculative", "vllm/config/speculative.py", lambda value: True, aliases=("-sc",)
    ),
    "--hf-overrides": Row("launch.overrides", f"{_MODEL}.hf_overrides", text),
}
"""All rows of ``vllm serve``. Its parser takes ``_`` for ``-`` (``FlexibleArgumentParser``)."""
