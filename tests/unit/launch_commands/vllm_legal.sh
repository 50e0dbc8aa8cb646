#!/bin/bash
# Modelled on vllm docs/serving/expert_parallel_deployment.md at 13642f1e: one node, data-parallel attention, experts
# spread over all ranks; the model's name and the sizes by variables.
MODEL=${MODEL:-"Qwen/Qwen3-30B-A3B-FP8"}
DP_SIZE=$((8 / ${TP_SIZE:=1}))

VLLM_LOGGING_LEVEL=INFO vllm serve "$MODEL" \
    --tensor-parallel-size $TP_SIZE \
    --data-parallel-size $DP_SIZE \
    --enable-expert-parallel \
    --gpu_memory_utilization 0.85 \
    --max-model-len 32768 &
wait
