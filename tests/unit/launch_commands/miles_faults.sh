#!/bin/bash
# Modelled on THUDM/slime scripts/run-glm4.7-30B-A3B.sh, whose expert grid of 16 does not divide its 8 GPUs, with the
# numbers of the review in radixark/miles#2347 (four GPUs, ep 4). Planted beside it: no split of 47 layers, flags that
# other flags overrule, variables that a Ray job never gets, a variable that contradicts another.
export NCCL_ALGO=Ring
ray start --head --num-gpus 4
export NCCL_DEBUG=INFO

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/glm4.7-30B-A3B.sh"

RUNTIME_ENV_JSON=$(cat <<EOF_JSON
{
  "env_vars": {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "SGLANG_OPT_USE_COMPRESSOR_V2": "false",
    "SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton",
    "API_TOKEN": "hunter2"
  }
}
EOF_JSON
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 2
   --expert-model-parallel-size 4
   --expert-tensor-parallel-size 1
   --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 2048
   --moe-enable-deepep
)

ray job submit --runtime-env-json="${RUNTIME_ENV_JSON}" -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate --rollout-num-gpus 4 \
   --hf-checkpoint /root/GLM-4.7-Flash \
   --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 100 \
   --rollout-num-gpus-per-engine 4 --sglang-tp-size 2 --sglang-mem-fraction-static 0.7 \
   ${MODEL_ARGS[@]} \
   ${PERF_ARGS[@]}
