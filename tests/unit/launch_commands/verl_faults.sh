set -x
# Modelled on verl-project/verl examples/gspo_trainer/run_qwen30b_gspo.sh: configuration in strings that are split into
# words. Planted: an expert size that divides neither experts nor GPUs, a batch that does not come out, a token budget
# without dynamic batches, keys of the other strategy, a key that does not exist.
backend=megatron
actor_ep=6

if [ "$backend" = "megatron" ]; then
    CONFIG_NAME=ppo_megatron_trainer
else
    CONFIG_NAME=ppo_trainer
fi

ACTOR_CONFIG="
    actor_rollout_ref.actor.ppo_mini_batch_size=48 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=4 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=$actor_ep \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
    actor_rollout_ref.actor.megatron.param_offload=True"

python3 -m verl.trainer.main_ppo \
    --config-path=./config \
    --config-name=$CONFIG_NAME \
    actor_rollout_ref.model.path=$HOME/models/Qwen3-30B-A3B \
    data.train_batch_size=64 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_sizes=4 \
    trainer.nnodes=1 \
    $ACTOR_CONFIG
