#!/bin/bash
# Modelled on sglang docs/basic_usage/deepseek_v32.md at 7bc99464, as a batch script. Planted: the number of GPUs is
# asked of the machine, an all-to-all that overrides the expert size, a data-parallel size that does not divide tp.
#SBATCH --nodes=2
#SBATCH --gres=gpu:h100:8
GPUS=$(nvidia-smi -L | wc -l)
ARGS=(--model-path deepseek-ai/DeepSeek-V4-Flash --tp-size 8 --quantization fp8)
ARGS+=(--dp-size 3 --enable-dp-attention --moe-a2a-backend deepep --ep-size 4)

srun bash -c "export SGLANG_SKIP_CHECKPOINT_LOAD_CHECK=1; python -m sglang.launch_server ${ARGS[*]} --nnodes \$SLURM_NNODES"

python -m sglang.launch_server --model-path Qwen/Qwen3-4B --tp $GPUS --deepep-mode auto
