"""SGLang's server arguments as settings of an engine. Sources: sgl-project/sglang 0.5.23, files of ``sglang/srt``."""

from __future__ import annotations

from dataclasses import replace

from lockstep.topology.launch_flags import Row, choice, integer, number, optional, text

_PARALLEL = "arg_groups/fields/parallel.py"
_SCHEDULE = "arg_groups/fields/schedule.py"
_EXEC = "arg_groups/fields/exec_.py"
_MODEL = "arg_groups/fields/model.py"
_KV_CACHE = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "auto": "bf16", "bf16": "bf16", "bfloat16": "bf16"}
_QUANTISATION = {"fp8": "fp8", "w8a8_fp8": "fp8", "mxfp4": "mxfp4_experts", "unquant": "none"}

SERVER: dict[str, Row] = {
    "--model-path": Row("launch.model", f"{_MODEL}: model_path", text, aliases=("--model",)),
    "--tp-size": Row("engine.tp", f"{_PARALLEL}: tp_size", integer, aliases=("--tensor-parallel-size", "--tp")),
    "--pp-size": Row("engine.pp", f"{_PARALLEL}: pp_size", integer, aliases=("--pipeline-parallel-size", "--pp")),
    "--dp-size": Row("engine.dp", f"{_PARALLEL}: dp_size", integer, aliases=("--data-parallel-size", "--dp")),
    "--ep-size": Row("engine.ep", f"{_PARALLEL}: ep_size", integer, aliases=("--expert-parallel-size", "--ep")),
    "--enable-dp-attention": Row("engine.dp_attention", f"{_PARALLEL}: enable_dp_attention"),
    "--attn-cp-size": Row(
        "engine.attention_cp", f"{_PARALLEL}: attn_cp_size", integer, aliases=("--attention-context-parallel-size",)
    ),
    "--moe-dp-size": Row("engine.moe_dp", f"{_PARALLEL}: moe_dp_size", integer, aliases=("--moe-data-parallel-size",)),
    "--moe-dense-tp-size": Row("engine.moe_dense_tp", f"{_PARALLEL}: moe_dense_tp_size", optional(integer)),
    "--moe-a2a-backend": Row("engine.moe_a2a", f"{_EXEC}: moe_a2a_backend", text),
    "--moe-runner-backend": Row("engine.moe_runner", f"{_EXEC}: moe_runner_backend", text),
    "--attention-backend": Row("engine.attention_backend", f"{_EXEC}: attention_backend", optional(text)),
    "--prefill-attention-backend": Row(
        "engine.prefill_attention_backend", f"{_EXEC}: prefill_attention_backend", optional(text)
    ),
    "--decode-attention-backend": Row(
        "engine.decode_attention_backend", f"{_EXEC}: decode_attention_backend", optional(text)
    ),
    "--deepep-mode": Row(
        "engine.deepep_mode",
        f"{_EXEC}: deepep_mode",
        choice({"auto": "auto", "normal": "normal", "low_latency": "low_latency"}),
    ),
    "--enable-eplb": Row("engine.expert_balancer", f"{_EXEC}: enable_eplb"),
    "--nnodes": Row("job.nodes", f"{_PARALLEL}: nnodes", integer),
    "--mem-fraction-static": Row("engine.memory_fraction", f"{_SCHEDULE}: mem_fraction_static", number),
    "--max-running-requests": Row("engine.max_running_requests", f"{_SCHEDULE}: max_running_requests", integer),
    "--max-total-tokens": Row("engine.max_total_tokens", f"{_SCHEDULE}: max_total_tokens", integer),
    "--chunked-prefill-size": Row("engine.chunked_prefill_tokens", f"{_SCHEDULE}: chunked_prefill_size", integer),
    "--page-size": Row("engine.page_tokens", f"{_SCHEDULE}: page_size", optional(integer)),
    "--kv-cache-dtype": Row("engine.kv_cache_dtype", f"{_MODEL}: kv_cache_dtype", choice(_KV_CACHE, default="bf16")),
    "--quantization": Row("engine.quantisation", f"{_MODEL}: quantization", choice(_QUANTISATION)),
    "--speculative-algorithm": Row(
        "engine.speculative", "arg_groups/fields/spec.py: speculative_algorithm", lambda value: value != "None"
    ),
    "--disable-cuda-graph": Row("engine.cuda_graphs", "server_args.py: add_cli_args", present=False),
    "--disable-custom-all-reduce": Row(
        "engine.custom_all_reduce", f"{_EXEC}: disable_custom_all_reduce", present=False
    ),
}
"""All rows of ``python -m sglang.launch_server``."""

_NOT_PREFIXED = {"--model-path", "--nnodes"}
_PREFIXER = "miles/backends/sglang_utils/arguments.py: _add_prefixed_server_args"

PREFIXED: dict[str, Row] = {
    f"--sglang-{flag.removeprefix('--')}": replace(
        row,
        source=f"{_PREFIXER}; {row.source}",
        aliases=tuple(f"--sglang-{alias.removeprefix('--')}" for alias in row.aliases),
    )
    for flag, row in SERVER.items()
    if flag not in _NOT_PREFIXED
}
"""The same as miles and slime spell them; they skip the model and the number of nodes."""
