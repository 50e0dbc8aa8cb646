#!/bin/bash
# Modelled on THUDM/slime scripts/run-kimi-k2-Instruct.sh: a line of the command has lost its backslash, so that
# everything below it is another command, which the shell can't find after the job has been submitted.
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4)

python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate \
   --hf-checkpoint Qwen/Qwen3-30B-A3B \
   --update-weight-buffer-size $(( 4 * 512 * 1024 * 1024))
   ${PERF_ARGS[@]} \
   --rollout-batch-size 8
