#!/bin/bash
# Modelled on radixark/miles examples/infra_features/low_precision/run-qwen3-30b-a3b-fp8-two-nodes.sh: the arrays, the
# sizes that a program prints, the runtime environment; the layout is that of its end-to-end baseline on four GPUs.
set -ex

NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then
    HAS_NVLINK=1
else
    HAS_NVLINK=0
fi

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
MODEL_ARGS_LINE="$(python3 "${SCRIPT_DIR}/model_args_utils.py" "qwen3-30B-A3B")" || exit 1
read -ra MODEL_ARGS <<< "${MODEL_ARGS_LINE}"

if [ -z "${BASE_DIR:-}" ]; then
  echo "BASE_DIR is not set"
  exit 1
fi

CKPT_ARGS=(
   --hf-checkpoint "${BASE_DIR}/Qwen3-30B-A3B/"
   --ref-load "${BASE_DIR}/Qwen3-30B-A3B_torch_dist/"
)

ROLLOUT_ARGS=(
   --prompt-data "${BASE_DIR}/dapo-math-17k.jsonl"
   --num-rollout 200
   --rollout-batch-size 8
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192

   --global-batch-size 32
)

PERF_ARGS=(
   --tensor-model-parallel-size 1
   --pipeline-model-parallel-size 2
   --context-parallel-size 2
   --expert-model-parallel-size 2
   --expert-tensor-parallel-size 1

   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1

   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --optimizer-cpu-offload
   --overlap-cpu-optimizer-d2h-h2d
   --use-precision-aware-optimizer
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 4
   --sglang-mem-fraction-static 0.7
)

RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/root/Megatron-LM/\",
    \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\",
    \"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"
  }
}"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 4 \
   --colocate \
   --update-weight-buffer-size $(( 512 * 1024 * 1024 )) \
   ${MODEL_ARGS[@]} \
   "${CKPT_ARGS[@]}" \
   ${ROLLOUT_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${SGLANG_ARGS[@]}
