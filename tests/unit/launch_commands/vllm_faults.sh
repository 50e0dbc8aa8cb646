#!/bin/bash
# Modelled on vllm docs/serving/expert_parallel_deployment.md at 13642f1e and the heads of zai-org/GLM-4.7-Flash (20).
# Planted: heads that 8 ranks can't share, a flag that a later release renamed, experts where there are none.
set -euo pipefail
TP=8
python -m vllm.entrypoints.openai.api_server --model zai-org/GLM-4.7-Flash -tp $TP --swap-space 16 &
vllm serve Qwen/Qwen3-4B -tp 4 --enable-expert-parallel --quantization bitsandbytes
