#!/bin/bash
# Modelled on NVIDIA/Megatron-LM examples/mixtral/train_mixtral_8x7b_distributed.sh, whose default of one node has an
# expert grid of 32 ranks on 8 GPUs. Planted beside it: settings that nothing reads, a misspelt flag, half an offload.
GPUS_PER_NODE=8
NNODES=1

PARALLEL="--tensor_model_parallel_size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
PARALLEL="$PARALLEL --pipeline-model-parallel-size 4 --expert-model-parallel-size 8"

torchrun --nproc-per-node=$GPUS_PER_NODE --nnodes=$NNODES pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --swiglu --untie-embeddings-and-output-weights \
    --disable-bias-linear --vocab-size 32000 --seq-length 4096 \
    --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall \
    --micro-batch-size 1 --global-batch-size 256 --bf16 \
    --fp8-recipe blockwise \
    --optimizer-offload-fraction 0.5 \
    --recompute-granularity full \
    --use-distributed-optimizer --global-batch-size 128 \
    $PARALLEL
